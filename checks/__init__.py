"""The catalogue: one folder per area, one file per disease. Each file is a manual page, then a rule, then its
own test cases."""
