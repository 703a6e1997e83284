"""Read, write and make the user's files, and private folders for our own."""

import glob
import os
import platform
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from fp8doctor.errors import UserError


def digest(content: bytes) -> str:
    """Return 16 digits that tell whether a file is still the same."""
    import hashlib

    return hashlib.sha256(content).hexdigest()[:16]


def regular(path: Path) -> os.stat_result:
    """Return a file's status. Raises `UserError` for a pipe or a device, which may never end, and OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"cannot read {path}: it is not a regular file")
    return status


def write_text(path: Path, text: str) -> None:
    """Write a file completely or leave it unchanged. Raises `UserError`."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")  # pipes and devices cannot be replaced
        else:
            _replace(Path(os.path.realpath(path)), text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from None


def _replace(path: Path, text: str) -> None:
    """Write a temporary file and rename it: a killed process leaves no partial file."""
    beside = path.with_name(f".fp8doctor-{os.urandom(8).hex()}")
    try:
        with open(beside, "x", encoding="utf-8") as file:
            file.write(text)
        if path.exists():
            shutil.copymode(path, beside)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise


def same_file(one: Path, other: Path) -> bool:
    """Check whether two paths name one file, which need not exist yet."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def own_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a folder of this process that is removed at the end of a ``with``."""
    return tempfile.TemporaryDirectory(prefix=_prefix(os.getpid()))


def remove_folders_of(process: int) -> None:
    """Remove the temporary folders of a killed process."""
    for folder in Path(tempfile.gettempdir()).glob(f"{glob.escape(_prefix(process))}*"):
        shutil.rmtree(folder, ignore_errors=True)


def _prefix(process: int) -> str:
    """Name a process among the machines and containers that share the folder."""
    return f"fp8doctor-{platform.node()}-{process}-"
