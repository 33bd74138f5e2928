"""Inodes in memory. (Being written.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fpfs.core.engine import Engine
    from fpfs.daemon.catalog import Catalog


class InodeTable:
    def __init__(self, *, catalog: Catalog, engine: Engine) -> None:
        raise NotImplementedError
