"""A small GPT that a worker trains on one thread, with a checkpoint after each iteration.

Each way to save is asked before the weights are updated, and does what its library lets it do
beside training. Two names take turns. But for torch.save to a mount, which stores it beside
training, the last checkpoint is durable, as by fsync, before the next one begins.

Concurrency: used by the worker's only thread; libraries have threads and processes of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from concurrent.futures import Future

DCP_THREADS = 8
WIDTH = 512
LAYERS = 6
VOCABULARY = 8192
CONTEXT = 256
BATCH = 1


class SmallGPT(nn.Module):
    """23 million parameters: 280 MB with the states of AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, WIDTH // 64, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, LAYERS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token, for each place."""
        length = tokens.shape[1]
        embedded = self.tokens(tokens) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.layers(embedded, mask=mask, is_causal=True) @ self.tokens.weight.T


class NoCheckpoints:
    """Saves nothing. The base of all that save."""

    def __init__(self, folder: Path, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._paths = itertools.cycle(folder / f"{name}{number}" for number in range(2))

    def start(self) -> None:
        """Before the first save, not timed."""

    def save(self, state: dict[str, Any]) -> None:
        """Begin to save."""

    def update(self) -> AbstractContextManager[Any]:
        """A context in which the weights may be updated."""
        return contextlib.nullcontext()

    def wait(self) -> None:
        """Until what was saved is durable."""


class _Fpfs(NoCheckpoints):
    """`fpfs.AsyncSaver`, which the optimizer waits for."""

    staging_bytes: int | None = None

    def start(self) -> None:
        from fpfs.client import AsyncSaver

        self._saver = AsyncSaver(optimizers=self._optimizer, staging_bytes=self.staging_bytes)

    def save(self, state: dict[str, Any]) -> None:
        self._saver.save(state, next(self._paths))

    def wait(self) -> None:
        self._saver.wait()


class _FpfsInPlace(_Fpfs):
    """The same, without memory for copies."""

    staging_bytes = 0


class _FpfsCopy(_Fpfs):
    """`fpfs.AsyncSaver` that knows no optimizer: `save` returns when all is copied."""

    def start(self) -> None:
        from fpfs.client import AsyncSaver

        self._saver = AsyncSaver()


class _FpfsSave(NoCheckpoints):
    """`fpfs.save`, durable: how long one persist takes, with nothing beside it."""

    def save(self, state: dict[str, Any]) -> None:
        from fpfs.client import save

        save(state, next(self._paths), durable=True)


class _TorchSave(NoCheckpoints):
    """torch.save and fsync."""

    def save(self, state: dict[str, Any]) -> None:
        with open(next(self._paths), "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())


class _TorchSaveToFpfs(NoCheckpoints):
    """Plain torch.save to a mount, which stores it beside training; durable when flushed."""

    def save(self, state: dict[str, Any]) -> None:
        self._path = next(self._paths)
        torch.save(state, self._path)

    def wait(self) -> None:
        fd = os.open(self._path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


class _DcpSave(NoCheckpoints):
    """torch.distributed.checkpoint.save with fsync."""

    def save(self, state: dict[str, Any]) -> None:
        from torch.distributed import checkpoint

        checkpoint.save(state, storage_writer=self._writer(), no_dist=True)

    def _writer(self) -> Any:
        from torch.distributed import checkpoint

        path = next(self._paths)
        return checkpoint.FileSystemWriter(path, thread_count=DCP_THREADS, sync_files=True)


class _DcpAsyncSave(_DcpSave):
    """async_save by a thread; tensors are copied beside training to memory that is kept."""

    in_process = False

    def start(self) -> None:
        from torch.distributed.checkpoint import staging, state_dict_saver

        if self.in_process:
            join()
        kind = state_dict_saver.AsyncCheckpointerType
        self._kind = kind.PROCESS if self.in_process else kind.THREAD
        self._stager = staging.DefaultStager(
            staging.StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self.in_process,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )
        self._response: Any = None

    def save(self, state: dict[str, Any]) -> None:
        from torch.distributed import checkpoint

        self.wait()
        self._response = checkpoint.async_save(
            state,
            storage_writer=self._writer(),
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
            no_dist=not self.in_process,
        )

    @contextlib.contextmanager
    def update(self) -> Any:
        if self._response is not None:
            self._response.staging_completion.result()
        yield

    def wait(self) -> None:
        if self._response is not None:
            self._response.upload_completion.result()


class _DcpAsyncSaveInProcess(_DcpAsyncSave):
    """async_save by a process."""

    in_process = True


class _TorchCheckpointing(NoCheckpoints):
    """Meta's library by its process, buffered (its default fails on ext4); then fsync."""

    def start(self) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._manager = CheckpointManager(
            CheckpointManager.Config(
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
            )
        )
        self._synced = threading.Event()
        self._synced.set()

    def save(self, state: dict[str, Any]) -> None:
        self.wait()
        self._synced.clear()
        path = next(self._paths)
        if path.exists():
            shutil.rmtree(path)
        future: Future[Any] | None = self._manager.save(str(path), state)
        assert future is not None

        def sync(_: Future[Any]) -> None:
            for folder, _folders, names in os.walk(path):
                for name in names:
                    fd = os.open(f"{folder}/{name}", os.O_RDONLY)
                    os.fsync(fd)
                    os.close(fd)
            self._synced.set()

        future.add_done_callback(sync)

    def update(self) -> AbstractContextManager[Any]:
        return self._manager.lock()

    def wait(self) -> None:
        self._synced.wait()


class _DeepSpeed(NoCheckpoints):
    """The decoupled engine: a process writes the tensors, which training shares with it.

    As DeepSpeed does it, the weights are not updated until all is written.
    """

    def start(self) -> None:
        from benchmarks.peers.deepspeed_engine import make_decoupled

        join()
        self._engine = make_decoupled()
        self._info: Any = None

    def save(self, state: dict[str, Any]) -> None:
        from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

        path = next(self._paths)
        self._info = CheckpointCommitInfo(
            tag=path.name, save_dir=str(path.parent), save_latest=False
        )
        self._engine.create(self._info)
        self._engine.save(state, str(path))

    @contextlib.contextmanager
    def update(self) -> Any:
        self.wait()
        yield

    def wait(self) -> None:
        if self._info is not None:
            self._engine.commit(self._info)
            self._info = None


def join() -> None:
    """Be a group of one, of torch.distributed."""
    import torch.distributed as dist

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


SAVERS: dict[str, type[NoCheckpoints]] = {
    "none": NoCheckpoints,
    "fpfs": _Fpfs,
    "fpfs_in_place": _FpfsInPlace,
    "fpfs_copy": _FpfsCopy,
    "fpfs_save": _FpfsSave,
    "torch_save": _TorchSave,
    "torch_save_to_fpfs": _TorchSaveToFpfs,
    "dcp_save": _DcpSave,
    "dcp_async_save": _DcpAsyncSave,
    "dcp_async_save_in_process": _DcpAsyncSaveInProcess,
    "torch_checkpointing": _TorchCheckpointing,
    "deepspeed": _DeepSpeed,
}


class Training:
    """Iterations of it."""

    def __init__(self, saver: str, folder: Path) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._model = SmallGPT()
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._saver = SAVERS[saver](folder, saver, self._optimizer)
        self._saver.start()
        self._update()  # makes the optimizer's states

    def state(self) -> dict[str, Any]:
        """What is saved."""
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def run(self, iterations: int, *, saves: bool = True) -> None:
        """Train, and begin to save after each."""
        for _ in range(iterations):
            self._update()
            if saves:
                self._saver.save(self.state())

    def _update(self) -> None:
        tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT))
        logits = self._model(tokens)
        nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        ).backward()
        with self._saver.update():
            self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self) -> None:
        """Save once more, as nothing else goes on."""
        self._saver.save(self.state())
        self._saver.wait()

    def wait(self) -> None:
        """Until the last checkpoint is durable."""
        self._saver.wait()
