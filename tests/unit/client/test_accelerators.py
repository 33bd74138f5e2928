"""States on accelerators: copied on streams of their own, beside what is computed meanwhile.

The accelerator is simulated. Its memory ends whoever touches it, its copies are done when their
stream comes to them, and a stream can be held.
"""

from __future__ import annotations

import copy
import errno
import functools
import gc
import signal
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import fpfs
from fpfs import client
from fpfs.client import (
    AsyncSaver,
    accelerators,
    filling,
    parallel_file,
    saving,
    snapshot,
    writing,
)
from fpfs.client.peers import RankFailed
from fpfs.core import transfers
from tests.support import accelerator
from tests.support.accelerator import Accelerator
from tests.support.failures.calls import die, full, unreadable
from tests.support.ranks import Worlds
from tests.support.states import (
    FEATURES,
    OPTIMIZERS,
    Training,
    directories,
    large_state,
    own_directory,
    placed_state,
    random_tensor,
    same,
    to_cpu,
    when_awaited,
)
from tests.support.waiting import wait_until

MIB = 2**20
LATE_S = 0.3
"""Who does not wait for copies would have ended."""


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    accelerator.build()


def begin() -> tuple[Accelerator, torch.device]:
    """As a rank: use the accelerator."""
    return accelerator.use(), torch.device("simulated:0")


def copy_stream(device: torch.device) -> torch.Stream:
    return accelerators._stream_of(device)


def to_zero(state: dict[str, Any]) -> Callable[[], object]:
    """What queues that on the current stream, and waits for nothing."""
    tensors = [*state["small"], *state["large"].values(), state["half"], state["again"]]
    zeros = [torch.zeros_like(tensor) for tensor in tensors]

    def clear() -> None:
        for tensor, zero in zip(tensors, zeros, strict=True):
            tensor.copy_(zero)

    return clear


def bytes_on_device(state: dict[str, Any]) -> int:
    tensors = [*state["small"], *state["large"].values(), state["half"], state["again"]]
    return sum(tensor.nbytes for tensor in tensors)


def copy_in_two_parts() -> list[int]:
    """As a rank: how many bytes count as moved when one of two is copied, and at the end."""
    used, device = begin()
    accelerators._MARK_BYTES = MIB
    stream = copy_stream(device)
    source = torch.zeros(MIB, dtype=torch.uint8, device=device)
    copies = accelerators.Copies(accelerators.now([device]))
    before, found = transfers.moved_bytes(), list[int]()

    def let_go() -> None:
        found.append(transfers.moved_bytes() - before)
        used.release(stream)

    to = accelerators.memory_for(2 * MIB, [device])
    copies.begin(to[:MIB], source)
    stream.synchronize()
    used.hold(stream)
    copies.begin(to[MIB:-1], source[1:])
    copies.wait(check=let_go)
    return [found[0], transfers.moved_bytes() - before]


def test_copying_counts_as_moving(forks: Worlds) -> None:
    """So what waits for copies waits as long as they go on."""
    assert forks.start(1, copy_in_two_parts).values() == [[MIB, 2 * MIB - 1]]


# --- fpfs.save ---


def save_in_waves(path: str, wave_bytes: int) -> list[int]:
    """As a rank: save; returns how much was pinned at most, and afterwards."""
    used, device = begin()
    writing.WAVE_BYTES = wave_bytes
    state = placed_state(lambda tensor: tensor.to(device))
    assert used.most_pinned_bytes == 0
    client.save(state, path)
    return [used.most_pinned_bytes, used.pinned_bytes]


@pytest.mark.parametrize("wave_bytes", [writing.REQUEST_BYTES, 3 * MIB, writing.WAVE_BYTES])
def test_what_is_saved(forks: Worlds, path: Path, wave_bytes: int) -> None:
    """Bit for bit, with right CRC32s, by two buffers that are not larger than they need be."""
    ((most, left),) = forks.start(1, save_in_waves, path, wave_bytes).values()
    expected = placed_state(lambda tensor: tensor)
    assert same(to_cpu(torch.load(path, map_location="cpu")), to_cpu(expected))
    assert zipfile.ZipFile(path).testzip() is None
    assert MIB // 4 < most <= 2 * (wave_bytes + 64)
    assert most < 2 * 9 * MIB
    assert left == 0


