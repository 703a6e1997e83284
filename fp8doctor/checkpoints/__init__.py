"""Checkpoints, read by their headers alone: nothing in them is imported, unpickled or loaded."""
