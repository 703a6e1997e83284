"""The table of rates comes from the tables of threads, recordings and recipes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from fp8doctor.cli import explain
from fp8doctor.finding import Finding
from research.check_rates import Case, cell, columns, counted, rates, recording, thread
from tests.clinic import Patient


def test_a_thread_judges_what_fired_first() -> None:
    total, by_code = counted(
        [
            thread(["CKP002", "MEM001"], ("CKP002",), "right"),
            thread(["SHP002", "MEM001"], ("CKP002",), "wrong"),
            thread([], ("NUM003", "NUM004"), "reassuring"),
        ]
    )
    assert total == 3
    assert by_code["CKP002"] == Counter(fired=1, rightly=1, missed=1)
    assert by_code["SHP002"] == Counter(fired=1, wrongly=1)
    assert by_code["MEM001"] == Counter(fired=2)
    assert cell(by_code["NUM003"]) == "1 missed"


def test_a_recording_is_judged_by_the_rules_that_its_patient_names() -> None:
    finding = Finding(title="t", explanation="e", code="STP004", name="fp32-adapters")
    patient = Patient(Path("lora_fp32.py"), ("fp32-adapters",), ("fp32-parameters",), healthy=False)
    assert recording([finding], patient) == Case(["STP004"], ("STP004",))
    assert recording([], patient).missed == ("STP004",)


def test_every_table_is_read() -> None:
    found = columns()
    assert found["threads of users"][0] == 65
    assert found["threads of users"][1]["ENV005"]["rightly"] >= 3
    assert found["recordings on GPUs"][0] > 100
    assert found["recordings on GPUs"][1]["CMP001"]["rightly"] >= 5
    assert found["recordings on GPUs"][1]["CMP001"]["wrongly"] == 0
    assert found["public recipes"][1]["CMP001"]["rightly"] >= 5


def test_every_check_has_a_row() -> None:
    codes = [check.code for check in explain.headings()]
    rows = rates(codes).splitlines()[2:]
    assert [row.split("](")[0].strip("| [") for row in rows[:-1]] == codes
    assert rows[-1].startswith("| all")
