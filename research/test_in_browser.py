"""The page in a real browser, headless, at the width of a phone and of a desk, without the network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fp8doctor import load_report
from tests.render.test_html import DEMO

BROWSER = os.environ.get("FP8DOCTOR_TESTS_BROWSER") or next(
    filter(None, map(shutil.which, ("chromium", "google-chrome"))), None
)
"""Nightly names one, which has to be there; elsewhere it is the one that is installed."""

MEASURE = """<!DOCTYPE html><html><body><pre id="told"></pre>
<iframe id="phone" width="390" height="800" src="page.html"></iframe>
<iframe id="desk" width="1280" height="800" src="page.html"></iframe>
<script>
addEventListener("load", () => {
  const told = {};
  for (const id of ["phone", "desk"]) {
    const page = document.getElementById(id).contentDocument, root = page.documentElement;
    const rects = [...page.querySelectorAll("svg[role=img] rect")];
    const drawn = rects.map((each) => each.getBoundingClientRect());
    told[id] = {
      client: root.clientWidth, scroll: root.scrollWidth, height: root.scrollHeight,
      bars: drawn.length, flat: drawn.filter((each) => each.height < 1).length,
      ground: getComputedStyle(page.querySelector(".fp8doctor")).backgroundColor,
    };
  }
  document.getElementById("told").textContent = JSON.stringify(told);
});
</script></body></html>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium here; nightly installs one")
def test_a_browser_lays_the_page_out(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(load_report(DEMO).to_html(), "utf-8")
    (tmp_path / "measure.html").write_text(MEASURE, "utf-8")
    assert BROWSER
    dark = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"]
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    done = subprocess.run(
        [
            BROWSER,
            *quiet,
            *dark,
            "--allow-file-access-from-files",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--dump-dom",
            f"file://{tmp_path / 'measure.html'}",
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = re.search(r'<pre id="told">(\{.*?\})</pre>', done.stdout)
    assert found, done.stderr[-2000:]
    told = json.loads(found[1])
    for width, page in zip((390, 1280), told.values(), strict=True):
        assert page["client"] == width
        assert page["scroll"] <= width, "it has to be scrolled sideways"
        assert page["bars"] > 10
        assert page["flat"] == 0
        assert page["ground"] == "rgb(20, 23, 28)", "dark, as the browser asked for it"
    assert told["phone"]["height"] > told["desk"]["height"] > 1000
