"""The packages, found: checks/ ships inside fp8doctor. Everything else is in setup.cfg."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["fp8doctor", "fp8doctor.*"]),
        "fp8doctor.checks",
        *(f"fp8doctor.checks.{area}" for area in find_packages("checks")),
    ]
)
