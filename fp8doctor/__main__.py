"""``python -m fp8doctor`` is ``fp8doctor``."""

from __future__ import annotations

from fp8doctor.cli import main

if __name__ == "__main__":
    main()
