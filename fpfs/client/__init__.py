"""Checkpoints written and read side by side: `save`, `AsyncSaver`, `load`, for torch.save files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpfs.core.lazy import lazily

if TYPE_CHECKING:
    from fpfs.client.async_saving import AsyncSaver, FileToSave, Saving
    from fpfs.client.loading import load
    from fpfs.client.peers import ALONE, RankFailed
    from fpfs.client.plan import Plan
    from fpfs.client.safetensors import save_safetensors
    from fpfs.client.saving import Saved, save
    from fpfs.client.shares.loading import load_shares
    from fpfs.client.shares.saving import save_shares
    from fpfs.client.topology import Topology
    from fpfs.client.writing import Written

__all__ = [
    "ALONE",
    "AsyncSaver",
    "FileToSave",
    "Plan",
    "RankFailed",
    "Saved",
    "Saving",
    "Topology",
    "Written",
    "load",
    "load_shares",
    "save",
    "save_safetensors",
    "save_shares",
]

# The commands know plans, and do without torch.
__getattr__, __dir__ = lazily(
    __name__,
    {
        "ALONE": "fpfs.client.peers",
        "AsyncSaver": "fpfs.client.async_saving",
        "FileToSave": "fpfs.client.async_saving",
        "Plan": "fpfs.client.plan",
        "RankFailed": "fpfs.client.peers",
        "Saved": "fpfs.client.saving",
        "Saving": "fpfs.client.async_saving",
        "Topology": "fpfs.client.topology",
        "Written": "fpfs.client.writing",
        "load": "fpfs.client.loading",
        "load_shares": "fpfs.client.shares.loading",
        "save": "fpfs.client.saving",
        "save_safetensors": "fpfs.client.safetensors",
        "save_shares": "fpfs.client.shares.saving",
    },
)
