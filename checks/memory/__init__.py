"""Memory: where it goes, and what takes more than BF16."""
