"""A watched forward: the rows of single layers, checkpointed regions, autocasts."""
