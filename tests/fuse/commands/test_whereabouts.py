"""Where a file is and whether it is safe: fpfs-ctl stat, ls and wait, attributes, Python."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import fpfs
from fpfs.core.protocol.reports import FileState, FileStatus, Status
from fpfs.testing.mounted import Mount, check_fpfs, run_fpfs
from tests.support.processes import REPOSITORY, run, run_program

pytestmark = pytest.mark.usefixtures("mount")  # only fpfs tells it

CTL = "fpfs.cli.ctl"
CHUNK = 1024 * 1024
ATTRIBUTES = {
    "durable", "state", "version", "acknowledged", "size_committed", "size_durable", "writers",
    "width", "chunk_bytes", "devices", "inline", "former_versions",
}  # fmt: skip


def told(path: Path) -> dict[str, Any]:
    """What ``fpfs-ctl stat --json`` tells of one file."""
    (found,) = json.loads(check_fpfs("stat", path, "--json", module=CTL))["files"]
    assert found["path"] == str(path)
    answer: dict[str, Any] = found
    return answer


def listed(*words: str | Path) -> list[list[str]]:
    """The lines of ``fpfs-ctl ls``, as words."""
    return [line.split() for line in check_fpfs("ls", *words, module=CTL).splitlines()]


def attribute(path: Path, name: str) -> str:
    """An attribute that fpfs makes up."""
    return os.getxattr(path, f"user.fpfs.{name}").decode()


def test_the_ranges_lie_where_they_are_said_to(mount: Mount, directory: Path) -> None:
    """The content is put together from the objects, without the filesystem."""
    content = os.urandom(5 * CHUNK + 12_345)
    path = directory / "file"
    path.write_bytes(content)
    with path.open("r+b") as stream:
        stream.seek(3 * CHUNK)
        stream.write(part := os.urandom(70_000))
    content = content[: 3 * CHUNK] + part + content[3 * CHUNK + len(part) :]
    check_fpfs("wait", path, module=CTL)
    found = told(path)
    devices = {device.number: device.path for device in mount.status().devices}
    put_together = bytearray(len(content))
    for each in found["where"]["runs"]:
        name = each["object"]
        place = Path(devices[each["device"]], "objects", name[-2:], name)
        with place.open("rb") as stream:
            stream.seek(each["object_offset_bytes"])
            piece = stream.read(each["size_bytes"])
        end = min(each["offset_bytes"] + len(piece), len(content))
        put_together[each["offset_bytes"] : end] = piece[: end - each["offset_bytes"]]
    assert bytes(put_together) == content
    assert found["where"]["blocks_with_checksum"] == -(-len(content) // 65536)
    assert found["where"]["blocks_without_checksum"] == 0
    assert found["status"]["width"] == len(devices)


def test_a_save_from_its_first_byte_to_durable(directory: Path) -> None:
    path = directory / "step.pt"
    path.write_bytes(b"before" * 10_000)
    check_fpfs("wait", path, module=CTL)
    before = told(path)["status"]
    assert (before["state"], before["durable"]) == ("durable", True)
    with path.open("wb") as stream:
        stream.write(b"now")
        stream.flush()
        during = told(path)["status"]
        assert (during["state"], during["writers"], during["durable"]) == ("writing", 1, False)
        assert (during["size_acknowledged"], during["size_durable"]) == (3, 0)
        assert (during["version"], during["size_committed"]) == (before["version"], 60_000)
        assert "being written by 1 handle" in check_fpfs("stat", path, module=CTL)
        assert run_fpfs("wait", path, "--timeout", "0.3", module=CTL).returncode == 1
    check_fpfs("wait", path, module=CTL)
    after = told(path)["status"]
    assert (after["state"], after["durable"], after["inline"]) == ("durable", True, True)
    assert (after["size_durable"], after["size_committed"]) == (3, 3)
    assert after["version"] > before["version"]


def test_a_listing_says_what_is_durable_and_in_which_version(directory: Path) -> None:
    (directory / "a.pt").write_bytes(b"x" * 100_000)
    (directory / "sub").mkdir()
    os.symlink("a.pt", directory / "link")
    (directory / ".hidden").touch()
    check_fpfs("wait", directory, module=CTL)
    version = attribute(directory / "a.pt", "version")
    with (directory / "log").open("wb") as stream:
        stream.write(b"line")
        stream.flush()
        head, *rows = listed(directory)
    assert head == "mode owner group size changed durable width version name".split()
    assert [row[-1] for row in rows] == ["a.pt", "a.pt", "log", "sub"], "the link shows its target"
    assert rows[0][0] == "-rw-r--r--"
    assert rows[0][-4:] == ["yes", "2", version, "a.pt"]
    assert rows[1][-6:] == ["yes", "-", "-", "link", "->", "a.pt"]
    assert rows[2][-4:-2] == ["open", "2"]
    assert ".hidden" in [row[-1] for row in listed("--all", directory)]
    assert [row[-1] for row in listed(directory / "a.pt")[1:]] == ["a.pt"]
    shown = json.loads(check_fpfs("ls", directory, "--json", module=CTL))["files"]
    assert [Path(each["path"]).name for each in shown] == ["a.pt", "link", "log", "sub"]
    assert shown[0]["status"]["version"] == int(version)


def test_a_directory_of_many_files_is_asked_for_in_pieces(directory: Path) -> None:
    for number in range(1100):
        (directory / f"{number:04}").touch()
    _head, *rows = listed(directory)
    assert len(rows) == 1100
    assert "?" not in {row[-4] for row in rows}


def test_waiting_for_a_directory_is_waiting_for_all_below(directory: Path) -> None:
    deep = directory / "run" / "shard"
    deep.mkdir(parents=True)
    outside = (directory / "outside").open("wb")
    inside = (deep / "0.pt").open("wb")
    with outside, inside:
        outside.write(b"x")
        outside.flush()
        inside.write(b"x" * 300_000)
        inside.flush()
        assert run_fpfs("wait", directory / "run", "--timeout", "0.3", module=CTL).returncode == 1
        closing = threading.Timer(0.3, inside.close)
        closing.start()
        check_fpfs("wait", directory / "run", module=CTL)
        closing.join()
        assert attribute(deep / "0.pt", "durable") == "1"
        assert attribute(directory / "outside", "state") == "writing"


def test_attributes_tell_the_same_and_are_not_listed(directory: Path) -> None:
    path = directory / "file.pt"
    path.write_bytes(b"x" * (2 * CHUNK))
    os.setxattr(path, "user.mine", b"kept")
    fpfs.wait_durable(path)
    status = told(path)["status"]
    found = {name: attribute(path, name) for name in ATTRIBUTES}
    assert found["devices"] == ",".join(map(str, status["devices"]))
    assert found["acknowledged"] == found["size_durable"] == str(2 * CHUNK)
    assert (found["durable"], found["state"], found["inline"]) == ("1", "durable", "0")
    for name in ("version", "width", "chunk_bytes", "size_committed", "former_versions"):
        assert found[name] == str(status[name])
    assert os.listxattr(path) == ["user.mine"]
    fpfs.wait_durable(directory)
    assert attribute(directory, "durable") == "1"
    for place, name in ((path, "nothing"), (directory, "width")):
        with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
            attribute(place, name)


def test_attributes_of_fpfs_cannot_be_set_or_removed(directory: Path) -> None:
    path = directory / "file"
    path.touch()
    for name in ("user.fpfs.durable", "user.fpfs.anything"):
        for change in (
            lambda name: os.setxattr(path, name, b"1"),
            lambda name: os.removexattr(path, name),
        ):
            with pytest.raises(PermissionError):
                change(name)
    os.setxattr(path, "user.fpfsx", b"somebody's own")
    assert os.listxattr(path) == ["user.fpfsx"]


def test_copies_take_only_stored_attributes_along(directory: Path) -> None:
    path = directory / "file"
    path.write_bytes(b"content")
    os.setxattr(path, "user.mine", b"kept")
    run("cp", "-a", path, directory / "copied")
    run("rsync", "-aX", path, directory / "synced")
    run("tar", "--xattrs", "-C", directory, "-cf", directory / "archive", "file")
    (directory / "out").mkdir()
    run("tar", "--xattrs", "-C", directory / "out", "-xf", directory / "archive")
    for copy in ("copied", "synced", "out/file"):
        assert os.listxattr(directory / copy) == ["user.mine"]
        assert os.getxattr(directory / copy, "user.mine") == b"kept"


def test_the_ranges_of_a_table_are_shortened(directory: Path) -> None:
    path = directory / "large"
    path.write_bytes(b"x" * (20 * CHUNK))
    check_fpfs("wait", path, module=CTL)
    shown = check_fpfs("stat", path, module=CTL)
    assert "and 4 more ranges: --runs shows all" in shown
    assert " 20971519 " not in shown
    assert " 20971519 " in check_fpfs("stat", "--runs", path, module=CTL)
    assert max(map(len, shown.splitlines())) <= max(80, len(str(path)))


def test_python_waits_and_tells(mount: Mount, directory: Path) -> None:
    path = directory / "file.pt"
    with path.open("wb") as stream:
        stream.write(b"x" * 100_000)
        stream.flush()
        during = fpfs.status(path)
        assert isinstance(during, FileStatus)
        assert during.state is FileState.WRITING
        with pytest.raises(TimeoutError, match="no answer within 0.2 s"):
            fpfs.wait_durable(path, timeout_s=0.2)
    fpfs.wait_durable(str(path))
    after = fpfs.status(str(path))
    assert isinstance(after, FileStatus)
    assert (after.state, after.size_durable) == (FileState.DURABLE, 100_000)
    fpfs.wait_durable(directory, timeout_s=60)
    whole = fpfs.status(mount.root)
    assert isinstance(whole, Status)
    assert whole.server_pid == mount.server_pid


def test_python_refuses_in_one_line(directory: Path, tmp_path: Path) -> None:
    for path in (directory / "missing", tmp_path):
        for ask in (fpfs.wait_durable, fpfs.status):
            with pytest.raises(fpfs.Refused) as refused:
                ask(path)
            assert "\n" not in str(refused.value)


def test_importing_the_package_imports_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import fpfs; "
        "print(sorted({name.split('.')[0] for name in set(sys.modules) - before}), end=' '); "
        "fpfs.wait_durable, fpfs.status, fpfs.NotKept, fpfs.TimedOut, fpfs.Refused; "
        "print('torch' in sys.modules, 'fpfs._native' in sys.modules)"
    )
    said = run(sys.executable, "-c", code)
    imported, *heavy = said.rsplit(maxsplit=2)
    assert heavy == ["False", "False"]
    assert "msgspec" not in imported
    assert set(fpfs.__all__) <= set(dir(fpfs))
    with pytest.raises(AttributeError):
        fpfs.nothing  # noqa: B018


def test_without_torch_it_says_what_to_install() -> None:
    code = """if True:
        import sys, fpfs
        sys.modules["torch"] = None
        try:
            fpfs.save
        except ImportError as error:
            print(error)
    """
    said = "fpfs.save needs torch: pip install '.[torch]' in a clone of fpfs\n"
    assert run(sys.executable, "-c", code) == said


def test_the_example_runs(directory: Path) -> None:
    program = REPOSITORY / "examples" / "wait_until_durable.py"
    said = run_program(program, directory / "step1.pt")
    assert said.splitlines()[-1].startswith(f"{directory / 'step1.pt'}: durable, version ")
    assert (directory / "step1.pt").stat().st_size > 0


def test_a_file_that_is_replaced_all_the_time_is_told_of_all_the_same(directory: Path) -> None:
    path = directory / "file"
    path.write_bytes(b"x" * CHUNK)
    ended = threading.Event()

    def replace() -> None:
        while not ended.is_set():
            path.write_bytes(os.urandom(CHUNK))

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        versions = [told(path)["status"]["version"] for _ in range(5)]
    finally:
        ended.set()
        thread.join()
    assert versions == sorted(versions)
