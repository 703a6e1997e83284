"""Nothing of Transformer Engine but its name: the version beside it is what the patient is about."""
