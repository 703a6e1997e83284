"""Annotations and test cases: golden files, and whatever a model is called they stay what they are."""

import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fp8doctor import cli
from fp8doctor.facts import Target
from fp8doctor.finding import Outcome
from fp8doctor.render.build_servers import github, junit
from fp8doctor.report import Report
from tests.render.reports import SCREENS
from tests.render.test_arbitrary_text import names, with_name
from tests.render.test_screens import hold
from tests.replays import of

ANNOTATION = re.compile(r"::(error|warning|notice) (?:file=[^,:\n]*,line=1,)?title=[^,:\n]*::[^\r\n]+\Z")


def hold_to_their_forms(report: Report) -> None:
    for line in github(report).splitlines():
        assert ANNOTATION.match(line), line
    for fail_on in ("warning", None):
        suites = ElementTree.fromstring(junit(report, fail_on=fail_on).encode())
        found = Counter(each.code for each in report.findings)
        cases = sum(max(1, found[each.code]) for each in report.outcomes)
        assert len(suites.findall("testsuite/testcase")) == cases + 1
        failures = suites.findall("testsuite/testcase/failure")
        assert suites.get("failures") == suites.find("testsuite").get("failures") == str(len(failures))
        assert bool(failures) == (fail_on is not None and report.reaches(fail_on))


def test_golden_files() -> None:
    report = SCREENS["on_a_gpu"]
    hold("on_a_gpu.github.txt", github(report))
    hold("on_a_gpu.junit.xml", junit(report, fail_on="warning"))


@pytest.mark.slow
@given(names, st.text(max_size=12))
@settings(max_examples=15, deadline=None)
def test_whatever_a_model_and_its_file_are_called(name: str, file: str) -> None:
    report = with_name(name)
    for target in (name, file):
        facts = replace(report.facts, target=Target(kind="file", name=target, attribute=None))
        hold_to_their_forms(replace(report, facts=facts))


def test_every_outcome_is_a_test_case() -> None:
    kinds = ("silent", "refuted", "not_applicable", "unknown", "crashed")
    outcomes = tuple(
        Outcome(code=f"ZZZ00{at}", outcome=kind, reason="because", missing="trial", area="step")
        for at, kind in enumerate(kinds)
    )
    report = replace(SCREENS["eager_decoder"], findings=(), prescription=(), outcomes=outcomes)
    cases = ElementTree.fromstring(junit(report)).findall("testsuite/testcase")[1:]
    assert [child.tag for case in cases for child in case] == [*["system-out"] * 2, *["skipped"] * 2, "error"]
    assert all("because" in str(case[0].get("message")) for case in cases[2:])
    verdict, *_ = ElementTree.fromstring(junit(of("patients", "h200-decoder_454m_compiled").report)).iter(
        "testcase"
    )
    assert [child.tag for child in verdict] == ["skipped"], "it is open"


def test_a_saved_report_names_its_own_file_in_every_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    name = "llama_8b_eager.py"
    for format, named in (("github", f"file={name},"), ("junit", f"fp8doctor {name}")):
        assert named in CliRunner().invoke(cli.main, ["demo", "--format", format]).stdout


def test_the_formats_are_written_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Annotations go to stdout, the page to the step's summary, the files by their suffixes."""
    summary = tmp_path / "summary.md"
    summary.write_text("before\n", "utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.chdir(tmp_path)
    args = ["demo", "--format", "github", "-o", "fp8.xml", "-o", "fp8.md"]
    result = CliRunner().invoke(cli.main, [*args, "--fail-on", "error"])
    assert result.exit_code == 1
    assert result.stdout.startswith("::error file=llama_8b_eager.py,line=1,title=VERDICT fp8_slower::")
    assert all(ANNOTATION.match(line) for line in result.stdout.splitlines())
    assert ElementTree.fromstring(Path("fp8.xml").read_bytes()).get("name") == "fp8doctor"
    assert summary.read_text("utf-8") == f"before\n{Path('fp8.md').read_text('utf-8')}\n"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "nowhere" / "summary.md"))
    lost = CliRunner().invoke(cli.main, ["demo", "--format", "github"])
    assert (lost.exit_code, len(lost.stderr.splitlines())) == (0, 1)
