"""Single layers: times of their matmuls and casts, and a watched forward: rows, regions, autocasts."""