def save_from_two(path: str) -> bool:
    """As a rank: save from two devices and the processor, load again to where all was."""
    begin()
    devices = [torch.device("simulated:0"), torch.device("simulated:1"), torch.device("cpu")]
    state = {
        f"{device} {n}": random_tensor(torch.float32, (700 * n,), seed=n).to(device)
        for n in range(1, 9)
        for device in devices
    }
    writing.WAVE_BYTES = writing.REQUEST_BYTES
    client.save(state, path)
    loaded = client.load(path)
    return all(
        loaded[key].device == value.device and same(loaded[key].cpu(), value.cpu())
        for key, value in state.items()
    )


def test_several_devices(forks: Worlds, path: Path) -> None:
    assert forks.start(1, save_from_two, path).values() == [True]


def save_what_is_queued(path: str, how: str) -> list[float]:
    """As a rank: save a tensor that the device is still to fill, by a stream of the caller's."""
    used, device = begin()
    tensor, ones = torch.zeros(1000, device=device), torch.ones(1000, device=device)
    torch.accelerator.synchronize(device)
    own = torch.Stream(device)

    def save() -> None:
        with own:
            if how == "save":
                client.save({"tensor": tensor}, path)
            else:
                with AsyncSaver(staging_bytes=0 if how == "in place" else None) as saver:
                    saver.save({"tensor": tensor}, path)

    used.hold(own)
    with own:
        tensor.copy_(ones)
    begun = used.copies
    saving = threading.Thread(target=save)
    saving.start()
    wait_until(lambda: used.copies > begun)
    # Others are not waited for.
    assert not copy_stream(device).record_event().query()
    used.release(own)
    saving.join()
    return torch.load(path, map_location="cpu")["tensor"].unique().tolist()


@pytest.mark.parametrize("how", ["save", "copied", "in place"])
def test_what_is_queued_is_done_before(forks: Worlds, path: Path, how: str) -> None:
    assert forks.start(1, save_what_is_queued, path, how).values() == [[1.0]]


def save_by_several_threads(path: str) -> list[float]:
    """As a rank: threads that are the first to copy get streams of their own; one is slow."""
    used, device = begin()
    streams = []

    def stream_of(device: torch.device) -> torch.Stream:
        streams.append(torch.Stream(device=device))
        if len(streams) == 1:
            used.hold(streams[0])
        return streams[-1]

    accelerators._stream_of = stream_of  # type: ignore[assignment]
    state = [torch.ones(1000, device=device)]
    saving = threading.Thread(target=client.save, args=(state, path))
    saving.start()
    wait_until(lambda: bool(streams))
    saving.join(LATE_S)
    assert saving.is_alive()
    used.release(streams[0])
    saving.join()
    return torch.load(path, map_location="cpu")[0].unique().tolist()


def test_each_waits_for_its_own_stream(forks: Worlds, path: Path) -> None:
    assert forks.start(1, save_by_several_threads, path).values() == [[1.0]]


def save_beside_a_device_that_hangs(path: str) -> str:
    """As a rank: 0 waits for its device, 1 dies."""
    used, device = begin()
    state = {"tensor": torch.zeros(MIB, device=device)}
    torch.accelerator.synchronize(device)
    if dist.get_rank() == 0:
        used.hold(copy_stream(device))
    else:
        accelerators.Copies.begin = die  # type: ignore[method-assign]
    try:
        client.save(state, path)
    except RankFailed as error:
        return str(error)
    return ""


def test_who_waits_for_a_device_learns_of_other_ranks(forks: Worlds, path: Path) -> None:
    outcomes = forks.start(2, save_beside_a_device_that_hangs, path).outcomes()
    assert "rank 1" in outcomes[0].value
    assert outcomes[1].error == -signal.SIGKILL
    assert not path.exists()


