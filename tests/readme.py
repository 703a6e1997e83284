"""What of README.md and ``docs/`` is made from the program: ``python -m tests.readme`` writes it,
`tests.test_readme` and `tests.test_check_pages` hold it.

A part of a page stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``; whole files are the picture
of the first screen and the pages of the checks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import click

import fp8doctor
from fp8doctor import cli, registry
from fp8doctor.diagnosis.diagnose import diagnose
from fp8doctor.report import Report
from tests import check_pages, clinic
from tests.configurations import LLAMA_8B
from tests.markdown import GENERATED, ROOT, table, text
from tests.picture import picture, printed

PATIENT = "tests/patients/decoder_468m.py"
PICTURE = "docs/screen.svg"
LLMS = "llms.txt"

VERSION = re.compile(r"\b(fp8doctor|torch|torchao|TE) \d\S*")


def options() -> str:
    """The options of every report in one table, those that only a model file or a script takes in others, and
    those of each command that writes no such report."""
    of_every_report = names(cli.demo)
    of_the_gate = names(cli.report_) - of_every_report
    elsewhere = of_every_report | of_the_gate
    everywhere = [option for option in shown(cli.examine) if option.name in of_every_report]
    gates = [option for option in shown(cli.examine) if option.name in of_the_gate]
    models_only = [option for option in shown(cli.examine) if option.name not in elsewhere]
    scripts_only = [option for option in shown(cli.run) if option.name not in elsewhere]
    return "\n".join(
        (
            optiontable("option of every report", everywhere),
            optiontable("gate of `fp8doctor model.py`, `run` and `report`", gates),
            optiontable("option of `fp8doctor model.py` only", models_only),
            optiontable("option of `fp8doctor run` only", scripts_only),
            *(
                optiontable(f"option of `fp8doctor {name}`", shown(command))
                for name, command in cli.main.commands.items()
                if not of_every_report <= names(command)
            ),
        )
    )


SYMPTOMS = {
    "slower": "CMP001 CMP002 SHP002 SHP003 SHP005 STP001 CKP001 DST001 DST003 MEM003 MEM004",
    "nothing": "MOD001 MOD002 MOD003 MOD006 ENV001 ENV002 ENV003 ENV004 GPU001",
    "nan": "NUM001 NUM003 NUM004 MOD007 MOD008",
    "memory": "MEM001 MEM002 MEM005",
    "raises": "SHP001 GPU002 ENV005",
}
"""What a user sees -> the checks to think of first, the most frequent causes first."""


def verified() -> str:
    """What was counted or measured of fp8doctor, a line and a number each, from the pages that say it."""

    def found(page: str, pattern: str) -> tuple[str, ...]:
        match = re.search(pattern, text(page))
        assert match, f"{page} says nothing like {pattern!r}"
        return tuple(each.replace(" %", "%") for each in match.groups())

    results, published = "tests/benchmarks/results", "tests/benchmarks/results/published.md"
    times = found(
        f"{results}/trial_jobs_h200.md", r"the GPU sets the pace.*?median ([\d.]+ %), worst [\d.]+ % of (\d+)"
    )
    plans = found("docs/trial.md", r"at most ([\d.]+ %) slower on (\d+) of (\d+) jobs")
    jobs, error = found(published, r"(?m)^\| all +\|[^(]*\((\d+)\) +\| ([\d.]+ %)")
    recipes, quiet = found("tests/recipes/README.md", r"(\d+) recipes, of which (\d+) raise no alarm")
    tried, same = found(
        "tests/reliability/README.md", r"a random tree of modules looked at \| ([\d,]+) \| ([\d,]+)"
    )
    assert tried == same
    return (
        f"- Times: 8 jobs, {times[1]} GPU-bound variants, one H200, against plain scripts: off by {times[0]} "
        "([median](docs/trial.md#how-far-off-it-was)).\n"
        f"- Fixes: on {plans[1]} of {plans[2]} other jobs on an H100, the plan ends within {plans[0]} of "
        "the fastest variant known.\n"
        f"- Plans: {jobs} published jobs, planned speedup off by {error} ([mean]({published})).\n"
        f"- False alarms: of {recipes} public recipes, {quiet} raise no warning "
        "([each one judged](tests/recipes/README.md)).\n"
        f"- No harm: {tried} random models examined, all unchanged to the bit "
        "([how](tests/reliability/README.md)).\n"
    )


def causes(symptom: str) -> str:
    """The titles of the checks behind a symptom."""
    titles = {check.code: check.title for check in registry.discover()}
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
    context = click.Context(cli.examine)
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
        if isinstance(option.type, click.Choice)
        else option.make_metavar(context)
    )


def described(option: click.Option) -> str:
    shown = option.default if option.show_default is True else option.show_default
    default = f" Default: {shown:g}." if isinstance(shown, float) else f" Default: {shown}." if shown else ""
    return (option.help or "") + default


def screen() -> str:
    """What the command line says of the patient on this machine, where nothing is timed."""
    report = Report.of(diagnose(clinic.examined(clinic.read(ROOT / PATIENT)).facts))
    with TemporaryDirectory() as folder:
        saved = Path(folder, "saved.json")
        report.save(saved)
        return f"```text\n{printed('report', str(saved), code=0)}```\n"


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
