"""The entry point. Ctrl-C is one sentence from here on, while libraries are still imported too."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    try:
        from fp8doctor.cli import main

        main()
    except KeyboardInterrupt:  # click takes only those for one that arrive within a command
        end_at_the_next()
        if sys.stderr is not None:
            print("fp8doctor: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        end_at_the_next()


def end_at_the_next() -> None:
    """Let an interrupt end the process without a word of Python's: the interpreter ends, or one was told."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
