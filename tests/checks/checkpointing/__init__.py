"""Tests of the checks of activation checkpointing."""
