"""What survives power loss before the next step of a save: the order of its system calls."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from fpfs import client
from fpfs.client import AsyncSaver, async_saving, planning, replacement
from fpfs.client.peers import RankFailed
from fpfs.client.replacement import Replacement
from fpfs.client.shares.format import MANIFEST
from tests.support.failures.calls import tell_steps, told_steps
from tests.support.ranks import Worlds
from tests.support.states import numbered, same, save_state


def save_shares_and_tell(root: str, log: str) -> None:
    """As a rank: save as on fpfs, where what nobody asks for is not flushed."""
    patch = pytest.MonkeyPatch()
    patch.setattr(replacement, "is_on_fpfs", lambda _: True)
    tell_steps(Path(log), patch)
    save_state(root, nodes=2, step=2, copies=2)


def test_shares_and_copies_are_durable_before_a_manifest_names_them(
    forks: Worlds, tmp_path: Path
) -> None:
    """And the manifest before former shares go; each node does so in its own directory."""
    root, log = tmp_path / "root", tmp_path / "log"
    forks.start(2, save_state, root, 2, 1, 2).values()
    forks.start(2, save_shares_and_tell, root, log).values()
    steps = [step.partition("-of-")[0] for step in told_steps(log, root)]

    def made(node: int, name: str) -> list[str]:
        place = f"node{node}/step7"
        return [f"flush {place}/{name}", f"name {place}/{name}", f"flush {place}"]

    for node, names in enumerate([("00000", "00001"), ("00001", "00000")]):
        expected = [step for name in (*names, "manifest.json") for step in made(node, name)]
        own = [step for step in steps if f" node{node}/" in step]
        assert own[:9] == expected
        assert sorted(own[9:]) == [f"remove node{node}/step7/{name}" for name in sorted(names)]
    shares = 2 * 2 * 3
    assert not any("manifest.json" in step for step in steps[:shares])
    assert steps[shares : shares + 3] == made(0, "manifest.json")


def test_directories_are_durable_before_shares_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_steps(tmp_path / "log", monkeypatch)
    client.save_shares(numbered(1), tmp_path / "new" / "deeper")
    steps = told_steps(tmp_path / "log", tmp_path)
    assert steps[:2] == ["flush new", "flush ."]


UNSEEN = """
import os, sys
from fpfs.client.paths import make_directories

os.chdir(sys.argv[1])
os.setresuid(54321, 54321, 54321)
make_directories("new/deeper")
"""


@pytest.mark.root
def test_a_working_directory_that_cannot_be_looked_at(tmp_path: Path) -> None:
    """As on a mount that nobody serves any more."""
    tmp_path.chmod(0)
    words = [sys.executable, "-c", UNSEEN, str(tmp_path)]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.stderr.endswith("PermissionError: [Errno 13] Permission denied: 'new'\n")
    assert os.listdir(tmp_path) == []


def save_and_tell(path: str, log: str) -> None:
    """As a rank: save one file. Rank 1 writes of it, too."""
    planning.CHUNK_BYTES_DEFAULT = 1 << 16  # type: ignore[attr-defined]
    assert dist.get_world_size() == 2
    tell_steps(Path(log), pytest.MonkeyPatch())
    client.save(numbered(1), path)


def test_each_rank_flushes_what_it_has_written(forks: Worlds, tmp_path: Path) -> None:
    """Elsewhere than on fpfs, before the file has its name, whether it is to be durable or not."""
    log = tmp_path / "log"
    forks.start(2, save_and_tell, tmp_path / "state.pt", log).values()
    assert told_steps(log, tmp_path) == ["flush state.pt"] * 2 + ["name state.pt"]


def save_what_cannot_be_durable(path: str, call: str) -> list[str]:
    """As a rank: rank 0's disk fails when the checkpoint has its name; what is raised, and logged.

    What else has names before, shares, is durable.
    """
    flush_name, said = Replacement.flush_name, list[str]()

    def fail(self: Replacement) -> None:
        if os.path.basename(self.path) in ("state.pt", MANIFEST):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush_name(self)

    def note(message: str, *arguments: object) -> None:
        said.append(message % arguments)

    saver = AsyncSaver()
    with (
        mock.patch.object(Replacement, "flush_name", fail),
        mock.patch.object(async_saving.logger, "error", note),
        pytest.raises((OSError, RankFailed)) as raised,
    ):
        if call == "save":
            client.save(numbered(2), path, durable=True)
        elif call == "save_shares":
            client.save_shares(numbered(2), path)
        else:
            getattr(saver, call.removeprefix("beside: "))(numbered(2), path)
            saver.wait()
    return [str(raised.value), *said]


@pytest.mark.parametrize("call", ["save", "save_shares", "beside: save_shares"])
def test_a_name_that_cannot_be_made_durable(forks: Worlds, path: Path, call: str) -> None:
    """The error says that it is there."""
    own, others = forks.start(2, save_what_cannot_be_durable, path, call).values()
    lost = "saved, but may not survive power loss"
    assert own[0].startswith(f"[Errno 5] {lost}: Input/output error: '{path}")
    assert others[0].startswith("rank 0: ")
    assert f"{lost}: Input/output error" in others[0]
    for logged in (own[1:], others[1:]):
        assert len(logged) == (call == "beside: save_shares")
        assert all(line.startswith(f"{path} was {lost}: ") for line in logged)
    assert same(client.load(path), numbered(2))


def test_one_file_whose_name_cannot_be_made_durable(tmp_path: Path) -> None:
    """As the metadata of torch.distributed.checkpoint, or what `gather` makes."""
    failure = OSError(errno.EIO, os.strerror(errno.EIO))
    with (
        mock.patch.object(Replacement, "flush_name", side_effect=failure),
        pytest.raises(OSError, match="saved, but may not survive power loss: Input/output error"),
        Replacement(str(tmp_path / "name")) as replaced,
    ):
        replaced.commit(durable=True)
    assert (tmp_path / "name").exists()
