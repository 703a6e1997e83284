"""Build, warm up, time, profile and prove the variants of a step, within a budget."""
