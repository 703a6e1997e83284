"""Findings to a verdict and a plan: measured savings, ranking, treatments in words and lines, and the
document that holds it all."""
