"""Activation checkpointing: what it costs, and whether it is needed."""
