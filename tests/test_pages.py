"""What users read: written in the style, true of the program, and its links, examples and tables whole."""

import ast
import gzip
import importlib.util
import inspect
import json
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from configparser import ConfigParser
from functools import cache
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from click.testing import CliRunner

from fp8doctor import cli
from fp8doctor.answer.verdict import Status
from fp8doctor.cli import console, project
from fp8doctor.cli.pages import DEMO
from fp8doctor.report import Report, load_report
from fp8doctor.worker.parent import examine_in_worker
from tests import check_pages, error_pages, picture, readme
from tests.markdown import (
    FENCED,
    GENERATED,
    ROOT,
    blocks,
    fenced,
    prose,
    rows_after,
    split_sentences,
    text,
    written_by_hand,
)

AGAIN = "python -m tests.refresh writes it again"
FOR_DEVELOPERS = {f"docs/{name}.md" for name in ("ARCHITECTURE", "layers", "sentences", "traps")}
FOR_USERS = [each for each in written_by_hand() if each not in {*FOR_DEVELOPERS, "docs/BELIEFS.md"}]
EVERY_PAGE = sorted(
    str(path.relative_to(ROOT))
    for pattern in runpy.run_path(str(ROOT / "docs/conf.py"))["include_patterns"]
    for path in ROOT.glob(pattern.replace("**.md", "**/*.md"))
)


# Style

NOT_SAID = {
    r"\b[Dd]iseases?\b": "finding, problem",
    r"\b[Ss]ick\b": "affected",
    r"\b[Mm]end(s|ed|ing)?\b": "fix, solve",
    r"\b[Cc]ure[sd]?\b": "fix, solve",
    r"\b[Ll]edger\b": "table, breakdown",
    r"(?<![.\w])[Aa]rms?\b": "variant",
    r"\b[Rr]ooms?\b": "memory, time, space",
    r"\b[Tt]old\b": "said, shown",
    r"\b[Dd]ear(er|est)?\b": "slower, more expensive",
    r"\b[Mm]ade[- ]up\b": "random, synthetic",
    r"\bheld to\b": "checked against",
    r"\b[Ee]agerly\b": "not compiled",
    r"\b[Bb]eside\b": "next to, with",
    r"\b[Aa]new\b": "again",
    r"\b[Hh]angs? on\b": "depends on",
    r"\bGEMMs?\b": "matmul",
    r"×": "x",
    r"(?<=[\d}]) %": "93%, without a space",
}
"""What no user reads -> what to say instead."""
MOST_WORDS = 25
STORED = {"made up"}
"""Values of facts, as recordings have them."""
IN_STYLE = "analysis answer cli diagnosis health loading planning render trial worker".split()
"""Packages whose strings users read."""


def not_said(words: str) -> list[str]:
    return [
        f"{found[0]!r} in {words[max(0, found.start() - 30) : found.end() + 30]!r}: say {instead}"
        for pattern, instead in NOT_SAID.items()
        if (found := re.search(pattern, words))
    ]


def faults(page: str) -> list[str]:
    """Name the long sentences and the words that are not said; no code, tables or names of rules."""
    written = re.sub(GENERATED.format(r"\w+"), "", page, flags=re.S)
    by_hand = re.sub(r"^(\||`[\w-]+` · ).*\n", "\n", written, flags=re.M)
    found = list(split_sentences(by_hand))
    long = [each for each in found if len(each.split()) > MOST_WORDS]
    return [*long, *(fault for each in found for fault in not_said(each))]


def phrases(path: Path) -> Iterator[str]:
    """Yield docstrings and texts of a file, with a hole for each value and without names of code."""
    tree = ast.parse(path.read_text("utf-8"))
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        said = ""
        if isinstance(node, ast.JoinedStr):
            said = "".join(
                str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values
            )
        elif isinstance(node, ast.Constant) and id(node) not in parts and " " in str(node.value):
            said = str(node.value)
        if said not in STORED:
            yield re.sub(r"`+[^`]*`+", "", said)


