"""Several GPUs: what is sent between them, and when."""
