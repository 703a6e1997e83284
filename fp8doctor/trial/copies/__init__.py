"""Copies of the model, whole or truncated, that neither run nor write to the original, and their step."""
