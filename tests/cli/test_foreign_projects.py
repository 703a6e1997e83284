"""Settings that belong to another user, or that every user may write to, are not taken."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fp8doctor.cli.project import project_near
from tests.cli.command import fp8doctor

NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, of which the current folder is one below."""
    (tmp_path / "src").mkdir()
    (tmp_path / "pyproject.toml").write_text("[tool.fp8doctor]\nfail-on = 'never'\n")
    (tmp_path / "pyproject.toml").chmod(0o644)
    monkeypatch.chdir(tmp_path / "src")
    monkeypatch.delenv("SUDO_UID", raising=False)
    return tmp_path


def read(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The options that hold in a folder, and what was said."""
    said: list[str] = []
    return dict(project_near(folder, said.append).options), said


def test_a_project_of_ones_own_is_read(project: Path) -> None:
    assert read(project / "src") == ({"fail_on": "never"}, [])


@as_root
def test_a_project_of_another_user_is_ignored(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(project / "pyproject.toml", NOBODY, -1)
    options, said = read(project)
    assert (options, len(said)) == ({}, 1)
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    assert read(project) == ({"fail_on": "never"}, [])


def test_a_project_that_every_user_may_write_to_is_ignored(project: Path) -> None:
    (project / "pyproject.toml").chmod(0o666)
    options, said = read(project)
    assert (options, len(said)) == ({}, 1)


def test_roots_files_are_trusted_and_others_not(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = (project / "pyproject.toml").stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setenv("SUDO_UID", str(owner))  # counts for root only
    assert (read(project)[0] == {}) == (owner != 0)


@as_root
def test_a_foreign_file_without_the_table_is_not_mentioned(project: Path) -> None:
    for text in ("[project]\ndependencies = ['fp8doctor']\n", "= [tool.fp8doctor]\n"):
        (project / "pyproject.toml").write_text(text)
        os.chown(project / "pyproject.toml", NOBODY, -1)
        assert read(project) == ({}, [])


@pytest.mark.parametrize("key", ["checks", "python"])
def test_a_project_names_no_code(key: str, project: Path, saved: Path) -> None:
    (project / "pyproject.toml").write_text(f"[tool.fp8doctor]\n{key} = 'tools'\n")
    said = fp8doctor("report", saved)
    assert (said.exit_code, said.stdout) == (2, "")
    assert f"has no key {key!r}" in said.stderr
