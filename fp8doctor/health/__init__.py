"""FP8's health over a long training: records, their file, what they say. Without torch."""
