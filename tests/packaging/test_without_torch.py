"""Torch is an extra: what reads, explains and renders runs where only the small dependencies are installed.

No network: the venv gets links to the running interpreter's packages that setup.cfg requires, and those
that they require.
"""

import gzip
import json
import os
import subprocess
import sys
import venv
from configparser import ConfigParser
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fp8doctor import errors
from fp8doctor.errors import UserError, require_torch
from tests.profiling.composed import Composed
from tests.waiting import LONGEST_S

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests/patients/recorded"
ONE, OTHER = (str(RECORDED / f"h200-{name}.json.gz") for name in ("llama_8b", "decoder_468m"))
HEALTH = ROOT / "tests/health/recorded/h100-tensorwise.jsonl.gz"

WORKS = (
    ("--help",),
    ("--version",),
    ("demo", "-o", "demo.html"),
    ("list",),
    ("explain", "CMP001"),
    ("explain", "CUDA out of memory"),
    ("env",),
    ("report", ONE, "-o", "report.md"),
    ("report", ONE, "--format", "json"),
    ("compare", ONE, OTHER),
    ("why", "lm_head", ONE),
    ("plan", ONE, "--gpu", "H100,B200"),
    ("health", "health.jsonl"),
    ("trace", "trace.json"),
)
NEEDS_TORCH = (("model.py",), ("plan", "config.json"), ("plan", "model.py"), ("plan", "llama"))


def requirements() -> list[Requirement]:
    """What setup.cfg installs without an extra."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", "utf-8")
    return [Requirement(line) for line in setup["options"]["install_requires"].split("\n") if line]


def link_all(folder: Path) -> set[str]:
    """Link the requirements and theirs into a folder of packages. Return their names."""
    to_come, done = requirements(), set[str]()
    while to_come:
        wanted = to_come.pop()
        if wanted.name.lower() in done or not (
            wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        ):
            continue
        done.add(wanted.name.lower())
        found = metadata.distribution(wanted.name)
        to_come += map(Requirement, found.requires or ())
        for name in {Path(file).parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (folder / name).symlink_to(Path(str(found.locate_file(name))).resolve())
    return done


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a venv that has this checkout and its requirements, and its working folder beside it."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder / "venv", with_pip=False)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    link_all(site)
    (site / "checkout.pth").write_text(f"{ROOT}\n", "utf-8")
    (folder / "model.py").write_text("import torch\nmodel = torch.nn.Linear(2, 2)\n", "utf-8")
    (folder / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    trace = Composed()
    trace.add("user_annotation", "ProfilerStep#1", 0, 1000, 10)
    trace.kernel("nvjet_tst_qqtst_128x128", 10, 900, launched=5)
    trace.write(folder, "trace.json")
    (folder / "health.jsonl").write_bytes(gzip.decompress(HEALTH.read_bytes()))
    return folder / "venv/bin/python"


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [python, "-m", "fp8doctor", *arguments],
        cwd=python.parents[2],
        env=environment | {"PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )


def test_torch_is_no_requirement(tmp_path: Path) -> None:
    assert "torch" not in {name.replace("_", "-") for name in link_all(tmp_path)}
    assert not (tmp_path / "torch").exists()


@pytest.mark.parametrize("arguments", WORKS, ids=" ".join)
def test_it_works_without_torch(arguments: tuple[str, ...], bare: Path) -> None:
    done = run(bare, *arguments)
    assert done.returncode in (0, 1), done.stderr
    assert len(done.stdout + done.stderr) > 10
    assert "failed" not in done.stderr


@pytest.mark.parametrize("arguments", NEEDS_TORCH, ids=" ".join)
def test_what_needs_torch_says_so_and_what_to_type(arguments: tuple[str, ...], bare: Path) -> None:
    done = run(bare, *arguments)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    package = "" if arguments[-1] == "model.py" else " transformers"
    assert last.endswith(f"{bare} -m pip install 'torch>=2.6'{package}")
    assert "Traceback" not in done.stderr


def test_a_script_without_torch_fails_by_itself_and_its_report_says_what_to_type(bare: Path) -> None:
    done = run(bare, "run", "model.py")
    assert done.returncode == 1, "the script's own code"
    assert (
        f"No module named 'torch'; install fp8doctor where you train, or type: {bare} -m pip" in done.stderr
    )


def test_the_machine_is_told_apart_from_its_python(bare: Path) -> None:
    shown = run(bare, "env").stdout
    assert "✗ torch" in shown
    assert "not installed" in shown
    facts = json.loads(run(bare, "env", "--format", "json").stdout)["facts"]
    assert facts["software"]["torch"] is None
    assert "cuda" not in facts["software"], "a torch that is not there is not built without CUDA"


def test_a_torch_of_the_users_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in ("2.6.0", "2.14.0.dev2+cpu"):
        monkeypatch.setattr(metadata, "version", lambda name, found=found: found)
        require_torch("it")
    monkeypatch.setattr(metadata, "version", lambda name: "2.5.1+cu121")
    with pytest.raises(UserError, match=r"it needs torch 2\.6 or newer, and .* has 2\.5\.1\+cu121\. Install"):
        require_torch("it")


def test_the_oldest_torch_is_that_of_the_extra() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", "utf-8")
    assert setup["options.extras_require"]["torch"] == f"torch>={errors.OLDEST_TORCH}"


def test_a_folder_that_an_uninstall_left_is_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    monkeypatch.setattr(errors.sys, "modules", {**sys.modules, "torch": None})
    monkeypatch.setattr(
        errors.importlib.util, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)])
    )
    assert not errors.has_torch()
