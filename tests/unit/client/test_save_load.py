"""save and load on a plain filesystem: both ways with torch's own, and what is refused."""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.testing._internal.two_tensor import TwoTensor

from fpfs import client, dcp
from fpfs.client import AsyncSaver, load, paths, save, saving
from fpfs.client.peers import Alone
from fpfs.client.shares import saving as shares_saving
from fpfs.client.shares.saving import save_shares
from fpfs.core.mounts import mount_containing
from tests.support.failures.calls import full
from tests.support.states import Custom, large_state, nested_states, same, some_states

# torch's own, of types that it is not done with.
pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def only(path: Path) -> bool:
    """Whether nothing else lies beside it."""
    return os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("name", ["odd", "large", "empty", "tensor", "text"])
def test_both_ways_with_torch(path: Path, name: str) -> None:
    state = some_states()[name]
    saved = save(state, path)
    assert saved.bytes == path.stat().st_size
    assert same(torch.load(path, weights_only=False), state)
    assert same(load(path, weights_only=False), state)
    assert only(path)
    torch.save(state, path)
    assert same(load(path, weights_only=False), state)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_parameters_of_lazy_modules(path: Path) -> None:
    """They have no shape and no memory yet."""
    state = {"lazy": torch.nn.LazyLinear(5).state_dict(), "other": torch.ones(3)}
    save(state, path)
    with AsyncSaver() as saver:
        saver.save(state, path.with_name("beside.pt"))
    for saved in (path, path.with_name("beside.pt")):
        found = load(saved, weights_only=False)
        assert all(map(torch.nn.parameter.is_lazy, found["lazy"].values()))
        assert found["lazy"].keys() == state["lazy"].keys()
        assert same(found["other"], state["other"])


