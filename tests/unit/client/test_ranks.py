"""Ranks of a group save one file together, or all learn why not."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fpfs import client
from fpfs.client import gathering, parallel_file, peers, planning, writing
from fpfs.client import store as stores
from fpfs.client.paths import default_threads
from fpfs.client.plan import Plan
from fpfs.client.topology import WRITERS, Topology
from fpfs.core import transfers
from tests.support.ranks import Worlds
from tests.support.states import (
    FORMER,
    PLACEMENTS,
    a_mesh,
    answer_patiently,
    fitting,
    is_as_before,
    large_state,
    odd_state,
    own_part,
    same,
    sharded,
    wholes,
)
from tests.support.waiting import wait_until

# torch's own, of types that it is not done with.
pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.fixture
def path(path: Path) -> Path:
    """Where a state is saved, with what a failure must leave."""
    client.save(FORMER, path)
    return path


def state_of(kind: str) -> Any:
    """A state, the same on all ranks."""
    if kind == "odd":
        torch.manual_seed(0)
        return odd_state()
    return large_state(seed=1)


def save_once(path: str, kind: str) -> Any:
    """As a rank: save a state; returns the report."""
    saved = client.save(state_of(kind), path)
    return [saved.path, saved.bytes, [list(part) for part in saved.written], str(saved)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_one_file(forks: Worlds, path: Path, size: int) -> None:
    reports = forks.start(size, save_once, path, "large").values()
    assert same(torch.load(path), state_of("large"))
    assert same(client.load(path), state_of("large"))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    assert os.listdir(path.parent) == [path.name]
    for name, total_bytes, written, line in reports:
        assert (name, total_bytes) == (str(path), path.stat().st_size)
        assert [part[0] for part in written] == list(range(size))
        assert total_bytes == sum(part[1] for part in written)
        assert (f" by {size} ranks, " in line) == (size > 1)


def test_all_kinds_of_tensors(forks: Worlds, path: Path) -> None:
    expected = state_of("odd")
    forks.start(3, save_in_small_blocks, path).values()
    assert same(torch.load(path, weights_only=False), expected)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def save_in_small_blocks(path: str) -> None:
    planning.CHUNK_BYTES_DEFAULT = 512
    saved = client.save(state_of("odd"), path)
    assert len(saved.written) == dist.get_world_size()


def save_what_differs(path: str) -> None:
    """What is no tensor may differ, also in size: rank 0's is saved."""
    rank = dist.get_rank()
    planning.CHUNK_BYTES_DEFAULT = 512
    own = {"rank": rank, "text": "x" * (1000 * rank), "letters": "y" * (rank % 2)}
    client.save({**own, **sharded_with_ordinary()}, path)


def sharded_with_ordinary() -> dict[str, torch.Tensor]:
    """Of each kind of tensor one."""
    whole = torch.arange(60_000.0).reshape(200, 300)
    state: dict[str, torch.Tensor] = {"ordinary": whole}
    if dist.is_initialized():
        state["rows"] = distribute_tensor(whole, a_mesh(), [Shard(0)])
        state["columns"] = distribute_tensor(whole, a_mesh(), [Shard(1)])
    return state


