"""torch.compile: does it cover the casts, and does it compile what it covers."""
