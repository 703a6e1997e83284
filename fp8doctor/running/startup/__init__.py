"""Folder for ``PYTHONPATH``: the script's Python imports its ``sitecustomize``."""
