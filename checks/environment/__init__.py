"""Environment variables, launchers and package versions."""
