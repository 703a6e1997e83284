"""The GPU: does it support FP8, and does anything slow it down."""
