"""The process that saves and loads: a child of the benchmark, driven by JSON lines.

Kept apart from the benchmark so that several can run at once, and so that the one that is timed
has nothing else to do. Run with ``python -m benchmarks.worker``. `Worker` is the side of the
benchmark.

Invariants:
  * Buffers are filled with random bytes, hence touched, before anything is timed.
  * Times are read from CLOCK_MONOTONIC, which all processes of a machine share.

Concurrency: one command at a time; `together` starts one in each of several workers.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TENSOR_BYTES = 64 * 1024 * 1024
SMALL_BYTES = 4096
STREAM_BYTES = 16 * 1024 * 1024
DCP_THREADS = 8
"""The fastest of 1, 2, 4, 8, 16 and 32 (0.56, 0.69, 0.83, 0.92, 0.93, 0.79 GB/s: 2 processors)."""
COLUMNS = 4096
"""Of tensors that ranks have parts of: 16 KiB in a row of half of them."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """When a command began and ended, in seconds of the machine's monotonic clock."""

    started_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_s - self.started_s


class Worker:
    """A running worker process."""

    def __init__(self) -> None:
        root = Path(__file__).resolve().parent.parent
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root), "PYTHONWARNINGS": "ignore"},
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def start(self, command: str, **arguments: Any) -> None:
        """Begin a command without waiting for it."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        stdin.flush()

    def finish(self) -> Timing:
        """Wait for the command. RuntimeError with the worker's error, or if it died."""
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the worker process ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the worker failed: {answer['error']}")
        return Timing(started_s=answer["started_s"], ended_s=answer["ended_s"])

    def call(self, command: str, **arguments: Any) -> Timing:
        """Run a command to its end."""
        self.start(command, **arguments)
        return self.finish()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def together(workers: Sequence[Worker], command: str, **arguments: Sequence[Any]) -> float:
    """One command in each worker at once; seconds from the first start to the last end.

    Each argument is a sequence with one value for each worker.
    """
    for index, worker in enumerate(workers):
        worker.start(command, **{name: values[index] for name, values in arguments.items()})
    timings = [worker.finish() for worker in workers]
    return max(t.ended_s for t in timings) - min(t.started_s for t in timings)


def alike(workers: Sequence[Worker], command: str, **arguments: Any) -> float:
    """As `together`, with the same arguments for each worker."""
    of_all = {name: [value] * len(workers) for name, value in arguments.items()}
    return together(workers, command, **of_all)


# --- the worker's side ----------------------------------------------------------------------


