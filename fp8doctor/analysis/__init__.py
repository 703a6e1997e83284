"""What the facts add up to, one answer for whoever asks: pure functions of facts, without torch."""
