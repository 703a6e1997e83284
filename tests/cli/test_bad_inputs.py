"""Bad command lines and bad files: one sentence each, before any work, and exit code 2.

Model files that cannot be used are in ``tests/bad_input/``, arguments of Python in ``tests/test_api.py``.
"""

import gzip
import json
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from fp8doctor.cli.options import FORMATS
from fp8doctor.cli.pages import DEMO
from tests.cli.command import Worker, fp8doctor
from tests.configurations import LLAMA_8B

NO_REPORT = "is JSON, but not a report"
NO_JSON = "is not JSON"
NO_HEALTH = "holds no health of a job"

BAD: dict[str, str] = {
    # files
    "report nowhere.json": "No such file",
    "report folder": "is not a regular file",
    "report pipe": "is not a regular file",
    "report /dev/null": "is not a regular file",
    "report cut.json": NO_JSON,
    "report cut.json.gz": NO_JSON,
    "report empty": NO_JSON,
    "report binary": NO_JSON,
    "report utf16.json": NO_JSON,
    "report deep.json": "nested too deep",
    "report list.json": NO_REPORT,
    "report config.json": NO_REPORT,
    "report trace.json": NO_REPORT,
    "report newer.json": "upgrade fp8doctor",
    "report odd_version.json": "its schema_version is 'two'",
    "report odd_facts.json": "at `$.trial.arms`",
    "compare demo.json.gz nowhere.json": "nowhere.json",
    "compare list.json demo.json.gz": "list.json",
    "trace nowhere.json": "No such file",
    "trace folder": "it is not a file",
    "trace empty": NO_JSON,
    "trace demo.json.gz": "traceEvents",
    "trace trace.json": "no work of a GPU",
    "health nowhere.jsonl": "No such file",
    "health binary": NO_HEALTH,
    "health demo.json.gz": NO_HEALTH,
    "why down nowhere.json": "No such file",
    "plan cut.json": NO_JSON,
    "fix nowhere.py": "No such file",
    "fix binary --report demo.json.gz": "UTF-8",
    "fix model.py --report demo.json.gz": "not of model.py",
    "run nowhere.py": "no such file",
    # words
    "why .": "'SAVED'",
    "why . demo.json.gz": "none of the 225 linear layers",
    "why zzz demo.json.gz": "none of the 225 linear layers have the name zzz",
    "why layers.0.mlp.dwn_proj demo.json.gz": "did you mean",
    "compare demo.json.gz": "'SECOND'",
    "trace": "'FILE'",
    "trace trace.json demo.json.gz": "unexpected extra argument",
    "demo second": "unexpected extra argument",
    "model.py second.py": "fp8doctor run model.py",
    "model.py --lr 3": "fp8doctor run model.py",
    "exlpain": "did you mean explain?",
    "checkpoint pipe": "unexpected extra argument",  # withdrawn: no file of it is read
    "explain NOPE999": "NOPE999",
    "run": "no script was named",
    # options
    "--bogus": "--bogus",
    "model.py --bogus": "--bogus",
    "demo -v -q": "-v and -q contradict",
    "demo --fail-on sometimes": "never",
    "demo --select NOPE": "NOPE",
    "demo --select ,": "names no code",
    "demo --ignore NOPE": "NOPE",
    "demo --assume-gpu H300": "did you mean H200",
    "demo --checks nowhere": "no such folder",
    "demo --format sarif": "'junit'",
    "demo -o r.yaml": "junit",
    "demo -o folder": "is a directory",
    "demo -o nowhere/r.json": "no such folder",
    "demo --save folder": "is a directory",
    "demo --save nowhere/r.json": "no such folder",
    "compare demo.json.gz demo.json.gz -o r.tar": "markdown",
    "compare demo.json.gz demo.json.gz --min-speedup nan": "not a positive number",
    "report demo.json.gz --max-regression 5": "--baseline",
    "report demo.json.gz --baseline list.json": "list.json",
    "plan llama.json --gpu H1000": "did you mean H100",
    "plan llama.json --gpu ,": "names no GPU",
    "plan llama.json --lora many": "does not begin with a rank",
    "plan llama.json --step-ms nan": "not a positive number",
    "plan demo.json.gz --batch 4096": "fits on no GPU",
    "plan demo.json.gz --recipe int3": "--recipe int3",
    "run --steps 2 model.py": "x>=3",
    "run --every 5 model.py": "--health",
    "run --health folder model.py": "is a directory",
    "run --stop --health h.jsonl model.py": "--health",
    **{
        f"model.py {option} {value}": option
        for option, value in (
            *product(("--batch", "--seq", "--layers"), ("0", "-1", "many", "1.5", "inf")),
            *product(("--load-timeout", "--budget", "--min-speedup"), ("0", "-1", "soon", "inf", "nan")),
        )
    },
}
"""Command line -> what the sentence names."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of every kind, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", None)  # a script that is run would replace this process
    packed = DEMO.read_bytes()
    report: dict[str, Any] = json.loads(gzip.decompress(packed))
    odd = json.dumps(report | {"facts": {**report["facts"], "trial": {"arms": 5}}})
    files = {
        "demo.json.gz": packed,
        "cut.json.gz": packed[:3000],
        "cut.json": gzip.decompress(packed)[:5000],
        "utf16.json": gzip.decompress(packed).decode().encode("utf-16"),
        "binary": bytes(range(256)),
        "empty": b"",
        "deep.json": b"[" * 100_000,
        "list.json": b"[1, 2]",
        "config.json": b'{"model_type": "llama"}',
        "trace.json": b'{"traceEvents": []}',
        "newer.json": b'{"schema_version": 99, "facts": {}}',
        "odd_version.json": b'{"schema_version": "two", "facts": {}}',
        "odd_facts.json": odd.encode(),
        "llama.json": json.dumps(LLAMA_8B).encode(),
        "model.py": b"raise AssertionError('run')",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")


@pytest.mark.slow
@pytest.mark.parametrize("line", BAD)
@pytest.mark.usefixtures("folder")
def test_it_is_refused_in_a_sentence(line: str, worker: Worker) -> None:
    result = fp8doctor(*line.split())
    assert (result.exit_code, result.stdout) == (2, "")
    (sentence,) = result.stderr.splitlines()
    assert sentence.startswith("fp8doctor: ")
    assert BAD[line] in sentence
    assert not worker.asked


def test_an_unknown_format_is_answered_with_the_others() -> None:
    assert all(each in fp8doctor("demo", "--format", "pdf").stderr for each in FORMATS)
