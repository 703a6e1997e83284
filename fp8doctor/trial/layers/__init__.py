"""Single layers: times of their matmuls and casts, their rows, and FP8's effect on numerics."""
