"""The version of fp8doctor, which setup.cfg reads too: to ask for an installed package's takes too long for a
start."""

VERSION = "0.1.0"
