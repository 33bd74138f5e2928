"""Saves beside training: what is saved is what was there at the call, whatever happens since."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fpfs import client
from fpfs.client import AsyncSaver, Plan, Topology, agreement, async_saving, snapshot, writing
from fpfs.client.async_saving import FileToSave
from fpfs.client.container import _Sink
from fpfs.client.replacement import Replacement
from fpfs.client.safetensors import lay_out_safetensors
from fpfs.client.snapshot import TouchedMemory
from fpfs.client.topology import Writers
from fpfs.client.updates import ends
from fpfs.core import transfers
from tests.support.failures.calls import Slow
from tests.support.ranks import Worlds
from tests.support.seeds import IS_LONG
from tests.support.states import large_state, let_go, odd_state, same

SAVES = 1000 if IS_LONG else 100

pytestmark = [
    # torch's own, of types that it is not done with.
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Writers do not begin until this is called."""
    go = threading.Event()

    def write(*arguments: Any, **options: Any) -> Any:
        assert go.wait(60)
        return transfers.write_pieces(*arguments, **options)

    monkeypatch.setattr(writing, "write_pieces", write)
    return go.set


def test_what_changes_afterwards_is_not_saved(path: Path, held: Callable[[], None]) -> None:
    state, before = large_state(seed=1), large_state(seed=1)
    with AsyncSaver() as saver:
        saving = saver.save(state, path)
        for tensor in state.values():
            tensor.zero_()
        assert not saving.acknowledged.done()
        assert not path.exists()
        held()
        saved = saving.durable.result(60)
    assert (saved.durable, saved.bytes) == (True, path.stat().st_size)
    assert not saving.acknowledged.result().durable
    assert same(torch.load(path), before)
    assert os.listdir(path.parent) == [path.name]


def test_all_kinds_of_tensors(path: Path) -> None:
    state = odd_state()
    with AsyncSaver() as saver:
        saver.save(state, path)
    assert same(client.load(path, weights_only=False), state)


def test_the_next_one_waits(path: Path, held: Callable[[], None]) -> None:
    released_s: list[float] = []

    def release() -> None:
        released_s.append(time.monotonic())
        held()

    with AsyncSaver() as saver:
        first = saver.save({"step": torch.zeros(1)}, path)
        threading.Timer(0.2, release).start()
        second = saver.save({"step": torch.ones(1)}, path)
        assert first.durable.done()
        assert released_s[0] <= second.began_s + second.stall_s <= time.monotonic()
    assert client.load(path)["step"].tolist() == [1]


def test_several_are_under_way(tmp_path: Path, held: Callable[[], None]) -> None:
    """None waits, up to the given number; each has a copy of its own, and they end in order."""
    state = {"step": torch.zeros(100_000, dtype=torch.int64)}
    with AsyncSaver(in_flight=3) as saver:
        savings = []
        for step in range(3):
            state["step"].fill_(step)
            savings.append(saver.save(state, tmp_path / f"{step}.pt"))
        assert [saving.staged.result(60) for saving in savings] == [None] * 3
        assert not any(saving.acknowledged.done() for saving in savings)
        done: list[int] = []
        for number, each in enumerate(savings):
            each.durable.add_done_callback(lambda _, number=number: done.append(number))
        threading.Timer(0.2, held).start()
        state["step"].fill_(3)
        saver.save(state, tmp_path / "3.pt")
        assert savings[0].durable.done()
        saver.wait()
        assert done == [0, 1, 2]
        assert len(saver._spare) == 3
    for step in range(4):
        found = client.load(tmp_path / f"{step}.pt")
        assert found["step"].unique().tolist() == [step]


def test_files_that_alternate_find_their_memory(tmp_path: Path) -> None:
    """Also where one comes between."""
    with AsyncSaver(in_flight=9) as saver:
        sizes = []
        for _ in range(3):
            saver.save({"large": torch.ones(10**6)}, tmp_path / "large.pt")
            saver.save({"small": torch.ones(10)}, tmp_path / "small.pt")
            saver.wait()
            saver.save({"small": torch.ones(9)}, tmp_path / "between.pt")
            saver.wait()
            sizes.append(sorted(each.size for each in saver._spare))
    assert sizes == [[64, 4_000_000]] * 3


