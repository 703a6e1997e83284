"""Copies of the model that provably neither run nor write to the original, whole or cut to a few blocks, and
a step over one."""
