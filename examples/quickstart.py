"""Trains a small GPT for a few steps and saves it on a mount of fpfs with plain torch.save.

Then it unmounts, mounts again, loads, and compares every tensor. `make run` runs it; everything
lies in one folder under the user's data folder (or --folder) and is made anew by each run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

from fpfs.core.mounts import mount_at
from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import WaitDurable
from fpfs.core.units import format_rate, format_size

DEVICES = 4
MARK = "made-by-quickstart"
"""A file in the folder of a run: only what has it is removed."""
LAYERS = 8
STEPS = 5
CONTEXT = 64
BATCH = 8
VOCABULARY = 256
TEXT = b"A checkpoint is worth what it takes to get it back whole. " * 200

console = Console()


class Block(nn.Module):
    """One transformer block: causal attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, time, width) to the same."""
        batch, length, width = x.shape
        parts = self.attend(self.norm_1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm_2(x))


class SmallGPT(nn.Module):
    """A GPT over bytes, 25 million parameters with LAYERS layers."""

    def __init__(self, *, width: int = 512, heads: int = 8, layers: int = LAYERS) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, time) of byte values to (batch, time, 256) of logits."""
        positions = torch.arange(tokens.shape[1])
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(positions))))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[float]:
    """Train for STEPS steps; yields each loss."""
    data = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    for _ in range(STEPS):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,))
        window = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])
        logits = model(window[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def run(tool: str, *arguments: str | Path) -> str:
    """Run fpfs or fpfs-ctl of this installation; its errors go to the terminal."""
    command = [Path(sys.executable).with_name(tool), *arguments]
    done = subprocess.run(
        [str(word) for word in command], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"quickstart: {tool} {arguments[0]} failed; what it says is above")
    return done.stdout


def connection(path: Path) -> ControlClient:
    """What ``fpfs-ctl`` uses, without the time that starting a command takes."""
    return ControlClient(find_fpfs(str(path), asked="quickstart"), asked="quickstart")


class Demonstration:
    """The folders of one run, and what it measured."""

    def __init__(self, folder: Path) -> None:
        self.devices = [folder / f"device{number}" for number in range(DEVICES)]
        self.mountpoint = folder / "ckpt"
        self.log = folder / "server.log"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MARK).touch()
        for path in (*self.devices, self.mountpoint):
            path.mkdir()
        self.checkpoint = self.mountpoint / "step5.pt"

    def mount(self) -> None:
        """Mount over the device folders."""
        devices = [word for device in self.devices for word in ("-d", str(device))]
        run("fpfs", "mount", *devices, "--log", self.log, self.mountpoint)
        console.print(f"mounted [bold]{self.mountpoint}[/] over {DEVICES} device folders")

    def unmount(self) -> None:
        """Unmount; everything is durable then."""
        run("fpfs", "umount", self.mountpoint)
        console.print("unmounted")

    def save(self, state: dict[str, Any]) -> None:
        """Save with plain torch.save, twice: the first save also meets cold memory."""
        table = Table("", "torch.save returned", "durable on the devices", title="saving")
        for name in ("first save", "overwriting it"):
            started = time.perf_counter()
            torch.save(state, self.checkpoint)
            returned_s = time.perf_counter() - started
            with connection(self.checkpoint) as client:
                client.ask(WaitDurable(ino=self.checkpoint.stat().st_ino))
            durable_s = time.perf_counter() - started
            size_bytes = self.checkpoint.stat().st_size
            table.add_row(
                name,
                f"{returned_s * 1000:.0f} ms, {format_rate(size_bytes / returned_s)}",
                f"{durable_s * 1000:.0f} ms, {format_rate(size_bytes / durable_s)}",
            )
        console.print(table)

    def show_devices(self) -> None:
        """Where the bytes lie."""
        status = json.loads(run("fpfs-ctl", "status", "--json", self.mountpoint))
        table = Table("device", "bytes of objects", "written", title="where the bytes lie")
        for device in status["devices"]:
            table.add_row(
                Path(device["path"]).name,
                format_size(device["bytes_used"]),
                format_size(device["bytes_written"]),
            )
        console.print(table)

    def load(self) -> dict[str, Any]:
        """Load with plain torch.load, twice: the first load also meets cold memory."""
        rates = []
        for _ in range(2):
            started = time.perf_counter()
            state: dict[str, Any] = torch.load(self.checkpoint)
            rates.append(self.checkpoint.stat().st_size / (time.perf_counter() - started))
        first, again = map(format_rate, rates)
        console.print(f"torch.load after the remount: {first} from the devices, then {again}")
        return state


def tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor inside dictionaries and lists, with its place."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors(part, f"{name}/{key}")


def compare(saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Compare bit for bit; exits with a message where something differs."""
    before, after = dict(tensors(saved)), dict(tensors(loaded))
    wrong = [name for name in before if name not in after or not before[name].equal(after[name])]
    if wrong or before.keys() != after.keys():
        sys.exit(f"the checkpoint came back different: {wrong or before.keys() ^ after.keys()}")
    size_bytes = sum(tensor.nbytes for tensor in before.values())
    console.print(
        f"[green]all {len(before)} tensors ({format_size(size_bytes)}) came back bit for bit[/]"
    )


def demonstrate(folder: Path, *, layers: int) -> None:
    """The whole story, once."""
    torch.manual_seed(0)
    demonstration = Demonstration(folder)
    demonstration.mount()
    try:
        model = SmallGPT(layers=layers)
        optimizer = torch.optim.AdamW(model.parameters())
        losses = ", ".join(f"{loss:.2f}" for loss in train(model, optimizer))
        console.print(f"trained a small GPT for {STEPS} steps on the CPU, losses {losses}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        demonstration.save(state)
        demonstration.show_devices()
        demonstration.unmount()
        demonstration.mount()
        compare(state, demonstration.load())
    finally:
        if os.path.ismount(demonstration.mountpoint):
            demonstration.unmount()


def clear(folder: Path) -> None:
    """Remove what an earlier run left; exits where there is anything else."""
    if mount_at(str(folder / "ckpt")) is not None:
        # That run was killed; where its server is gone too, this says so and fails.
        subprocess.run(
            [Path(sys.executable).with_name("fpfs"), "umount", folder / "ckpt"], check=False
        )
        if mount_at(str(folder / "ckpt")) is not None:
            sys.exit(f"quickstart: {folder}/ckpt is mounted: end what uses it and unmount it")
    if (folder / MARK).exists():
        shutil.rmtree(folder)
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.exit(f"quickstart: {folder} is no empty folder: name another with --folder")


def main() -> None:
    """Run in a fresh folder, and remove it after success."""
    data_folder = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(data_folder, "fpfs", "quickstart"))
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model (default 8)")
    arguments = parser.parse_args()
    folder = arguments.folder
    clear(folder)
    demonstrate(folder, layers=arguments.layers)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
