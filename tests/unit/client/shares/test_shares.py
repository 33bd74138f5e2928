"""Nodes save their shares of one checkpoint, which is loaded wherever these are seen."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fpfs import client
from fpfs.client import planning
from fpfs.client.replacement import Replacement
from fpfs.client.shares import saving
from fpfs.client.shares.format import Damaged, Identity, share_name
from fpfs.client.shares.gathering import gather, verify
from fpfs.client.shares.saving import save_shares
from tests.support.failures.calls import die, full, unreadable
from tests.support.ranks import Worlds
from tests.support.states import (
    PLACEMENTS,
    directories,
    fitting,
    large_state,
    numbered,
    odd_state,
    own_directory,
    own_part,
    same,
    save_state,
    sharded,
    wholes,
    without_id,
)

# torch's own, of types that it is not done with.
pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def names(root: Path, nodes: int) -> list[list[str]]:
    """What lies in each node's directory, without what is random in names."""
    found = []
    for place in directories(root, nodes):
        with contextlib.suppress(FileNotFoundError):
            found.append(sorted(name.partition("-of-")[0] for name in os.listdir(place)))
    return found


def whole(nodes: int) -> list[list[str]]:
    """`names` of one checkpoint and nothing else."""
    return [[f"{node:05d}", "manifest.json"] for node in range(nodes)]


def no_progress(done: int, total: int) -> None:
    """Do nothing with it."""
    assert 0 < done <= total


def gathered(places: Sequence[str], path: Path) -> bytes:
    """The ordinary file of a checkpoint, all of which is sound."""
    manifest, found = verify(places, progress=no_progress)
    assert [each.share for each in found] == list(range(len(manifest.shares)))
    assert [each.problem for each in found] == [None] * len(found)
    assert gather(places, str(path), progress=no_progress) == manifest.bytes
    return path.read_bytes()


def save_once(root: str, nodes: int, kind: str, block_bytes: int) -> Any:
    """As a rank: save a state, also as one file; returns the report."""
    planning.CHUNK_BYTES_DEFAULT = block_bytes
    torch.manual_seed(0)
    state = odd_state() if kind == "odd" else large_state(seed=1)
    client.save(state, os.path.join(root, "one.pt"))
    saved = save_shares(state, own_directory(root, nodes))
    return [saved.path, saved.bytes, saved.durable, [list(part) for part in saved.written]]


