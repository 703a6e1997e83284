"""The catalogue: one folder per area, one file per issue. Each file is a manual page, then a rule, then its
own test cases."""