def save_files(root: str) -> None:
    """As a rank: other formats."""
    _, device = begin()
    writing.WAVE_BYTES = MIB
    tensors = {key: value.to(device) for key, value in large_state(seed=5).items()}
    client.save_safetensors(tensors, f"{root}/state.safetensors")
    client.save_shares(tensors, own_directory(root, dist.get_world_size()))


def test_other_formats(forks: Worlds, tmp_path: Path) -> None:
    forks.start(2, save_files, tmp_path).values()
    assert same(load_file(tmp_path / "state.safetensors"), large_state(seed=5))
    loaded = client.load_shares(directories(tmp_path, 2), map_location="cpu")
    assert same(loaded, large_state(seed=5))


# --- AsyncSaver ---


def save_what_changes(path: str, has_room: bool) -> list[Any]:
    """As a rank: save, and queue changes of what is saved before the device has copied it."""
    used, device = begin()
    state = placed_state(lambda tensor: tensor.to(device))
    copies, clear = copy_stream(device), to_zero(state)
    in_use, needed = used.device_bytes, bytes_on_device(state)
    used.tell_free(2 * needed if has_room else 2 * needed - 1)
    with AsyncSaver() as saver:
        used.hold(copies)
        began = saver.save(state, path)
        clear()
        state["here"].zero_()
        changed = torch.accelerator.current_stream(device).record_event()
        found = [began.staged.done(), used.device_bytes - in_use >= needed]
        if has_room:
            changed.synchronize()
        found.append(changed.query())
        used.release(copies)
        began.durable.result(60)
        assert used.device_bytes == in_use
        assert used.pinned_bytes > needed
        found.append(torch.count_nonzero(state["half"]).item())
    del saver
    gc.collect()
    # A thread may still leave what has used it.
    wait_until(lambda: used.pinned_bytes == 0)
    return found


@pytest.mark.parametrize("has_room", [False, True])
def test_what_changes_afterwards_is_not_saved(forks: Worlds, path: Path, has_room: bool) -> None:
    """The call does not wait. What is queued after it does, unless the device has a copy."""
    found = forks.start(1, save_what_changes, path, has_room).values()
    assert found == [[False, has_room, has_room, 0]]
    expected = placed_state(lambda tensor: tensor)
    assert same(to_cpu(torch.load(path, map_location="cpu")), to_cpu(expected))


def train(path: str, name: str, staging_bytes: int | None) -> None:
    """As a rank: a step waits until its device has copied, and nothing else does."""
    used, device = begin()
    training = Training(OPTIMIZERS[name], device)
    copies, current = copy_stream(device), torch.accelerator.current_stream(device)
    go, held = threading.Event(), threading.Event()

    def copy_rest(uncopied: snapshot.Uncopied) -> None:
        assert go.wait(60)
        go.clear()
        used.hold(copies)
        held.set()
        snapshot.copy_rest(uncopied)

    saving.copy_rest = copy_rest
    with AsyncSaver(optimizers=training.optimizer, staging_bytes=staging_bytes) as saver:
        for step in range(3):
            torch.save(copy.deepcopy(training.state()), f"{path}.{step}x")
            began = saver.save(training.state(), f"{path}.{step}")
            # Buffers, which no optimizer has.
            current.synchronize()
            go.set()
            assert held.wait(60)
            held.clear()
            training.forward_and_backward()
            current.synchronize()
            assert not began.staged.done()
            when_awaited(began.staged, functools.partial(used.release, copies))
            training.optimizer.step()
            assert began.update_wait_s > 0
            assert (began.in_place_bytes > 0) == (staging_bytes is not None)


@pytest.mark.parametrize("staging_bytes", [None, 2500])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_step_waits_for_the_device(
    forks: Worlds, path: Path, name: str, staging_bytes: int | None
) -> None:
    forks.start(1, train, path, name, staging_bytes).values()
    for step in range(3):
        saved, expected = (
            to_cpu(torch.load(f"{path}.{step}{x}", map_location="cpu", weights_only=False))
            for x in ("", "x")
        )
        assert same(saved, expected)


