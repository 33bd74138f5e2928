"""``fpfs-ctl plan``: a file's plan is the one that its state has."""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fpfs import client
from fpfs.cli import ctl
from tests.support.states import large_state

NO_ARCHIVE = "it is no archive of torch.save"
REMEDY = "name a checkpoint that torch 1.6 or later has written"


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert ctl.main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("writers", ["replica", "socket", "node", "device"])
def test_of_a_file_it_is_that_of_its_state(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, writers: Any
) -> None:
    state = large_state(seed=1)
    client.save(state, tmp_path / "state.pt")
    topology = client.Topology.regular(8, ranks_per_node=4, sockets_per_node=2, devices=3)
    expected = client.Plan.build(state, topology, writers=writers).to_dict()
    words = ["--ranks", "8", "--per-node", "4", "--sockets", "2", "--devices", "3"]
    found = planned(capsys, str(tmp_path / "state.pt"), *words, "--writers", writers)
    assert (found["file"], found["bytes"]) == (str(tmp_path / "state.pt"), expected["bytes"])
    assert found["tensors"] == len(state)
    for rank, other in zip(found["ranks"], expected["ranks"], strict=True):
        assert rank["ranges"] == [each[:2] for each in other["ranges"]]
        for name in ("rank", "node", "socket", "bytes"):
            assert rank[name] == other[name]
        assert sum(rank["device_bytes"].values()) == rank["bytes"]
    # Chunks go to the devices in turn.
    of_devices = [
        sum(rank["device_bytes"][str(each)] for rank in found["ranks"]) for each in range(3)
    ]
    assert max(of_devices) - min(of_devices) <= 1024**2


def test_shards(capsys: pytest.CaptureFixture[str]) -> None:
    """Four parts of each tensor, with two ranks each: each rank writes half of its part."""
    words = ["--simulate", "64M", "--tensors", "2", "--ranks", "8", "--shards", "4"]
    ranks = planned(capsys, *words)["ranks"]
    assert max(rank["bytes"] for rank in ranks) - min(rank["bytes"] for rank in ranks) < 2000
    # Rank 5 has what rank 1 has: of each tensor the second quarter. It writes of the second tensor.
    for rank, other in ((1, 5), (2, 6)):
        (first, count), (begin, _) = ranks[rank]["ranges"][0], ranks[other]["ranges"][0]
        assert count == 8 * 1024**2
        assert abs(begin - first - 32 * 1024**2) < 1024
    covered = sorted(tuple(each) for rank in ranks for each in rank["ranges"])
    at = 0
    for offset, count in covered:
        assert offset == at
        at += count


def test_one_rank_of_a_machine_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["plan", "--simulate", "1G", "--ranks", "4", "--writers", "node"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        "a simulated state: 1.00 GiB in 400 tensors: 1 of 4 ranks writes 1.00 GiB (node)"
    )


def test_many_ranks_are_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--simulate", "1G", "--ranks", "40"]
    assert ctl.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "a simulated state: 1.00 GiB in 400 tensors: 40 of 40 ranks write 25.0 MiB to 26.0 MiB each"
        " (replica)"
    )
    assert lines[-1] == "  and 24 more ranks: --all shows them"
    assert len(lines) == 2 + 16 + 1
    assert ctl.main([*words, "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 40


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "plan: no file is named; name one, or --simulate 14G"),
        (["{}/none.pt"], "plan of {}/none.pt: No such file or directory; name a checkpoint"),
        (["{}"], "plan of {}: this is no file; name a checkpoint"),
        (["{}/text"], f"plan of {{}}/text: {NO_ARCHIVE} (File is not a zip file); {REMEDY}"),
        (
            ["{}/legacy.pt"],
            f"plan of {{}}/legacy.pt: {NO_ARCHIVE} (File is not a zip file); {REMEDY}",
        ),
        (["{}/other.zip"], f"plan of {{}}/other.zip: {NO_ARCHIVE} (it has no data.pkl); {REMEDY}"),
        (["{}/small.zip"], f"plan of {{}}/small.zip: {NO_ARCHIVE} (it is compressed); {REMEDY}"),
        (
            ["--simulate", "1G", "--devices", "0"],
            "plan: devices of a topology is from 1 to 65536, not 0; see --help",
        ),
        (["{}/empty.pt"], "plan of {}/empty.pt: it has no tensors; name a checkpoint"),
        (
            ["{}/text", "--simulate", "1G"],
            "plan of {}/text: there is a file; leave --simulate out",
        ),
        (
            ["--simulate", "1G", "--writers", "all"],
            "plan: --writers is one of replica, socket, node, device, not all; see --help",
        ),
        (
            ["--simulate", "1G", "--shards", "3"],
            "plan --shards 3: 8 ranks cannot have as many of each part; take a divisor of --ranks",
        ),
        (
            ["--simulate", "1K", "--tensors", "2000"],
            "plan --tensors 2000: 1K is not enough for as many; take fewer, and 1 at least",
        ),
        (
            ["--simulate", "1G", "--per-node", "0"],
            "plan: ranks_per_node of a topology is from 1 to 1048576, not 0; see --help",
        ),
    ],
)
def test_what_cannot_be_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "text").write_text("no checkpoint")
    torch.save({"step": 1}, tmp_path / "empty.pt")
    state = {"weight": torch.ones(1000)}
    torch.save(state, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(state, tmp_path / "state.pt")
    with (
        zipfile.ZipFile(tmp_path / "state.pt") as archive,
        zipfile.ZipFile(tmp_path / "small.zip", "w", zipfile.ZIP_DEFLATED) as small,
        zipfile.ZipFile(tmp_path / "other.zip", "w") as other,
    ):
        for name in archive.namelist():
            small.writestr(name, archive.read(name))
        other.writestr("archive/data/0", b"x")
    folder = str(tmp_path)
    assert ctl.main(["plan", *(word.format(folder) for word in words), "--ranks", "8"]) == 1
    assert capsys.readouterr().err == f"fpfs-ctl: {said.replace('{}', folder)}\n"


def test_damaged_archives(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Whatever is wrong with the directory, it is one line, or a plan of bytes that are there."""
    state = {f"tensor{number}": torch.ones(50 * number) for number in range(8)}
    torch.save(state, tmp_path / "state.pt")
    whole = (tmp_path / "state.pt").read_bytes()
    chance = random.Random(1)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(whole) - 1200, len(whole))] = chance.randrange(256)
        (tmp_path / "damaged.pt").write_bytes(damaged)
        status = ctl.main(["plan", str(tmp_path / "damaged.pt"), "--ranks", "2", "--json"])
        said = capsys.readouterr()
        refused += status
        if status == 0:
            ranks = json.loads(said.out)["ranks"]
            assert sum(rank["bytes"] for rank in ranks) == len(whole)
            assert min(figure for rank in ranks for figure in rank["device_bytes"].values()) >= 0
        else:
            assert len(said.err.splitlines()) == 1
    assert refused > 10
