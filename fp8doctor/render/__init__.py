"""Reports for people and programs: every format is a function ``Report -> str``."""
