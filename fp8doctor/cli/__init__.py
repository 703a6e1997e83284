"""The command line: arguments in, an exit code out."""

from fp8doctor.cli.commands import main

__all__ = ["main"]
