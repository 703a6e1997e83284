"""Settings, checks and interpreters that belong to another user, or that every user may write to, are not
taken."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8doctor.cli.project import project_near
from tests.cli.command import Worker, fp8doctor

EVIL = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()\n"
NOBODY = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a check of its own, which leaves a file when it runs, and an interpreter; the current
    folder is two below."""
    root = tmp_path / "project"
    (root / "src" / "deep").mkdir(parents=True)
    (root / "tools").mkdir()
    (root / "tools" / "c.py").write_text(EVIL)
    (root / "python").write_text("#!/bin/sh\nexit 3\n")
    (root / "python").chmod(0o755)
    (root / "src" / "deep" / "model.py").write_text("model = None\n")
    (root / "pyproject.toml").write_text(
        "[tool.fp8doctor]\nchecks = ['tools']\npython = './python'\nfail-on = 'never'\n"
    )
    for each in (root, *root.rglob("*")):
        each.chmod(each.stat().st_mode & 0o755)
    monkeypatch.chdir(root / "src" / "deep")
    monkeypatch.delenv("SUDO_UID", raising=False)
    return root


def ran(project: Path) -> bool:
    """Whether the project's check has run since it was last asked; forgets that it is imported."""
    for name in [name for name in sys.modules if name.startswith("fp8doctor_checks_")]:
        del sys.modules[name]
    found = (project / "tools" / "ran").exists()
    (project / "tools" / "ran").unlink(missing_ok=True)
    return found


def read(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The options that hold in a folder, and what was said."""
    said: list[str] = []
    return dict(project_near(folder, said.append).options), said


def test_a_project_of_ones_own_is_read(project: Path) -> None:
    options, said = read(project / "src" / "deep")
    assert options == {
        "checks": [f"{project}/tools"],
        "python": f"{project}/python",
        "fail_on": "never",
    }
    assert said == []


@as_root
@pytest.mark.parametrize("given", [".", "pyproject.toml"])
def test_a_project_of_another_user_is_ignored_whole(project: Path, given: str) -> None:
    os.chown(project / given, NOBODY, -1)
    options, said = read(project)
    assert options == {}
    (sentence,) = said
    assert sentence.startswith(
        f"fp8doctor ignores {project}/pyproject.toml: {(project / given).absolute()} belongs"
    )
    assert f"chown root {(project / given).absolute()}" in sentence


@pytest.mark.parametrize(
    ("open_to_all", "mode"),
    [("pyproject.toml", 0o666), (".", 0o777), (".", 0o1777), ("..", 0o777)],
)
def test_a_project_that_every_user_may_write_to_is_ignored(
    project: Path, open_to_all: str, mode: int
) -> None:
    path = Path(os.path.abspath(project / open_to_all))
    path.chmod(mode)
    options, said = read(project)
    path.chmod(0o755)
    assert options == {}
    assert len(said) == 1
    assert f"every user may write to {path}. " in said[0]
    assert ("Move the project" if mode & 0o1000 else f"chmod o-w {path}") in said[0]


def test_a_sticky_folder_above_a_project_is_no_reason(project: Path) -> None:
    project.parent.chmod(0o1777)
    assert read(project)[1] == []
    project.parent.chmod(0o755)


@as_root
@pytest.mark.parametrize("given", ["tools", "tools/c.py", "tools/more/d.py", "tools/__pycache__/c.x.pyc"])
def test_checks_of_another_user_are_not_taken(project: Path, given: str) -> None:
    (project / given).parent.mkdir(exist_ok=True)
    (project / given).touch()
    os.chown(project / given, NOBODY, -1)
    options, said = read(project)
    assert sorted(options) == ["fail_on", "python"]
    (sentence,) = said
    assert f"pyproject.toml: fp8doctor ignores checks: {project / given} belongs to" in sentence


def test_a_cache_of_checks_that_every_user_may_write_to_is_not_used(project: Path) -> None:
    (project / "tools" / "__pycache__").mkdir()
    (project / "tools" / "__pycache__").chmod(0o777)
    assert "checks" not in read(project)[0]


@as_root
def test_links_to_what_another_user_has_are_not_followed(project: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, NOBODY, -1)
    (project / "tools").rename(theirs / "tools")
    (project / "tools").symlink_to(theirs / "tools")
    assert f"{theirs} belongs to" in " ".join(read(project)[1])
    os.lchown(project / "tools", NOBODY, -1)
    assert f"{project}/tools belongs to" in " ".join(read(project)[1])


@as_root
@pytest.mark.parametrize("python", ["./python", "python-of-theirs", "theirs"])
def test_an_interpreter_of_another_user_is_not_taken(project: Path, python: str) -> None:
    file = project / "theirs" / "bin" / "python" if python == "theirs" else project / python
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("#!/bin/sh\n")
    os.chown(file, NOBODY, -1)
    (project / "pyproject.toml").write_text(f"[tool.fp8doctor]\npython = '{python}'\n")
    options, said = read(project)
    assert options == {}
    assert f"fp8doctor ignores python: {file} belongs to" in said[0]


def test_a_system_interpreter_is_roots(project: Path) -> None:
    (project / "pyproject.toml").write_text("[tool.fp8doctor]\npython = '/bin/sh'\n")
    assert read(project) == ({"python": "/bin/sh"}, [])


@as_root
def test_under_sudo_the_files_of_who_typed_it_are_trusted(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.chown(project / "pyproject.toml", NOBODY, -1)
    monkeypatch.setenv("SUDO_UID", str(NOBODY))
    assert read(project)[1] == []


def test_roots_files_are_trusted_and_others_not(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = project.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setenv("SUDO_UID", str(owner))  # counts for root only
    assert (read(project)[0] == {}) == (owner != 0)


@as_root
def test_a_foreign_file_without_the_table_is_not_mentioned(project: Path) -> None:
    for text in ("[project]\ndependencies = ['fp8doctor']\n", "= [tool.fp8doctor]\n"):
        (project / "pyproject.toml").write_text(text)
        os.chown(project / "pyproject.toml", NOBODY, -1)
        assert read(project) == ({}, [])


@pytest.mark.parametrize("command", [("list",), ("explain", "CMP001"), ("env",)])
def test_a_project_that_is_not_named_lends_no_code(
    command: tuple[str, ...], project: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = fp8doctor(*command)
    assert below.exit_code == 0
    assert not ran(project)
    assert "To use it, type --checks DIR" in below.stderr
    assert [asked["python"] for asked in worker.asked] == [None] * len(worker.asked)
    monkeypatch.chdir(project)
    assert "ignores" not in fp8doctor(*command).stderr
    assert ran(project)
    assert [asked["python"] for asked in worker.asked[1:]] == [f"{project}/python"] * len(worker.asked[1:])


@pytest.mark.slow
def test_a_replay_runs_no_code_of_a_project(
    project: Path, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    done = fp8doctor("report", saved)
    assert not ran(project)
    assert done.exit_code == 0  # fail-on holds
    assert done.stderr.count("ignores") == 1
    named = fp8doctor("report", saved, "--checks", "tools")
    assert ran(project)
    assert "ignores" not in named.stderr


@pytest.mark.slow
def test_a_target_names_its_project(project: Path, worker: Worker) -> None:
    assert fp8doctor("model.py").exit_code == 0
    assert worker.asked[0]["python"] == f"{project}/python"
    assert ran(project)
