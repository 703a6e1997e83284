"""Reports as people and programs read them: every format is a pure function ``Report -> str``."""