class Commands:
    """What a worker can do. torch is imported by the first command that needs it."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._stager: Any = None
        self._plugin: Any = None
        self._saving: Any = None
        self._copy: dict[str, Any] = {}
        self._saver: Any = None
        self._training: Any = None

    def state(self, *, tensors: int) -> None:
        """Make a state of `tensors` x 64 MiB random bytes."""
        import numpy as np
        import torch

        torch.set_num_threads(1)  # one core saves or loads; the others belong to the filesystem
        generator = np.random.default_rng(tensors)
        self._state = {
            f"layer{index}.weight": torch.from_numpy(
                generator.integers(-(2**63), 2**63 - 1, TENSOR_BYTES // 8, dtype=np.int64)
            )
            for index in range(tensors)
        }

    def save(self, *, path: str, crc32: bool = True, legacy: bool = False, fsync: bool) -> None:
        """Plain torch.save; `fsync` opens the file again and syncs it, as a careful user would."""
        import torch

        torch.serialization.set_crc32_options(crc32)
        torch.save(self._state, path, _use_new_zipfile_serialization=not legacy)
        if fsync:
            self._sync(path)

    def save_in_place(self, *, path: str, fsync: bool) -> None:
        """torch.save over a file that is not truncated first: what of it is cached stays so."""
        import torch

        torch.serialization.set_crc32_options(True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
            torch.save(self._state, file)
            if fsync:
                os.fsync(file.fileno())

    def save_deepspeed(self, *, path: str, legacy: bool) -> None:
        """torch.save into DeepSpeed's FastFileWriter, then fsync."""
        from benchmarks.peers.deepspeed_writer import save

        save(self._state, path, legacy=legacy)
        self._sync(path)

    def save_safetensors(self, *, path: str, fsync: bool) -> None:
        """Save the state with safetensors."""
        from safetensors.torch import save_file

        save_file(self._state, path)
        if fsync:
            self._sync(path)

    def save_torch_checkpointing(
        self, *, path: str, direct: bool, fsync: bool, by_fpfs: bool = False
    ) -> None:
        """Save the state with Meta's library, without its background process."""
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.storage.base_storage import StorageConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage: StorageConfig = LocalFileSystemStorageConfig(use_direct_io=direct)
        if by_fpfs:
            from fpfs.integrations.torch_checkpointing import FpfsStorageConfig

            storage = FpfsStorageConfig(durable=fsync)
        manager = CheckpointManager(
            CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage)
        )
        manager.save(path, {"state": self._state})
        manager.close()
        if fsync and not by_fpfs:
            self._sync_all(path)

    def save_by_accelerate(self, *, path: str, by_fpfs: bool) -> None:
        """Save a model that has the state with Accelerate's save_state, durable."""
        import torch
        from accelerate import Accelerator

        from fpfs.integrations.accelerate import register

        parameters = [
            torch.nn.Parameter(tensor, requires_grad=False) for tensor in self._state.values()
        ]
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(torch.nn.ParameterList(parameters))
        if by_fpfs:
            register(accelerator, durable=True)
        accelerator.save_state(path)
        if not by_fpfs:
            self._sync_all(path)

    def save_client(self, *, path: str) -> None:
        """Save the state with fpfs, durable."""
        from fpfs.client import save

        save(self._state, path, durable=True)

    def save_safetensors_by_fpfs(self, *, path: str) -> None:
        """Save the state with fpfs as a file of safetensors, durable."""
        from fpfs.client import save_safetensors

        save_safetensors(self._state, path, durable=True)

    def save_shares(self, *, path: str, copies: int) -> None:
        """Save this node's share, to a directory, durably."""
        import fpfs

        fpfs.save_shares(self._state, path, copies=copies)

    def load_shares(self, *, path: str | Sequence[str]) -> None:
        """Load a checkpoint, of which this rank may see a part, into the tensors that there are."""
        import fpfs

        fpfs.load_shares(path, into=self._state)

    def copy(self) -> None:
        """Copy the state to memory that is there, but for the first time."""
        if not self._copy:
            self._copy = {name: tensor.clone() for name, tensor in self._state.items()}
        for name, tensor in self._state.items():
            self._copy[name].copy_(tensor)

    def save_beside(self, *, path: str) -> None:
        """Begin to save the state with fpfs."""
        self._saver.save(self._state, path)

    def wait_beside(self, *, memory_bytes: int = 0) -> None:
        """Until that is durable. memory_bytes: then go on with a new saver that has so many."""
        from fpfs.client import AsyncSaver

        if self._saver is not None:
            self._saver.wait()
        if self._saver is None or memory_bytes:
            self._saver = None
            self._saver = AsyncSaver(memory_bytes=memory_bytes)

    def use_gpu(self) -> None:
        """Have the state on the GPU."""
        self._state = {name: tensor.cuda() for name, tensor in self._state.items()}

    def copy_from_gpu(self, *, to: str) -> None:
        """Copy it to memory that is there, but for the first time: of the GPU, or pinned."""
        import torch

        if not self._copy:
            self._copy = {
                name: torch.empty_like(tensor, device=to, pin_memory=to == "cpu")
                for name, tensor in self._state.items()
            }
        for name, tensor in self._state.items():
            self._copy[name].copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    def save_beside_gpu(self, *, path: str, snapshots: bool) -> None:
        """Begin to save it with fpfs; until the stream has changed a tensor.

        snapshots: the GPU may have room for a copy.
        """
        import torch

        from fpfs.client import snapshot

        if not snapshots:
            vars(snapshot)["free_bytes"] = lambda _: 0
        self._saver.save(self._state, path)
        next(iter(self._state.values()))[:1].add_(1)
        torch.cuda.current_stream().synchronize()

    def train_with(self, *, saver: str, folder: str) -> None:
        """Make a model that is saved to `folder` by one of `training.SAVERS`."""
        from benchmarks.training import Training

        self._training = Training(saver, Path(folder))

    def train(self, *, iterations: int, saves: bool = True) -> None:
        """Train it, and begin to save after each iteration."""
        self._training.run(iterations, saves=saves)

    def save_training(self) -> None:
        """Save it, and wait."""
        self._training.save()

    def wait_for_training(self) -> None:
        """Until the last checkpoint is durable."""
        self._training.wait()

    def save_dcp(self, *, path: str) -> None:
        """Save the state with torch.distributed.checkpoint, as many threads as help, and fsync."""
        from torch.distributed import checkpoint

        writer = checkpoint.FileSystemWriter(path, thread_count=DCP_THREADS, sync_files=True)
        checkpoint.save(self._state, storage_writer=writer, no_dist=True)

    def save_dcp_by_fpfs(self, *, path: str) -> None:
        """Save the state with torch.distributed.checkpoint by fpfs, durable."""
        from torch.distributed import checkpoint

        from fpfs.dcp import Writer

        checkpoint.save(self._state, storage_writer=Writer(path), no_dist=True)

    def save_dcp_beside(self, *, path: str, stager: str) -> None:
        """Begin to save it beside training: staged by "torch" anew, "torch, kept", "fpfs", or by
        "fpfs, later" as what an optimizer has.
        """
        import torch
        from torch.distributed import checkpoint
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        from fpfs.dcp import Stager, Writer

        if stager == "fpfs":
            self._stager = self._stager or Stager()
        elif stager == "fpfs, later":
            optimizer = torch.optim.SGD(self._state.values())
            self._stager = self._stager or Stager(optimizers=optimizer)
        elif stager == "torch, kept":
            self._stager = self._stager or DefaultStager(StagingOptions(*[False] * 4))
        self._saving = checkpoint.async_save(
            self._state,
            storage_writer=Writer(path)
            if stager.startswith("fpfs")
            else checkpoint.FileSystemWriter(path, thread_count=DCP_THREADS, sync_files=True),
            async_stager=self._stager,
            no_dist=True,
        )

    def save_dcp_beside_durably(self, *, path: str, stager: str) -> None:
        """The same, until it is durable."""
        self.save_dcp_beside(path=path, stager=stager)
        self.wait_dcp()

    def wait_dcp(self) -> None:
        """Until that is durable."""
        getattr(self._saving, "upload_completion", self._saving).result()
        self._saving = None

    def save_by_lightning(self, *, path: str, plugin: str) -> None:
        """Save a Trainer's checkpoint as Lightning does: by "torch", "async" or "fpfs"."""
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        from fpfs.integrations.lightning import FpfsCheckpointIO

        if self._plugin is None:
            make = {
                "torch": TorchCheckpointIO,
                "async": lambda: AsyncCheckpointIO(TorchCheckpointIO()),
                "fpfs": FpfsCheckpointIO,
            }
            self._plugin = make[plugin]()
        within_an_epoch = {"epoch_progress": {"current": {"ready": 1, "completed": 0}}}
        checkpoint = {"loops": {"fit_loop": within_an_epoch}, "state_dict": self._state}
        self._plugin.save_checkpoint(checkpoint, path)

    def wait_lightning(self) -> None:
        """Until that is saved, by fpfs durable."""
        wait = getattr(self._plugin, "wait", self._plugin.teardown)
        wait()

    def save_by_transformers(self, *, path: str, total_bytes: int, by_fpfs: bool) -> Timing:
        """Train by a Trainer that saves to `path`; when the checkpoint held it."""
        from benchmarks.peers.transformers_trainer import Run

        if self._plugin is None:
            self._plugin = Run(total_bytes=total_bytes, by_fpfs=by_fpfs)
        timing: Timing = self._plugin.train(path)
        return timing

    def wait_transformers(self) -> None:
        """Nothing: a run ends when all is saved, by fpfs durable."""

    def save_by_deepspeed(self, *, path: str, engine: str) -> None:
        """Save a checkpoint as DeepSpeed does, by an engine: until weights may be updated."""
        from benchmarks.peers.deepspeed_engine import make_decoupled, make_fpfs, make_torch, save
        from benchmarks.training import join

        if self._plugin is None:
            join()
            make = {"torch": make_torch, "decoupled": make_decoupled, "fpfs": make_fpfs}
            self._plugin = make[engine]()
        save(self._plugin, self._state, path)

    def wait_deepspeed(self) -> None:
        """Until that is saved, by fpfs durable."""
        if hasattr(self._plugin, "wait"):
            self._plugin.wait()

    def load_dcp(self, *, path: str, by_fpfs: bool) -> None:
        """Load with torch.distributed.checkpoint into the state."""
        from torch.distributed import checkpoint

        from fpfs.dcp import Reader

        reader = Reader(path) if by_fpfs else checkpoint.FileSystemReader(path)
        checkpoint.load(self._state, storage_reader=reader, no_dist=True)

    def save_dcp_together(self, *, path: str) -> None:
        """The same by all ranks of the group that the worker has joined."""
        from torch.distributed import checkpoint

        writer = checkpoint.FileSystemWriter(path, thread_count=DCP_THREADS, sync_files=True)
        checkpoint.save(self._state, storage_writer=writer)

    def join(self, *, rank: int, size: int, port: int) -> None:
        """Become a rank of a group."""
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
        )

    def lay_out(self, *, layout: str) -> None:
        """Have of the state what a rank has: "replicas" (all), "rows" or "columns" (DTensors)."""
        if layout == "replicas":
            return
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        dim = {"rows": 0, "columns": 1}[layout]
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name, tensor in self._state.items():
            parts = tensor.reshape(-1, COLUMNS).chunk(dist.get_world_size(), dim)
            part = parts[dist.get_rank()].clone()
            self._state[name] = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)

    def load_only(self, *, path: str, client: bool) -> None:
        """Load, by fpfs or by torch, and let go of it; the bytes are there, and nobody looks."""
        import torch

        from fpfs.client import load

        if client:
            load(path)
        else:
            torch.load(path)

    def load_into(self, *, path: str) -> None:
        """Load with fpfs into the state, of DTensors what this rank has."""
        from fpfs.client import load

        load(path, into=self._state)

    def load(self, *, path: str, mmap: bool) -> None:
        """torch.load, every tensor summed."""
        import torch

        torch.set_num_threads(1)
        loaded = torch.load(path, mmap=mmap, weights_only=True)
        total = 0
        for tensor in loaded.values():
            total ^= int(tensor.sum())

    def small_files(self, *, directory: str, count: int) -> None:
        """Create, write and close `count` files of 4 KiB."""
        content = os.urandom(SMALL_BYTES)
        for index in range(count):
            fd = os.open(f"{directory}/{index:06d}", os.O_WRONLY | os.O_CREAT, 0o644)
            os.write(fd, content)
            os.close(fd)

    def stat_often(self, *, path: str, count: int) -> None:
        """Ask for one name's attributes `count` times."""
        for _ in range(count):
            os.stat(path)

    def stream(self, *, path: str, total_bytes: int) -> None:
        """Write one file in pieces of 16 MiB."""
        content = os.urandom(STREAM_BYTES)
        with open(path, "wb", buffering=0) as file:
            for _ in range(total_bytes // STREAM_BYTES):
                file.write(content)

    @classmethod
    def _sync_all(cls, path: str) -> None:
        """All files of a directory."""
        for folder, _folders, names in os.walk(path):
            for name in names:
                cls._sync(f"{folder}/{name}")

    @staticmethod
    def _sync(path: str) -> None:
        fd = os.open(path, os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _answer(commands: Commands, request: dict[str, Any]) -> dict[str, Any]:
    action: Callable[..., Timing | None] = getattr(commands, request.pop("command"))
    started_s = time.monotonic()
    try:
        counted = action(**request)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return {"error": repr(error)}
    # Of some commands a part counts.
    timing = counted or Timing(started_s=started_s, ended_s=time.monotonic())
    gc.collect()
    return {"started_s": timing.started_s, "ended_s": timing.ended_s}


def main() -> None:
    """Answer requests from standard input until it ends."""
    # Libraries print to standard output: what they print goes to standard error instead.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    commands = Commands()
    for line in sys.stdin:
        answers.write(json.dumps(_answer(commands, json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