def test_what_users_read_is_in_the_style() -> None:
    pages = [*FOR_USERS, "CHANGELOG.md", "SECURITY.md", "examples/README.md"]
    pages += [f"docs/checks/{each.name}" for each in (ROOT / "docs/checks").glob("[A-Z]*[0-9].md")]
    said = {page: faults(text(page).split("**References.**")[0]) for page in pages}
    for command in readme.COMMANDS.values():
        helps = (command.help, command.epilog, *(option.help for option in readme.shown(command)))
        said[f"{command.name} --help"] = [
            fault for each in helps for fault in faults(re.sub(r"(\w+, ){5,}", "", each or ""))
        ]
    modules = [each for folder in IN_STYLE for each in (ROOT / "fp8doctor" / folder).rglob("*.py")]
    for module in (*modules, *(ROOT / "checks").rglob("*.py")):
        said[str(module)] = [fault for phrase in phrases(module) for fault in not_said(phrase)]
    assert {place: each for place, each in said.items() if each} == {}
    assert len(said) > 200
    assert (
        len(faults(f"It is dear.\n\n- A {'word ' * 25}\n\n```sh\ndear\n```\nShort `and dear` is fine.\n"))
        == 2
    )


# What the program says

PARTS = [(page, name) for page, parts in readme.PARTS.items() for name in parts]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "name"), PARTS, ids=lambda each: each)
def test_a_generated_part_is_what_the_program_says(page: str, name: str) -> None:
    made = readme.PARTS[page][name]()
    if name == "screen" and "no GPU;" not in made:
        pytest.skip("the page shows a machine without a GPU")
    assert readme.without_versions(readme.written(page, name)) == readme.without_versions(made), AGAIN


def test_generated_files_are_what_the_program_says() -> None:
    assert text(readme.LLMS) == readme.llms(), AGAIN
    for folder, pages in (
        (check_pages.FOLDER, check_pages.pages()),
        (error_pages.FOLDER, error_pages.pages()),
    ):
        written = {path.name: path.read_text("utf-8") for path in folder.iterdir()}
        assert written.keys() == pages.keys(), AGAIN
        assert [name for name, page in pages.items() if written[name] != page] == [], AGAIN


def test_the_picture_is_of_what_demo_prints_and_loads_nothing() -> None:
    drawn = text(readme.PICTURE)
    assert picture.shown(drawn) == picture.shown(picture.picture()), AGAIN
    assert set(re.findall(r"(?:https?:|//)[^\s\"']*", drawn)) == {"http://www.w3.org/2000/svg"}
    assert all(place.startswith("#") for place in re.findall(r"url\((.*?)\)", drawn))
    facts = load_report(DEMO).facts
    versions = (facts.software.torch, str(facts.software.packages["torchao"].version))
    torch, torchao = (".".join(version.split(".")[:2]) for version in versions)
    caption = " ".join(text("README.md").split(f"({readme.PICTURE})")[1].split("\n\n")[1].split())
    assert f"one {facts.gpus[0].name} (torch {torch}, torchao {torchao})" in caption


# Commands and options

COMMAND = re.compile(r"^(?:\.venv/bin/)?fp8doctor\s.*?(?=\s+#|$)", re.M)


def commands() -> Iterator[str]:
    """Yield every command line of fp8doctor: in backticks, and in blocks for a shell."""
    for page in [*FOR_USERS, *(f"docs/checks/{name}" for name in check_pages.pages())]:
        yield from re.findall(r"`(fp8doctor [^`]+)`", prose(page)) if "checks/" not in page else ()
        shell = (line for each in blocks(page) if each.language == "sh" for line in each.code.split(" && "))
        for line in shell:
            yield from (found.removeprefix(".venv/bin/").strip() for found in COMMAND.findall(line))


def parse(line: str) -> None:
    program, *arguments = shlex.split(line, comments=True)
    assert program == "fp8doctor"
    context = cli.main.make_context("fp8doctor", arguments)
    name, command, rest = cli.main.resolve_command(context, [*context._protected_args, *context.args])
    assert command is not None
    assert command.make_context(name, rest, parent=context)


def test_commands_and_options_exist() -> None:
    lines = set(commands())
    assert len(lines) > 50
    for line in lines:
        parse(line)
    with pytest.raises(click.UsageError):
        parse("fp8doctor env --no-such-option")
    known = {
        opt
        for command in readme.COMMANDS.values()
        for option in readme.shown(command)
        for opt in (*option.opts, *option.secondary_opts)
    }
    named = {
        (page, each) for page in FOR_USERS for each in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", prose(page))
    }
    assert [(page, each) for page, each in named if each not in known] == []
    words = {shlex.split(row[0].strip("`"))[1] for row in rows_after("docs/options.md", "command")}
    assert words == {name or "model.py" for name in readme.COMMANDS}
    codes = (console.OK, console.FOUND, console.FAILED, console.INTERRUPTED)
    assert [row[0] for row in rows_after("docs/options.md", "exit code")] == [*map(str, codes)]


