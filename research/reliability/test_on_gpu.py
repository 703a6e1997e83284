"""What was recorded of inspections on a GPU, and the page that shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from research.reliability.on_gpu import HOSTILE, NAMES, rows
from tests.markdown import table
from tests.recordings import text_of

HERE = Path(__file__).parent
COLUMNS = ("patient", "items compared", "changed", "arms that were timed")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text_of(HERE / "h200.json.gz"))
    return document


def test_no_bit_changed_and_every_patient_was_timed(recorded: dict[str, Any]) -> None:
    inspections = recorded["inspections"]
    told = [(each["patient"], each["hostile"]) for each in inspections]
    assert told == [(name, False) for name in NAMES] + [(name, True) for name in HOSTILE]
    for each in inspections:
        assert each["items"] > 100
        assert each["changed"] == []
        assert bool(each["timed"]) is not each["hostile"]


def test_the_page_shows_what_was_recorded(recorded: dict[str, Any]) -> None:
    page = (HERE / "README.md").read_text("utf-8")
    shown = page.partition("<!-- gpu -->\n")[2].partition("<!-- end of gpu -->")[0]
    assert shown == table(COLUMNS, rows(recorded))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_is_read_without_cuda_being_initialized() -> None:
    program = """
import ctypes
from fp8doctor.examine import examine_surroundings
from fp8doctor.facts import Target
facts = examine_surroundings(Target(kind="environment", name="environment"))
software = facts.software
assert facts.gpus[0].name and software.driver and software.cudnn and software.cublaslt, facts
state, active, not_initialized = ctypes.c_uint(), ctypes.c_int(), 3
get_state = ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState
assert get_state(0, ctypes.byref(state), ctypes.byref(active)) == not_initialized
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=600)
    assert done.returncode == 0
