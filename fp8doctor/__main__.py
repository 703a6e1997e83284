"""The entry point. Ctrl-C is one sentence from here on, while libraries are still imported too."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from fp8doctor.cli import main
    except KeyboardInterrupt:
        if sys.stderr is not None:
            print("fp8doctor: interrupted", file=sys.stderr)
        sys.exit(130)
    main()


if __name__ == "__main__":
    main()
