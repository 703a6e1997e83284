"""Diseases of environment variables, launchers and package versions."""
