"""A model that is saved as files of safetensors, as Hugging Face's libraries load it.

    python examples/safetensors_shards.py /ckpt/model

saves a model in shards and loads it. With torchrun all ranks write each shard together:

    torchrun --nproc-per-node 2 examples/safetensors_shards.py /ckpt/model
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import load_torch_model
from torch import nn

import fpfs

LAYERS, WIDTH = 6, 512
SHARD_BYTES = 4_000_000


def main() -> None:
    """Save, load, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the model goes: a mount of fpfs, or any")
    folder: Path = parser.parse_args().folder

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)  # so all ranks have the same model
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    saved = fpfs.save_safetensors(
        model.state_dict(),
        folder / "model.safetensors",
        metadata={"format": "pt"},
        max_shard_bytes=SHARD_BYTES,
        durable=True,
    )

    loaded = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    load_torch_model(loaded, folder, strict=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    if not dist.is_initialized() or dist.get_rank() == 0:
        shards = len(list(folder.glob("model-*.safetensors")))
        print(f"{shards} shards, written by {len(saved.written)} rank(s), loaded bit for bit")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