def test_what_is_not_a_tensor_is_rank_0s(forks: Worlds, path: Path) -> None:
    forks.start(3, save_what_differs, path).values()
    whole = sharded_with_ordinary()["ordinary"]
    tensors = dict.fromkeys(("ordinary", "rows", "columns"), whole)
    assert same(torch.load(path), {"rank": 0, "text": "", "letters": "", **tensors})
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def save_over_and_over(path: str, times: int) -> list[int]:
    """Returns how many keys the store has after half of the saves, and after all."""
    store = dist.distributed_c10d._get_default_store()
    keys = []
    for step in range(times):
        # Now and then a rank fails.
        bad = {"bad": lambda: None} if step % 5 == 3 and dist.get_rank() == step % 3 else {}
        with contextlib.suppress(AttributeError, client.RankFailed):
            client.save({"step": step, **bad}, path)
        dist.barrier()
        if step % (times // 2) == times // 2 - 1:
            keys.append(store.num_keys())
        dist.barrier()
    return keys


def exchange_over_and_over() -> tuple[int, int]:
    """Returns how many keys the store has in the second half, before the first and at the end."""
    stores.VALUE_BYTES_MAX = 100
    store = dist.distributed_c10d._get_default_store()
    keys = []
    rank, size = dist.get_rank(), dist.get_world_size()

    def call(times: int) -> None:
        with peers.peers_of(None, timeout_s=60, call="test") as ranks:
            for time_ in range(times):
                # Some have several values; a step's name comes again.
                mine = bytes([rank]) * (37 * time_ + rank)
                same = time_ % 3 == 0

                def answer(handed_in: list[bytes], same: bool = same) -> list[bytes]:
                    return [b"".join(handed_in)] * size if same else handed_in[::-1]

                answered = ranks.exchange("step", mine, answer, of=bytes)
                sizes = [37 * time_ + each for each in range(size)]
                expected = [bytes([each]) * sizes[each] for each in range(size)]
                assert answered == (b"".join(expected) if same else expected[size - 1 - rank])
        dist.barrier()
        keys.append(store.num_keys())
        dist.barrier()

    for times in (3, 10, 3):
        call(times)
    return keys[0], keys[2]


def test_exchanges_of_one_call_do_not_meet(forks: Worlds) -> None:
    for first, last in forks.start(3, exchange_over_and_over).values():
        assert first == last


def test_nothing_is_left_in_the_store(forks: Worlds, path: Path) -> None:
    for first, last in forks.start(3, save_over_and_over, path, 40).values():
        assert first == last
    assert client.load(path) == {"step": 39}


def save_with(path: str, what: str, rank: int) -> None:
    """Save, of which `rank` does something else than the others."""
    state: Any = large_state(seed=3)
    if dist.get_rank() == rank:
        if what in BAD_WRITES:
            writing.write_pieces = BAD_WRITES[what]
        if what == "unpicklable":
            state["bad"] = lambda: None
        if what == "another tensor":
            state["layer2"] = state["layer2"][:-1].clone()
        if what == "another name":
            state = {name.replace("2", "9"): tensor for name, tensor in state.items()}
        if what == "another order":
            state = dict(reversed(state.items()))
        if what == "another path":
            path = f"{path}.other"
        if what == "no path":
            path = 7  # type: ignore[assignment]
    client.save(state, path)


def write_nothing(*_: Any, **__: Any) -> None:
    """As on a full device."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def be_interrupted(*arguments: Any, **options: Any) -> Any:
    """Begin to write, and be interrupted."""
    os.kill(os.getpid(), signal.SIGINT)
    return transfers.write_pieces(*arguments, **options)


def be_killed(*arguments: Any, **options: Any) -> Any:
    """Begin to write, and die."""
    transfers.write_pieces(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)


BAD_WRITES = {"full": write_nothing, "interrupted": be_interrupted, "killed": be_killed}
DIFFERENT = "saves 6 tensors in "
FAILURES = {
    "unpicklable": "AttributeError: ",
    "another tensor": DIFFERENT,
    "another name": DIFFERENT,
    "another order": DIFFERENT,
    "another path": "saves to ",
    "no path": "TypeError: fpfs takes a path, not int",
    "full": "OSError: [Errno 28] No space left on device",
    "interrupted": "KeyboardInterrupt: ",
    "killed": "its process is no more",
}
"""What goes wrong on one rank, and what the others say of it."""


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_is_everybodys(forks: Worlds, path: Path, what: str, rank: int) -> None:
    errors = [outcome.error for outcome in forks.start(3, save_with, path, what, rank).outcomes()]
    # Of two that differ, rank 0 is right.
    wrong = 1 if what.startswith("another") and rank == 0 else rank
    told = f"RankFailed: rank {wrong}: {FAILURES[what]}"
    own = errors.pop(wrong)
    if what == "killed":
        assert own == -signal.SIGKILL
    else:
        assert isinstance(own, str)
        assert own.startswith(told if what.startswith("another") else FAILURES[what])
    for error in errors:
        assert isinstance(error, str)
        assert error.startswith(told)
    assert is_as_before(path)


def save_on_machines(path: str, ranks_of_each: str) -> list[int]:
    """As a rank of a machine that has so many: save; returns how many threads each had."""
    os.environ["LOCAL_WORLD_SIZE"] = ranks_of_each
    return [written.threads for written in client.save(large_state(seed=1), path).written]


@pytest.mark.parametrize("ranks_of_each", [1, 2])
def test_ranks_of_a_machine_share_its_threads(
    forks: Worlds, path: Path, ranks_of_each: int
) -> None:
    each = max(1, default_threads() // ranks_of_each)
    assert forks.start(2, save_on_machines, path, str(ranks_of_each)).values() == [[each] * 2] * 2


def save_many(path: str, counts: list[int], other: int) -> None:
    """Save as many small tensors, of which the second rank has one of another type."""
    rank = dist.get_rank()
    state = {f"a{number}": torch.zeros(3) for number in range(counts[rank])}
    if rank == 1:
        state[f"a{other}"] = torch.zeros(3, dtype=torch.float64)
    client.save(state, path)


@pytest.mark.parametrize(
    ("counts", "other", "told"),
    [
        ([40, 40], 17, ", whose 'a17 torch.float32 (3,)' it has not: "),
        ([1000, 1000], 500, ", of whose 16 tensors from 'a496 torch.float32 (3,)' to 'a511 "),
        ([1000, 990], 989, ", of whose 16 tensors from 'a976 "),
        ([40, 41], 40, "saves 41 tensors in 504 B, and rank 0 40 tensors in 480 B: all ranks"),
        ([40, 400], 17, "saves 400 tensors in 4.70 KiB, and rank 0 40 tensors in 480 B: all"),
    ],
)
def test_where_states_differ_is_told(
    forks: Worlds, path: Path, counts: list[int], other: int, told: str
) -> None:
    for outcome in forks.start(2, save_many, path, counts, other).outcomes():
        assert isinstance(outcome.error, str)
        assert outcome.error.startswith(f"RankFailed: rank 1: saves {counts[1]} tensors")
        assert told in outcome.error


def come_late(path: str, absent: int) -> tuple[list[str], list[str]]:
    """All but one rank save; then all do, each until it succeeds. Returns errors and log lines."""
    errors: list[str] = []
    lines: list[str] = []
    peers.SAY_AFTER_S = 0.1
    peers.logger.addFilter(lambda record: lines.append(record.getMessage()) is None)
    dist.barrier()
    for step in range(2, 9):
        if step > 2 or dist.get_rank() != absent:
            try:
                # One rank gives up, for all.
                is_first = dist.get_rank() == 0 or absent == 0
                client.save({"step": step}, path, timeout_s=3.0 if step == 2 and is_first else 60.0)
                break
            except client.RankFailed as error:
                errors.append(str(error))
        if step == 2:
            dist.barrier()
    return errors, lines


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come(forks: Worlds, path: Path, absent: int) -> None:
    errors, lines = zip(*forks.start(3, come_late, path, absent).values(), strict=True)
    waited = "3" if absent != 0 else "6"
    for rank in {0, 1, 2} - {absent}:
        assert errors[rank][0] == (
            f"rank {absent}: did not call save within {waited} s. All ranks of a group do; to save"
            " with one alone, give group=fpfs.ALONE"
        )
        if 0 in (rank, absent):  # Ranks other than 0 wait for rank 0 alone.
            assert lines[rank][0] in (
                f"rank {rank} waits for rank {absent} to call save",
                "rank 0 waits for ranks 1, 2 to call save",
            )
    # Who missed a save hears so once, at most.
    assert max(map(len, errors)) == 1
    assert client.load(path)["step"] > 2
    assert os.listdir(path.parent) == [path.name]


def fail_and_go_on(path: str, failing: int) -> list[str]:
    """As a rank: save twice; the first fails on one rank before the other comes."""
    said = []
    other = dist.get_rank() != failing
    store = dist.distributed_c10d._get_default_store()
    if other:
        store.wait(["failed"])
    for step in (1, 2):
        state = {"weight": torch.full((300_000,), float(step))}
        if step == 1 and not other:
            state["bad"] = lambda: None  # type: ignore[assignment]
        try:
            client.save(state, path)
            said.append(f"saved {step}")
        except (AttributeError, client.RankFailed) as error:
            said.append(type(error).__name__)
        if step == 1 and not other:
            store.set("failed", "")
    return said


@pytest.mark.parametrize("failing", [0, 1])
def test_a_late_rank_does_not_skip_a_call_that_failed(
    forks: Worlds, path: Path, failing: int
) -> None:
    said = forks.start(2, fail_and_go_on, path, failing).values()
    assert said[failing] == ["AttributeError", "saved 2"]
    assert said[1 - failing] == ["RankFailed", "saved 2"]
    assert torch.equal(torch.load(path)["weight"], torch.full((300_000,), 2.0))


def make_another_call(path: str, other: int) -> list[str]:
    """As a rank: all save but one, which saves shares; then all save."""
    said = []
    try:
        if dist.get_rank() == other:
            client.save_shares({"weight": torch.ones(3)}, f"{path}.shares", timeout_s=900.0)
        client.save(large_state(seed=3), path, timeout_s=900.0)
    except (ValueError, client.RankFailed) as error:
        said.append(str(error))
    client.save(large_state(seed=4), path, timeout_s=60.0)
    return said


@pytest.mark.parametrize("other", [0, 1])
def test_ranks_that_make_different_calls(forks: Worlds, path: Path, other: int) -> None:
    said = forks.start(3, make_another_call, path, other).values()
    where = {
        f"rank {a} called {first} where this rank called {second}: all ranks of a group make the"
        " same calls, in the same order"
        for a in range(3)
        for first, second in (("save", "save_shares"), ("save_shares", "save"))
    }
    assert all(len(each) == 1 for each in said)
    assert {each[0].rpartition("ValueError: ")[2] for each in said} <= where
    assert same(client.load(path), large_state(seed=4))


def stop_in_the_middle(path: str) -> None:
    """As rank 1: neither write nor end."""
    if dist.get_rank() == 1:
        writing.write_pieces = lambda *_, **__: signal.pause()
    dist.barrier()
    client.save(large_state(seed=3), path, timeout_s=5.0 if dist.get_rank() == 0 else 60.0)


def test_a_rank_that_hangs(forks: Worlds, path: Path) -> None:
    world = forks.start(3, stop_in_the_middle, path)
    wait_until(lambda: os.listdir(path.parent) != [path.name])
    wait_until(lambda: os.listdir(path.parent) == [path.name])
    world.kill(1)
    errors = [outcome.error for outcome in world.outcomes()]
    told = "RankFailed: rank 1: has not come to the end of a step (part), and moved no byte for 5 s"
    assert errors[1] == -signal.SIGKILL
    assert errors[0] == errors[2]
    assert str(errors[0]).startswith(told)
    assert is_as_before(path)


def save_by_some(path: str) -> list[str]:
    """Groups that are not all ranks, each process alone, and none of the two."""
    answer_patiently()
    rank = dist.get_rank()
    pair = dist.new_group([0, 2])
    said = []
    if rank != 1:
        said.append(str(client.save(large_state(seed=4), path, group=pair)))
    else:
        with pytest.raises(ValueError, match="not a rank of the group"):
            client.save({}, path, group=pair)
    with pytest.raises(TypeError, match="group"):
        client.save({}, path, group="all")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="group"):
        client.load(path, group="all")  # type: ignore[arg-type]
    if rank == 1:
        with pytest.raises(ValueError, match="not a rank of the group"):
            client.load(path, group=pair)
    client.save({"rank": rank}, f"{path}.{rank}", group=client.ALONE)
    # One alone, in a loop of all, as scripts with torch.save do.
    if rank == 0:
        with pytest.raises(client.RankFailed, match="did not call save within 0 s"):
            client.save({}, path, timeout_s=0.1)
        with pytest.raises(client.RankFailed, match="did not call Topology.of within 0 s"):
            Topology.of(timeout_s=0.1)
    assert Topology.of(group=client.ALONE).ranks == (0,)
    return said


def test_groups(forks: Worlds, path: Path) -> None:
    said = forks.start(3, save_by_some, path).values()
    assert [" by 2 ranks, " in line for lines in said for line in lines] == [True, True]
    assert same(client.load(path), large_state(seed=4))
    for rank in range(3):
        assert client.load(f"{path}.{rank}") == {"rank": rank}


def save_strange(paths: list[int]) -> list[str]:
    """As a rank: a name that is no UTF-8; returns what is said of a directory of that name."""
    strange = bytes(paths)
    saved = client.save(large_state(seed=5), strange)
    assert os.fsencode(saved.path) == strange
    os.makedirs(strange + b".d", exist_ok=True)
    with pytest.raises((IsADirectoryError, client.RankFailed)) as refused:
        client.save({}, strange + b".d")
    return [type(refused.value).__name__]


def test_a_name_that_is_no_text(forks: Worlds, path: Path) -> None:
    strange = os.fsencode(path.parent) + b"/\xff\n.pt"
    errors = forks.start(2, save_strange, list(strange)).values()
    assert errors == [["IsADirectoryError"], ["RankFailed"]]
    assert same(client.load(strange), large_state(seed=5))


def save_aliases(path: str) -> None:
    """As a rank: DTensors that have the same memory, and are different tensors."""
    square = torch.arange(16.0).reshape(4, 4) * 1j
    mesh = a_mesh()
    first = distribute_tensor(square, mesh, [Replicate()])
    flat = torch.zeros(8)
    if dist.get_rank() == 0:
        flat += torch.arange(8.0)
    # Of two rows in one buffer rank 1 has nothing, and cannot tell one from the other.
    rows = {
        name: DTensor.from_local(
            flat[at : at + 4].reshape(1, 4) if dist.get_rank() == 0 else flat[:0].reshape(0, 4),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size([1, 4]),
            stride=(4, 1),
        )
        for name, at in (("row0", 0), ("row4", 4))
    }
    client.save({"w": first, "t": first.t(), "conj": first.conj(), **rows}, path)


def test_tensors_that_share_memory_differ(forks: Worlds, path: Path) -> None:
    forks.start(2, save_aliases, path).values()
    square = torch.arange(16.0).reshape(4, 4) * 1j
    loaded = torch.load(path)
    assert torch.equal(loaded["w"], square)
    assert torch.equal(loaded["t"], square.t())
    assert torch.equal(loaded["conj"], square.conj())
    assert torch.equal(loaded["row0"], torch.arange(4.0).reshape(1, 4))
    assert torch.equal(loaded["row4"], torch.arange(4.0, 8.0).reshape(1, 4))


def save_sharded(path: str, block_bytes: int, readable: bool) -> list[str]:
    """As a rank: a file for each placement; returns what is logged."""
    planning.CHUNK_BYTES_DEFAULT = block_bytes
    lines: list[str] = []
    gathering.logger.addFilter(lambda record: lines.append(record.getMessage()) is None)
    if not readable:
        be_unreadable()
    for name in fitting(dist.get_world_size()):
        state = sharded(PLACEMENTS[name])
        client.save(state, f"{path}.{name}")
        check_loaded_into(state, f"{path}.{name}")
    return lines


def check_loaded_into(state: dict[str, Any], path: str) -> None:
    """As a rank: load into tensors that are sharded in the same way, and in no other."""
    empty = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for key, value in state.items()
    }
    loaded = client.load(path, into=empty)
    assert loaded.pop("step") == 7
    for key, value in loaded.items():
        assert value is empty[key]
        assert same(own_part(value), own_part(state[key]))


def load_in_another_world(path: str) -> None:
    """As a rank: read only what this rank has, of columns all rows."""
    read = []
    native = parallel_file.read_pieces

    def count(pieces: Any, **options: Any) -> Any:
        read.append(sum(piece[1] for piece in pieces))
        return native(pieces, **options)

    parallel_file.read_pieces = count
    whole = torch.arange(1000.0).reshape(100, 10)
    tensor = distribute_tensor(torch.zeros(100, 10), a_mesh(), [Shard(0)])
    client.load(path, into={"whole": tensor})
    assert torch.equal(tensor.full_tensor(), whole)
    assert sum(read) == tensor.to_local().nbytes
    read.clear()
    columns = distribute_tensor(torch.zeros(100, 10), a_mesh(), [Shard(1)])
    client.load(path, into={"whole": columns})
    assert torch.equal(columns.full_tensor(), whole)
    assert columns.to_local().nbytes <= sum(read) <= whole.nbytes


@pytest.mark.parametrize("size", [1, 3])
def test_load_in_another_world(forks: Worlds, path: Path, size: int) -> None:
    whole = torch.arange(1000.0).reshape(100, 10)
    torch.save({"whole": whole, "other": torch.zeros(10**6)}, path)
    forks.start(size, load_in_another_world, path).values()


def be_unreadable() -> None:
    """Let no process without the capability read this one's memory, and drop the capability."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    for effective_or_permitted in range(2):
        sets[effective_or_permitted] &= ~(1 << 19)  # CAP_SYS_PTRACE
    assert libc.capset(header, sets) == 0
    assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE


@pytest.mark.parametrize(
    ("size", "readable"),
    [
        *((1, True), (2, True), (2, False), (4, True), (4, False)),
        *(pytest.param(6, readable, marks=pytest.mark.long) for readable in (True, False)),
    ],
)
def test_a_sharded_state_is_saved_whole(
    forks: Worlds, path: Path, size: int, readable: bool
) -> None:
    lines, *others = forks.start(size, save_sharded, path, 512, readable).values()
    assert not any(others)
    for line in lines:
        assert line == (
            "the memory of rank 1 cannot be read (Operation not permitted): tensors that are"
            " sharded along an inner dimension are saved in small pieces, slowly"
        )
    # "columns", and with more than two ranks "rows and columns".
    assert len(lines) == (0 if readable else 1 if size == 2 else 2)
    expected = wholes()
    for name in fitting(size):
        with zipfile.ZipFile(f"{path}.{name}") as archive:
            assert archive.testzip() is None
        loaded = torch.load(f"{path}.{name}", weights_only=True)
        assert loaded["step"] == 7
        for key, whole in expected.items():
            assert same(loaded[key], whole)
            assert same(loaded[f"{key} ordinary"], whole)
        matrix = expected["matrix torch.float32"]
        assert same(loaded["parameter"], nn.Parameter(matrix))
        assert loaded["again"] is loaded["matrix torch.float32"]


def train_and_save(path: str, columns: bool) -> None:
    """As a rank: FSDP2, with tensor parallelism, and an optimizer."""
    torch.manual_seed(0)
    # Tensor parallelism leaves the norm whole, which lies on slices of the mesh then.
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 30), nn.Linear(30, 5))
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    plan = {"1": ColwiseParallel(), "2": RowwiseParallel()} if columns else {}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"] if columns else mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 16)).sum().backward()
    optimizer.step()
    state, optimizer_state = get_state_dict(model, optimizer)
    client.save({"model": state, "optimizer": optimizer_state}, path)
    options = StateDictOptions(full_state_dict=True)
    full_state, full_optimizer = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        torch.save({"model": full_state, "optimizer": full_optimizer}, f"{path}.full")
    # A step later all is different, until it is loaded.
    model(torch.randn(8, 16)).sum().backward()
    optimizer.step()
    state, optimizer_state = get_state_dict(model, optimizer)
    loaded = client.load(path, into={"model": state, "optimizer": optimizer_state})
    set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    again, optimizer_again = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        assert same({"model": again, "optimizer": optimizer_again}, torch.load(f"{path}.full"))