def save_in_place(path: str) -> list[Any]:
    """As a rank: save without room for copies; `save` waits for what no optimizer has."""
    used, device = begin()
    writing.WAVE_BYTES = MIB
    state = placed_state(lambda tensor: tensor.to(device))
    clear = to_zero(state)
    with AsyncSaver(staging_bytes=100_000) as saver:
        began = saver.save(state, path)
        assert began.staged.done()
        most = used.most_pinned_bytes
        clear()
    return [began.in_place_bytes > 8 * MIB, most < 2 * MIB + 200_000]


def test_a_state_larger_than_what_is_staged(forks: Worlds, path: Path) -> None:
    assert forks.start(1, save_in_place, path).values() == [[True, True]]
    expected = placed_state(lambda tensor: tensor)
    assert same(to_cpu(torch.load(path, map_location="cpu")), to_cpu(expected))
    assert zipfile.ZipFile(path).testzip() is None


def save_shares_beside(root: str) -> None:
    """As a rank: nodes' shares, of which one has no room for copies."""
    _, device = begin()
    tensors = {key: value.to(device) for key, value in large_state(seed=5).items()}
    staging_bytes = [None, 0][dist.get_rank()]
    with AsyncSaver(staging_bytes=staging_bytes) as saver:
        saver.save_shares(tensors, own_directory(root, 2), copies=2)
        for tensor in tensors.values():
            tensor.copy_(torch.zeros_like(tensor))


def test_shares(forks: Worlds, tmp_path: Path) -> None:
    forks.start(2, save_shares_beside, tmp_path).values()
    for each in directories(tmp_path, 2):
        assert same(client.load_shares(each, map_location="cpu"), large_state(seed=5))


def save_without_streams(path: str, what: str) -> list[str]:
    """As a rank: a device that has no streams, or memory that cannot be pinned."""
    used, device = begin()
    said: list[str] = []
    if what == "streams":
        torch.accelerator.current_accelerator = lambda: None  # type: ignore[assignment]
    elif what == "runtime":
        del torch.get_device_module(device).cudart
    else:

        def warning(text: str, *given: Any) -> None:
            said.append(text % given)

        accelerators.logger.warning = warning  # type: ignore[assignment]
        used.refuse_pinning()
    state = placed_state(lambda tensor: tensor.to(device))
    clear = to_zero(state)
    client.save(state, f"{path}.now")
    with AsyncSaver() as saver:
        for _ in range(2):
            began = saver.save(state, path)
            began.durable.result(60)
        clear()
        assert used.pinned_bytes == 0
    return said


@pytest.mark.parametrize("what", ["streams", "runtime", "pinned memory"])
def test_devices_that_cannot_copy_beside(forks: Worlds, path: Path, what: str) -> None:
    (said,) = forks.start(1, save_without_streams, path, what).values()
    expected = to_cpu(placed_state(lambda tensor: tensor))
    for each in (path, f"{path}.now"):
        assert same(to_cpu(torch.load(each, map_location="cpu")), expected)
    if what == "pinned memory":
        # Of each save's two buffers, and once of what is kept.
        whys = ["no memory can be pinned", "CUDA's error 2"]
        assert said == [
            f"8.02 MiB cannot be pinned ({why}): copies from devices are slow" for why in whys
        ]
    else:
        assert said == []


def save_from_the_second(path: str) -> list[int]:
    """As a rank: threads use the device that is the caller's current one."""
    begin()
    torch.accelerator.set_device_index(1)
    tensors = [torch.ones(MIB, device="simulated:1") for _ in range(2)]
    found = []

    def copy_rest(uncopied: snapshot.Uncopied) -> None:
        snapshot.copy_rest(uncopied)
        found.append(torch.accelerator.current_device_index())

    def write_pieces(*arguments: Any, **options: Any) -> Any:
        found.append(torch.accelerator.current_device_index())
        return transfers.write_pieces(*arguments, **options)

    saving.copy_rest, writing.write_pieces = copy_rest, write_pieces
    optimizer = torch.optim.SGD(tensors)
    with AsyncSaver(optimizers=optimizer, staging_bytes=5 * MIB) as saver:
        saver.save(tensors, path)
    return found[:2]