@settings(max_examples=60)
@given(state=nested_states())
def test_random_states(tmp_path_factory: pytest.TempPathFactory, state: Any) -> None:
    path = tmp_path_factory.mktemp("random") / "state.pt"
    save(state, path)
    assert same(torch.load(path, weights_only=False), state)
    assert same(load(path, weights_only=False), state)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def test_unzip_finds_no_fault(path: Path) -> None:
    save(large_state(seed=4), path)
    for command in (["unzip", "-tqq"], [sys.executable, "-m", "zipfile", "-t"]):
        done = subprocess.run([*command, path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_what_shares_a_storage_shares_it_again(path: Path) -> None:
    base = torch.arange(10.0)
    save([base, base[2:]], path)
    found = load(path)
    found[0][3] = 77.0
    assert found[1][1] == 77.0


def test_a_storage_of_its_own(path: Path) -> None:
    save(torch.arange(5, dtype=torch.uint8).untyped_storage(), path)
    assert list(load(path)) == list(torch.load(path)) == [0, 1, 2, 3, 4]


def test_tensors_in_tensors(path: Path) -> None:
    """Subclasses that hold others, whose memory is none of their own."""
    state = {"two": TwoTensor(torch.arange(6.0), torch.ones(6))}
    for write in (save, torch.save):
        write(state, path)
        for found in (load(path, weights_only=False), torch.load(path, weights_only=False)):
            assert type(found["two"]) is TwoTensor
            assert torch.equal(found["two"].a, state["two"].a)
            assert torch.equal(found["two"].b, state["two"].b)


class Inner:
    """Saves its tensor by itself, within what is saved."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> bytes:
        buffer = io.BytesIO()
        torch.save(self.tensor, buffer)
        return buffer.getvalue()

    def __setstate__(self, state: bytes) -> None:
        self.tensor = torch.load(io.BytesIO(state))


def test_objects_that_load_themselves(path: Path) -> None:
    state = [Inner(torch.arange(100)), torch.arange(50)]
    save(state, path)
    inner, outer = load(path, weights_only=False)
    assert torch.equal(inner.tensor, torch.arange(100))
    assert torch.equal(outer, torch.arange(50))


def test_files_without_crc32(path: Path) -> None:
    state = large_state(seed=12, tensors=2)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(load(path), state)


def test_the_file_before_stays_when_it_cannot_be_pickled(path: Path) -> None:
    save({"step": 1}, path)
    with pytest.raises(AttributeError, match="pickle"):
        save({"large": torch.zeros(10), "bad": lambda: None}, path)
    assert load(path) == {"step": 1}
    assert only(path)


@pytest.mark.parametrize("how", [save, save_shares])
def test_a_second_interrupt_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[..., object]
) -> None:
    """It comes while the other ranks are told of the first one, as when no store answers."""
    there: list[str] = []

    def tell(self: Alone, error: BaseException) -> None:
        assert isinstance(error, OSError)
        there.extend(os.listdir(tmp_path))
        raise KeyboardInterrupt

    monkeypatch.setattr(Alone, "tell", tell)
    monkeypatch.setattr(saving, "write_share", full)
    monkeypatch.setattr(shares_saving, "write", full)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        how({"weight": torch.ones(9)}, tmp_path / "state.pt" if how is save else tmp_path)
    assert len(there) == 1, "they are told before anything is undone"
    assert os.listdir(tmp_path) == []
    assert set(os.listdir("/proc/self/fd")) == before


class Bomb:
    """Deletes a file when it is loaded."""

    def __init__(self, victim: str) -> None:
        self.victim = victim

    def __reduce__(self) -> Any:
        return (os.unlink, (self.victim,))


def test_weights_only_runs_nothing(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    save([torch.zeros(3), Bomb(str(victim))], path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only"):
        load(path)
    assert victim.exists()
    save(Custom(1), path)
    with torch.serialization.safe_globals([Custom]):
        assert load(path) == Custom(1)


@pytest.mark.parametrize(
    "map_location",
    [
        None,
        "cpu",
        torch.device("cpu"),
        {"cpu": "cpu"},
        lambda storage, location: storage,
        lambda storage, location: None,
        lambda storage, location: storage.clone(),
    ],
)
def test_places_in_memory(path: Path, map_location: Any) -> None:
    state = large_state(seed=5, tensors=3)
    save(state, path)
    assert same(load(path, map_location=map_location), state)


def test_what_is_not_on_fpfs_is_said_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(paths, "_said_elsewhere", set())
    for _ in range(2):
        save({"step": 1}, path)
        load(path)
    (line,) = caplog.messages
    entry = mount_containing(str(path))
    assert line.startswith(
        f"{path.parent} is on {entry.mountpoint} ({entry.filesystem_type}), not on a mount of fpfs:"
    )


def flags_at(address: int) -> list[str]:
    """What the kernel has been told about this process's memory at `address`."""
    holds = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            holds = int(found[1], 16) <= address < int(found[2], 16)
        elif holds and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no memory at {address:#x}")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages"
)
def test_large_tensors_come_to_huge_pages(path: Path) -> None:
    save({"large": torch.ones(10**7)}, path)
    large = load(path)["large"]
    for address in (large.data_ptr(), large.data_ptr() + large.nbytes - 1):
        assert "hg" in flags_at(address)  # MADV_HUGEPAGE


@pytest.mark.parametrize("map_location", ["meta", torch.device("meta"), {"cpu": "meta"}])
def test_no_place_in_memory(path: Path, map_location: Any) -> None:
    state = {"one": torch.zeros(3), "two": torch.ones(3), "again": torch.zeros(0)}
    save(state, path)
    found = load(path, map_location=map_location)
    assert {name: tensor.device.type for name, tensor in found.items()} == dict.fromkeys(
        state, "meta"
    )


def test_a_place_for_each(path: Path) -> None:
    """A function sees each storage with its bytes, as torch.load's does."""
    state = large_state(seed=6, tensors=3)
    seen = []

    def place(storage: torch.UntypedStorage, location: str) -> None:
        seen.append((bytes(storage[:100].tolist()), location))

    save(state, path)
    load(path, map_location=place)
    assert seen == [(bytes(tensor[:100].tolist()), "cpu") for tensor in state.values()]


def test_mapped(path: Path) -> None:
    state = large_state(seed=7)
    save(state, path)
    assert same(load(path, mmap=True), state)


def write_deflated(state: Any, path: Path) -> None:
    """As torch.save, compressed afterwards by another program."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with (
        zipfile.ZipFile(buffer) as stored,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made,
    ):
        for name in stored.namelist():
            made.writestr(name, stored.read(name))


@pytest.mark.parametrize(
    "write",
    [
        lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
        write_deflated,
    ],
    ids=["legacy", "deflated"],
)
def test_other_formats_are_left_to_torch(path: Path, write: Any) -> None:
    state = large_state(seed=8, tensors=2)
    write(state, path)
    assert same(load(path), state)


WRONG_CONTENT = (EOFError, IndexError, RuntimeError, pickle.UnpicklingError)


def test_what_is_no_checkpoint_is_refused_as_torch_does(path: Path) -> None:
    for content in (b"", b"PK\x03\x04 and no more", b"text"):
        path.write_bytes(content)
        with pytest.raises(WRONG_CONTENT) as theirs:
            torch.load(path)
        with pytest.raises(type(theirs.value)):
            load(path)
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        load(path.with_name("none.pt"))


def test_a_file_that_was_cut_off(path: Path) -> None:
    save(large_state(seed=9), path)
    os.truncate(path, path.stat().st_size - 3_000_000)
    with pytest.raises(RuntimeError, match="zip archive"):
        load(path)


def test_a_storage_behind_the_end(path: Path) -> None:
    """The directory is whole, and says that a storage lies where the file has ended."""
    save(large_state(seed=10, tensors=1), path)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        (info,) = (each for each in archive.infolist() if each.filename.endswith("data/0"))
    directory = content.rindex(b"PK\x01\x02", 0, content.rindex(info.filename.encode()))
    wrong = bytearray(content)
    wrong[directory + 42 : directory + 46] = (len(content) - 200).to_bytes(4, "little")
    path.write_bytes(wrong)
    with pytest.raises((OSError, RuntimeError)):
        load(path)


@pytest.mark.parametrize("wrong", ["x", None, 0, -1, math.inf, math.nan, 1e300])
def test_what_is_no_time_to_wait(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout_s is .*: give seconds, more than 0 and at most"):
        save({}, tmp_path / "state.pt", timeout_s=wrong)
    with pytest.raises(ValueError, match="timeout_s is "):
        AsyncSaver(timeout_s=wrong)
    assert os.listdir(tmp_path) == []


def test_what_is_no_path() -> None:
    for wrong in (7, None, io.BytesIO()):
        remedy = "use torch.save" if isinstance(wrong, io.BytesIO) else "give a str"
        with pytest.raises(TypeError, match=f"fpfs takes a path, not .*: {remedy}"):
            save({}, wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="fpfs takes a path, not"):
            load(wrong)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="empty string"):
        save({}, "")


@pytest.mark.parametrize("wrong", ["no", 1, None])
def test_what_is_no_flag(tmp_path: Path, wrong: Any) -> None:
    """A text would mean True."""
    for save_by in (save, client.save_safetensors):
        with pytest.raises(TypeError, match=f"durable is {wrong!r}: give True or False"):
            save_by({"a": torch.ones(1)}, tmp_path / "state", durable=wrong)
    for flag in ("durable", "overwrite"):
        with pytest.raises(TypeError, match=f"{flag} is {wrong!r}: give True or False"):
            dcp.Writer(tmp_path, **{flag: wrong})
    assert os.listdir(tmp_path) == []


def test_an_address_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word, a directory `s3:` would be made, or none be found."""
    monkeypatch.chdir(tmp_path)
    tensors = {"a": torch.ones(1)}
    calls: list[Callable[[str], object]] = [
        lambda name: save(tensors, name),
        lambda name: client.save_shares(tensors, name),
        lambda name: client.save_safetensors(tensors, name),
        lambda name: client.save_safetensors(tensors, name, max_shard_bytes=100),
        load,
        client.load_shares,
        lambda name: load([name, "b"]),
        dcp.Writer,
        lambda name: dcp.Writer().reset(name),
        dcp.Reader,
        lambda name: dcp.Reader("a").reset(name),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^s3://a/b is not on a filesystem of this machine"):
            call("s3://a/b")
        with pytest.raises(ValueError, match=r"^file:///a is an address: give the path alone, /a$"):
            call("file:///a")
    assert os.listdir(tmp_path) == []


def test_names_that_are_not_quite_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for directory in ("s3:", "1:", ":"):
        os.mkdir(directory)
    for name in ("s3:/b", "./s3://c", "s3:b", "://d", "1://e"):
        save({"of": name}, name)
        assert load(name) == {"of": name}


def test_paths_of_all_kinds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    for name in (str(path), os.fsencode(path), path, path.name, b"./state.pt"):
        save({"of": str(name)}, name)
        assert load(name) == {"of": str(name)}
    strange = path.with_name(os.fsdecode(b"\xff\n " + b"x" * 240 + b".pt"))
    save({"a": 1}, strange)
    assert load(strange) == {"a": 1}


def test_where_nothing_can_be_saved(path: Path, tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        save({}, tmp_path)
    for name in (f"{tmp_path}/new/", os.fsencode(tmp_path / "new") + b"/"):
        with pytest.raises(IsADirectoryError, match="new/"):
            save({}, name)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        save({}, tmp_path / "nowhere" / "state.pt")
    path.touch()
    with pytest.raises(NotADirectoryError):
        save({}, path / "state.pt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file: use torch.save"):
        save({}, tmp_path / "pipe")
    assert sorted(os.listdir(tmp_path)) == ["pipe", "state.pt"]


def test_links_are_followed_and_modes_stay(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "latest.pt"
    link.symlink_to(path)
    umask = os.umask(0o027)
    try:
        save({"step": 1}, link)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        save({"step": 2}, link)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert link.is_symlink()
    assert load(link) == {"step": 2}


def test_the_report(path: Path) -> None:
    state = large_state(seed=11)
    saved = save(state, path, durable=True)
    assert saved.path == str(path)
    assert saved.durable
    assert saved.seconds >= saved.lay_out_s + saved.write_s > 0
    # Requests that hold more than one tensor, and what is between them.
    (written,) = saved.written
    assert (written.rank, written.bytes) == (0, saved.bytes)
    assert written.copied_bytes < 256 * 1024 * (len(state) + 2)
    assert str(saved).startswith(f"{path}: 16.0 MiB durable in ")
