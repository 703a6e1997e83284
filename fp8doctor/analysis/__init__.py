"""Conclusions from facts, each made once: pure functions, without torch."""