def test_threads_use_the_current_device(forks: Worlds, path: Path) -> None:
    assert forks.start(1, save_from_the_second, path).values() == [[1, 1]]


# --- loading ---


def load_into(path: str) -> list[Any]:
    """As a rank: fill tensors of devices, one of another type."""
    used, device = begin()
    filling.BUFFER_BYTES = MIB
    state = placed_state(lambda tensor: torch.zeros_like(tensor, device=device))
    state["half"] = state["half"].float()
    state["large"]["layer1"] = torch.zeros_like(state["large"]["layer1"], device="simulated:1")
    assert used.most_pinned_bytes == 0
    client.load(path, into=state)
    most = used.most_pinned_bytes
    client.save(to_cpu(state), f"{path}.loaded")
    return [MIB < most <= 2 * (MIB + 64), used.pinned_bytes]


def test_loading_into_tensors(forks: Worlds, path: Path) -> None:
    expected = placed_state(lambda tensor: tensor)
    client.save(expected, path)
    assert forks.start(1, load_into, path).values() == [[True, 0]]
    expected["half"] = expected["half"].float()
    assert same(to_cpu(torch.load(f"{path}.loaded")), to_cpu(expected))


def load_beside_others(path: str) -> list[list[float]]:
    """As a rank: load a tensor that the device is still to fill with zeros."""
    used, device = begin()
    tensor, zeros = torch.full((1000,), 7.0, device=device), torch.zeros(1000, device=device)
    found = []
    for held in (torch.accelerator.current_stream(device), copy_stream(device)):
        torch.accelerator.synchronize(device)
        used.hold(held)
        tensor.copy_(zeros)
        begun = used.copies
        loading = threading.Thread(target=client.load, args=(path,), kwargs={"into": [tensor]})
        loading.start()
        wait_until(lambda begun=begun: used.copies > begun)
        loading.join(LATE_S)
        assert loading.is_alive()
        used.release(held)
        loading.join()
        found.append(tensor.cpu().unique().tolist())
    return found


def test_tensors_are_filled_after_what_is_queued(forks: Worlds, path: Path) -> None:
    client.save([torch.ones(1000)], path)
    assert forks.start(1, load_beside_others, path).values() == [[[1.0], [1.0]]]


def load_badly(path: str) -> list[Any]:
    """As a rank: what fails while the device still copies ends when it has, and others go on."""
    used, device = begin()
    filling.BUFFER_BYTES = MIB
    state = [torch.zeros(MIB, dtype=torch.uint8, device=device) for _ in range(3)]
    twos = torch.full_like(state[0], 2)
    copies, found, failed = copy_stream(device), list[str](), threading.Event()
    torch.accelerator.synchronize(device)

    def load() -> None:
        try:
            client.load(path, into=state)
        except OSError as error:
            found.append(str(error))

    sound, begun = parallel_file.ParallelFile.read_pieces, used.copies

    def read_pieces(self: Any, pieces: list[Any], owners: object) -> None:
        if used.copies > begun:
            failed.set()
            unreadable()
        sound(self, pieces, owners)

    parallel_file.ParallelFile.read_pieces = read_pieces  # type: ignore[method-assign]
    used.hold(copies)
    loading = threading.Thread(target=load)
    loading.start()
    assert failed.wait(60)
    loading.join(LATE_S)
    assert loading.is_alive()
    used.release(copies)
    loading.join()
    state[0].copy_(twos)
    return [found, state[0].cpu().unique().tolist()]


def test_a_load_that_fails_leaves_nothing_under_way(forks: Worlds, path: Path) -> None:
    client.save([torch.ones(MIB, dtype=torch.uint8)] * 3, path)
    ((errors, left),) = forks.start(1, load_badly, path).values()
    assert [str(path) in error for error in errors] == [True]
    assert left == [2]


