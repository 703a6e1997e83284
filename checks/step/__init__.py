"""The measured step: does FP8 pay off, and where does the time go."""