@pytest.mark.parametrize("columns", [False, True], ids=["replicas", "tensor parallel"])
def test_fsdp(forks: Worlds, path: Path, columns: bool) -> None:
    forks.start(4, train_and_save, path, columns).values()
    loaded = torch.load(path, weights_only=True)
    assert len(loaded["model"]) == 6
    assert len(loaded["optimizer"]["state"]) == 6
    loaded["model"] = dict(loaded["model"])
    assert same(loaded, torch.load(f"{path}.full", weights_only=True))


def save_what_is_no_whole(path: str, what: str) -> None:
    """As a rank: a DTensor that this group cannot save."""
    mesh = a_mesh()
    if what == "several pieces":
        rows = distribute_tensor(torch.arange(54.0).reshape(6, 9), mesh, [Shard(1)])
        strided = rows.view(54)
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"part": torch.arange(54.0)}, f"{folder}/whole.pt")
            with pytest.raises(ValueError, match="'part': it lies in several pieces"):
                client.load(f"{folder}/whole.pt", into={"part": strided})
        client.save({"part": strided}, path)
        return
    if what == "sum":
        tensor = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        client.save({"part": tensor}, path)
        return
    tensor = distribute_tensor(torch.arange(12.0), mesh, [Shard(0)])
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        client.save({"part": tensor}, path, group=pair)


