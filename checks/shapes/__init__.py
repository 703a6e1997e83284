"""Matmul shapes, and the recipe that fits them."""
