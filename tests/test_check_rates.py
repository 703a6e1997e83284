"""The rates on the checks' pages come from the tables of threads, recordings and recipes."""

from __future__ import annotations

from tests.check_rates import counts, judged, rates


def test_a_thread_judges_what_fired_first() -> None:
    assert judged(["CKP002", "MEM005"], ["CKP002"], "right") == [
        ("CKP002", "right"),
        ("MEM005", "not judged"),
    ]
    assert judged(["SHP002", "MEM005"], ["CKP002"], "wrong") == [
        ("SHP002", "wrong"),
        ("MEM005", "not judged"),
    ]


def test_every_table_is_read() -> None:
    threads, recordings = counts()["threads of users"], counts()["recordings on GPUs"]
    assert threads[0] > 45
    assert threads[1]["ENV005"]["right"] >= 3
    assert recordings[0] > 100
    assert recordings[1]["CMP001"]["right"] >= 5
    assert recordings[1]["CMP001"]["wrong"] == 0


def test_a_page_has_a_row_for_each_kind_of_case() -> None:
    assert [line.split("|")[1].split(maxsplit=1)[1].strip() for line in rates("SHP001").splitlines()[2:]] == [
        "threads of users",
        "recordings on GPUs",
        "public recipes",
    ]
