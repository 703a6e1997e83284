"""The child process that runs torch and user code, and its parent, which imports neither."""