def test_reports_share_their_options() -> None:
    gates = {key.replace("-", "_") for key in project.GATE} - {"fail_on"}
    names = {name: readme.names(command) for name, command in readme.COMMANDS.items()}
    every = {frozenset(names[name] - gates) for name in ("env", "report", "demo")}
    assert len(every) == 1
    assert all(gates <= names[name] for name in ("", "run", "report"))
    assert every.pop() < names[""]


def test_the_readmes_commands_pin_no_torch_and_the_first_needs_none() -> None:
    marks = [block.mark for block in blocks("README.md")]
    assert marks[0] == "command: run"
    assert "install . &&" in fenced("command: run")
    assert "'.[test]'" in fenced("command: test")
    for mark in ("command: run", "command: test"):
        assert not re.search(r"torch=|index", fenced(mark))
    assert len(text("README.md").splitlines()) <= 90
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    said = " ".join(text("README.md").split()).split("The extras are ")[1].split("You need")[0]
    assert set(re.findall(r"`(\w+)`", said)) == {*setup["options.extras_require"]} - {"dev", "docs", "lint"}


# The API and the JSON


def test_names_of_the_api_exist() -> None:
    rows = rows_after("docs/api.md", "field")
    named = {field.strip("`").removeprefix("report.").removesuffix("()") for field, _ in rows}
    assert named >= {"verdict", "findings", "prescription", "outcomes", "facts", "to_dict"}
    assert all(hasattr(Report, name) for name in named)
    assert tuple(re.findall(r"`(\w+)`", rows[0][1].split("(")[1].split(")")[0])) == get_args(Status)
    from fp8doctor import inspect_model

    said = text("docs/api.md").split("`inspect_model` works in your process")[1].split("## ")[0]
    parameters = {*inspect.signature(inspect_model).parameters} - {"model", "batch"}
    assert set(re.findall(r"`(\w+)(?:=\w+)?`", said)) == parameters


def test_examples_are_python_with_names_that_exist() -> None:
    """Found in the source: some of these modules import the framework that they are for."""
    codes = [block.code for page in FOR_USERS for block in blocks(page) if block.language == "python"]
    imported = [
        node
        for code in codes
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fp8doctor")
    ]
    assert len(imported) > 3
    for node in imported:
        source = Path(str(importlib.util.find_spec(str(node.module)).origin)).read_text("utf-8")
        assert all(re.search(rf"(class |def |\"){each.name}\b", source) for each in node.names)


@pytest.mark.slow
def test_the_examples_of_the_api_and_of_a_model_file_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from torch import nn
    from torchao.float8 import convert_to_float8_training

    monkeypatch.chdir(tmp_path)
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16())
    names: dict[str, Any] = {"model": model, "batch": torch.randn(32, 64, dtype=torch.bfloat16)}
    exec(compile(fenced("example: api"), "docs/api.md", "exec"), names)
    assert isinstance(names["report"], Report)
    assert "CMP001" in capsys.readouterr().out
    assert (tmp_path / "report.json").is_file()
    (tmp_path / "model.py").write_text(fenced("example: model file"), "utf-8")
    examination = examine_in_worker(str(tmp_path / "model.py"), layers=2, progress=lambda stage: None)
    assert examination.problem is None
    assert len(examination.facts.network.linears) == 2
    assert examination.facts.workload.tokens == 4096


ERROR = (
    "RuntimeError: Expected trailing dimension of mat1 to be divisible by 16 but got mat1 shape: (512x50)."
)
NEEDS_A_JOB = ("model.py", "run", "env", "trace")


