"""Every printed fix, applied literally to the script that triggered it, and judged by its effect."""
