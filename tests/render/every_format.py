"""A report in every format that `-o` can write, each of which has to be sound."""

import re

from fp8doctor.cli.delivery import Output, Wanted, writer
from fp8doctor.cli.gate import Gate
from fp8doctor.cli.options import FORMATS
from fp8doctor.diagnosis.document import Document
from fp8doctor.render import text
from fp8doctor.report import Report
from tests.render.sound_html import hold_sound
from tests.render.test_build_servers import hold_to_their_forms

CELL = re.compile(r"(?<!\\)\|")
WIDTH = 80


def in_format(report: Document, format: str, verbose: bool = False, quiet: bool = False) -> str:
    """Write a report as the command line does."""
    wanted = Wanted(Output(format, ()), Gate(fail_on="error"), verbose=verbose, quiet=quiet)
    return writer(report, wanted)(format)


def hold_every_format(report: Report) -> None:
    """Fail where a format is not what its readers take."""
    for format in FORMATS:
        in_format(report, format).encode("utf-8")
    hold_sound(report.to_html())
    hold_sound(report._repr_html_())
    hold_to_their_forms(report)
    for table in re.findall(r"(?m)(?:^\|.*\|$\n?)+", report.to_markdown()):
        assert len({len(CELL.split(line)) for line in table.splitlines()}) == 1, table
    assert text.render(report, width=WIDTH, verbose=True, ascii=True).isascii()
