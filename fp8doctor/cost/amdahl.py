"""Amdahl's law."""


def amdahl(share: float, speedup: float) -> float:
    """Speedup of the whole when ``share`` of its time (0 to 1) runs ``speedup`` times as fast.

    60 % at 1.5x gives 1.25x, 80 % gives 1.36x. Raises ValueError outside those ranges. Source: Amdahl, AFIPS 1967.
    """
    if not 0.0 <= share <= 1.0 or speedup <= 0.0:
        raise ValueError(f"a share of 0 to 1 and a positive speedup are needed, not {share} and {speedup}")
    return 1.0 / (1.0 - share + share / speedup)
