"""README.md and docs/ say nothing that the program does not: commands, tables, examples, screens."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import runpy
import shlex
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any, get_args

import click
import pytest

from fp8doctor import cli
from fp8doctor.answer.verdict import Status
from fp8doctor.cli import delivery, project
from fp8doctor.cli.commands import DEMO
from fp8doctor.report import Report, load_report
from fp8doctor.worker.parent import examine_in_worker
from tests import picture, readme
from tests.markdown import (
    ROOT,
    blocks,
    fenced,
    prose,
    rows_after,
    split_sentences,
    text,
    written_by_hand,
)

README = text("README.md")
NOT_FOR_USERS = tuple(
    f"docs/{name}.md" for name in ("ARCHITECTURE", "BELIEFS", "layers", "sentences", "traps")
)
PAGES = tuple(page for page in written_by_hand() if page not in NOT_FOR_USERS)
"""What is written for users."""

COMMAND = re.compile(r"^(?:\.venv/bin/)?fp8doctor\s.*?(?=\s+#|$)", re.M)


def commands() -> Iterator[str]:
    """Every command line of fp8doctor: in backticks, and in blocks for a shell."""
    for page in PAGES:
        yield from re.findall(r"`(fp8doctor [^`]+)`", prose(page))
        shell = (line for each in blocks(page) if each.language == "sh" for line in each.code.split(" && "))
        yield from (
            found.removeprefix(".venv/bin/").strip() for line in shell for found in COMMAND.findall(line)
        )


def examples() -> Iterator[Any]:
    for page in PAGES:
        for number, block in enumerate(each for each in blocks(page) if each.language == "python"):
            yield pytest.param(block.code, id=f"{page}-{number}")


def test_options_are_what_the_code_says() -> None:
    assert readme.written("docs/options.md", "options") == readme.options(), "python -m tests.readme"


@pytest.mark.slow
def test_screen_without_a_gpu_is_what_the_program_says() -> None:
    """Modulo versions; the page's was made without a GPU, and says so."""
    made = readme.screen()
    if "no GPU;" not in made:
        pytest.skip("the page shows a machine without a GPU")
    written = readme.written("docs/screen.md", "screen")
    assert readme.without_versions(written) == readme.without_versions(made), "python -m tests.readme"


def test_recorded_screen_is_what_demo_prints() -> None:
    assert readme.written("docs/screen.md", "recorded") == readme.recorded(), "python -m tests.readme"


@pytest.mark.slow
def test_plan_is_what_the_program_says() -> None:
    written, made = readme.written("docs/plan.md", "plan"), readme.plan()
    assert readme.without_versions(written) == readme.without_versions(made), "python -m tests.readme"


def test_picture_is_of_what_demo_prints() -> None:
    pytest.importorskip("rich")
    drawn = text(readme.PICTURE)
    assert picture.shown(drawn) == picture.shown(picture.picture()), "python -m tests.readme"
    assert len(picture.shown(drawn)) > 20


def test_picture_loads_nothing() -> None:
    drawn = text(readme.PICTURE)
    assert set(re.findall(r"(?:https?:|//)[^\s\"']*", drawn)) == {"http://www.w3.org/2000/svg"}
    assert all(place.startswith("#") for place in re.findall(r"url\((.*?)\)", drawn))


def test_picture_is_named_with_its_hardware_and_versions() -> None:
    facts = load_report(DEMO).facts
    versions = (facts.software.torch, str(facts.software.packages["torchao"].version))
    torch, torchao = (".".join(version.split(".")[:2]) for version in versions)
    caption = " ".join(README.split(f"({readme.PICTURE})")[1].split("\n\n")[1].split())
    assert f"one {facts.gpus[0].name} (torch {torch}, torchao {torchao})" in caption


def test_screen_without_a_gpu_says_what_it_rests_on() -> None:
    around = text("docs/screen.md").split("<!-- generated: screen -->")[0].split("## Without a GPU")[1]
    assert "estimate" in around
    assert "estimated" in readme.written("docs/screen.md", "screen")


def test_commands_parse() -> None:
    lines = set(commands())
    assert len(lines) > 50
    for line in lines:
        parse(line)


