"""Checkpoints over several nodes: each node's storage has a share of one torch.save file."""
