"""Checkpoints over several nodes, each of which has a directory of its own."""
