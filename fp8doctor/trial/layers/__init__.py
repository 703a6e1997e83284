"""Layers timed or compared alone: their GEMMs and casts by shape, the rows they see, what FP8 does to their
numbers."""
