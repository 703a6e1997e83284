"""A folder for ``PYTHONPATH``: the interpreter that runs the user's script imports its ``sitecustomize``."""
