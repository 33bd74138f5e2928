"""A simulated accelerator for torch: the device "simulated".

What tests learn by it: that nothing but torch touches a device's memory, and that everybody waits
for what is copied beside (backend.cc). A process that uses it has it for good, and torch does some
things in another way there: tests use it in ranks.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import types
from pathlib import Path

import torch

from tests.support.processes import REPOSITORY

SOURCE = Path(__file__).with_name("backend.cc")
FOLDER = REPOSITORY / "build" / "accelerator"
BUILD_S = 600.0


def build() -> Path:
    """Compile it, once for all processes; returns the library."""
    digest = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = FOLDER / f"{digest}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    root = Path(torch.__file__).parent
    made = library.with_suffix(".made")
    headers = (root / "include", root / "include" / "torch" / "csrc" / "api" / "include")
    ccache = shutil.which("ccache")
    command = [
        *([ccache] if ccache else []),
        *("c++", "-std=c++20", "-O1", "-fPIC", "-w", "-c", SOURCE, "-o", made.with_suffix(".o")),
        # torch's headers are not ours.
        *(argument for header in headers for argument in ("-isystem", header)),
    ]
    linking = ["c++", "-shared", made.with_suffix(".o"), "-o", made, f"-L{root / 'lib'}"]
    for each in (command, [*linking, "-lc10", "-ltorch_cpu"]):
        subprocess.run(each, check=True, timeout=BUILD_S)
    os.replace(made, library)


class Accelerator:
    """What tests do with it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("device_bytes", "pinned_bytes", "most_pinned_bytes", "copies"):
            getattr(library, f"simulated_{name}").restype = ctypes.c_uint64

    def hold(self, stream: torch.Stream) -> None:
        """Have a stream do nothing: who waits for it waits until it is released."""
        self._library.simulated_hold(ctypes.c_int64(stream.stream_id), True)

    def release(self, stream: torch.Stream) -> None:
        """Have it go on."""
        self._library.simulated_hold(ctypes.c_int64(stream.stream_id), False)

    def tell_free(self, size: int) -> None:
        """Have each device say that so many bytes of its memory are free; at first it says 0."""
        self._library.simulated_tell_free(ctypes.c_uint64(size))

    def refuse_pinning(self) -> None:
        """Have no more memory that can be pinned."""
        self._library.simulated_refuse_pinning()
        self.cudaHostRegister = lambda *_: 2  # type: ignore[method-assign]

    @property
    def device_bytes(self) -> int:
        """Of the devices' memory that is in use."""
        return int(self._library.simulated_device_bytes())

    @property
    def pinned_bytes(self) -> int:
        """Of the processor's memory that is pinned."""
        return int(self._library.simulated_pinned_bytes())

    @property
    def most_pinned_bytes(self) -> int:
        """At any time since this was asked the last time."""
        return int(self._library.simulated_most_pinned_bytes())

    @property
    def copies(self) -> int:
        """How many were begun."""
        return int(self._library.simulated_copies())

    # As torch.cuda.cudart() has them.

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        """Pin memory."""
        assert flags == 1
        self._library.simulated_pin(ctypes.c_void_p(address), ctypes.c_uint64(size))
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        """Unpin it."""
        self._library.simulated_unpin(ctypes.c_void_p(address))
        return 0


@functools.cache
def use() -> Accelerator:
    """Have this process use it from now on."""
    path = build()
    torch.ops.load_library(str(path))
    library = ctypes.CDLL(str(path))
    accelerator = Accelerator(library)
    module = types.ModuleType("torch.simulated")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        cudart=lambda: accelerator,
        device_count=lambda: 2,
        current_device=lambda: torch.accelerator.current_device_index(),
        device=lambda device: torch.accelerator.device_index(torch.device(device).index),
    )
    torch.utils.rename_privateuse1_backend("simulated")
    torch._register_device_module("simulated", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    library.simulated_register()
    return accelerator


__all__ = ["Accelerator", "build", "use"]
