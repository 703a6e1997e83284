"""Every way to get fp8doctor brings the whole catalogue: wheel, sdist, pip install, editable install, bare
checkout.

No network: the venvs see the packages of the running interpreter through a .pth file, and nothing is
downloaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from fp8doctor import registry
from fp8doctor.areas import AREAS
from tests.packaging.test_without_torch import link_all

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = (
    ".git",
    ".venv",
    "build",
    "dist",
    "*.egg-info",
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
)
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
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_SOURCE, "tests", "research"))
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


class Venv:
    """A fresh virtual environment without pip that sees other folders of packages."""

    def __init__(self, folder: Path, seen: Iterable[str] = (sysconfig.get_paths()["purelib"],)) -> None:
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        self.command = folder / "bin" / "fp8doctor"
        site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (site / "seen.pth").write_text("".join(f"{each}\n" for each in seen), "utf-8")

    def install(self, *what: str | Path) -> None:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.python,
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--no-build-isolation",
            "--ignore-installed",
        ]
        run([*pip, *what], self.python.parent)


@pytest.fixture
def fresh(tmp_path: Path) -> Venv:
    return Venv(tmp_path / "venv")


def codes(command: Iterable[str | Path], cwd: Path) -> list[str]:
    return sorted(check["code"] for check in json.loads(run([*command, "list", "--format", "json"], cwd)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_distribution_brings_every_check(
    kind: str, distributions: dict[str, Path], fresh: Venv, tmp_path: Path
) -> None:
    fresh.install(distributions[kind])
    assert codes([fresh.command], tmp_path) == CODES
    assert codes([fresh.python, "-m", "fp8doctor"], tmp_path) == CODES
    run([fresh.command, "demo", "--fail-on", "never", "-o", "demo.html"], tmp_path)
    assert (tmp_path / "demo.html").read_text("utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.slow
def test_the_wheel_shows_its_demo_without_torch(distributions: dict[str, Path], tmp_path: Path) -> None:
    """In a venv with nothing but the wheel and its requirements."""
    bare = Venv(tmp_path / "venv", [])
    bare.install(distributions["wheel"])
    link_all(next((tmp_path / "venv/lib").glob("python*/site-packages")))
    find = "import importlib.util; print(importlib.util.find_spec('torch'))"
    assert run([bare.python, "-c", find], tmp_path) == "None\n"
    assert "FP8 is 2.5x slower than BF16" in run([bare.command, "demo", "--fail-on", "never"], tmp_path)
    assert codes([bare.command], tmp_path) == CODES


@pytest.mark.slow
def test_pytest_finds_the_fixture(distributions: dict[str, Path], fresh: Venv, tmp_path: Path) -> None:
    fresh.install(distributions["wheel"])
    listed = run([fresh.python, "-m", "pytest", "--fixtures", "-p", "no:xdist", tmp_path], tmp_path)
    assert "fp8doctor [session scope] -- " in listed


@pytest.mark.nightly
def test_pip_install_brings_every_check(clean_checkout: Path, fresh: Venv, tmp_path: Path) -> None:
    fresh.install(clean_checkout)
    assert codes([fresh.command], tmp_path) == CODES
    where = run([fresh.python, "-c", "import fp8doctor, torch; print(fp8doctor.__file__)"], tmp_path)
    assert where.startswith(str(fresh.python.parents[1])), (
        "the installed copy is what runs, and torch is seen"
    )


@pytest.mark.nightly
def test_editable_install_brings_every_check_and_no_deleted_one(
    checkout: Path, fresh: Venv, tmp_path: Path
) -> None:
    fresh.install("-e", checkout)
    assert codes([fresh.command], tmp_path) == CODES


@pytest.mark.slow
def test_bare_checkout_finds_every_check_and_no_deleted_one(checkout: Path) -> None:
    assert codes([sys.executable, "-m", "fp8doctor"], checkout) == CODES


@pytest.mark.slow
def test_wheel_holds_the_data_files(distributions: dict[str, Path], tmp_path: Path) -> None:
    shutil.unpack_archive(distributions["wheel"], tmp_path, "zip")
    package = tmp_path / "fp8doctor"
    for name in ("plan.schema.json", "report.schema.json", "py.typed"):
        assert (package / name).is_file()
    assert not (package / "tests").exists()


@pytest.mark.slow
def test_the_sdist_holds_the_pages_and_no_half_of_the_tests(distributions: dict[str, Path]) -> None:
    with tarfile.open(distributions["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")}
    assert pages | {"README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md", "CONTRIBUTING.md"} <= names
    assert not [name for name in names if name.startswith("tests")]


@pytest.mark.slow
def test_the_page_of_an_index_has_no_link_into_the_checkout(distributions: dict[str, Path]) -> None:
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        page = wheel.read(name).decode("utf-8")
    assert "\n# fp8doctor\n" in page
    assert "Description-Content-Type: text/markdown" in page
    assert [each for each in re.findall(r"\]\(([^)]*)\)", page) if not each.startswith("https://")] == []


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


@pytest.mark.slow
def test_the_wheel_holds_every_module(distributions: dict[str, Path]) -> None:
    shipped = {name for name in zipfile.ZipFile(distributions["wheel"]).namelist() if name.endswith(".py")}
    library = {str(path.relative_to(ROOT)) for path in (ROOT / "fp8doctor").rglob("*.py")}
    checks = {f"fp8doctor/{path.relative_to(ROOT)}" for path in (ROOT / "checks").rglob("*.py")}
    assert shipped == library | checks


def test_every_area_folder_is_a_package_and_an_area() -> None:
    folders = sorted(path for path in (ROOT / "checks").iterdir() if path.is_dir() and any(path.glob("*.py")))
    for folder in folders:
        assert (folder / "__init__.py").is_file(), f"checks/{folder.name} lacks __init__.py"
        assert folder.name in AREAS
