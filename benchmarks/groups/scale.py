"""What rank 0 does when thousands of ranks save shares: others' messages are simulated.

Rank 0 is a real one, with a group of torch's "fake" backend, and a TCPStore that another process
serves. That one puts what all other ranks would hand in, of each step, before rank 0 looks for it.
So the figure is the time that rank 0 takes for all steps, without that of others and of bytes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from benchmarks.framework import Bound, Contender, Entry, Group, Sense
from benchmarks.places import Bench
from fpfs import client
from fpfs.client import peers
from fpfs.client.peers import ANSWER_KEYS, Process, Ranks
from fpfs.client.plan import Plan
from fpfs.client.shares import saving
from fpfs.client.shares.format import Identity, ShareFile, share_name
from fpfs.client.store import Store
from fpfs.client.topology import Topology
from fpfs.client.writing import Written

CALL = "save_shares"
RANKS = (1024, 4096, 16_384)
PER_NODE = 8
TENSORS = 2000
ELEMENTS = 100_000
SECONDS_MAX = 5.0
MIB_MAX = 4096

T = TypeVar("T")
R = TypeVar("R")


def _state() -> dict[str, Any]:
    # Nobody touches what others would write.
    return {f"layer{number}.weight": torch.empty(ELEMENTS) for number in range(TENSORS)}


def be_rank_0(ranks: int, folder: str) -> None:
    """In a process of its own: save shares; print what all exchanges took together."""
    # Registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401

    port = int(sys.stdin.readline())
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=store)
    exchange, seconds, exchanges = Ranks.exchange, 0.0, 0

    def exchange_when_all_have(self: Ranks, step: str, *arguments: Any, **keywords: Any) -> Any:
        nonlocal seconds, exchanges
        exchanges += 1
        store.wait([f"simulated/{exchanges}"])
        began = time.monotonic()
        answer = exchange(self, step, *arguments, **keywords)
        seconds += time.monotonic() - began
        return answer

    # The group's own has a prefix.
    vars(peers)["Store"] = lambda _, **options: Store(store, **options)
    Ranks.exchange = exchange_when_all_have  # type: ignore[method-assign]
    plan = Plan.build(_state(), Topology.regular(ranks, ranks_per_node=PER_NODE))
    client.save_shares(_state(), folder, plan=plan)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "peak_mib": peak_mib}))
    os._exit(0)


class _Others:
    """All ranks but rank 0, of which the first does what ranks do."""

    is_group = True
    rank = 1

    def __init__(self, plan: Plan, raw: dist.Store) -> None:
        self.size = size = len(plan.topology.ranks)
        self._plan = plan
        self.ranks = tuple(range(size))
        self._raw = raw
        self._store = Store(raw, prefix="fpfs.save", timeout_s=600)
        self._checkpoint = Identity(0, "")
        self._exchanges = 0

    def __enter__(self) -> _Others:
        self._store.open()
        own = msgspec.msgpack.encode(Process("another machine", 1, 1))
        for rank in range(1, self.size):
            self._store.set(f"process/{rank}", own)
            self._store.set(f"call/{rank}", f"1 {CALL}")
            self._store.add(f"calls/{rank}", 1)
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def check(self) -> None:
        """None fails."""

    def tell(self, error: BaseException) -> None:
        """Nobody wants to know."""
        raise error

    def verdict(self, mine: bool) -> bool:
        """It is one's own."""
        return mine

    def exchange(
        self, step: str, mine: T, answer: Callable[[list[T]], list[R]], *, of: type[R]
    ) -> R:
        """Hand in what each of the others would; return what rank 0 answers the first."""
        del answer
        self._exchanges += 1
        name = f"1/{CALL}.{self._exchanges}.{step}"
        messages = {
            f"{name}/{rank}": msgspec.msgpack.encode(self._of(step, mine, rank))
            for rank in range(1, self.size)
        }
        self._store.put(messages)
        self._store.add(name, len(messages))
        self._raw.set(f"simulated/{self._exchanges}", b"")
        of_all = f"1/{ANSWER_KEYS[self._exchanges % 2]}"
        self._raw.wait([f"fpfs.save/{of_all}"])
        (answered,) = self._store.read([of_all])
        if not answered:
            (answered,) = self._store.read([f"{of_all}.1"])
        found = msgspec.msgpack.decode(answered, type=of)
        self._checkpoint = getattr(found, "checkpoint", self._checkpoint)
        return found

    def _of(self, step: str, mine: Any, rank: int) -> Any:
        node, is_first = rank // PER_NODE, rank % PER_NODE == 0
        if step == "node" and node > 0:
            return msgspec.structs.replace(mine, kernel=f"node {node}")
        if step == "share" and is_first:
            return saving.Opened(f".fpfs-save-{node}.share".encode(), 1 << 20, 1 << 30)
        if step == "part":
            pieces = self._plan.share(rank).pieces
            records = {int(piece.record): 0xFEDCBA98 for piece in pieces}
            written = Written(rank, 1 << 30, 1.5, 0, 8)
            return saving.PartWritten(written, records, [0xFEDCBA98] * len(pieces))
        if step == "closed" and is_first:
            name = share_name(node, self.size // PER_NODE, self._checkpoint)
            return saving.Closed(ShareFile(name, f"node{node}", 1 << 30, 1 << 20, 0xFEDCBA98))
        return mine


class _Save(saving.SharesSave):
    """Others write nothing: `_Others` makes up what they would hand in."""

    def _write_part(
        self, opened: saving.Opened, threads: int, *, in_place: bool
    ) -> saving.PartWritten:
        del opened, threads, in_place
        return saving.PartWritten(Written(1, 0, 0.0, 0, 1), {}, [])


def be_others(ranks: int, folder: str) -> None:
    """In a process of its own: serve the store, and hand in what other ranks would."""
    raw = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    print(raw.port, flush=True)
    plan = Plan.build(_state(), Topology.regular(ranks, ranks_per_node=PER_NODE))
    others: Any = _Others(plan, raw)
    with _Save(others, copies=1, timeout_s=600) as save:
        save.agree(_state(), folder, plan)
        save.write()
    os._exit(0)


def _measured(ranks: int) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        command = [sys.executable, "-c"]
        code = f"from benchmarks.groups import scale; scale.{{}}({ranks}, {folder!r})"
        others = stack.enter_context(
            subprocess.Popen(
                [*command, code.format("be_others")], stdout=subprocess.PIPE, text=True
            )
        )
        stack.callback(others.kill)
        assert others.stdout is not None
        port = others.stdout.readline()
        done = subprocess.run(
            [*command, code.format("be_rank_0")],
            input=port,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _figure(figure: str, ranks: int) -> float:
    return float(_measured(ranks)[figure])


def _opener(figure: str) -> Any:
    @contextlib.contextmanager
    def opened(_: Bench) -> Iterator[Sequence[Entry]]:
        yield [
            Contender(name=_name(ranks), play=functools.partial(_figure, figure, ranks))
            for ranks in RANKS
        ]

    return opened


def _name(ranks: int) -> str:
    return f"{ranks:,} ranks"


GROUPS = (
    Group(
        name="shares-scale",
        title=f"rank 0's part of a save of shares, of {PER_NODE} ranks a node, others simulated",
        unit="s",
        open=_opener("seconds"),
        bounds=(Bound(contender=_name(RANKS[-1]), figure=SECONDS_MAX, sense=Sense.AT_MOST),),
    ),
    Group(
        name="shares-scale-memory",
        title="highest memory of rank 0 then",
        unit="MiB",
        open=_opener("peak_mib"),
        bounds=(Bound(contender=_name(RANKS[-1]), figure=MIB_MAX, sense=Sense.AT_MOST),),
        rounds_max=1,
    ),
)
