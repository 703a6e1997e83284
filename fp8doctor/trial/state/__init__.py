"""The state of the user's process that a trial must not change: read before, compared and put back after."""
