"""A file is the same into how many shares it may be divided, and shares are equal."""

from __future__ import annotations

import ctypes
import io
import json
import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fpfs.client import plan as planning
from fpfs.client.boxes import Mesh, Sharding, box_of
from fpfs.client.container import Container, lay_out
from fpfs.client.plan import NO_PIECES, Plan, Records, Share
from fpfs.client.planning import check_whole
from fpfs.client.saving import save
from fpfs.client.sharding import Sharded
from fpfs.client.topology import WRITERS, Topology, Writers, _joined, _Site, own_sockets
from fpfs.client.writing import crc32_parts, put_crc32
from tests.support.states import large_state, nested_states, odd_state, random_tensor, without_id

# torch's own, of types that it is not done with.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def write(
    share: Share,
    container: Container,
    file: bytearray,
    written: bytearray,
    *,
    wholes: dict[int, torch.Tensor],
) -> dict[int, int]:
    """Write a share as the native writer does, byte by byte; returns its parts of CRC32s.

    wholes: what is read from other ranks, by the records' numbers.
    """

    def put(offset: int, content: bytes) -> None:
        assert not written.count(b"x", offset, offset + len(content)), "no byte is written twice"
        written[offset : offset + len(content)] = b"x" * len(content)
        file[offset : offset + len(content)] = content

    crcs: list[list[int]] = []
    for piece in share.pieces:
        source = container.record(piece.record)
        memory, room = source.storage.data_ptr() + source.start, source.storage.nbytes()
        if piece.record in wholes:
            memory, room = wholes[piece.record].data_ptr(), wholes[piece.record].nbytes
        else:
            room -= source.start
        assert piece.start + piece.total_bytes <= room
        crcs.append([])
        for offset, start in piece.runs():
            content = ctypes.string_at(memory + start, piece.bytes)
            put(offset, content)
            crcs[-1].append(zlib.crc32(content))
    of_records = {piece.record: crcs[index][-1] for index, piece in enumerate(share.pieces)}
    for number in share.texts:
        text = container.text_part(number)
        content = container.text[text.start : text.start + text.bytes]
        for record, offset in container.crc_places.get(number, ()):
            if record in of_records:
                struct.pack_into("<L", content, offset - text.offset, of_records[record])
        put(text.offset, content)
    return crc32_parts(share.pieces, crcs, container)


def cut_at(topology: Topology, chunk_bytes: int) -> Topology:
    return msgspec.structs.replace(topology, chunk_bytes=chunk_bytes)


def filled(
    containers: list[Container],
    *,
    block_bytes: int,
    writers: Writers = "replica",
    topology: Topology | None = None,
    wholes: Sequence[torch.Tensor] = (),
) -> tuple[bytearray, list[int]]:
    """The file that ranks write, and how much each of them wrote before rank 0 wrote the rest.

    wholes: what the records are of, if ranks can read each other's memory.
    """
    first = containers[0]
    file, written = bytearray(first.bytes), bytearray(first.bytes)
    if topology is None:
        topology = Topology.regular(len(containers))
    topology = cut_at(topology, block_bytes)
    crcs, sizes = [], []
    for rank, container in enumerate(containers):
        # Each plans by itself, of what it has.
        own = container
        if own.layout_digest() != first.layout_digest():
            own = own.laid_out_as(first.layout())
        plan = Plan(own.records(), topology, writers, gathers=bool(wholes))
        assert plan.records == first.records()
        before = written.count(b"x")
        read = {number: wholes[number] for number in plan.gathered}
        crcs.append(write(plan.share(rank), own, file, written, wholes=read))
        sizes.append(written.count(b"x") - before)
        if rank == 0:
            rest = plan.rest
    put_crc32(rest, crcs, first)
    write(Share(NO_PIECES, rest), first, file, written, wholes={})
    assert written == b"x" * first.bytes
    return file, sizes


@settings(max_examples=80)
@given(
    state=nested_states(),
    ranks=st.integers(1, 9),
    block_bytes=st.sampled_from([1, 7, 64, 100, 512, 4096]),
)
def test_random_states(state: Any, ranks: int, block_bytes: int) -> None:
    check_one_file(state, ranks=ranks, block_bytes=block_bytes)


