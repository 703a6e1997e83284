"""Settings that belong to another user, or that every user may write to, are not taken."""

import os
from pathlib import Path
from typing import Any

import pytest

from fp8doctor.cli.options import project_near
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fp8doctor.cli.options.complain", said.append)
        return dict(project_near(str(folder / "train.py")).options), said


OWN, NO_TABLE = "[tool.fp8doctor]\nfail-on = 'never'\n", "[project]\ndependencies = ['fp8doctor']\n"


@pytest.mark.parametrize(
    ("text", "owner", "mode", "sudo", "taken", "told"),
    [
        (OWN, None, 0o644, None, True, 0),
        (OWN, None, 0o666, None, False, 1),
        pytest.param(OWN, NOBODY, 0o644, None, False, 1, marks=as_root),
        pytest.param(OWN, NOBODY, 0o644, NOBODY, True, 0, marks=as_root),
        pytest.param(NO_TABLE, NOBODY, 0o644, None, False, 0, marks=as_root),
        pytest.param("= [tool.fp8doctor]\n", NOBODY, 0o644, None, False, 0, marks=as_root),
    ],
    ids=["ones own", "of all", "foreign", "of who used sudo", "foreign, no table", "foreign, no TOML"],
)
def test_a_project_is_read_if_no_other_user_can_write_it(
    text: str,
    owner: int | None,
    mode: int,
    sudo: int | None,
    taken: bool,
    told: int,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = project / "pyproject.toml"
    file.write_text(text)
    file.chmod(mode)
    if owner:
        os.chown(file, owner, -1)
    if sudo:
        monkeypatch.setenv("SUDO_UID", str(sudo))
    options, said = read(project / "src")
    assert (options, len(said)) == ({"fail_on": "never"} if taken else {}, told)


def test_roots_files_are_trusted_and_others_not(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = (project / "pyproject.toml").stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setenv("SUDO_UID", str(owner))  # counts for root only
    assert (read(project)[0] == {}) == (owner != 0)


@pytest.mark.parametrize("key", ["checks", "python"])
def test_a_project_names_no_code(key: str, project: Path, saved: Path) -> None:
    (project / "pyproject.toml").write_text(f"[tool.fp8doctor]\n{key} = 'tools'\n")
    said = fp8doctor("report", saved)
    assert (said.exit_code, said.stdout) == (2, "")
    assert f"has no key {key!r}" in said.stderr
