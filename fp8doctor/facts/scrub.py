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

SHORTEST_HOST = 4
"""Characters; a shorter host name would be found inside ordinary words."""

HOST_VARIABLES = ("HOSTNAME", "SLURMD_NODENAME", "COMPUTERNAME")
"""Environment variables that hold a name of this host. Its full name is not asked for: that may wait for a
name server."""

DOMAIN = r"(?:internal|local|localdomain|lan|corp|(?:[a-z][\w-]*\.)+[a-z]{2,})\b"
"""The domain after a host's name."""

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

    named = {socket.gethostname(), *(os.environ.get(variable, "") for variable in HOST_VARIABLES)}
    hosts = sorted({part for name in named for part in (name, name.partition(".")[0])}, key=len, reverse=True)
    patterns = [
        (re.compile(rf"(?i)\b{re.escape(name)}\b(?:\.{DOMAIN})?"), HOST)
        for name in hosts
        if len(name) >= SHORTEST_HOST and name.lower() not in COMMON_HOSTS
    ]
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        return tuple(patterns)
    if len(user) > 1 and user.lower() not in COMMON_USERS:
        patterns.append((re.compile(rf"(?<=[/\\_]){re.escape(user)}(?=[/\\]|$)"), USER))
    return tuple(patterns)