@pytest.mark.parametrize(("ranks", "block_bytes"), [(5, 64), (3, 4096), (400, 1)])
def test_all_kinds_of_tensors(ranks: int, block_bytes: int) -> None:
    check_one_file(odd_state(), ranks=ranks, block_bytes=block_bytes)


def check_one_file(state: Any, *, ranks: int, block_bytes: int) -> None:
    whole = io.BytesIO()
    torch.save(state, whole)
    found, _ = filled([lay_out(state)] * ranks, block_bytes=block_bytes)
    assert without_id(bytes(found)) == without_id(whole.getvalue())


@st.composite
def shardings(draw: st.DrawFn, *, ranks: int) -> Sharding:
    """How a tensor is cut by a mesh of some of the ranks, and who has replicas."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        sizes.append(draw(st.integers(1, ranks // math.prod(sizes))))
    of_mesh = draw(st.permutations(range(ranks)))[: math.prod(sizes)]
    cuts = []
    for mesh_dim in draw(st.permutations(range(len(sizes)))):
        dim = draw(st.none() | st.integers(0, len(shape) - 1))
        if dim is not None:
            cuts.append((mesh_dim, dim))
    itemsize = draw(st.sampled_from([1, 2, 4]))
    return Sharding(shape, itemsize, Mesh(sizes, of_mesh), tuple(cuts))


DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}


def as_rank(state: Any, of_tensors: dict[str, Sharding], rank: int) -> Container:
    """What a rank has of a state: of some tensors only boxes. What is no tensor differs."""
    container = lay_out({**state, "text": "x" * 40 * rank})
    for number, name in enumerate(state):
        if name in of_tensors:
            sharding, tensor = of_tensors[name], state[name]
            box = box_of(sharding, rank)
            local = torch.zeros(0, dtype=tensor.dtype)
            if box.elements:
                cells = zip(box.offsets, box.shape, strict=True)
                local = tensor[tuple(slice(at, at + size) for at, size in cells)]
            # Not at the begin of its storage.
            local = torch.cat([torch.zeros(3, dtype=tensor.dtype), local.flatten()])[3:]
            container.parts[2 * number + 1] = container.record(number)._replace(
                storage=local.untyped_storage(),
                start=3 * tensor.element_size(),
                sharded=Sharded(name, sharding, box, local),
            )
    return container


def state_of(of_tensors: dict[str, Sharding]) -> dict[str, torch.Tensor]:
    return {
        name: random_tensor(DTYPES[sharding.itemsize], sharding.shape, seed=number)
        for number, (name, sharding) in enumerate(of_tensors.items())
    }


@settings(max_examples=150)
@given(
    data=st.data(),
    ranks=st.integers(1, 8),
    block_bytes=st.sampled_from([1, 7, 64, 512, 4096]),
    writers=st.sampled_from(WRITERS),
)
def test_sharded_tensors(
    data: st.DataObject, ranks: int, block_bytes: int, writers: Writers
) -> None:
    of_tensors = {
        f"tensor{number}": data.draw(shardings(ranks=ranks))
        for number in range(data.draw(st.integers(1, 4)))
    }
    state = state_of(of_tensors)
    # Some are ordinary.
    of_tensors = {name: each for name, each in of_tensors.items() if data.draw(st.booleans())}
    topology = Topology.regular(
        ranks,
        ranks_per_node=data.draw(st.integers(1, ranks)),
        sockets_per_node=data.draw(st.integers(1, 2)),
        devices=data.draw(st.integers(1, 3)),
    )
    group = data.draw(st.permutations(range(ranks)))
    some = group[: data.draw(st.integers(1, ranks))]
    if all(is_whole(each, some) for each in of_tensors.values()):
        group = some
    topology = msgspec.structs.replace(
        topology,
        ranks=tuple(group),
        nodes=topology.nodes[: len(group)],
        sockets=topology.sockets[: len(group)],
    )
    containers = [as_rank(state, of_tensors, rank) for rank in group]
    found, _ = filled(
        containers,
        block_bytes=block_bytes,
        writers=writers,
        topology=topology,
        wholes=list(state.values()) if data.draw(st.booleans()) else [],
    )
    alone = io.BytesIO()
    torch.save({**state, "text": "x" * 40 * group[0]}, alone)
    assert without_id(bytes(found)) == without_id(alone.getvalue())


def is_whole(sharding: Sharding, group: Sequence[int]) -> bool:
    """Whether these ranks have all of a tensor."""
    _, sizes = sharding.boxes()
    return all(
        0 in shape or set(holders) & set(group)
        for shape, holders in zip(sizes.tolist(), sharding.holders.tolist(), strict=True)
    )


def rows(ranks: list[int], shape: tuple[int, ...], *mesh: int) -> Sharding:
    """Rows by the last dimension of a mesh, with replicas along the others."""
    sizes = (*mesh, len(ranks) // math.prod(mesh))
    return Sharding(shape, 1, Mesh(sizes, ranks), ((len(sizes) - 1, 0),))


def test_replicas_and_sharded_tensors_make_equal_shares() -> None:
    """Two halves with two replicas each, a tensor of one rank, and what all have."""
    state = {
        "halves": random_tensor(torch.uint8, (80, 1000), seed=1),
        "third": random_tensor(torch.uint8, (30_000,), seed=2),
        "all": random_tensor(torch.uint8, (90_000,), seed=3),
    }
    of_tensors = {"halves": rows([0, 1, 2, 3], (80, 1000), 2), "third": rows([2], (30_000,))}
    file, shares = filled([as_rank(state, of_tensors, rank) for rank in range(4)], block_bytes=512)
    waiting = len(file) - sum(shares)
    assert 0 < waiting < 2000
    assert max(shares) - min(shares) <= 2 * 512 + waiting


def columns(ranks: int, shape: tuple[int, ...]) -> Sharding:
    return Sharding(shape, 1, Mesh((ranks,), range(ranks)), ((0, 1),))


def test_columns_are_gathered_by_ranks_that_write_equal_shares() -> None:
    """Of columns everybody writes rows, and rows are still written by those who have them."""
    state = {name: random_tensor(torch.uint8, (300, 400), seed=1) for name in ("columns", "rows")}
    of_tensors = {"columns": columns(3, (300, 400)), "rows": rows([0, 1, 2], (300, 400))}
    records = as_rank(state, of_tensors, 0).records()
    plan = Plan(records, cut_at(Topology.regular(3), 1000), gathers=True)
    assert plan.gathered == [0]
    for rank in range(3):
        pieces = plan.share(rank).pieces
        assert [piece.count for piece in pieces] == [1, 1]
        assert pieces[0].bytes == pytest.approx(40_000, abs=1500)
        assert pieces[1].bytes == 40_000


@pytest.mark.parametrize(
    ("writers", "expected"),
    [
        ("replica", list(range(8))),
        ("socket", [0, 2, 4, 6]),
        ("node", [0, 4]),
        ("device", [0, 1, 2, 4, 5, 6]),
    ],
)
def test_who_writes(writers: Writers, expected: list[int]) -> None:
    """Two machines of two sockets and three devices."""
    topology = Topology.regular(8, ranks_per_node=4, sockets_per_node=2, devices=3)
    container = lay_out(large_state(seed=1))
    _, shares = filled([container] * 8, block_bytes=4096, writers=writers, topology=topology)
    begin = container.record(0).offset
    assert [rank for rank, share in enumerate(shares) if share > begin] == expected
    of_writers = [shares[rank] for rank in expected]
    assert max(of_writers) - min(of_writers) <= 4096 + 3000


def test_a_part_that_no_rank_has() -> None:
    state = {"weight": torch.zeros(4, 4, dtype=torch.uint8)}
    container = as_rank(state, {"weight": rows([0, 1, 2], (4, 4))}, 0)
    # Rank 2 would have nothing: two rows are rank 0's, and two are rank 1's.
    check_whole(container, [0, 1])
    plan = Plan(container.records(), Topology.regular(2))
    assert [sum(piece.bytes for piece in plan.share(rank).pieces) for rank in range(2)] == [8, 8]
    with pytest.raises(ValueError, match="the group's ranks have not all of 'weight': .* 3 parts"):
        check_whole(container, [0, 2])


def test_shares_differ_by_a_block_and_a_few_bytes() -> None:
    """What waits for CRC32s is in no share: some headers, and the directory."""
    container = lay_out(large_state(seed=1))
    for ranks in (2, 3, 4, 7):
        file, shares = filled([container] * ranks, block_bytes=4096)
        waiting = len(file) - sum(shares)
        assert 0 < waiting < 2000
        assert max(shares) - min(shares) <= 4096 + waiting
        # As it is planned, with all that rank 0 writes in the end.
        plan = Plan(container.records(), cut_at(Topology.regular(ranks), 4096))
        assert sum(plan.loads) == len(file)
        assert max(plan.loads) - min(plan.loads) <= 4096
        for share, load in zip(shares, plan.loads, strict=True):
            assert abs(share - load) <= waiting


def test_a_file_of_one_block_is_rank_0s() -> None:
    container = lay_out({"small": torch.arange(10)})
    _, shares = filled([container] * 4, block_bytes=1024**2)
    assert shares[0] > 0
    assert shares[1:] == [0, 0, 0]


@given(
    total=st.integers(0, 10**6),
    loads=st.lists(st.integers(0, 10**5), min_size=1, max_size=9),
    block_bytes=st.sampled_from([1, 7, 512, 4096]),
    head=st.integers(0, 5000),
)
def test_loads_become_equal(total: int, loads: list[int], block_bytes: int, head: int) -> None:
    head %= block_bytes
    ends = planning._dealt(total, planning.np.array(loads), block_bytes, head=head).tolist()
    assert ends[-1] == total
    begins = [0, *ends[:-1]]
    after = []
    for load, begin, end in zip(loads, begins, ends, strict=True):
        assert begin <= end
        # Cut at the blocks of the file.
        assert end in (0, total) or (end - head) % block_bytes == 0
        if end - begin > block_bytes:
            after.append(load + end - begin)
    lowest = min(load + end - begin for load, begin, end in zip(loads, begins, ends, strict=True))
    # Who has got a whole block has no more than a block more than anybody.
    assert max(after, default=0) - lowest <= block_bytes


@pytest.mark.parametrize("gathers", [False, True])
def test_ranges_are_the_file(gathers: bool) -> None:
    state = {
        name: torch.zeros(60, 70, dtype=torch.uint8) for name in ("rows", "columns", "ordinary")
    }
    of_tensors = {"rows": rows([0, 1, 2], (60, 70)), "columns": columns(3, (60, 70))}
    container = as_rank(state, of_tensors, 0)
    plan = Plan(container.records(), cut_at(Topology.regular(3), 512), gathers=gathers)
    file = bytearray(container.bytes)
    for rank in range(3):
        for offset, count_bytes, count, step in plan.ranges(rank):
            for number in range(count):
                at = offset + number * step
                assert not any(file[at : at + count_bytes])
                file[at : at + count_bytes] = b"x" * count_bytes
    assert file == b"x" * container.bytes


def test_a_plan_as_json() -> None:
    topology = Topology.regular(4, ranks_per_node=2, sockets_per_node=2, devices=3)
    plan = Plan.build({"a": torch.zeros(10**6), "b": torch.zeros(10**6)}, topology, writers="node")
    found = json.loads(json.dumps(plan.to_dict()))
    assert {key: value for key, value in found.items() if key != "ranks"} == {
        "writers": "node",
        "bytes": plan.records.file_bytes,
        "records": 2,
        "chunk_bytes": 1024**2,
        "devices": 3,
    }
    first, second, third, fourth = found["ranks"]
    cut = first["ranges"][0][1]
    assert cut % 1024**2 == 0
    # The header of the second tensor, which both write, and the directory are rank 0's.
    assert first["ranges"][0] == [0, cut, 1, 0]
    assert third["ranges"][0] == [cut, third["bytes"], 1, 0]
    assert first["ranges"][-1] == [
        cut + third["bytes"],
        plan.records.file_bytes - first["ranges"][-1][0],
        1,
        0,
    ]
    assert second == {"rank": 1, "node": 0, "socket": 1, "bytes": 0, "ranges": []}
    assert (fourth["node"], fourth["socket"], fourth["bytes"]) == (1, 1, 0)
    assert first["bytes"] + third["bytes"] == plan.records.file_bytes
    assert str(plan) == "7.63 MiB in 2 tensors: 2 of 4 ranks write 3.63 MiB to 4.00 MiB each (node)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology((0, 1), (0,), (0, 0)), "2 ranks, 1 nodes and 2 sockets"),
        (lambda: Topology((), (), ()), "0 ranks"),
        (lambda: Topology((0, 0), (0, 0), (0, 0)), "the ranks of a topology are different numbers"),
        (lambda: Topology((-1,), (0,), (0,)), "from 0 on"),
        (lambda: Topology((0,), (0,), (0,), devices=0), "devices of a topology is from 1 to"),
        (lambda: Topology((0,), (0,), (0,), chunk_bytes=2**70), "chunk_bytes of a topology is"),
        (lambda: Topology.regular(0), "ranks of a topology is from 1 to 1048576, not 0"),
        (lambda: Topology.regular(2**40), "ranks of a topology is from 1 to 1048576"),
        (lambda: Topology.regular(4, ranks_per_node=0), "ranks_per_node of a topology is from 1"),
        (lambda: Topology.regular(4, sockets_per_node=-1), "sockets_per_node of a topology is"),
        (lambda: Plan.build({}, Topology.regular(2)).ranges(2), "rank 2 is none of 2 ranks"),
        (
            lambda: Plan.build({}, Topology.regular(1), writers="all"),  # type: ignore[arg-type]
            "writers is one of replica, socket, node, device, not 'all'",
        ),
    ],
)
def test_what_is_no_topology(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_ranks_are_spread_over_sockets() -> None:
    """Those of a machine, in their order, over the ones that each may run on."""
    sites = [_Site(machine, [0, 1], 2, 1 << 22) for machine in "abaab"]
    found = _joined([*sites, _Site("c", [1], 1, 1 << 20)], range(6))
    assert found.nodes == (0, 1, 0, 0, 1, 2)
    assert found.sockets == (0, 0, 0, 1, 1, 1)
    assert (found.devices, found.chunk_bytes) == (2, 1 << 22)


def test_a_topology_has_numbers() -> None:
    made = Topology(planning.np.arange(2), [0, 0], [0, 0])  # type: ignore[arg-type]
    assert repr(made) == repr(Topology((0, 1), (0, 0), (0, 0)))
    with pytest.raises(TypeError, match="integer"):
        Topology.regular(4, devices=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"take Topology.of\(path\)"):
        Plan.build({}, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="plan is a Topology: make one by Plan.build"):
        save({}, "unused.pt", plan=made)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4, 5])
def test_long_runs_are_cut(rank: int) -> None:
    """Two columns of a few long rows, with three replicas each."""
    mesh = Mesh((3, 2), range(6))
    sharding, size = Sharding((4, 3 << 20), 1, mesh, ((1, 1),)), 12 << 20
    records = Records(
        offsets=planning.np.array([0]),
        sizes=planning.np.array([size]),
        file_bytes=size,
        shardings=(sharding,),
        sharding_of=planning.np.array([0]),
        digest=b"",
    )
    plan = Plan(records, cut_at(Topology.regular(6), 4096))
    assert plan.share(rank).bytes == pytest.approx(size / 6, abs=2 * 4096)
    assert plan.share(rank).bytes == pytest.approx(plan.loads[rank], abs=2 * 4096)


def test_sockets_are_those_of_the_processors(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    for number, cpu in enumerate(allowed):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{7 if number else 3}\n")
    assert own_sockets(tmp_path) == ([3, 7] if len(allowed) > 1 else [3])
    assert own_sockets(tmp_path / "nothing") == [0]