def parse(line: str) -> None:
    program, *arguments = shlex.split(line)
    assert program == "fp8doctor"
    context = cli.main.make_context("fp8doctor", arguments)
    name, command, rest = cli.main.resolve_command(context, [*context._protected_args, *context.args])
    assert command is not None
    assert command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("code", list(examples()))
def test_example_is_python_with_names_that_exist(code: str) -> None:
    """Found in the source: some of these modules import the framework that they are for."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fp8doctor"):
            source = Path(str(importlib.util.find_spec(str(node.module)).origin)).read_text("utf-8")
            assert all(re.search(rf"(class |def |\"){each.name}\b", source) for each in node.names)


def test_every_command_has_a_row() -> None:
    words = {shlex.split(row[0].strip("`"))[1] for row in rows_after("docs/options.md", "command")}
    assert words == {"model.py", *cli.main.commands}


def test_reports_share_their_options() -> None:
    gates = {*project.GATE} - {"fail_on"}
    every = {frozenset(readme.names(command) - gates) for command in (cli.env, cli.report_, cli.demo)}
    assert len(every) == 1
    assert all(gates <= readme.names(command) for command in (cli.examine, cli.run, cli.report_))
    assert every.pop() < readme.names(cli.examine)


def test_exit_codes_are_those_of_the_command_line() -> None:
    assert [row[0] for row in rows_after("docs/options.md", "exit code")] == [
        str(code) for code in (delivery.OK, delivery.FOUND, delivery.FAILED, delivery.INTERRUPTED)
    ]


def test_options_named_in_the_text_exist() -> None:
    known = {
        opt
        for command in (cli.examine, *cli.main.commands.values())
        for option in readme.shown(command)
        for opt in (*option.opts, *option.secondary_opts)
    }
    named = {
        (page, each) for page in PAGES for each in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", prose(page))
    }
    assert [(page, each) for page, each in named if each not in known] == []


def test_files_named_in_the_text_exist() -> None:
    path = r"`((?:checks|tests|fp8doctor)/[\w./]+)`"
    named = {(page, each) for page in PAGES for each in re.findall(path, text(page))}
    assert [(page, each) for page, each in named if not (ROOT / each).exists()] == []


def test_set_up_commands_come_first_and_pin_no_build_of_torch() -> None:
    marks = [block.mark for block in blocks("README.md")]
    assert marks[:2] == ["command: run", "command: test"]
    for mark, extra in (("command: run", ".[torchao]"), ("command: test", ".[test]")):
        command = fenced(mark)
        assert "venv" in command
        assert f"'{extra}'" in command
        assert "torch=" not in command
        assert "index" not in command
    assert readme.PATIENT in fenced("command: run")
    assert "pytest" in fenced("command: test")


def test_every_page_is_on_the_home_page() -> None:
    linked = [f"docs/{page}" for page in re.findall(r"\]\(([^)#]+)", text("docs/index.md"))]
    assert {*written_by_hand(), "docs/checks/README.md"} - {"README.md", "docs/index.md"} <= {*linked}
    assert len(linked) == len(set(linked)), "a page has one place in the sidebar"
    assert {"docs/index.md", readme.PICTURE} <= set(re.findall(r"\]\(([^)#]+)", README))


@pytest.mark.parametrize("symptom", readme.SYMPTOMS)
def test_causes_of_a_symptom_are_titles_of_checks(symptom: str) -> None:
    assert readme.written("docs/symptoms.md", symptom) == readme.causes(symptom), "python -m tests.readme"


def test_language_models_get_the_same_map() -> None:
    assert text(readme.LLMS) == readme.llms(), "python -m tests.readme"
    assert all((ROOT / path).is_file() for path in re.findall(r"\]\(([^)]+)\)", text(readme.LLMS)))


def test_sentences_are_told_apart() -> None:
    page = "# A head\n\nOne [two](x.md) `three four`, 0.4 of\nit. Five!\n\n- six\n- seven\n\n| a b | c |\n"
    page += "|---|---|\n\n```sh\ncode\n```\n![picture](x.svg)\n"
    assert list(split_sentences(page)) == [
        "A head",
        "One two CODE, 0.4 of it.",
        "Five!",
        "six",
        "seven",
        "a b",
        "c",
    ]


def test_what_is_said_of_its_accuracy_was_measured() -> None:
    """Beside plain scripts, on a GPU; the pages of these runs say it in one sentence."""
    measured = text("research/benchmarks/results/trial_accuracy_h200.md").split("Held, all of them: ")[1]
    times, median, memory, _ = re.findall(r"\((?:worst )?[+-]?([\d.]+ %)\)", measured.split("60 s")[0])
    assert f"worst {times}, median {median} |" in text("docs/trial.md")
    assert f"worst {memory} |" in text("docs/trial.md")
    for page in ("trial_jobs_h200.md", "trial_jobs_h200_older.md", "trial_jobs_h100.md"):
        of_all, _, closely, of_memory = spreads(text(f"research/benchmarks/results/{page}"))
        line = next(each for each in text("docs/trial.md").splitlines() if f"{page})" in each)
        assert re.search(rf"\b{of_all[2]} variants\b", line)
        assert (
            f"median {of_all[0]}, worst {of_all[1]}; worst {closely[1]} of the {closely[2]} whose own" in line
        )
        assert f"memory of {of_memory[2]} variants | worst {of_memory[1]}, median {of_memory[0]} |" in text(
            "docs/trial.md"
        )


def spreads(page: str) -> list[tuple[str, str, str]]:
    """Read median, worst and number of the errors of all times, of those relied on, of those told closely,
    and of memory."""
    line = next(each for each in page.splitlines() if each.startswith("Time where the GPU sets the pace"))
    found: list[tuple[str, str, str]] = re.findall(r"median ([\d.]+ %), worst ([\d.]+ %) of (\d+)", line)
    return found


def test_what_the_first_page_says_of_its_checks_was_counted() -> None:
    written = readme.written("README.md", "verified")
    assert written == readme.verified(), "python -m tests.readme"
    of_all, *_ = spreads(text("research/benchmarks/results/trial_jobs_h200.md"))
    assert (
        f"{of_all[2]} GPU-bound variants, one H200, against plain scripts: off by {of_all[0]}".replace(
            " %", "%"
        )
        in written
    )


def test_extras_are_those_of_the_package() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    said = " ".join(README.split()).split("The extras are ")[1].split("You need none")[0]
    assert set(re.findall(r"`(\w+)`", said)) == {*setup["options.extras_require"]} - {"dev", "docs", "lint"}


@pytest.mark.slow
def test_a_package_index_gets_no_link_into_the_checkout() -> None:
    """An index shows the page without the files beside it."""
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]
    relative = re.compile(r"\]\((?!https://)[^)]*\)")
    assert relative.search(README), "in the checkout links lead to the files of that very version"
    assert not relative.search(description(None))
    assert "![" not in description(None)
    published = description("https://example.org/fp8doctor")
    assert not relative.search(published)
    assert "(https://example.org/fp8doctor/blob/main/docs/running.md)" in published
    assert f"(https://example.org/fp8doctor/raw/main/{readme.PICTURE})" in published


@pytest.mark.slow
def test_api_example_runs(
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


def test_report_fields_exist() -> None:
    rows = rows_after("docs/api.md", "field")
    named = {field.strip("`").removeprefix("report.").removesuffix("()") for field, _ in rows}
    assert named >= {"verdict", "findings", "prescription", "outcomes", "facts", "to_dict"}
    assert all(hasattr(Report, name) for name in named)


def test_every_status_of_the_verdict_is_named() -> None:
    named = rows_after("docs/api.md", "field")[0][1].split("(")[1].split(")")[0]
    assert tuple(re.findall(r"`(\w+)`", named)) == get_args(Status)


def test_api_options_exist() -> None:
    from fp8doctor import inspect_model

    said = text("docs/api.md").split("`inspect_model` works in your process")[1].split("## ")[0]
    parameters = inspect.signature(inspect_model).parameters
    assert set(re.findall(r"`(\w+)(?:=\w+)?`", said)) == {*parameters} - {"model", "batch"}


@pytest.mark.slow
def test_model_file_example_is_examined(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(fenced("example: model file"), "utf-8")
    examination = examine_in_worker(str(path), layers=2, progress=lambda stage: None)
    assert examination.problem is None
    assert len(examination.facts.network.linears) == 2
    assert examination.facts.workload.tokens == 4096


def test_nothing_in_it_is_a_click_usage_error() -> None:
    """A line with an option that does not exist is noticed: the parser of these tests is the real one."""
    with pytest.raises(click.UsageError):
        parse("fp8doctor env --no-such-option")
