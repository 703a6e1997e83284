"""What a trial may not change of the user's process, noted before and compared, or put back, after."""
