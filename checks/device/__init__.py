"""Diseases of the GPU."""
