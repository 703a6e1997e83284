"""Secrets of every known kind, in the texts that they stand in."""

from __future__ import annotations

from fp8doctor.facts.scrub import scrub
from research.reliability.count import Count
from tests.facts.test_scrub import SECRETS


def scrubbed() -> Count:
    """Each kind once: it is gone, and scrubbing again changes nothing."""
    count = Count("a kind of secret scrubbed")
    for kind, (secret, text) in SECRETS.items():
        with count.attempt(kind) as why:
            once = scrub(text)
            why += ["it survives"] * (secret in once) + ["it is scrubbed twice"] * (scrub(once) != once)
    return count
