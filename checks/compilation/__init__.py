"""Diseases of torch.compile."""
