"""Objects of few blocks, so that short recordings have many that are kept and used again.

Python imports this by itself in every process that has this folder in PYTHONPATH.
"""

from __future__ import annotations

import msgspec

from fpfs.core.engine import BLOCK_BYTES, EngineConfig
from fpfs.core.native_engine import NativeEngine

_open = NativeEngine.__init__


def _open_with_small_objects(self: NativeEngine, config: EngineConfig) -> None:
    _open(self, msgspec.structs.replace(config, first_object_bytes=BLOCK_BYTES))


NativeEngine.__init__ = _open_with_small_objects  # type: ignore[method-assign]
