"""checks/README.md, followed to the letter in a copy of this repository."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fp8doctor.areas import AREAS

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "checks" / "README.md").read_text("utf-8")
STEP = re.compile(r"<!-- step: (?P<where>\S+) -->\n```\w+\n(?P<what>.*?)^```$", re.S | re.M)
LEFT_OUT = shutil.ignore_patterns(".*", "build", "*.egg-info", "recorded", "results")
"""What is compiled comes along, or each command compiles it again where PYTHONDONTWRITEBYTECODE is set."""


@pytest.mark.slow
def test_the_five_steps_as_they_stand(tmp_path: Path) -> None:
    assert tuple(re.findall(r"^\| `(\w+)/` \|", PAGE, re.M)) == AREAS
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    said: dict[str, str] = {}
    for step in STEP.finditer(PAGE):
        where, what = step["where"], step["what"]
        if where != "commands":
            (copy / where).parent.mkdir(exist_ok=True)
            begun = (copy / where).read_text("utf-8") + "\n\n" if (copy / where).exists() else ""
            (copy / where).write_text(begun + what, encoding="utf-8")
            continue
        for line in what.splitlines():
            program, *arguments = shlex.split(line)
            assert program == "python"
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=copy,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            said[line] = done.stdout
    tested, explained, listed, _ = said.values()
    assert int(re.findall(r"(\d+) passed", tested)[0]) >= 2
    assert explained.startswith("MEM900 many-dtypes")
    assert "MEM900" in listed
    assert "`many-dtypes`" in (copy / "docs/checks/README.md").read_text("utf-8")
    assert "model.head.bfloat16()" in (copy / "docs/checks/MEM900.md").read_text("utf-8")
