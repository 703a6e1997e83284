"""The version. setup.cfg reads it here; querying installed metadata is too slow."""

VERSION = "0.2.0"
