"""Whatever a model calls its layers: no renderer fails, obeys it, or lets it out of its place."""

import functools
import re
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fp8doctor.answer.causes import Cause
from fp8doctor.answer.items import Item
from fp8doctor.answer.record import Answer
from fp8doctor.answer.verdict import Open
from fp8doctor.facts import Package, Target
from fp8doctor.finding import Finding
from fp8doctor.render import text
from fp8doctor.report import Report
from tests.render.reports import BROKEN, LORA

NASTY = (
    *r"~~~ | \| \ ` ** __init__ <!-- --> &lt; [a](http://b) ![x](y) 1) ===== --- $x$ ^1 :smile:".split(),
    *("```\n# out\n```", "<script>alert(1)</script>", "x\n```\n# out\n", "x\n  `````\n<b>\n"),
    *("\n\n# heading", "- item", "1. item", "\n    code", " ", "\t"),
    *("\x1b[31mred", "\x07", "\r\nx", "\u202egnp.exe", "\u2028"),
    *("日本語" * 40, "e\u0301" * 90, "👩\u200d💻", "\ud800", "x" * 300, "a b " * 90),
)

names = st.one_of(
    st.sampled_from(NASTY),
    st.text(max_size=60),
    st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=8)), max_size=4).map("".join),
)


def named_answer(name: str, finding: Finding) -> Answer:
    causes, doubts = (Cause(finding.title, finding.code), Cause(name)), (name,)
    fixes = (replace(LORA.prescription[0], title=name, treatment=finding.treatment),)
    said, rule = f"a {name}", name or "rule"  # no rule is without a name
    items = (
        Item(1, "bad", "CMP001", rule, finding.title, said, said, said, f"model.{name}.compile()"),
        Item(None, "warning", "SHP002", rule, f"168 of 168 {name}", said, said, said, f"# {name}"),
        Item(None, "info", "SHP001", rule, said, "", said, is_note=True),
    )
    told = {"causes": causes, "fixes": fixes, "items": items, "doubts": doubts}
    return replace(LORA.answer, **told, open=(Open(what=name, command=name),))


def with_name(name: str) -> Report:
    """The LoRA report with ``name`` wherever a model, a package, a GPU or an exception can put text."""
    finding = LORA.findings[0]
    assert finding.treatment is not None
    named = replace(
        finding,
        title=f"168 of 168 {name}",
        explanation=name,
        treatment=replace(finding.treatment, summary=f"compile {name}", code=f"model.{name}.compile()"),
    )
    facts = LORA.facts
    return replace(
        LORA,
        facts=replace(
            facts,
            target=Target(kind="file", name=name, attribute=name),
            assumed_gpu=name,
            software=replace(facts.software, torch=name, packages={"torchao": Package(version=name)}),
            gpus=tuple(replace(gpu, name=name) for gpu in facts.gpus),
            network=replace(
                facts.network,
                kind=name,
                linears=tuple(replace(linear, kind=f"pkg.{name}") for linear in facts.network.linears),
                blocks=tuple(replace(blocks, kind=name) for blocks in facts.network.blocks),
            ),
            gaps={name: name},
        ),
        verdict=replace(LORA.verdict, summary=name),
        answer=named_answer(name, named),
        findings=(named, replace(LORA.findings[1], title=f"a {name}", explanation=name, name=name)),
        prescription=(replace(LORA.prescription[0], treatment=named.treatment),),
        outcomes=(*LORA.outcomes, *(replace(outcome, reason=name) for outcome in BROKEN.outcomes)),
    )


@pytest.mark.slow
@given(names, st.integers(1, 140), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
@example("日本語" * 40, 40, True, False)
@example(f"m{text.TIED}\x1b[31m\x1b]0;own\x07.py", 100, True, False)
def test_text_stays_in_its_columns_and_obeys_nothing(
    name: str, width: int, verbose: bool, ascii: bool
) -> None:
    report = with_name(name)
    screen = text.render(report, width=width, verbose=verbose, ascii=ascii)
    kinds = {unicodedata.category(each) for each in screen.replace("\n", "")}
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert screen.isascii() or not ascii
    for line in screen.split("\n"):
        assert line == line.rstrip()
        assert len(line) <= max(width, text.NARROWEST) or line.startswith(" " * 6)


def test_a_tie_of_a_name_carries_no_control_character() -> None:
    screen = text.render(with_name(f"m{text.TIED}\x1b[31m\x1b]0;own\x07.py"), verbose=True)
    assert not {"\x1b", "\x07"} & {*screen}
    assert "m\ufffd\ufffd[31m" in screen.partition("\n")[0]


@pytest.mark.slow
@given(names.filter(str.strip))
@settings(max_examples=200, deadline=None)
def test_markdown_cannot_be_broken_out_of(name: str) -> None:
    """Outside of fenced code, a report says as much Markdown with a nasty name as with a plain one."""
    assert skeleton(with_name(name).to_markdown()) == skeleton(plain_markdown())


@functools.cache
def plain_markdown() -> str:
    return with_name("name").to_markdown()


LINKS = re.compile(r"(?i)https?://\w|ftp://\w|\bwww\.\w|(?<![\w`])@[a-z0-9]|[a-z0-9]@[a-z0-9]|#\d|\bgh-\d")
"""What GitHub makes a link or a mention of, in text that it has rendered."""

ADDRESSES = (
    *("https://evil.example/x", "http://a", "HTTPS://a.b", "ftp://a.b", "www.evil.example", "WWW.a.b"),
    *("@torvalds", "@org/team", "@a-b", "#1", "#123", "owner/repo#7", "GH-12", "a@b.example"),
    *("mailto:a@b.example", " ", ".", "(", ")", "x", "\\", "[", "_", "://"),
)


@pytest.mark.slow
@given(st.lists(st.sampled_from(ADDRESSES), min_size=1, max_size=4).map("".join))
@settings(max_examples=150, deadline=None)
@example("@@a ##1 https://https://a www.www.a")
def test_markdown_links_and_notifies_nobody(name: str) -> None:
    document = with_name(name).to_markdown()
    prose = re.sub(r"(?ms)^(`{3,})$.*?^\1$", "", document)
    rendered = re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", prose)
    assert not LINKS.search(rendered)


def skeleton(document: str) -> list[str]:
    """What Markdown reads as markup in each line, code taken out, lines of the table's rule brought to one
    length."""
    lines: list[str] = []
    fence = ""
    for line in document.split("\n"):
        run = re.fullmatch(r" {0,3}(`{3,})\s*", line)
        if fence:
            fence = "" if run and run[1].startswith(fence) else fence
        elif run:
            fence = run[1]
            lines.append("code")
        else:
            plain = re.sub(r"\\[!-/:-@\[-`{-~]|&(?:lt|gt|amp);", "x", line)
            markup = re.sub(r"[^\\`*_{}\[\]<>|~#$&]", "", plain)
            begins = re.match(r"\s{4}|\t|[-+=]+|\d+[.)]", plain)
            lines.append(f"{begins[0] if begins else ''} {markup}")
    assert not fence
    return [line for line in lines if line != " "]
