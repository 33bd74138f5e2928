"""Plans of a million tensors over thousands of ranks: time, memory, and how equal shares are."""

from __future__ import annotations

import contextlib
import functools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.framework import Bound, Contender, Entry, Group, Sense
from benchmarks.places import Bench
from fpfs.client.boxes import Mesh, Sharding
from fpfs.client.plan import Plan, Records
from fpfs.client.topology import Topology

TENSORS = 1_000_000
RANKS = 4096
SHAPES = 200
"""Different ones of sharded tensors, as layers of a model are alike."""
REPLICAS = {"replicas": RANKS, "8 replicas of 512 parts": 8, "4096 parts": 1}
"""How many ranks have the same bytes."""
MIB = 1024**2


def plan_once(replicas: int) -> None:
    """In a process of its own: plan, find the share of one rank, and print what that took."""
    random = np.random.default_rng(0)
    shardings: tuple[Sharding, ...] = ()
    sharding_of = np.full(TENSORS, -1)
    sizes = 4 * random.integers(1, 50_000, TENSORS)
    if replicas < RANKS:
        mesh = Mesh((replicas, RANKS // replicas), range(RANKS))
        rows, columns = (random.integers(100, most, SHAPES) for most in (50_000, 4000))
        shapes = zip(rows.tolist(), columns.tolist(), strict=True)
        of_shapes = 4 * rows * columns
        shardings = tuple(Sharding(shape, 4, mesh, ((1, 0),)) for shape in shapes)
        sharding_of = random.integers(0, SHAPES, TENSORS)
        sizes = of_shapes[sharding_of]
    spans = -(-(sizes + 200) // 64) * 64
    offsets = MIB + np.cumsum(spans) - spans
    file_bytes = int(spans.sum()) + 2 * MIB
    records = Records(offsets, sizes, file_bytes, shardings, sharding_of, b"")
    topology = Topology.regular(RANKS, ranks_per_node=8)
    began = time.monotonic()
    plan = Plan(records, topology)
    plan.share(RANKS // 3)
    seconds = time.monotonic() - began
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    blocks = (max(plan.loads) - min(plan.loads)) / topology.chunk_bytes
    print(json.dumps({"seconds": seconds, "peak_mib": peak_mib, "blocks": blocks}))


def _measured(replicas: int) -> dict[str, Any]:
    code = f"from benchmarks.groups.planning import plan_once; plan_once({replicas})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _figure(figure: str, name: str) -> float:
    return float(_measured(REPLICAS[name])[figure])


def _opener(figure: str, names: Sequence[str]) -> Any:
    @contextlib.contextmanager
    def opened(_: Bench) -> Iterator[Sequence[Entry]]:
        yield [
            Contender(name=name, play=functools.partial(_figure, figure, name)) for name in names
        ]

    return opened


GROUPS = (
    Group(
        name="plan",
        title="a plan of 1,000,000 tensors over 4,096 ranks, and the share of one",
        unit="s",
        open=_opener("seconds", list(REPLICAS)),
        bounds=tuple(Bound(contender=name, figure=2, sense=Sense.AT_MOST) for name in REPLICAS),
    ),
    Group(
        name="plan-memory",
        title="highest memory of a process that plans 1,000,000 tensors over 4,096 ranks",
        unit="MiB",
        open=_opener("peak_mib", list(REPLICAS)),
        bounds=tuple(Bound(contender=name, figure=1024, sense=Sense.AT_MOST) for name in REPLICAS),
        rounds_max=1,
    ),
    Group(
        name="plan-balance",
        title="by how much shares of 1,000,000 replicated tensors differ over 4,096 ranks",
        unit="blocks",
        open=_opener("blocks", ["replicas"]),
        bounds=(Bound(contender="replicas", figure=1, sense=Sense.AT_MOST),),
        rounds_max=1,
    ),
)
