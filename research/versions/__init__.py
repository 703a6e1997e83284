"""The same detector tests under other versions of the libraries they look at."""
