"""Removal of home folders, hosts, users and secrets from text before it is a fact."""

import functools
import os
import re
from pathlib import Path

from fp8doctor.facts.secrets import HOST, USER, cut, without_secrets

COMMON_HOSTS = frozenset(
    "localhost ubuntu debian linux server node host machine desktop cuda torch model train root".split()
)
"""Host names that are ordinary words of reports and say nothing about whose machine it is."""

COMMON_USERS = frozenset("root user runner ubuntu nobody jovyan home torch model data tmp src app".split())
"""User names that are ordinary names of folders."""


def scrub(text: str) -> str:
    """Remove secrets, home folders, and this host's and user's names; cut at `LIMIT`."""
    text = cut(text)
    for home in _homes():
        text = re.sub(rf"(?<![\w.]){re.escape(home)}(?![\w.-])", "~", text)
    for pattern, instead in _names():
        text = pattern.sub(instead, text)
    return without_secrets(text)


@functools.cache
def _homes() -> tuple[str, ...]:
    """List this user's home folders, as named and as resolved, the longest first; never the root."""
    named = {os.path.expanduser("~"), os.environ.get("HOME", ""), os.environ.get("USERPROFILE", "")}
    folders = {folder.rstrip("/\\") for name in named if name for folder in (name, str(Path(name).resolve()))}
    return tuple(
        sorted((folder for folder in folders if len(folder) > 1 and folder != "~"), key=len, reverse=True)
    )


@functools.cache
def _names() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Make patterns of this host's names as words, and of the user's name in a path."""
    import getpass
    import socket

    # the full name is not asked for: that may wait for a name server
    variables = ("HOSTNAME", "SLURMD_NODENAME", "COMPUTERNAME")
    named = {socket.gethostname(), *(os.environ.get(variable, "") for variable in variables)}
    domain = r"(?:internal|local|localdomain|lan|corp|(?:[a-z][\w-]*\.)+[a-z]{2,})\b"
    hosts = sorted({part for name in named for part in (name, name.partition(".")[0])}, key=len, reverse=True)
    patterns = [
        (re.compile(rf"(?i)\b{re.escape(name)}\b(?:\.{domain})?"), HOST)
        for name in hosts
        if len(name) > 3 and name.lower() not in COMMON_HOSTS  # a shorter one is inside ordinary words
    ]
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        return tuple(patterns)
    if len(user) > 1 and user.lower() not in COMMON_USERS:
        patterns.append((re.compile(rf"(?<=[/\\_]){re.escape(user)}(?=[/\\]|$)"), USER))
    return tuple(patterns)
