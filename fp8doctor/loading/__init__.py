"""Find the user's model file, run it once, and make a job of it."""
