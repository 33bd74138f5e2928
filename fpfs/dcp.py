"""`fpfs.dcp`: torch.distributed.checkpoint at the speed of a mount of fpfs (docs/frameworks.md).

    dcp.save(state, storage_writer=fpfs.dcp.Writer("/ckpt/step100"))
    dcp.load(state, storage_reader=fpfs.dcp.Reader("/ckpt/step100"))
    dcp.async_save(state, storage_writer=fpfs.dcp.Writer("/ckpt/step200"), async_stager=stager)

with ``stager = fpfs.dcp.Stager()``, the same for each save.
"""

from __future__ import annotations

from fpfs.integrations.dcp import Reader, Stager, Writer

__all__ = ["Reader", "Stager", "Writer"]
