"""Taking home folders, names of hosts and users, and secrets out of text, before it becomes a fact.

Facts are saved, mailed and pasted into public issues. What reads the live world therefore passes every free
text through `scrub`: values of environment variables, messages of exceptions, reasons of failures.
"""

from __future__ import annotations

import functools
import getpass
import os
import re
import socket
from pathlib import Path

LIMIT = 2000
"""Longest text that is kept, in characters; the rest is cut and an ellipsis says so."""

SECRET = "<secret>"
HOST = "<host>"
USER = "<user>"

COMMON_HOSTS = frozenset(
    {
        "localhost",
        "ubuntu",
        "debian",
        "linux",
        "server",
        "node",
        "host",
        "machine",
        "desktop",
        "cuda",
        "torch",
        "model",
        "train",
        "root",
    }
)
"""Host names that are ordinary words of reports and say nothing about whose machine it is."""

SHORTEST_HOST = 4
"""Characters; a shorter host name would be found inside ordinary words."""

COMMON_USERS = frozenset(
    {
        "root",
        "user",
        "runner",
        "ubuntu",
        "nobody",
        "jovyan",
        "home",
        "torch",
        "model",
        "data",
        "tmp",
        "src",
        "app",
    }
)
"""User names that are ordinary names of folders."""

TOKENS = re.compile(
    r"""(?x)
      (?<![A-Za-z0-9]) (?:
          hf_[A-Za-z0-9]{16,}                          # Hugging Face
        | sk-[A-Za-z0-9_-]{16,}                        # OpenAI, Anthropic
        | gh[pousr]_[A-Za-z0-9]{16,}                   # GitHub
        | github_pat_[A-Za-z0-9_]{16,}
        | glpat-[A-Za-z0-9_-]{16,}                     # GitLab
        | (?:AKIA|ASIA)[A-Z0-9]{12,}                   # Amazon
        | AIza[A-Za-z0-9_-]{30,}                       # Google
        | xox[a-z]-[A-Za-z0-9-]{10,}                   # Slack
        | eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_.-]{8,}     # JSON web token
        | [0-9a-f]{40}(?![0-9A-Za-z])                  # Weights & Biases
      )
    | (?<=://) [^/\s@:]+:[^/\s@]+ (?=@)                # user:password@ in an address
    """
)
"""Secrets that are known by their shape."""

ASSIGNED = re.compile(
    r"""(?xi)
    (   (?: key | token | secret | passw(?:or)?d | passphrase | credentials? ) ["']? \s*[=:]\s* ["']?
      | bearer \s+ )
    (?=[\w+/=~-]*[a-z]) [\w+/=~-]{16,}
    """
)
"""A long value after the name of a secret; one without a letter is a number."""

HOMES = re.compile(
    r"""(?:/(?:home|Users)/|[A-Za-z]:[\\/]+Users[\\/]+)[^/\\\s:;,'"<>]+|(?<![\w.])/root(?![\w.-])"""
)


def scrub(text: str) -> str:
    """``text`` without secrets, home folders, and names of this host and this user, and at most `LIMIT`
    characters long."""
    text = TOKENS.sub(SECRET, text)
    text = ASSIGNED.sub(rf"\1{SECRET}", text)
    for home in _homes():
        text = re.sub(rf"(?<![\w.]){re.escape(home)}(?![\w.-])", "~", text)
    text = HOMES.sub("~", text)
    for pattern, instead in _names():
        text = pattern.sub(instead, text)
    return text if len(text) <= LIMIT else text[: LIMIT - 1] + "…"


@functools.cache
def _homes() -> tuple[str, ...]:
    """This user's home folders, as named and as resolved, the longest first; the root of the file system is
    none."""
    named = {os.path.expanduser("~"), os.environ.get("HOME", ""), os.environ.get("USERPROFILE", "")}
    folders = {folder.rstrip("/\\") for name in named if name for folder in (name, str(Path(name).resolve()))}
    return tuple(
        sorted((folder for folder in folders if len(folder) > 1 and folder != "~"), key=len, reverse=True)
    )


@functools.cache
def _names() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Patterns of this host's names as whole words, and of this user's name as a part of a path."""
    host = socket.gethostname()
    hosts = sorted({host, host.partition(".")[0]}, key=len, reverse=True)
    patterns = [
        (re.compile(rf"(?i)\b{re.escape(name)}\b"), HOST)
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
