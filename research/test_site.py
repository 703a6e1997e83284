"""The documentation's site as it is published."""

from __future__ import annotations

import runpy

from tests import accessible
from tests.markdown import ROOT

THEMED = """<html lang="en"><head><title>t</title></head><body>
<aside class="sidebar-drawer"><p class="caption" role="heading"><span>Start</span></p></aside>
<article role="main"><h1>t<a href="#t">#</a></h1><pre>code</pre>
<div class="table-wrapper docutils container"><table><tr><th class="head"><p></p></th></tr></table></div>
</article></body></html>"""
"""What Sphinx 9 and furo 2025.12 write, in short."""


def test_the_site_gets_what_a_keyboard_and_a_screen_reader_need() -> None:
    repaired = runpy.run_path(str(ROOT / "docs/conf.py"))["accessible"]
    assert len(set(accessible.faults(THEMED))) == 4
    assert accessible.faults(repaired(THEMED)) == []
