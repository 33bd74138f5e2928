"""Checkpoints written and read side by side: `save` and `load`, for torch.save files."""

from fpfs.client.loading import load
from fpfs.client.saving import Saved, save

__all__ = ["Saved", "load", "save"]
