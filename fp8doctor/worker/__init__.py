"""The wall between the parent, which imports neither torch nor user code, and the child process that does."""
