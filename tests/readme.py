"""What of README.md and ``docs/`` is made from the program: ``python -m tests.readme`` writes it,
`tests.test_pages` compares.

A part of a page stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``; whole files are the picture
of the first screen and the pages of the checks.
"""

import contextlib
import re
from collections.abc import Callable, Iterable
from functools import partial

import click

import fp8doctor
from fp8doctor import cli
from fp8doctor.cli.explain import headings
from fp8doctor.planning.estimates import Row
from fp8doctor.wording import percent
from tests import check_pages
from tests.configurations import LLAMA_1B, LLAMA_8B, LLAMA_200M
from tests.markdown import GENERATED, ROOT, table, text
from tests.picture import picture, printed

COMMANDS = cli.main.every()

EXAMPLE = "examples/llama_8b.py"
PICTURE = "docs/screen.svg"
LLMS = "llms.txt"

VERSION = re.compile(r"\b(fp8doctor|torch|torchao|TE) \d\S*")


def options() -> str:
    """The options of every report in one table, those that only a model file or a script takes in others, and
    those of each command that writes no such report."""
    of_every_report = names(COMMANDS["demo"])
    of_the_gate = names(COMMANDS["report"]) - of_every_report
    elsewhere = of_every_report | of_the_gate
    everywhere = [option for option in shown(COMMANDS[""]) if option.name in of_every_report]
    gates = [option for option in shown(COMMANDS[""]) if option.name in of_the_gate]
    models_only = [option for option in shown(COMMANDS[""]) if option.name not in elsewhere]
    scripts_only = [option for option in shown(COMMANDS["run"]) if option.name not in elsewhere]
    return "\n".join(
        (
            optiontable("option of every report", everywhere),
            optiontable("gate of `fp8doctor model.py`, `run` and `report`", gates),
            optiontable("option of `fp8doctor model.py` only", models_only),
            optiontable("option of `fp8doctor run` only", scripts_only),
            *(
                optiontable(f"option of `fp8doctor {name}`", shown(command))
                for name, command in COMMANDS.items()
                if not of_every_report <= names(command)
            ),
        )
    )


SYMPTOMS = {
    "slower": "CMP001 CMP002 SHP002 SHP003 SHP005 STP001 CKP001 DST001 STP004 MEM004",
    "nothing": "MOD001 MOD002 MOD003 ENV001 GPU002",
    "nan": "NUM001 NUM003 ENV005 MOD007",
    "memory": "MEM001 MEM002",
    "raises": "SHP001 GPU002 ENV005",
}
"""What a user sees -> the checks to think of first, the most frequent causes first."""


def verified() -> str:
    """What was counted or measured of fp8doctor, with its worst case, from the pages that say it."""

    def found(page: str, pattern: str) -> tuple[str, ...]:
        match = re.search(pattern, text(page), re.S)
        assert match, f"{page} says nothing like {pattern!r}"
        return tuple(each.replace(" %", "%") for each in match.groups())

    jobs_page, published = (
        f"research/benchmarks/results/{name}.md" for name in ("jobs_2026-12-01_turn_2_h200", "published")
    )
    times = found(
        jobs_page, r"Median error ([\d.]+ %) of (\d+) variants.*?at most ([\d.]+ %).*?told (\d+ to \d+ %) too"
    )
    plans = found(jobs_page, r"best known on (\d+) of (\d+), of two after a rule.*?; (\d+) of \d+ before")
    slower = found(jobs_page, r"\*\*([\d.]+ %)\*\* \| 73")
    groups, jobs, error, worst = found(
        published, r"\n\| all +\|[^(]*?(\d+) \((\d+)\) +\| ([\d.]+ %)[^|]*\|[^|]*\| \+([\d.]+ %)"
    )
    recipes, quiet = found("research/recipes/README.md", r"(\d+) recipes, of which (\d+) raise no alarm")
    tried, same = found(
        "research/reliability/README.md", r"a random tree of modules looked at \| ([\d,]+) \| ([\d,]+)"
    )
    assert tried == same
    rows = (
        (
            f"[Times of {times[1]} variants of {plans[1]} new jobs]({jobs_page})",
            f"{times[0]} off plain scripts",
            f"{times[2]}; {times[3]} if the host sets the pace",
        ),
        (
            f"[Printed plans of these jobs, applied]({jobs_page})",
            f"the fastest variant known, or within 2% of it, on {plans[0]} of {plans[1]}; on {plans[2]} "
            "before two rules that these jobs asked for",
            f"{slower[0]} slower, before",
        ),
        (
            f"[Speedups that `plan` gives, {jobs} published ones ({groups} groups)]({published})",
            f"{error} off (mean)",
            worst,
        ),
        (
            f"[{recipes} public recipes](research/recipes/README.md), each finding judged",
            f"{quiet} get no warning",
            f"{int(recipes) - int(quiet)} get one or more",
        ),
        (f"[{tried} random models](research/reliability/README.md)", "unchanged to the bit", "0 changed"),
    )
    return table(("what", "median, mean or most", "worst"), rows)


