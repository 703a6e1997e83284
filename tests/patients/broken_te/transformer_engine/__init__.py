"""A half-installed Transformer Engine: like the real one, it imports although its torch part does not."""

try:
    from . import pytorch
except ImportError:
    pass