def load_into_inference_tensors(path: str) -> list[float]:
    """As a rank: tensors that only native code may change outside of inference mode."""
    _, device = begin()
    with torch.inference_mode():
        tensors = [torch.zeros(10, device=device), torch.zeros(10)]
    client.load(path, into=tensors)
    return torch.stack([tensor.cpu() for tensor in tensors]).unique().tolist()


def test_inference_tensors(forks: Worlds, path: Path) -> None:
    client.save([torch.ones(10), torch.ones(10)], path)
    assert forks.start(1, load_into_inference_tensors, path).values() == [[1.0]]


def load_begun_elsewhere(path: str) -> None:
    """As a rank: the second of two begins to read in the middle."""
    _, device = begin()
    filling.BUFFER_BYTES = MIB
    state = {
        key: torch.zeros_like(value, device=device) for key, value in large_state(seed=5).items()
    }
    client.load(path, into=state)
    assert same(to_cpu(state), large_state(seed=5))


def test_ranks_load_into_tensors(forks: Worlds, path: Path) -> None:
    client.save(large_state(seed=5), path)
    forks.start(2, load_begun_elsewhere, path).values()


# --- torch.distributed.checkpoint ---


def save_by_dcp(root: str, how: str) -> list[Any]:
    """As a rank: save and load; `async`: what is queued after the call changes what is saved."""
    used, device = begin()
    training = Training(OPTIMIZERS["AdamW"], device)
    expected = copy.deepcopy(to_cpu(training.state()))
    state = {**training.state(), "again": training.model[0].weight.T}
    writer = fpfs.dcp.Writer(f"{root}/step")
    if how == "sync":
        dcp.save(state, storage_writer=writer, no_dist=True)
    else:
        optimizers = training.optimizer if how == "async, optimizers known" else ()
        stager = fpfs.dcp.Stager(optimizers=optimizers)
        found = dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)
        training.forward_and_backward()
        training.optimizer.step()
        assert used.pinned_bytes >= 3 * FEATURES * FEATURES * 4
        done = found.upload_completion if optimizers else found
        done.result(60)
        stager.close()
        del stager, found, done
    gc.collect()
    loaded = Training(OPTIMIZERS["AdamW"], device).state()
    dcp.load(loaded, storage_reader=fpfs.dcp.Reader(f"{root}/step"), no_dist=True)
    wait_until(lambda: used.pinned_bytes == 0)
    return [same(to_cpu(loaded), expected)]


@pytest.mark.parametrize("how", ["sync", "async", "async, optimizers known"])
def test_dcp(forks: Worlds, tmp_path: Path, how: str) -> None:
    assert forks.start(1, save_by_dcp, tmp_path, how).values() == [[True]]


def stage_badly() -> list[Any]:
    """As a rank: the second copy fails while the first one is under way; others use the memory."""
    used, device = begin()
    parameters = [torch.nn.Parameter(torch.ones(50_000, device=device)) for _ in range(2)]
    stager = fpfs.dcp.Stager(optimizers=torch.optim.SGD(parameters))
    copies, sound, begun = copy_stream(device), accelerators.Copies.begin, list[torch.Tensor]()
    torch.accelerator.synchronize(device)

    def fail_later(self: Any, to: torch.Tensor, source: torch.Tensor) -> None:
        begun.append(source)
        if len(begun) == 2:
            full()
        sound(self, to, source)

    accelerators.Copies.begin = fail_later  # type: ignore[method-assign]
    used.hold(copies)
    failed = stager.stage({"parameters": parameters})
    wait_until(lambda: len(begun) == 2)
    threading.Timer(LATE_S, used.release, (copies,)).start()
    failed.result(60)
    is_done = copies.record_event().query()
    try:
        list(failed.result()["state"])
    except OSError as error:
        return [is_done, error.errno]
    return [is_done]


def test_a_stager_that_fails_leaves_nothing_under_way(forks: Worlds) -> None:
    assert forks.start(1, stage_badly).values() == [[True, errno.ENOSPC]]
