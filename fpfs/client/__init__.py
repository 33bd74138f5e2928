"""Checkpoints written and read side by side: `save` and `load`, for torch.save files."""

from fpfs.client.loading import load
from fpfs.client.peers import ALONE, RankFailed
from fpfs.client.saving import Saved, save
from fpfs.client.writing import Written

__all__ = ["ALONE", "RankFailed", "Saved", "Written", "load", "save"]
