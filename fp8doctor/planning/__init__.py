"""Estimates before there is a run: step time, speedup and memory by GPU and recipe.

`fp8doctor.planning.estimates.rows` is a pure function from facts of a model, read on the meta device or from
a saved report, and `Options`. It adds parallelism, memory and links to `fp8doctor.cost`.
"""
