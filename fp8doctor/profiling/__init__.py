"""Read a profiler's trace of a step and split it into kernel families. No torch."""