@pytest.mark.parametrize(("size", "nodes"), [(1, 1), (2, 1), (2, 2), (4, 2), (3, 3), (4, 4)])
def test_shares(forks: Worlds, tmp_path: Path, size: int, nodes: int) -> None:
    found = forks.start(size, save_once, str(tmp_path), nodes, "large", 1 << 20).values()
    places = directories(tmp_path, nodes)
    assert [each[0] for each in found] == [places[rank * nodes // size] for rank in range(size)]
    assert all(each[2] for each in found)
    assert sum(part[1] for part in found[0][3]) == found[0][1]
    assert [part[0] for part in found[0][3]] == list(range(size))
    assert names(tmp_path, nodes) == whole(nodes)
    manifests = [Path(place, "manifest.json").read_bytes() for place in places]
    assert manifests == manifests[:1] * nodes
    assert same(client.load(places), large_state(seed=1))
    content = gathered(places, tmp_path / "gathered.pt")
    assert without_id(content) == without_id((tmp_path / "one.pt").read_bytes())


def test_all_kinds_of_tensors(forks: Worlds, tmp_path: Path) -> None:
    forks.start(3, save_once, str(tmp_path), 3, "odd", 64).values()
    torch.manual_seed(0)
    expected = odd_state()
    places = directories(tmp_path, 3)
    assert same(client.load(places, weights_only=False), expected)
    content = gathered(places, tmp_path / "gathered.pt")
    assert same(torch.load(io.BytesIO(content), weights_only=False), expected)


def save_sharded(root: str, nodes: int, block_bytes: int) -> None:
    """As a rank: a checkpoint for each placement, and load each into tensors sharded alike."""
    planning.CHUNK_BYTES_DEFAULT = block_bytes
    for name in fitting(dist.get_world_size()):
        state = sharded(PLACEMENTS[name])
        save_shares(state, own_directory(os.path.join(root, name), nodes))
        empty = {
            key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
            for key, value in state.items()
        }
        dist.barrier()
        places = directories(Path(root, name), nodes)
        loaded = client.load(places, into=empty, group=client.ALONE)
        assert loaded.pop("step") == 7
        for key, value in loaded.items():
            assert value is empty[key]
            assert same(own_part(value), own_part(state[key]))


@pytest.mark.parametrize(("size", "nodes", "block_bytes"), [(2, 2, 64), (4, 2, 512), (4, 4, 4096)])
def test_sharded_tensors(
    forks: Worlds, tmp_path: Path, size: int, nodes: int, block_bytes: int
) -> None:
    forks.start(size, save_sharded, str(tmp_path), nodes, block_bytes).values()
    for name in fitting(size):
        places = directories(tmp_path / name, nodes)
        content = gathered(places, tmp_path / f"{name}.pt")
        loaded = torch.load(io.BytesIO(content))
        for key, expected in wholes().items():
            assert same(loaded[key], expected)
            assert same(loaded[f"{key} ordinary"], expected)


def test_a_checkpoint_replaces_the_one_before(forks: Worlds, tmp_path: Path) -> None:
    places = directories(tmp_path, 2)
    for step in (1, 2):
        forks.start(4, save_state, str(tmp_path), 2, step).values()
        assert names(tmp_path, 2) == whole(2)
        manifest = json.loads(Path(places[0], "manifest.json").read_text())
        assert manifest["checkpoint"]["number"] == step
        assert same(client.load(places), numbered(step))
    # In a world of other nodes, too.
    forks.start(3, save_state, str(tmp_path), 3, 3).values()
    assert same(client.load(directories(tmp_path, 3)), numbered(3))
    assert names(tmp_path, 3) == whole(3)


MOMENTS: dict[str, tuple[Any, str]] = {
    "room": (Replacement, "reserve"),
    "tensors": (saving, "write"),
    "header": (saving, "encode_header"),
    "share": (Replacement, "complete"),
    "name": (Replacement, "take_name"),
    "manifest": (saving.SharesSave, "_write_manifest"),
    "former": (saving.SharesSave, "_remove_former"),
}
"""When a rank fails: instead of which function."""
CASES = [
    (moment, rank, killed)
    for moment in MOMENTS
    # Rank 1 is not the first of its node, and makes no files.
    for rank in ((0, 1, 2) if moment == "tensors" else (0, 2))
    for killed in (False, True)
]
SHORT = [
    ("room", 2, False),
    ("tensors", 0, False),
    ("tensors", 1, True),
    ("header", 2, False),
    ("share", 2, True),
    ("name", 0, False),
    ("manifest", 0, True),
    ("manifest", 2, False),
    ("former", 2, True),
]


def save_badly(root: str, rank: int, moment: str, killed: bool) -> None:
    """As a rank: save, which one rank does not come to the end of."""
    if dist.get_rank() == rank:
        owner, function = MOMENTS[moment]
        setattr(owner, function, die if killed else full)
    save_state(root, 2, 2)


@pytest.mark.parametrize(
    ("moment", "rank", "killed"),
    [
        pytest.param(
            *case, marks=() if case in SHORT else pytest.mark.long, id="-".join(map(str, case))
        )
        for case in CASES
    ],
)
def test_a_rank_that_fails(
    forks: Worlds, tmp_path: Path, moment: str, rank: int, killed: bool
) -> None:
    places = directories(tmp_path, 2)
    for place in places:
        os.makedirs(place)
    save_shares(numbered(1), places[0])
    outcomes = forks.start(4, save_badly, str(tmp_path), rank, moment, killed).outcomes()
    for other, outcome in enumerate(outcomes):
        if other != rank:
            cause = "its process is no more" if killed else "OSError: [Errno 28]"
            assert str(outcome.error).startswith(f"RankFailed: rank {rank}: {cause}")
    # Rank 0's manifest makes it complete.
    is_new = moment == "former" or (moment == "manifest" and rank != 0)
    assert same(client.load(places), numbered(2 if is_new else 1))
    is_known = not (killed and rank == 0) or moment in ("room", "tensors")
    if not is_new and is_known:
        assert names(tmp_path, 2) == [["00000", "manifest.json"], []], "nothing else is left"
    forks.start(4, save_state, str(tmp_path), 2, 3).values()
    assert same(client.load(places), numbered(3))
    assert names(tmp_path, 2) == whole(2)


def save_and_die(root: str, moment: str, dying: list[int]) -> None:
    """As a rank of a node of its own: save, which some ranks die of."""
    if dist.get_rank() in dying:
        setattr(*MOMENTS[moment], die)
    save_state(root, 2, 2)


def save_in_room_for_two(root: str) -> None:
    """As a rank of a node of its own: save, where there is room for the former share and one."""
    reserve = Replacement.reserve

    def reserve_or_fail(self: Replacement, size: int) -> None:
        share, temporary, manifest = 1, 1, 1
        if len(os.listdir(os.path.dirname(self.path))) > share + temporary + manifest:
            full()
        reserve(self, size)

    Replacement.reserve = reserve_or_fail  # type: ignore[method-assign]
    save_state(root, 2, 3)


@pytest.mark.parametrize("moment", ["tensors", "manifest"])
def test_what_a_killed_save_left_takes_no_room(forks: Worlds, tmp_path: Path, moment: str) -> None:
    forks.start(2, save_state, str(tmp_path), 2, 1).values()
    forks.start(2, save_and_die, str(tmp_path), moment, [0, 1]).outcomes()
    assert [len(found) for found in names(tmp_path, 2)] == [3, 3]
    assert same(client.load(directories(tmp_path, 2)), numbered(1))
    forks.start(2, save_in_room_for_two, str(tmp_path)).values()
    assert same(client.load(directories(tmp_path, 2)), numbered(3))
    assert names(tmp_path, 2) == whole(2)


def test_a_save_under_way_may_become_complete(tmp_path: Path) -> None:
    """Its share has its name, and is locked until the save ends."""
    checkpoint = Identity(3, "0" * 16)
    with Replacement(str(tmp_path / share_name(0, 2, checkpoint))) as share:
        share.complete(durable=True)
        share.take_name()
        former, _ = saving._look_for_former(str(tmp_path))
        assert (former.number, former.never_complete) == (3, [])
    former, _ = saving._look_for_former(str(tmp_path))
    assert former.never_complete == [checkpoint]
    # The directory may be of a node that has a copy of it, and then has a share of its own, too.
    (tmp_path / share_name(1, 2, checkpoint)).touch()
    former, _ = saving._look_for_former(str(tmp_path))
    assert (former.number, former.never_complete) == (3, [])


def test_what_may_be_complete_stays(
    forks: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node, that is away now, may have the manifest."""
    forks.start(2, save_state, str(tmp_path), 2, 1).values()
    forks.start(2, save_and_die, str(tmp_path), "manifest", [1]).outcomes()
    places = directories(tmp_path, 2)
    monkeypatch.setattr(Replacement, "reserve", full)
    for place in (places[1], places[0]):
        with pytest.raises(OSError, match="No space left on device"):
            save_shares(numbered(3), place)
    assert same(client.load(places), numbered(2))


@pytest.fixture
def saved(forks: Worlds, tmp_path: Path) -> list[str]:
    """The directories of two nodes with a checkpoint."""
    forks.start(2, save_state, str(tmp_path), 2, 1).values()
    return directories(tmp_path, 2)


def share_in(place: str) -> Path:
    """The share of a node."""
    (found,) = Path(place).glob("*.share")
    return found


def damage(path: Path, at: int) -> None:
    """Change a byte."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("at", "wrong"),
    [
        (6, "is no share of a checkpoint"),
        (100, "has another header than the manifest says"),
        (4096 + 10, "1 ranges, of 589056 bytes, are damaged, the first from byte 4096 on"),
        (-1, "ranges, of"),
    ],
)
def test_damaged_bytes_are_found(saved: list[str], tmp_path: Path, at: int, wrong: str) -> None:
    damage(share_in(saved[0]), at)
    _, found = verify(saved, progress=no_progress)
    assert wrong in str(found[0].problem)
    assert found[1].problem is None
    with pytest.raises(Damaged, match=wrong):
        gather(saved, str(tmp_path / "gathered.pt"), progress=no_progress)
    assert not list(tmp_path.glob("*.pt"))


def test_what_is_unsound_is_taken_from_another_directory(
    saved: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of two directories has what the other one has not: a manifest, a header, or bytes."""
    copies = [str(tmp_path / f"copy{number}") for number in range(2)]
    for place, copy in zip(saved, copies, strict=True):
        shutil.copytree(place, copy)
    os.truncate(share_in(saved[0]), 5000)
    damage(share_in(copies[1]), 100)
    Path(saved[1], "manifest.json").write_text("")
    for places in ([*saved, *copies], [*copies, *saved]):
        caplog.clear()
        assert same(client.load(places), numbered(1))
        path = tmp_path / "gathered.pt"
        gather(places, str(path), progress=no_progress)
        assert same(torch.load(path), numbered(1))
        said = [each.getMessage() for each in caplog.records if "is read instead" in each.msg]
        expected = share_in(saved[0]) if places[0] == saved[0] else share_in(copies[1])
        assert any(f"{saved[1]}/manifest.json is no manifest" in each for each in said)
        assert any(each.startswith(f"{expected} of node ") for each in said)
    with pytest.raises(Damaged, match=rf"{share_in(saved[0])} of node .* has 5000 bytes instead"):
        client.load(saved)
    # Bytes that are no header's are found when all are read.
    shutil.copy(share_in(copies[0]), saved[1])
    damage(share_in(copies[0]), -10)
    gather([*copies, saved[1]], str(path), progress=no_progress)
    assert same(torch.load(path), numbered(1))


def test_what_is_missing_is_named(saved: list[str], tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    lost = share_in(saved[1])
    lost.rename(copy / lost.name)
    wrong = rf"share 1 of node '.+' \({lost.name}\) of 2 is not in {saved[0]}, {saved[1]}"
    with pytest.raises(FileNotFoundError, match=wrong):
        client.load(saved)
    assert verify(saved, progress=no_progress)[1][1].problem == "is in no directory"
    # From wherever shares are.
    assert same(client.load([*saved, copy]), numbered(1))
    os.truncate(copy / lost.name, 5000)
    with pytest.raises(Damaged, match="share of node '.+' has 5000 bytes instead of "):
        client.load([*saved, copy])


def test_a_share_of_another_checkpoint(saved: list[str], forks: Worlds, tmp_path: Path) -> None:
    for step in (2, 3):
        forks.start(2, save_state, str(tmp_path / "other"), 2, step).values()
    others = directories(tmp_path / "other", 2)
    # Of two checkpoints the one of the greater number is loaded.
    for places in ([*saved, *others], [*others, *saved]):
        assert same(client.load(places), numbered(3))
    shutil.copy(share_in(others[0]), share_in(saved[0]))
    wrong = "share of node '.+' has ([0-9]+ bytes instead of|another header than the manifest says)"
    with pytest.raises(Damaged, match=wrong):
        client.load(saved)


def test_what_is_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": "of something else"}')
    for call in (lambda: client.load(tmp_path), lambda: save_shares({}, tmp_path)):
        with pytest.raises(Damaged, match="manifest.json is no manifest of a checkpoint"):
            call()
    assert os.listdir(tmp_path) == ["manifest.json"]
    manifest = '{"version": 99, "new": 1}'
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(Damaged, match="is of version 99, and this fpfs knows 1"):
        client.load(tmp_path)


def test_a_manifest_that_cannot_be_read_is_replaced(forks: Worlds, tmp_path: Path) -> None:
    """Where another directory shows that it is a checkpoint's; otherwise all ranks fail."""
    places = directories(tmp_path, 2)
    for step, wrong in enumerate(places, start=2):
        forks.start(2, save_state, str(tmp_path), 2, 1).values()
        Path(wrong, "manifest.json").write_text("")
        forks.start(2, save_state, str(tmp_path), 2, step).values()
        assert same(client.load(places), numbered(step))
        assert names(tmp_path, 2) == whole(2)
    # What could not be replaced is found before anything is written.
    for wrong in places:
        manifest = Path(wrong, "manifest.json")
        manifest.rename(tmp_path / "aside")
        manifest.mkdir()
        outcomes = forks.start(2, save_state, str(tmp_path), 2, 4).outcomes()
        assert all("IsADirectoryError: [Errno 21]" in str(each.error) for each in outcomes)
        assert same(client.load(places), numbered(3))
        manifest.rmdir()
        (tmp_path / "aside").rename(manifest)
    for place in places:
        Path(place, "manifest.json").unlink()
    Path(places[1], "manifest.json").write_text("{}")
    first, other = forks.start(2, save_state, str(tmp_path), 2, 5).outcomes()
    cause = f"Damaged: {places[1]}/manifest.json is no manifest of a checkpoint"
    assert str(first.error).startswith(f"RankFailed: rank 1: {cause}")
    assert str(other.error).startswith(cause)
    assert Path(places[1], "manifest.json").read_text() == "{}"


def test_a_place_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        save_shares({}, tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        save_shares({}, tmp_path / "file" / "below")
    with pytest.raises(TypeError, match="fpfs takes a path, not int"):
        save_shares({}, 7)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="empty string"):
        save_shares({}, "")
    with pytest.raises(AttributeError):
        save_shares({"bad": lambda: None}, tmp_path / "new" / "deeper")
    assert os.listdir(tmp_path) == ["file"], "what was made is removed"
    with pytest.raises(IsADirectoryError, match="without a manifest.json: name a file, or"):
        client.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no complete checkpoint in"):
        client.load([tmp_path, tmp_path])
    with pytest.raises(ValueError, match="empty list"):
        client.load([])


def test_a_shared_directory(forks: Worlds, tmp_path: Path) -> None:
    forks.start(3, save_state, str(tmp_path), 1, 1).values()
    (place,) = directories(tmp_path, 1)
    assert same(client.load(place), numbered(1))
    assert same(client.load(place, into=numbered(0)), numbered(1))
    with pytest.raises(ValueError, match="fpfs-ctl gather"):
        client.load(place, mmap=True)


def test_a_save_that_another_one_overtakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has begun later, and ends first, is the newest."""
    save_shares(numbered(1), tmp_path)
    write = saving.SharesSave._write_manifest

    def be_overtaken(self: saving.SharesSave, content: bytes) -> None:
        monkeypatch.setattr(saving.SharesSave, "_write_manifest", write)
        monkeypatch.setattr(saving.SharesSave, "_remove_former", lambda self: others.append(self))
        save_shares(numbered(3), tmp_path)
        monkeypatch.setattr(saving.SharesSave, "_remove_former", remove)
        write(self, content)

    others: list[saving.SharesSave] = []
    remove = saving.SharesSave._remove_former
    monkeypatch.setattr(saving.SharesSave, "_write_manifest", be_overtaken)
    save_shares(numbered(2), tmp_path)
    assert same(client.load(tmp_path), numbered(3))
    remove(others[0])
    assert same(client.load(tmp_path), numbered(3))
    assert len(os.listdir(tmp_path)) == 2


def test_the_shares_of_the_manifest_that_is_there_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are no locks, an earlier checkpoint's may be written behind a later one's."""
    save_shares(numbered(1), tmp_path)
    earlier = (tmp_path / "manifest.json").read_bytes()
    remove = saving.SharesSave._remove_former

    def be_overwritten(self: saving.SharesSave) -> None:
        (tmp_path / "manifest.json").write_bytes(earlier)
        remove(self)

    monkeypatch.setattr(saving.SharesSave, "_remove_former", be_overwritten)
    save_shares(numbered(2), tmp_path)
    assert same(client.load(tmp_path), numbered(1))


def test_a_directory_that_cannot_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", unreadable)
    with pytest.raises(OSError, match="Input/output error"):
        save_shares(numbered(1), tmp_path / "new" / "deeper")
    assert os.listdir(tmp_path) == [], "what was made is removed"


def test_a_header_that_a_file_has_no_room_for(tmp_path: Path) -> None:
    save_shares(numbered(1), tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for header_bytes in (1 << 50, manifest["shares"][0]["bytes"] + 1, 7):
        manifest["shares"][0]["header_bytes"] = header_bytes
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(Damaged, match=f"manifest.json is no manifest .*, {header_bytes} are"):
            client.load(tmp_path)


def test_a_name_with_too_great_a_number_is_no_share(tmp_path: Path) -> None:
    """Or the next checkpoint would have a number that its manifest cannot have."""
    for number in (1 << 56, 10**30):
        (tmp_path / f"00000-of-00001.{number}-0123456789abcdef.share").touch()
    for step in (1, 2):
        save_shares(numbered(step), tmp_path)
        assert same(client.load(tmp_path), numbered(step))
    (tmp_path / f"00000-of-00001.{(1 << 56) - 1}-0123456789abcdef.share").touch()
    save_shares(numbered(3), tmp_path)
    assert same(client.load(tmp_path), numbered(3))


def test_a_manifest_without_shares_is_none(tmp_path: Path) -> None:
    save_shares(numbered(1), tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for change in ({"shares": []}, {"checkpoint": {"number": 1, "token": "a"}}, {"more": 1}):
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | change))
        with pytest.raises(Damaged, match="manifest.json is no manifest of a checkpoint"):
            client.load(tmp_path)
