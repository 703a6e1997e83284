"""Numerics: recipes and layers that lose precision."""
