"""The entry point. Catches Ctrl-C from here on, also while libraries are imported."""

import signal
import sys


def main() -> None:
    try:
        from fp8doctor.cli import main

        main()
    except KeyboardInterrupt:  # click only handles interrupts within a command
        end_at_the_next()
        if sys.stderr is not None:
            print("fp8doctor: interrupted", file=sys.stderr)
        sys.exit(130)
    finally:
        end_at_the_next()


def end_at_the_next() -> None:
    """End the process quietly at the next interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