def worth() -> str:
    """What `plan` says of some jobs that a team may have, a row for each GPU."""
    common = {"seq": 8192, "stack": "torchao"}
    jobs: dict[str, tuple[dict[str, object], dict[str, object]]] = {
        "Llama 8B, all weights, 8 GPUs (FSDP)": (LLAMA_8B, {"dp": 8, "checkpointing": "selective", **common}),
        "Llama 8B, LoRA of rank 16, 1 GPU": (LLAMA_8B, {"lora": 16, "checkpointing": "selective", **common}),
        "Llama of 1.2B, 8 GPUs (FSDP)": (LLAMA_1B, {"dp": 8, "checkpointing": "selective", **common}),
        "Llama of 0.2B, 8 GPUs (DDP)": (LLAMA_200M, {"dp": 8, "sharding": "ddp", "batch": 2, **common}),
    }
    gpus = ("H100", "B200")
    lines = []
    for job, (config, options) in jobs.items():
        plan = fp8doctor.plan(config, gpus, **options)
        lines.append(
            (job, *(_best([row for row in plan.rows if row.gpu == gpu and row.fits]) for gpu in gpus))
        )
    return table(("job", *gpus), lines)


def _best(rows: list[Row]) -> str:
    """What the fastest recipe of a GPU gives, and the share of the time that it saves."""
    best = max(rows, key=lambda row: row.speedup or 0.0)
    speedup = best.speedup or 0.0
    if speedup <= 1.0:
        return f"stay in BF16 (the best recipe: {speedup:.2f}x)"
    saved = percent(100.0 * (1.0 - 1.0 / speedup))
    return (
        f"{speedup:.2f}x ({best.speedup_low:.2f} to {best.speedup_high:.2f}), saves {saved} of the GPU-hours"
    )


def causes(symptom: str) -> str:
    """The titles of the checks behind a symptom."""
    titles = {check.code: check.title for check in headings()}
    rows = ((titles[code], f"[{code}](checks/{code}.md)") for code in SYMPTOMS[symptom].split())
    return table(("cause", "check"), rows)


def llms() -> str:
    """The map of the pages for language models (llmstxt.org), with links from the checkout's root."""
    return re.sub(r"\]\((?!\.\./)", "](docs/", text("docs/index.md")).replace("](../", "](")


def shown(command: click.Command) -> list[click.Option]:
    """The options of a command that its help shows."""
    return [
        parameter
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.hidden
    ]


def names(command: click.Command) -> set[str | None]:
    return {option.name for option in shown(command)}


def optiontable(title: str, options: Iterable[click.Option]) -> str:
    context = click.Context(COMMANDS[""])
    return table(
        (title, "what it does"),
        ((f"`{called(option)}{metavar(option, context)}`", described(option)) for option in options),
    )


def called(option: click.Option) -> str:
    return ", ".join((*option.opts, *option.secondary_opts))


def metavar(option: click.Option, context: click.Context) -> str:
    """What stands behind the option: a name, or the words to choose from."""
    if option.is_flag:
        return ""
    return " " + (
        "|".join(option.type.choices)
        if isinstance(option.type, click.Choice) and not option.metavar
        else option.make_metavar(context)
    )


def described(option: click.Option) -> str:
    shown = option.default if option.show_default is True else option.show_default
    default = f" Default: {shown:g}." if isinstance(shown, float) else f" Default: {shown}." if shown else ""
    return (option.help or "") + default


def screen() -> str:
    """What the command line says of the example for README.md, where nothing is timed."""
    with contextlib.chdir(ROOT):  # the command stands there as it was typed
        shown = printed(EXAMPLE, "--no-trial", "--assume-gpu", "h200", code=0)
    return f"```text\n{shown}```\n"


def recorded() -> str:
    """What the command line prints for the recording that ships, which is the same on every machine."""
    return f"```text\n{printed('demo', code=0)}```\n"


def plan() -> str:
    """The plan of a Llama 3 8B, which is the same on every machine."""
    found = fp8doctor.plan(LLAMA_8B, "H100", dp=8, seq=8192, checkpointing="selective", stack="torchao")
    return f"```text\n{found.to_text()}```\n"


def without_versions(text: str) -> str:
    """The text with the versions taken out, which differ from machine to machine."""
    return VERSION.sub(r"\1 ...", text)


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"verified": verified},
    "docs/options.md": {"options": options},
    "docs/plan.md": {"plan": plan},
    "docs/screen.md": {"recorded": recorded, "screen": screen},
    "docs/worth-it.md": {"worth": worth},
    "docs/symptoms.md": {symptom: partial(causes, symptom) for symptom in SYMPTOMS},
}
"""The parts of each page that are made, by their names."""


def written(page: str, name: str) -> str:
    """What stands on a page under that name."""
    found = re.search(GENERATED.format(name), text(page), re.S)
    assert found, f"{page} has no place for {name!r}"
    return found[2]


def main() -> None:
    for page, parts in PARTS.items():
        told = text(page)
        for name, make in parts.items():
            place = re.search(GENERATED.format(name), told, re.S)
            assert place, f"{page} has no place for {name!r}"
            told = told[: place.start(2)] + make() + told[place.end(2) :]
        (ROOT / page).write_text(told, "utf-8")
    (ROOT / PICTURE).write_text(picture(), "utf-8")
    (ROOT / LLMS).write_text(llms(), "utf-8")
    check_pages.main()


if __name__ == "__main__":
    main()
