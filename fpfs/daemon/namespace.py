"""The namespace: POSIX semantics over catalog, engine and commit. (Being written.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fpfs.core.engine import Engine
    from fpfs.core.policy import Policy
    from fpfs.daemon.catalog import Catalog
    from fpfs.daemon.commit import Commit
    from fpfs.daemon.inodes import InodeTable


class Namespace:
    def __init__(
        self,
        *,
        catalog: Catalog,
        engine: Engine,
        inodes: InodeTable,
        commit: Commit,
        policy: Policy,
        device_paths: Mapping[int, Path],
    ) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        """Forget everything the kernel still knew (it is gone)."""
        raise NotImplementedError
