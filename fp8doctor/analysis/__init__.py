"""What the facts add up to: one answer for every check, verdict and renderer that asks. Pure functions of
facts, without torch."""
