"""One profiled step: a trace as the profiler exports it, read, owned and split into families of kernels.
Imports no torch."""