NO_WHOLE = {
    "several pieces": "fpfs cannot tell what this rank has of the sharded tensor 'part': it lies in"
    " several pieces: redistribute() it",
    "sum": "fpfs cannot tell what this rank has of the sharded tensor 'part': its sum is still to"
    " be made: redistribute() it",
    "another group": "the group's ranks have not all of 'part': it is cut into 3 parts, and the"
    " group must have a rank of each",
}


@pytest.mark.parametrize("what", NO_WHOLE)
def test_what_is_no_whole(forks: Worlds, path: Path, what: str) -> None:
    outcomes = forks.start(3, save_what_is_no_whole, path, what).outcomes()
    own = f"ValueError: {NO_WHOLE[what]}"
    third = None if what == "another group" else own
    assert [outcome.error for outcome in outcomes] == [own, own, third]
    assert is_as_before(path)


def save_own_parts(path: str) -> None:
    """As a rank: what torch.save would save."""
    tensor = distribute_tensor(torch.arange(12.0), a_mesh(), [Shard(0)])
    name = f"{path}.{dist.get_rank()}"
    client.save({"part": tensor}, name, group=client.ALONE)
    loaded = torch.load(name, weights_only=False)["part"]
    assert isinstance(loaded, DTensor)
    assert torch.equal(loaded.to_local(), tensor.to_local())


