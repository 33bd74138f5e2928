"""Worlds of torch.distributed: functions that run in several processes, a rank each.

Processes are forked from one that has imported torch, which takes seconds, and what a module's
`before_forks` imports besides, and which has one thread only, as who forks must. Another one serves
the world's store, as torchrun's agent does, so a world outlives each of its ranks.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.support.failures.links import Network, enter
from tests.support.processes import DEADLINE_S, REPOSITORY, python_child

# Does a line of stdin after the other: forks the ranks, says their process ids, then what each has
# returned or raised, then "done".
_PARENT = """
import gc, importlib, json, os, sys
import torch
# What they import when it is first used.
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
from tests.support.ranks import be_rank, serve_store

torch.set_num_threads(1)
for line in sys.stdin:
    world = json.loads(line)
    module = importlib.import_module(world["module"])
    getattr(module, "before_forks", lambda: None)()
    # A rank that collected garbage would copy all that it has from here.
    gc.collect()
    gc.freeze()
    (port_in, port_out), (life_in, life_out) = os.pipe(), os.pipe()
    server = os.fork()
    if server == 0:
        os.close(life_out)
        serve_store(port_out, life_in, network=world["network"])
    port = int(os.read(port_in, 100))
    ranks = {}
    for rank in range(world["size"]):
        if (pid := os.fork()) == 0:
            os.close(life_out)
            be_rank(rank, port, **world)
        ranks[pid] = rank
    os.write(1, (json.dumps(list(ranks)) + "\\n").encode())
    for fd in (port_in, port_out, life_in):
        os.close(fd)
    for pid, rank in ranks.items():
        _, status = os.waitpid(pid, 0)
        if status != 0:
            died = {"rank": rank, "error": os.waitstatus_to_exitcode(status)}
            os.write(1, (json.dumps(died) + "\\n").encode())
    os.close(life_out)
    os.waitpid(server, 0)
    os.write(1, b"done\\n")
"""


class Outcome(NamedTuple):
    """What became of a rank."""

    value: Any = None
    """What the function has returned, through JSON."""
    error: str | int | None = None
    """The type and text of what it has raised; negative: the signal that ended the process."""


def serve_store(port_fd: int, life_fd: int, *, network: Sequence[Any] | None) -> None:
    """Serve a store, say its port, and exit when the other end of `life_fd` is closed."""
    import torch.distributed as dist

    if network is not None:
        enter(Network(*network), 0)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    os.write(port_fd, str(store.port).encode())
    os.read(life_fd, 1)
    os._exit(0)


def be_rank(
    rank: int,
    port: int,
    *,
    size: int,
    module: str,
    function: str,
    arguments: list[Any],
    network: Sequence[Any] | None,
) -> None:
    """Run a function as a rank of a world, say what became of it, and exit."""
    import faulthandler
    import importlib

    import torch.distributed as dist

    faulthandler.enable()
    said: dict[str, Any] = {"rank": rank}
    host = "127.0.0.1"
    try:
        if network is not None:
            made = Network(*network)
            host = made.address(0)
            node = rank * made.nodes // size
            enter(made, node)
            be_on_a_machine(f"node {node}")
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # it would choose the loopback
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        if function == be_program.__name__:
            # It makes a group itself, or needs none. To end one and make another takes gloo 5 s now
            # and then, and has ended in an abort.
            said["value"] = be_program(rank, size, *arguments)
        else:
            store = dist.TCPStore(host, port, None, False)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            os.environ.pop("GLOO_SOCKET_IFNAME", None)  # which is for torch alone
            said["value"] = getattr(importlib.import_module(module), function)(*arguments)
    except BaseException as error:  # noqa: BLE001 the test looks at it
        said["error"] = f"{type(error).__name__}: {error}"
    os.write(1, (json.dumps(said) + "\n").encode())
    os._exit(0)


def be_program(rank: int, size: int, path: str, is_launched: bool, *words: str) -> str:
    """Run a Python program in this rank, as torchrun does if it `is_launched`; what it prints.

    `Worlds.start` gives all but rank and size.
    """
    import runpy

    if is_launched:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(size), "TORCHELASTIC_RESTART_COUNT": "0"}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    sys.argv = [path, *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def be_on_a_machine(name: str) -> None:
    """Have processes of other machines not be seen from here."""
    from fpfs.client.peers import Process

    own = msgspec.structs.replace(Process.own(), kernel=name)
    Process.own = staticmethod(lambda: own)  # type: ignore[method-assign]


class World:
    """Ranks that run a function."""

    def __init__(self, parent: subprocess.Popen[str], pids: list[int]) -> None:
        self._parent = parent
        self._has_ended = False
        self.pids = pids
        """Of each rank's process."""

    def kill(self, rank: int) -> None:
        """End a rank by SIGKILL."""
        os.kill(self.pids[rank], signal.SIGKILL)

    def kill_all(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the ranks that have not ended."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """End what still runs, as of a test that failed: others use the same parent."""
        if not self._has_ended:
            self.kill_all()
            self.outcomes()

    def outcomes(self) -> list[Outcome]:
        """Wait for all ranks; what became of each. Ranks that take too long say where they are."""
        timer = threading.Timer(DEADLINE_S, self.kill_all, [signal.SIGABRT])
        timer.start()
        found = {}
        assert self._parent.stdout is not None
        while (line := self._parent.stdout.readline()) not in ("done\n", ""):
            said = json.loads(line)
            rank = said.pop("rank")
            found[rank] = Outcome(**said)
        timer.cancel()
        self._has_ended = True
        return [found[rank] for rank in range(len(self.pids))]

    def values(self) -> list[Any]:
        """What all have returned, none having failed."""
        outcomes = self.outcomes()
        errors = [outcome.error for outcome in outcomes]
        assert errors == [None] * len(outcomes), errors
        return [outcome.value for outcome in outcomes]


class Worlds:
    """Starts worlds, one at a time."""

    def __init__(self, parent: subprocess.Popen[str]) -> None:
        self._parent = parent
        self._last: World | None = None

    def end(self) -> None:
        """End the world that still runs, if one does."""
        if self._last is not None:
            self._last.end()

    def start(
        self,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,
        network: Network | None = None,
    ) -> World:
        """Run a function of a module's top with `arguments`, which go through JSON.

        network: on whose nodes the ranks are, as many on each; the store is on the first.
        """
        self.end()
        given = [str(value) if isinstance(value, Path) else value for value in arguments]
        world = {
            "size": size,
            "module": function.__module__,
            "function": function.__name__,
            "arguments": given,
            "network": network,
        }
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(world) + "\n")
        self._parent.stdin.flush()
        self._last = World(self._parent, json.loads(self._parent.stdout.readline()))
        return self._last


@pytest.fixture(scope="session")
def forks() -> Iterator[Worlds]:
    """Where ranks come from."""
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{_PARENT}"
    with python_child(code) as parent:
        worlds = Worlds(parent)
        yield worlds
        worlds.end()


__all__ = ["Outcome", "World", "Worlds", "be_program", "be_rank", "forks"]
