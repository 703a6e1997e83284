"""Every way to install fp8doctor brings the whole catalogue: wheel, sdist, pip install, editable install.

No network: the venvs see the packages of the running interpreter through a .pth file, and nothing is
downloaded.
"""

from __future__ import annotations

import sys
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.packaging.test_packaging import CODES, checkout, clean_checkout, codes, distributions, run
from tests.packaging.test_without_torch import link_all

__all__ = ["checkout", "clean_checkout", "distributions"]


class Venv:
    """A fresh virtual environment without pip that sees other folders of packages."""

    def __init__(self, folder: Path, seen: Iterable[str] = (sysconfig.get_paths()["purelib"],)) -> None:
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        self.command = folder / "bin" / "fp8doctor"
        site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (site / "seen.pth").write_text("".join(f"{each}\n" for each in seen), "utf-8")

    def install(self, *what: str | Path) -> None:
        options = "--quiet --no-deps --no-index --no-build-isolation --ignore-installed".split()
        pip = [sys.executable, "-m", "pip", "--python", self.python]
        run([*pip, "install", *options, *what], self.python.parent)


@pytest.fixture
def fresh(tmp_path: Path) -> Venv:
    return Venv(tmp_path / "venv")


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_distribution_brings_every_check(
    kind: str, distributions: dict[str, Path], fresh: Venv, tmp_path: Path
) -> None:
    fresh.install(distributions[kind])
    assert codes([fresh.command], tmp_path) == codes([fresh.python, "-m", "fp8doctor"], tmp_path) == CODES
    run([fresh.command, "demo", "--fail-on", "never", "-o", "demo.html"], tmp_path)
    assert (tmp_path / "demo.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    listed = run([fresh.python, "-m", "pytest", "--fixtures", "-p", "no:xdist", tmp_path], tmp_path)
    assert "fp8doctor [session scope] -- " in listed


def test_the_wheel_shows_its_demo_without_torch(distributions: dict[str, Path], tmp_path: Path) -> None:
    """In a venv with nothing but the wheel and its requirements."""
    bare = Venv(tmp_path / "venv", [])
    bare.install(distributions["wheel"])
    link_all(next((tmp_path / "venv/lib").glob("python*/site-packages")))
    find = "import importlib.util; print(importlib.util.find_spec('torch'))"
    assert run([bare.python, "-c", find], tmp_path) == "None\n"
    assert "FP8 is 2.5x slower than BF16" in run([bare.command, "demo", "--fail-on", "never"], tmp_path)
    assert codes([bare.command], tmp_path) == CODES


@pytest.mark.parametrize(("options", "tree"), [((), "clean_checkout"), (("-e",), "checkout")])
def test_an_install_brings_every_check_and_no_deleted_one(
    options: tuple[str, ...], tree: str, fresh: Venv, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fresh.install(*options, request.getfixturevalue(tree))
    assert codes([fresh.command], tmp_path) == CODES