def test_a_file_of_each_rank_has_its_parts(forks: Worlds, path: Path) -> None:
    forks.start(2, save_own_parts, path).values()


def save_by_plans(path: str) -> list[Any]:
    """As a rank: by plans for each kind of writers; returns them, who wrote, and what is logged."""
    lines: list[str] = []
    planning.logger.addFilter(lambda record: lines.append(record.getMessage()) is None)
    topology = Topology.of(path)
    # As if there were two machines.
    topology = msgspec.structs.replace(topology, nodes=(0, 0, 1, 1))
    state = large_state(seed=1)
    writers = {}
    for name in WRITERS:
        plan = Plan.build(state, topology, writers=name)
        saved = client.save(state, f"{path}.{name}", plan=plan)
        planned = {each["rank"]: each["bytes"] for each in plan.to_dict()["ranks"] if each["bytes"]}
        assert planned == {written.rank: written.bytes for written in saved.written}
        writers[name] = [written.rank for written in saved.written]
    assert not lines
    assert planning._planned.cache_info().misses == 0, "what is given is what is gone by"
    # Others than were planned.
    client.save({**state, "more": torch.zeros(5)}, f"{path}.more", plan=plan)
    return [msgspec.to_builtins(topology), writers, lines]


def test_plans(forks: Worlds, path: Path) -> None:
    state = large_state(seed=1)
    for topology, writers, lines in forks.start(4, save_by_plans, path).values():
        assert topology["ranks"] == [0, 1, 2, 3]
        assert (topology["devices"], topology["chunk_bytes"]) == (1, 1024**2)
        assert writers == {
            "replica": [0, 1, 2, 3],
            "socket": [0, 2],
            "node": [0, 2],
            "device": [0, 2],
        }
        assert lines == [
            "the state has changed since it was planned (6 tensors then, 7 now): it is planned anew"
        ]
    for name in WRITERS:
        assert same(torch.load(f"{path}.{name}"), state)
    assert same(torch.load(f"{path}.more"), {**state, "more": torch.zeros(5)})


