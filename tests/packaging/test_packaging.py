"""What the wheel, the sdist and a bare checkout hold; ``research/test_packaging.py`` installs them."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from fp8doctor import registry
from fp8doctor.areas import AREAS

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = "build dist *.egg-info __pycache__ .git .venv .*_cache .hypothesis tests research".split()
CODES = sorted({check.code for check in registry.discover()})
GHOST = "build/lib/fp8doctor/checks/shapes/deleted_check.py"
GHOST_CODE = '''"""A check that was deleted and lives on in a stale build folder"""
from fp8doctor.registry import check

@check("SHP999", "deleted-check", area="shapes", severity="info")
def deleted_check(facts):
    return None
'''


def run(command: Iterable[str | Path], cwd: Path) -> str:
    """What a command prints; its stderr is shown when it fails. It sees neither this checkout nor the
    network."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    environment |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{done.args}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree with a stale ``build`` folder in it, as an old ``pip install .`` leaves
    one."""
    tree = tmp_path_factory.mktemp("source") / "fp8doctor-checkout"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    ghost = tree / GHOST
    ghost.parent.mkdir(parents=True)
    ghost.write_text(GHOST_CODE, "utf-8")
    return tree


@pytest.fixture(scope="module")
def clean_checkout(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tree as git would clone it: without ``build``."""
    tree = tmp_path_factory.mktemp("clone") / "fp8doctor-clone"
    shutil.copytree(checkout, tree, ignore=shutil.ignore_patterns("build"))
    return tree


@pytest.fixture(scope="module")
def distributions(clean_checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel and the sdist, the wheel built from the sdist as a release is."""
    target = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", target, clean_checkout], target)
    return {"wheel": next(target.glob("*.whl")), "sdist": next(target.glob("*.tar.gz"))}


def codes(command: Iterable[str | Path], cwd: Path) -> list[str]:
    return sorted(check["code"] for check in json.loads(run([*command, "list", "--format", "json"], cwd)))


@pytest.mark.slow
def test_what_the_distributions_hold(distributions: dict[str, Path]) -> None:
    """Every module, the data, the pages; no half of the tests; for an index no link into the checkout."""
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        shipped = set(wheel.namelist())
        (name,) = (name for name in shipped if name.endswith(".dist-info/METADATA"))
        page = wheel.read(name).decode("utf-8")
    with tarfile.open(distributions["sdist"]) as sdist:
        source = {name.partition("/")[2] for name in sdist.getnames()}
    library = {str(path.relative_to(ROOT)) for path in (ROOT / "fp8doctor").rglob("*.py")}
    checks = {f"fp8doctor/{path.relative_to(ROOT)}" for path in (ROOT / "checks").rglob("*.py")}
    assert {name for name in shipped if name.endswith(".py")} == library | checks
    assert {f"fp8doctor/{name}" for name in ("plan.schema.json", "report.schema.json", "py.typed")} <= shipped
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert pages | {"README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md", "CONTRIBUTING.md"} <= source
    assert not [name for name in source if name.startswith("tests")]
    assert "\n# fp8doctor\n" in page
    assert "Description-Content-Type: text/markdown" in page
    assert [each for each in re.findall(r"\]\(([^)]*)\)", page) if not each.startswith("https://")] == []


@pytest.mark.slow
def test_bare_checkout_finds_every_check_and_no_deleted_one(checkout: Path) -> None:
    assert codes([sys.executable, "-m", "fp8doctor"], checkout) == CODES


def test_the_hooks_run_the_ruff_of_the_gate() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    (rev,) = (each["rev"] for each in hooks if each["repo"].endswith("/ruff-pre-commit"))
    assert f"ruff=={rev.removeprefix('v')}\n" in (ROOT / "setup.cfg").read_text("utf-8")


def test_only_a_tag_releases() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
    assert workflow[True] == {"push": {"tags": ["v*"]}}, "YAML reads the key 'on' as True"
    assert [name for name, job in workflow["jobs"].items() if "permissions" in job] == ["publish"]


def test_git_ignores_build_folders() -> None:
    assert {"build/", "dist/", "*.egg-info/"} <= set((ROOT / ".gitignore").read_text("utf-8").split())


def test_every_area_folder_is_a_package_and_an_area() -> None:
    folders = sorted(path for path in (ROOT / "checks").iterdir() if path.is_dir() and any(path.glob("*.py")))
    for folder in folders:
        assert (folder / "__init__.py").is_file(), f"checks/{folder.name} lacks __init__.py"
        assert folder.name in AREAS
