"""The packages, found: checks/ ships inside fp8doctor. Everything else is in setup.cfg.

``find:`` in setup.cfg cannot do it: it would ship checks/ under that very name. ``package_dir`` renames only
packages that are listed one by one, and a new area would be missing from such a list.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["fp8doctor", "fp8doctor.*"]),
        "fp8doctor.checks",
        *(f"fp8doctor.checks.{area}" for area in find_packages("checks")),
    ]
)
