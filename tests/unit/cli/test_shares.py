"""``fpfs-ctl gather`` and ``verify``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fpfs.cli import ctl
from fpfs.client.shares import reading
from fpfs.client.shares.format import Manifest
from fpfs.client.shares.saving import save_shares
from tests.support.processes import REPOSITORY, run
from tests.support.ranks import Worlds
from tests.support.states import directories, numbered, same, save_state


@pytest.fixture
def saved(forks: Worlds, tmp_path: Path) -> list[str]:
    """The directories of two nodes with a checkpoint."""
    forks.start(2, save_state, str(tmp_path), 2, 1).values()
    return directories(tmp_path, 2)


def printed(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> Any:
    assert ctl.main([*words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "words",
    [["verify", "/a"], ["gather", "/a", "-o", "/b"], ["plan", "--simulate", "1G", "--ranks", "2"]],
)
def test_numpy_is_enough(words: list[str]) -> None:
    """It is what a line names where it is missing, and not torch, which is far larger."""
    code = f"""if True:
        import sys
        sys.modules["numpy"] = None
        from fpfs.cli import ctl
        sys.exit(ctl.main({words}))
    """
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        1,
        f"fpfs-ctl: {words[0]}: numpy is missing; pip install numpy in the environment of fpfs\n",
    )


def test_gather(capsys: pytest.CaptureFixture[str], saved: list[str], tmp_path: Path) -> None:
    path = tmp_path / "gathered.pt"
    found = printed(capsys, "gather", *saved, "-o", str(path))
    assert found == {"file": str(path), "bytes": path.stat().st_size}
    assert same(torch.load(path), numbered(1))
    assert ctl.main(["gather", *saved, "--output", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: 1.15 MiB\n"


def test_verify(capsys: pytest.CaptureFixture[str], saved: list[str]) -> None:
    found = printed(capsys, "verify", *saved)
    assert (found["whole"], found["ranks"], len(found["shares"])) == (True, 2, 2)
    for number, (place, share) in enumerate(zip(saved, found["shares"], strict=True)):
        path = Path(share["path"])
        assert (share["share"], share["problem"]) == (number, None)
        assert (str(path.parent), path.stat().st_size) == (place, share["bytes"])
    Path(found["shares"][1]["path"]).unlink()
    lost = printed(capsys, "verify", *saved, status=1)
    assert not lost["whole"]
    assert lost["shares"][1]["problem"] == "is in no directory"
    assert ctl.main(["verify", *saved]) == 1
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[1].endswith("is well")
    assert lines[2].endswith("is in no directory")
    assert lines[3] == f"checkpoint {lost['checkpoint']}: 1.15 MiB, NOT WHOLE"


def test_verify_counts_copies(
    capsys: pytest.CaptureFixture[str], forks: Worlds, tmp_path: Path
) -> None:
    forks.start(2, save_state, str(tmp_path), 2, 1, 2).values()
    places = directories(tmp_path, 2)

    def verified(*places: str, status: int = 0) -> tuple[list[Any], str]:
        report = printed(capsys, "verify", *places, status=status)
        assert ctl.main(["verify", *places]) == status
        last = capsys.readouterr().out.splitlines()[-1]
        return [report[key] for key in ("copies", "copies_lost", "whole")], last.split("MiB, ")[1]

    assert verified(*places) == ([2, 0, True], "whole")
    assert verified(places[1]) == ([2, 2, True], "whole, COPIES LOST: 2 of 4")
    first, second = sorted(Path(places[0]).glob("*.share"))
    first.unlink()
    assert verified(*places) == ([2, 1, True], "whole, COPIES LOST: 1 of 4")
    with second.open("r+b") as file:
        file.truncate(100)
    assert verified(*places, status=1) == ([2, 2, True], "whole, COPIES LOST: 2 of 4")
    assert verified(places[0], status=1) == ([2, 4, False], "NOT WHOLE, COPIES LOST: 4 of 4")


def test_verify_of_what_is_replaced_meanwhile(
    capsys: pytest.CaptureFixture[str], saved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its manifest is read: its shares are gone, and another's are there."""
    newest_manifest = reading.newest_manifest

    def replace(directories: Sequence[str]) -> Manifest:
        monkeypatch.undo()
        found = newest_manifest(directories)
        save_shares(numbered(2), saved[0])
        return found

    monkeypatch.setattr(reading, "newest_manifest", replace)
    found = printed(capsys, "verify", saved[0])
    assert found["checkpoint"].startswith("2-")
    assert [share["problem"] for share in found["shares"]] == [None]


@pytest.mark.parametrize(
    "command", [["gather", "-o", "out.pt"], ["verify"]], ids=["gather", "verify"]
)
def test_what_cannot_be(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    name = command[0]
    for words, wrong in (
        ([""], "the directory is an empty string"),
        (["s3://a"], "s3://a is not on a filesystem of this machine"),
        ([str(tmp_path)], f"there is no complete checkpoint in {tmp_path}"),
        ([str(tmp_path / "none")], f"there is no complete checkpoint in {tmp_path / 'none'}"),
    ):
        assert ctl.main([*command, *words]) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"fpfs-ctl: {name}: {wrong}")
        assert said.count("\n") == 1
    (tmp_path / "manifest.json").write_text("{}")
    assert ctl.main([*command, "."]) == 1
    assert "manifest.json is no manifest of a checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.root
@pytest.mark.parametrize(
    ("output", "named", "wrong"),
    [
        ("none/out.pt", "none", "No such file or directory"),
        ("full", "full", "Is a directory"),
        ("out.pt/", "out.pt/", "Is a directory"),
        ("full/out.pt", "full/out.pt", "No space left on device"),
    ],
    ids=["no directory", "a directory", "named as a directory", "no room"],
)
def test_an_output_that_cannot_be(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    saved: list[str],
    output: str,
    named: str,
    wrong: str,
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=64K", "tmpfs", full)
    try:
        assert ctl.main(["gather", *saved, "-o", f"{tmp_path}/{output}"]) == 1
        assert not list(full.iterdir())
    finally:
        run("umount", full)
    said = capsys.readouterr().err
    assert said.startswith(f"fpfs-ctl: gather: {tmp_path}/{named}: ")
    assert said.endswith(
        f"{wrong}; have the output in a directory that is there, is yours, and has room\n"
    )