@pytest.mark.slow
def test_commands_for_agents_run_and_the_json_is_as_they_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = text("docs/SKILL.md")
    monkeypatch.chdir(tmp_path)
    for name in ("report.json", "before.json", "after.json"):
        shutil.copy(DEMO, tmp_path / name)
    health = ROOT / "tests/health/recorded/h100-tensorwise.jsonl.gz"
    (tmp_path / "health.jsonl").write_bytes(gzip.decompress(health.read_bytes()))
    run = 0
    for command in {each for each in re.findall(r"`(fp8doctor [^`]+)`", page) if "CODE" not in each}:
        args = [ERROR if each == "RuntimeError: ..." else each for each in shlex.split(command)[1:]]
        if args[0] not in NEEDS_A_JOB:
            result = CliRunner().invoke(cli.main, args, input=ERROR)
            assert result.exit_code == (args[0] == "report"), result.stderr  # the demo's FP8 is slower
            assert "--format" not in args or json.loads(result.stdout)
            run += 1
    assert run >= 6
    known = json.loads(text("fp8doctor/report.schema.json"))["$defs"]["Report"]["properties"]
    for key in ("verdict", "prescription", "next", "findings", "outcomes", "ignored"):
        assert key in known
        assert f"`{key}" in page
    assert all(f"`{status}`" in page for status in get_args(Status))


# Paths, links, tables, quotes

PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:md|cfg|toml|py))`")
WITH_PATHS = (
    *FOR_DEVELOPERS - {"docs/sentences.md"},
    "CONTRIBUTING.md",
    "checks/README.md",
    "tests/README.md",
)
OF_THE_PROJECT = re.compile(r"`((?:checks|tests|research|fp8doctor)/[\w./]+)`")


def test_every_path_exists() -> None:
    """A name in capitals stands for what the reader will write."""
    named = [(page, each) for page in WITH_PATHS for each in PATH.findall(FENCED.sub("", text(page)))]
    named += [(page, each) for page in FOR_USERS for each in OF_THE_PROJECT.findall(text(page))]
    there = [each for each in named if not re.search(r"\b(NAME|ROOM|AREA)\b", each[1])]
    assert len(there) > 100
    lost = [
        each for each in there if not any((at / each[1]).exists() for at in (ROOT, (ROOT / each[0]).parent))
    ]
    assert lost == []


@cache
def headings(page: Path) -> set[str]:
    """The places in a page that a link can lead to, as GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text("utf-8")), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_leads_somewhere() -> None:
    lost = []
    for page in [*EVERY_PAGE, readme.LLMS]:
        for path, place in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", FENCED.sub("", text(page))):
            there = (ROOT / page).parent / path if path else ROOT / page
            found = "//" in path or (there.is_file() and (not place or place in headings(there)))
            lost += [] if found else [f"{page}: {path}#{place}"]
    assert lost == []
    linked = [f"docs/{page}" for page in re.findall(r"\]\(([^)#]+)", text("docs/index.md"))]
    assert {*written_by_hand(), "docs/checks/README.md"} - {"README.md", "docs/index.md"} <= {*linked}
    assert len(linked) == len(set(linked)), "a page has one place in the sidebar"


def test_every_row_of_a_table_has_its_cells() -> None:
    tables = [
        (page, each)
        for page in EVERY_PAGE
        for each in re.findall(r"(?:^\|.*\n)+", FENCED.sub("", text(page)), re.M)
    ]
    assert len(tables) > 50
    for page, table in tables:
        cells = [len(re.split(r"(?<!\\)\|", line)) for line in table.splitlines()]
        assert len(set(cells)) == 1, f"{page}: {table.splitlines()[0]}"
        assert re.fullmatch(r"\|( ?:?-+:? ?\|)+", table.splitlines()[1]), page


def test_what_is_quoted_from_a_file_stands_there() -> None:
    quoted = re.findall(r"^<!-- from: (\S+) -->\n```\w+\n(.*?)^```$", text("checks/README.md"), re.S | re.M)
    assert len(quoted) >= 5
    lost = [path for path, code in quoted if " ".join(code.split()) not in " ".join(text(path).split())]
    assert lost == []


UNPUBLISHED = re.compile(
    r"\b(uvx|pipx run|(pip|pipx|uv|uv tool|uv pip) (install|add))( -\S+)* ['\"]?fp8doctor\b(?! ?@)"
)
"""A command that would fetch fp8doctor by its name, which no index has: whoever takes it could run code."""


def test_no_page_installs_a_name_that_is_not_published() -> None:
    kinds = {".md", ".py", ".ipynb", ".yml", ".jinja", ".toml"}
    files = [
        path
        for folder in ("docs", "examples", "fp8doctor", "checks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in kinds
    ]
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    assert [path.name for path in files if UNPUBLISHED.search(path.read_text("utf-8"))] == []
    assert UNPUBLISHED.search("pip install -U 'fp8doctor[torch]'")
    assert not UNPUBLISHED.search('pip install "fp8doctor @ git+$FP8DOCTOR"')
