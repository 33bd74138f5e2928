"""Saves a checkpoint, goes on at once, and asks whether it is safe yet.

Usage: wait_until_durable.py PATH, where PATH is on a mount of fpfs.

`torch.save` returns when the bytes are in staging memory. Before something irreversible happens,
such as removing the checkpoint before it, `fpfs.wait_durable` waits until this one would survive
power loss.
"""

from __future__ import annotations

import sys

import torch

import fpfs


def main(path: str) -> None:
    """Save, look, wait, look again."""
    torch.save({"weights": torch.randn(1024, 1024), "step": 1}, path)
    print(describe(path))
    try:
        fpfs.wait_durable(path, timeout_s=60)
    except fpfs.TimedOut as error:
        sys.exit(f"not durable yet: {error}")
    except fpfs.NotKept as error:
        sys.exit(f"save it again: {error}")
    print(describe(path))


def describe(path: str) -> str:
    """How far a file has come."""
    status = fpfs.status(path)
    assert isinstance(status, fpfs.FileStatus), "a path of a file gives a file's status"
    return (
        f"{path}: {status.state}, version {status.version}, {status.size_durable} of"
        f" {status.size_acknowledged} bytes durable, on devices {status.devices}"
    )


if __name__ == "__main__":
    main(sys.argv[1])
