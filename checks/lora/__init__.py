"""LoRA: what the adapters cost, and what a frozen base leaves to gain."""
