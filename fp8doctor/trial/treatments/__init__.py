"""Apply treatments to a replica: one file for each family (docs/ARCHITECTURE.md, "A fix")."""
