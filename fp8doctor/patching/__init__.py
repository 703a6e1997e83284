"""Fixes as edits of a training script, which is read and never run."""
