"""The thin pyfuse3.Operations over a Namespace. (Being written.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyfuse3

if TYPE_CHECKING:
    from fpfs.daemon.namespace import Namespace


class Operations(pyfuse3.Operations):
    def __init__(self, namespace: Namespace) -> None:
        super().__init__()
        raise NotImplementedError
