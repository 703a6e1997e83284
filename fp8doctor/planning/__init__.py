"""Estimates before there is a run: step time, speedup and memory by GPU and recipe."""
