"""The compiled 454 M decoder under the name it had: its head is slow, and so is the size that it is compared
by."""

from decoder_454m_compiled import build_model, example_batch, loss

__all__ = ["build_model", "example_batch", "loss"]

MUST = ("slow-16-bit-gemm",)
MUST_NOT = ("CMP001", "CMP002", "MOD001", "MOD003", "unaligned-dimensions")
