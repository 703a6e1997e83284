"""A test that asserts nothing fails, wherever its assertions stand."""

import subprocess
import sys
from pathlib import Path

import pytest

PLANTED = """
import pytest

def test_in_a_loop_over_nothing():
    for each in []:
        assert each

def test_of_a_call_alone():
    len("")

def test_that_asserts():
    assert True

def test_that_expects():
    with pytest.raises(KeyError):
        {}[1]

def test_that_skips():
    pytest.skip("no")
"""


@pytest.mark.slow
def test_a_planted_vacuous_test_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_planted.py").write_text(PLANTED)
    # -rN: no summary, which repeats each message where the variable CI is set.
    command = [sys.executable, "-m", "pytest", "-q", "-rN", "-p", "tests.assertions"]
    command += ["-p", "no:cacheprovider", "-o", "enable_assertion_pass_hook=true"]
    command += ["--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stderr
    assert "2 failed, 2 passed, 1 skipped" in done.stdout
    assert done.stdout.count("it passed without reaching an assertion") == 2