def test_of_several_one_fails(
    tmp_path: Path, held: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """All others are saved; the failure is raised once."""
    saver = AsyncSaver(in_flight=3)
    savings = [
        saver.save({"step": step}, tmp_path / folder / f"{step}.pt")
        for step, folder in enumerate((".", "none", "."))
    ]
    held()
    with pytest.raises(FileNotFoundError):
        saver.wait()
    assert [type(saving.durable.exception()) for saving in savings] == [
        type(None),
        FileNotFoundError,
        type(None),
    ]
    assert len(errors_in(caplog)) == 1
    saver.close()
    assert sorted(os.listdir(tmp_path)) == ["0.pt", "2.pt"]


@pytest.mark.parametrize("in_flight", [0, -1, "2", 1.5])
def test_saves_that_are_no_number(in_flight: Any) -> None:
    with pytest.raises(ValueError, match=r"in_flight is .*: give a number of saves, 1 or more"):
        AsyncSaver(in_flight=in_flight)


def test_one_after_the_other(tmp_path: Path) -> None:
    state = {"step": torch.zeros(100_000, dtype=torch.int64), "more": torch.ones(3)}
    with AsyncSaver() as saver:
        for step in range(10):
            state["step"].fill_(step)
            saver.save(state, tmp_path / f"{step % 3}.pt")
    for name, step in (("0", 9), ("1", 7), ("2", 8)):
        found = client.load(tmp_path / f"{name}.pt")
        assert found["step"].unique().tolist() == [step]


def test_nothing_is_left_of_many(path: Path) -> None:
    state = large_state(seed=2, tensors=3)
    with AsyncSaver() as saver:
        saver.save(state, path)
        saver.wait()
        memory = saver._spare[0]._bytes.data_ptr()
        # Of tests before some may end meanwhile.
        fds, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
        for _ in range(SAVES):
            saver.save(state, path)
        saver.wait()
        assert [each._bytes.data_ptr() for each in saver._spare] == [memory]
        assert set(os.listdir("/proc/self/fd")) <= fds
        assert set(threading.enumerate()) <= threads
    assert os.listdir(path.parent) == [path.name]


def resident_bytes() -> int:
    """Of this process, without what files have."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("kind", ["a new one each time", "optimizers", "failures", "shares"])
def test_no_memory_is_kept_of_many(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of copies nor of Python's objects, a few of which each save has."""
    # pytest keeps what is logged.
    monkeypatch.setattr(logging.getLogger("fpfs.client.async_saving"), "disabled", True)
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    saver = AsyncSaver(optimizers=optimizer if kind == "optimizers" else (), strict=False)

    def save() -> None:
        nonlocal saver
        if kind == "a new one each time":
            saver.close()
            saver = AsyncSaver()
        if kind == "shares":
            saving = saver.save_shares(model.state_dict(), tmp_path / "shares")
        else:
            folder = tmp_path / ("none" if kind == "failures" else ".")
            saving = saver.save([model.state_dict(), optimizer.state_dict()], folder / "state.pt")
        model(torch.ones(512)).sum().backward()
        optimizer.step()
        assert (saving.durable.exception(60) is None) == (kind != "failures")

    def taken() -> tuple[int, int]:
        gc.collect()
        return resident_bytes(), len(gc.get_objects())

    for _ in range(10):
        save()
    before_bytes, before = taken()
    for _ in range(SAVES):
        save()
    saver.wait()
    now_bytes, now = taken()
    assert now - before < SAVES
    assert now_bytes - before_bytes < SAVES * 2**20 / 4, "a save is 1 MiB or more"
    saver.close()


def test_memory_is_there_before_the_first(path: Path) -> None:
    state = large_state(seed=3, tensors=3)
    with AsyncSaver(memory_bytes=sum(tensor.nbytes for tensor in state.values()) + 4096) as saver:
        memory = saver._spare[0]._bytes.data_ptr()
        saver.save(state, path)
        saver.wait()
        assert [each._bytes.data_ptr() for each in saver._spare] == [memory]


@pytest.mark.parametrize("memory_bytes", ["1G", -1, 1.5])
def test_memory_that_is_no_number_of_bytes(memory_bytes: Any) -> None:
    with pytest.raises(ValueError, match=r"memory_bytes is .*: give a number of bytes, or 0"):
        AsyncSaver(memory_bytes=memory_bytes)


def errors_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines."""
    return [record.message for record in caplog.records if record.levelno == logging.ERROR]


def failing(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_failure_is_raised_by_the_next_call(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client.save({"step": 1}, path)
    saver = AsyncSaver()
    with monkeypatch.context() as patched:
        patched.setattr(writing, "write_pieces", failing)
        saving = saver.save(large_state(seed=4), path)
        for future in (saving.acknowledged, saving.durable):
            error = future.exception(60)
            assert isinstance(error, OSError)
            assert (error.errno, error.filename) == (errno.EIO, str(path))
    with pytest.raises(OSError, match="Input/output error") as failed:
        saver.save(large_state(seed=5), path)
    assert failed.value.filename == str(path)
    assert errors_in(caplog) == [
        f"{path} was not saved: OSError: [Errno 5] Input/output error: '{path}'"
    ]
    assert client.load(path) == {"step": 1}
    assert os.listdir(path.parent) == [path.name]
    # Once: the next one goes on.
    saver.save(large_state(seed=5), path)
    saver.close()
    assert same(client.load(path), large_state(seed=5))
    with pytest.raises(ValueError, match="the AsyncSaver is closed: make another one"):
        saver.save({}, path)
    saver.close()


def test_a_failure_can_be_a_line_in_the_log(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with AsyncSaver(strict=False) as saver:
        with monkeypatch.context() as patched:
            patched.setattr(writing, "write_pieces", failing)
            saver.save(large_state(seed=4), path).durable.exception(60)
        saver.save(large_state(seed=5), path)
    assert len(errors_in(caplog)) == 1
    assert same(client.load(path), large_state(seed=5))


def test_training_goes_on_beside_a_save_that_hangs(
    path: Path, held: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Saves fail until it has ended: the first after `timeout_s`, the others at once."""
    with AsyncSaver(strict=False, timeout_s=0.1) as saver:
        hanging = saver.save(large_state(seed=6), path)
        for step in range(3):
            failed = saver.save({"step": step}, path)
            for future in (failed.staged, failed.acknowledged, failed.durable):
                told = str(future.exception(0))
                assert told == f"the save of {path} has not ended, and moved no byte for 0 s"
        saver.wait()
        assert [told in line for line in errors_in(caplog)] == [True] * 4
        assert not path.exists()
        held()
        hanging.durable.result(60)
        saver.save(large_state(seed=7), path).durable.result(60)
    assert same(client.load(path), large_state(seed=7))


@pytest.mark.parametrize(
    ("state", "name", "error"),
    [
        ({"function": lambda: None}, "state.pt", Exception),
        ({"step": 1}, "", FileNotFoundError),
        ({"step": 1}, 7, TypeError),
    ],
)
def test_training_goes_on_if_a_save_cannot_begin(
    path: Path, state: Any, name: Any, error: type, caplog: pytest.LogCaptureFixture
) -> None:
    with AsyncSaver(strict=False) as saver:
        failed = saver.save(state, name)
        assert repr(failed) == f"<Saving {name}: failed>"
        raised = failed.durable.exception(0)
        assert isinstance(raised, error)
        assert errors_in(caplog) == [f"{name} was not saved: {type(raised).__name__}: {raised}"]
        saver.save({"step": 2}, path)
    assert client.load(path) == {"step": 2}


def test_what_is_there_is_made_durable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file before it has its name, as elsewhere than on fpfs; and both afterwards."""
    flushed = []

    def fsync(fd: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr("fpfs.client.replacement.os.fsync", fsync)
    with AsyncSaver() as saver:
        saver.save({"step": 1}, path)
    before, *after = flushed
    assert before.endswith(".state.pt")
    assert after == [str(path), str(path.parent)]


@pytest.mark.parametrize("durable", [False, True])
def test_a_durable_save_flushes_the_name(
    path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """And the file before it has its name, as any save elsewhere than on fpfs."""
    flushed = []

    def fsync(fd: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr("fpfs.client.replacement.os.fsync", fsync)
    client.save({"step": 1}, path, durable=durable)
    before, *after = flushed
    assert before.endswith(".state.pt")
    assert after == [str(path.parent)] * durable


def test_what_is_there_may_not_be_durable(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client.save({"step": 1}, path)
    saver = AsyncSaver()
    monkeypatch.setattr(Replacement, "flush", failing)
    saving = saver.save({"step": 2}, path)
    with pytest.raises(OSError, match="Input/output error"):
        saver.close()
    assert saving.acknowledged.result().path == str(path)
    (line,) = errors_in(caplog)
    assert line.startswith(f"{path} was saved, but may not survive power loss: OSError: [Errno 5] ")
    assert client.load(path) == {"step": 2}
    assert os.listdir(path.parent) == [path.name]


def test_a_future_cannot_be_cancelled(path: Path, held: Callable[[], None]) -> None:
    with AsyncSaver() as saver:
        saving = saver.save(large_state(seed=9), path)
        assert not saving.acknowledged.cancel()
        assert not saving.durable.cancel()
        held()
    assert saving.durable.result().durable


def test_an_interrupt_while_a_file_is_laid_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no failure of a save, which training would go on beside."""
    client.save({"step": 1}, path)

    def interrupted(self: Any, data: Any) -> None:
        if self.tell() > 0:
            monkeypatch.undo()
            raise KeyboardInterrupt
        write(self, data)

    write = _Sink.write
    with AsyncSaver(strict=False) as saver:
        for save in (client.save, saver.save):
            monkeypatch.setattr(_Sink, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                save({"step": 2}, path)
    assert client.load(path) == {"step": 1}
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("thread", ["_copying", "_writing"])
@pytest.mark.parametrize("thread_has_it", [True, False])
def test_an_interrupt_when_a_thread_begins(path: Path, thread: str, thread_has_it: bool) -> None:
    """The save goes on or was never begun; either way its memory is not written meanwhile."""
    client.save({"step": 1}, path)
    with AsyncSaver() as saver:
        executor = getattr(saver, thread)
        submit = executor.submit

        def interrupted(*arguments: Any) -> None:
            if thread_has_it:
                submit(*arguments).result()
            raise KeyboardInterrupt

        executor.submit = interrupted
        with pytest.raises(KeyboardInterrupt):
            saver.save({"step": 2}, path)
        goes_on = thread == "_writing" and thread_has_it
        assert client.load(path) == {"step": 2 if goes_on else 1}
        assert os.listdir(path.parent) == [path.name]
        executor.submit = submit
        saver.save({"step": 3}, path)
    assert client.load(path) == {"step": 3}


def test_a_saver_of_inference_mode(path: Path) -> None:
    with AsyncSaver() as saver:
        with torch.inference_mode():
            saver.save({"step": torch.ones(1000)}, path)
        saver.save({"step": torch.full((1000,), 2.0)}, path)
        with torch.inference_mode():
            saver.save({"step": torch.full((1000,), 3.0)}, path)
    assert client.load(path)["step"].unique().tolist() == [3]


def test_a_failure_keeps_no_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "write_pieces", failing)
    saver = AsyncSaver()
    saving = saver.save({"large": torch.ones(10**6)}, path)
    memory = weakref.ref(saver._under_way[0].memory._bytes.untyped_storage())
    assert isinstance(saving.durable.exception(60), OSError)
    let_go(saver)
    with pytest.raises(OSError, match="Input/output error"):
        saver.close()
    gc.collect()
    assert memory() is None


def test_no_memory_for_a_snapshot(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with AsyncSaver() as saver:
        with monkeypatch.context() as patched:
            # More than there are addresses.
            patched.setattr(snapshot, "TouchedMemory", lambda _: TouchedMemory(2**50))
            with pytest.raises(MemoryError, match=r"a snapshot needs 1\.00 PiB"):
                saver.save({"large": torch.ones(10**6)}, path)
        saver.save({"large": torch.ones(10**6)}, path)
    assert os.listdir(path.parent) == [path.name]


def test_what_cannot_be_saved_is_raised_at_once(path: Path) -> None:
    with AsyncSaver() as saver:
        with pytest.raises(TypeError, match="cannot pickle"):
            saver.save({"lock": threading.Lock()}, path)
        with pytest.raises(FileNotFoundError):
            saver.save({}, path.parent / "none" / "state.pt").durable.result(60)
        with pytest.raises(FileNotFoundError):
            saver.wait()
        saver.save({"step": 2}, path)
    assert client.load(path) == {"step": 2}


def test_one_that_does_not_end(path: Path, held: Callable[[], None]) -> None:
    saver = AsyncSaver(timeout_s=0.1)
    first = saver.save(large_state(seed=6), path)
    for call in (saver.wait, lambda: saver.save({}, path)):
        with pytest.raises(
            TimeoutError, match=r"the save of .*state.pt has not ended, and moved no"
        ):
            call()
    held()
    first.durable.result(60)
    saver.save(large_state(seed=7), path).durable.result(60)
    saver.close()
    assert same(client.load(path), large_state(seed=7))


def test_one_that_is_slow(in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step waits as long as it moves bytes."""
    limit_s = 3.0
    path = in_memory / "state.pt"

    def write(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        return Slow(transfers.write_pieces(*arguments, **options), 1.7 * limit_s)

    parameter = torch.nn.Parameter(torch.randn(1000))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with AsyncSaver(timeout_s=limit_s, staging_bytes=0, optimizers=optimizer) as saver:
        monkeypatch.setattr(writing, "write_pieces", write)
        saving = saver.save({"step": 3, "parameter": parameter}, path)
        optimizer.step()
        assert saving.staged.done()
        saver.wait()
    assert client.load(path)["step"] == 3


def test_it_is_waited_for_as_long_as_it_moves() -> None:
    moves, future = iter(range(5)), Future[None]()
    assert not ends(future, moved=lambda: next(moves, None), silent_s=0.01)
    assert next(moves, None) is None

    def moved() -> object:
        future.set_result(None)
        return None

    assert ends(future, moved=moved, silent_s=60)


@pytest.mark.parametrize("has_begun", [True, False])
@pytest.mark.parametrize("name", ["fpfs-copy", "fpfs-save"])
def test_a_thread_that_cannot_begin(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, has_begun: bool
) -> None:
    """No save is made, as if it had not been asked for, and the next one is."""
    client.save({"step": 1}, path)
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if has_begun or thread.name != name:
            start(thread)
        if thread.name == name:
            raise KeyboardInterrupt if has_begun else RuntimeError("can't start new thread")

    with AsyncSaver(timeout_s=60) as saver:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            with pytest.raises((KeyboardInterrupt, RuntimeError)):
                saver.save({"step": 2}, path)
        assert client.load(path) == {"step": 1}
        assert os.listdir(path.parent) == [path.name]
        for step in (3, 4):
            saver.save({"step": step}, path).durable.result(60)
            assert client.load(path) == {"step": step}


def test_a_thread_that_an_interrupt_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads make one call after the other, as one does, and both end."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        threads.append(thread)
        if len(threads) == 1:
            raise KeyboardInterrupt

    threads: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    thread = async_saving._Thread("twice")
    with pytest.raises(KeyboardInterrupt):
        thread.submit(lambda: None)
    has_begun = threading.Event()
    waited = thread.submit(has_begun.wait, 0.2)
    thread.submit(has_begun.set)
    assert not waited.result(60)
    assert has_begun.wait(60)
    thread.end()
    for each in threads:
        each.join(60)
        assert not each.is_alive()
    assert len(threads) == 2


def test_a_child_makes_its_own(path: Path, held: Callable[[], None]) -> None:
    with AsyncSaver() as saver:
        saver.save({"step": 1}, path)
        if (child := os.fork()) == 0:
            try:
                saver.save({}, path)
            except RuntimeError as error:
                saver.close()  # waits for nothing
                os._exit(0 if "make one here" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        held()
    assert client.load(path) == {"step": 1}


def test_a_state_that_grows(path: Path) -> None:
    """Each copy needs more memory than the one before has."""
    with AsyncSaver() as saver:
        for count in (1, 3, 2, 6):
            state = large_state(seed=count, tensors=count)
            saving = saver.save(state, path)
            for tensor in state.values():
                tensor.zero_()
            saving.durable.result(60)
            assert same(client.load(path), large_state(seed=count, tensors=count))


def wholes(step: int) -> dict[str, torch.Tensor]:
    """Tensors of which no two elements are the same."""
    rows = torch.arange(4_000_000).reshape(1000, 4000) + step
    return {"all": torch.arange(2_000_000) * (step + 1), "rows": rows, "columns": -rows}


def state_of(step: int) -> Any:
    """They, of which each rank has some as parts, which lie within larger storages."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = dict(wholes(step))
    for name, dim in (("rows", 0), ("columns", 1)):
        local = distribute_tensor(state[name], mesh, [Shard(dim)]).to_local()
        around = torch.cat([torch.zeros(77, dtype=local.dtype), local.flatten()])
        part = around[77:].view(local.shape)
        state[name] = DTensor.from_local(
            part, mesh, [Shard(dim)], shape=torch.Size((1000, 4000)), stride=(4000, 1)
        )
    return state


def save_beside(path: str, writers: Writers, gathers: bool) -> list[int]:
    """As a rank: save three times, and change all after each call."""
    if not gathers:
        getattr(agreement, "can_gather")  # noqa: B009 it is another module's
        agreement.can_gather = lambda *_: False  # type: ignore[attr-defined]
    plan = Plan.build(state_of(0), Topology.of(os.path.dirname(path)), writers=writers)
    with AsyncSaver(plan=plan) as saver:
        for step in range(3):
            state = state_of(step)
            began = saver.save(state, f"{path}.{step}")
            for tensor in state.values():
                tensor.fill_(-1)
        return [part.rank for part in began.durable.result(60).written]


@pytest.mark.parametrize(
    ("size", "writers", "gathers"), [(2, "replica", True), (3, "node", True), (3, "replica", False)]
)
def test_a_group(forks: Worlds, path: Path, size: int, writers: Writers, gathers: bool) -> None:
    ranks = forks.start(size, save_beside, path, writers, gathers).values()
    assert ranks == [list(range(size))] * size
    for step in range(3):
        assert same(torch.load(f"{path}.{step}"), wholes(step))


def save_and_die(path: str) -> None:
    """As a rank: 1 dies while it writes."""
    if dist.get_rank() == 1:

        def write(*_: object, **__: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        writing.write_pieces = write
    with AsyncSaver() as saver:
        saver.save(state_of(1), path)


def test_a_rank_that_dies(forks: Worlds, path: Path) -> None:
    client.save({"step": 1}, path)
    first, dead, last = (outcome.error for outcome in forks.start(3, save_and_die, path).outcomes())
    assert dead == -signal.SIGKILL
    assert first == last == "RankFailed: rank 1: its process is no more"
    assert client.load(path) == {"step": 1}
    assert os.listdir(path.parent) == [path.name]


def save_differently(path: str) -> None:
    """As a rank: another state than the others'."""
    with AsyncSaver() as saver:
        saver.save({"tensor": torch.zeros(10 + dist.get_rank())}, path)


def test_states_that_differ_are_found_at_once(forks: Worlds, path: Path) -> None:
    for outcome in forks.start(2, save_differently, path).outcomes():
        assert "RankFailed: rank 1: saves 1 tensor in 44 B, and rank 0" in str(outcome.error)


# --- several files ---


def two_files(folder: str | Path, step: int) -> list[FileToSave]:
    tensors = wholes(step)
    model, other = tensors.copy(), tensors.pop("rows")
    return [
        FileToSave(model, os.path.join(folder, "model.safetensors"), lay_out_safetensors),
        FileToSave([step, other], os.path.join(folder, "other.pt")),
    ]


def test_several_files(tmp_path: Path) -> None:
    """From one copy, whatever changes afterwards; they get their names together."""
    with AsyncSaver() as saver:
        for step in range(2):
            files = two_files(tmp_path, step)
            saving_ = saver.save_files(files)
            for tensor in files[0].state.values():
                tensor.fill_(-1)
            saved = saving_.durable.result(60)
            assert saved.path == str(tmp_path / "other.pt")
            assert saved.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
            found = load_file(tmp_path / "model.safetensors")
            assert same(dict(sorted(found.items())), dict(sorted(wholes(step).items())))
            assert same(torch.load(tmp_path / "other.pt"), [step, wholes(step)["rows"]])
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "other.pt"]


def test_how_much_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers, held, go = threading.Semaphore(2), threading.Event(), threading.Event()

    def write(*arguments: Any, **options: Any) -> Any:
        # The first file's tensors, and what had to wait for these.
        if not writers.acquire(blocking=False):
            held.set()
            assert go.wait(60)
        return transfers.write_pieces(*arguments, **options)

    monkeypatch.setattr(writing, "write_pieces", write)
    with AsyncSaver() as saver:
        files = two_files(tmp_path, 1)
        began = saver.save_files(files)
        assert held.wait(60)
        size = sum(tensor.nbytes for tensor in files[0].state.values())
        assert size <= began.bytes_written < size + 10_000
        written, total = began.bytes_written, began.bytes_to_write
        assert f"staged, {written} of {total} bytes written" in repr(began)
        go.set()
        saved = began.durable.result(60)
        assert saved.bytes - 10_000 < began.bytes_written == total <= saved.bytes
        assert repr(began) == f"<Saving {tmp_path / 'other.pt'}: durable>"


def test_none_of_several_files_is_there_if_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.pt").mkdir()
    with AsyncSaver(strict=False) as saver:
        failed = saver.save_files(two_files(tmp_path, 1)).durable
        assert isinstance(failed.exception(60), IsADirectoryError)
        assert os.listdir(tmp_path) == ["other.pt"]
        (tmp_path / "other.pt").rmdir()
        write = writing.write_pieces

        def fail_for_the_first(*arguments: Any, **options: Any) -> Any:
            monkeypatch.setattr(writing, "write_pieces", write)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(writing, "write_pieces", fail_for_the_first)
        failed = saver.save_files(two_files(tmp_path, 1)).durable
        with pytest.raises(OSError, match=r"No space left.*model\.safetensors"):
            failed.result(60)
        assert os.listdir(tmp_path) == []
        with pytest.raises(ValueError, match="no file to save"):
            saver.save_files([])


def save_two_files(folder: str) -> list[int]:
    """As a rank."""
    with AsyncSaver() as saver:
        for step in range(3):
            saved = saver.save_files(two_files(folder, step))
        return [part.rank for part in saved.durable.result(60).written]


def test_several_files_by_a_group(forks: Worlds, tmp_path: Path) -> None:
    assert forks.start(3, save_two_files, tmp_path).values() == [[0, 1, 2]] * 3
    found = load_file(tmp_path / "model.safetensors")
    assert same(dict(sorted(found.items())), dict(sorted(wholes(2).items())))
    assert same(torch.load(tmp_path / "other.pt"), [2, wholes(2)["rows"]])
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "other.pt"]
