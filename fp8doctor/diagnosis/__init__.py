"""Findings to a verdict and a plan: savings, ranking, lines, and the document."""