def save_by_other_plans(path: str, what: str) -> None:
    """As a rank: by another plan than the others, or one for another group."""
    topology = Topology.regular(4 if what == "another group" else 3)
    plan = Plan.build({}, topology, writers="node" if dist.get_rank() == 1 else "replica")
    client.save({"step": 2}, path, plan=None if what == "none" and dist.get_rank() == 2 else plan)


OTHER_PLANS = {
    "another group": "ValueError: the plan is for ranks 0, 1, 2, 3, and the group has ranks 0, 1,"
    " 2: build it of the group's topology",
    "another plan": "RankFailed: rank 1: was given another plan than rank 0: all ranks save by"
    " plans of the same topology and writers, or none",
    "none": "RankFailed: rank 1: was given another plan than rank 0",
}


@pytest.mark.parametrize("what", OTHER_PLANS)
def test_plans_that_are_not_the_same(forks: Worlds, path: Path, what: str) -> None:
    for outcome in forks.start(3, save_by_other_plans, path, what).outcomes():
        assert str(outcome.error).startswith(OTHER_PLANS[what])
    assert is_as_before(path)


def save_again(path: str) -> list[int]:
    """As a rank: a state that stays, and one that changes; returns how often it is planned."""
    counts = []
    for step, size in enumerate([1000, 1000, 1000, 2000]):
        client.save({"step": step, "tensor": torch.zeros(size)}, path)
        counts.append(planning._planned.cache_info().misses)
    return counts


def test_a_plan_is_kept_while_the_state_stays(forks: Worlds, path: Path) -> None:
    assert forks.start(2, save_again, path).values() == [[1, 1, 1, 2]] * 2
