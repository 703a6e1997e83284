"""Models that nobody here wrote, and what is printed for them, carried out line by line."""
