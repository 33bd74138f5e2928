"""A writer that is killed does not replace a good checkpoint: what it left goes to .fpfs/partial.

Invariants:
  * What a test has quarantined it also removes, so that each finds an empty folder.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from fpfs.core.temporary_names import make_temporary
from fpfs.testing.mounted import Mount, check_fpfs, mounted, run_fpfs
from tests.support.contents import assert_same, random_bytes
from tests.support.failures.crash import crash_and_mount
from tests.support.processes import KILLED, expect_line, python_child, tell

CTL = "fpfs.cli.ctl"
GOOD = random_bytes(3 * 2**20 + 17, seed=1)
TORN = random_bytes(2 * 2**20 + 5, seed=2)
BLOCK = 64 * 1024
SMALL = b"a small content, which the catalog holds\n"


# What writers begin with: the file and what they write.
START = """
import os, signal, sys, threading
path, source = sys.argv[1], open(sys.argv[2], "rb").read()
def done(word="ready"):
    os.write(1, f"{word}\\n".encode())  # in one piece, whoever else writes
def wait():
    assert sys.stdin.readline() == "go\\n"
"""

OVERWRITES = (
    START
    + """
fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
os.write(fd, source)
done()
signal.pause()
"""
)


WRITES_IN_PLACE = (
    START
    + """
fd = os.open(path, os.O_RDWR)
os.write(fd, source)
done()
signal.pause()
"""
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """What writers read before they are killed."""
    path = tmp_path / "source"
    path.write_bytes(TORN)
    return path


@pytest.fixture
def quarantine(mount: Mount) -> Iterator[Path]:
    """The folder of what was quarantined."""
    mount.allow_log(KILLED)
    folder = mount.root / ".fpfs/partial"
    assert not list(folder.iterdir())
    yield folder
    for path in folder.iterdir():
        path.unlink()


def kill_in_the_middle(
    path: Path, source: Path, code: str = OVERWRITES, number: int = signal.SIGKILL
) -> None:
    """Let a writer say that it is in the middle, and end it by a signal."""
    with python_child(code, path, source) as child:
        expect_line(child, "ready")
        child.send_signal(number)
        assert child.wait() == -number


def the_only(folder: Path) -> Path:
    """The one file of a folder."""
    (found,) = folder.iterdir()
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT])
def test_the_checkpoint_before_stays(
    mount: Mount, quarantine: Path, directory: Path, source: Path, number: int
) -> None:
    path = directory / "step.pt"
    path.write_bytes(GOOD)
    os.chmod(path, 0o604)
    before = path.stat()
    kill_in_the_middle(path, source, number=number)
    mount.flush()
    assert_same(path.read_bytes(), GOOD)
    after = path.stat()
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (
        before.st_ino,
        before.st_mode,
        before.st_mtime_ns,
    )
    torn = the_only(quarantine)
    assert_same(torn.read_bytes(), TORN)
    assert re.fullmatch(r"step\.pt\.\d{8}T\d{6}Z\.\d+", torn.name)
    assert torn.stat().st_mode == before.st_mode
    name = signal.Signals(number).name
    mount.expect_log(rf"step\.pt was cut off by {name}: what it wrote, {len(TORN)} bytes")


@pytest.mark.parametrize("suffix", ["pt", "pth", "ckpt", "bin", "safetensors", "distcp"])
def test_a_new_checkpoint_that_was_never_finished_is_none(
    mount: Mount, quarantine: Path, directory: Path, source: Path, suffix: str
) -> None:
    path = directory / f"step.{suffix}"
    kill_in_the_middle(path, source)
    mount.flush()
    assert os.listdir(directory) == []
    # The kernel learns soon that the name is gone; at once who opens it.
    with pytest.raises(FileNotFoundError):
        path.read_bytes()
    assert not path.exists()
    assert_same(the_only(quarantine).read_bytes(), TORN)
    assert the_only(quarantine).stat().st_nlink == 1
    path.write_bytes(GOOD)
    assert_same(path.read_bytes(), GOOD)


def test_a_name_that_is_no_text(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    """It is told with escapes: in the log, and by the tools."""
    kill_in_the_middle(directory / os.fsdecode(b"\xff\n\x1b[bold].pt"), source)
    mount.flush()
    told = [line for line in mount.log_text().splitlines() if "[bold].pt" in line]
    assert len(told) == 1
    assert "/\\xff\\x0a\\x1b[bold].pt was cut off by SIGKILL" in told[0]
    assert_same(the_only(quarantine).read_bytes(), TORN)
    shown = run_fpfs("status", mount.root, module="fpfs.cli.ctl").stdout
    assert "/\\xff\\x0a\\x1b[bold].pt (SIGKILL, " in shown


@pytest.mark.parametrize("good", [GOOD, SMALL])
@pytest.mark.parametrize("torn", [TORN, b"less"])
def test_small_and_large_contents(
    mount: Mount, quarantine: Path, directory: Path, source: Path, good: bytes, torn: bytes
) -> None:
    path = directory / "step.pt"
    path.write_bytes(good)
    source.write_bytes(torn)
    kill_in_the_middle(path, source)
    mount.flush()
    assert path.read_bytes() == good
    assert the_only(quarantine).read_bytes() == torn


@pytest.mark.parametrize("good", [GOOD, SMALL, None])
def test_a_writer_killed_before_its_first_byte(
    mount: Mount, quarantine: Path, directory: Path, source: Path, good: bytes | None
) -> None:
    path = directory / "step.pt"
    if good is not None:
        path.write_bytes(good)
    source.write_bytes(b"")
    kill_in_the_middle(path, source)
    mount.flush()
    if good is None:
        assert os.listdir(directory) == []
    else:
        assert path.read_bytes() == good
    assert the_only(quarantine).read_bytes() == b""


def test_other_names_follow_posix(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    path = directory / "train.log"
    path.write_bytes(GOOD)
    kill_in_the_middle(path, source)
    mount.flush()
    assert_same(path.read_bytes(), TORN)
    assert list(quarantine.iterdir()) == []


@pytest.mark.parametrize(
    "end",
    ["os._exit(9)", "sys.exit(137)", "os.close(fd); os.kill(os.getpid(), 9)"],
)
@pytest.mark.parametrize("threads", [0, 3])
def test_who_ends_or_closes_by_himself_is_not_killed(
    mount: Mount, quarantine: Path, directory: Path, source: Path, end: str, threads: int
) -> None:
    path = directory / "step.pt"
    path.write_bytes(GOOD)
    code = f"""{START}
for _ in range({threads}):
    threading.Thread(target=signal.pause, daemon=True).start()
fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
os.write(fd, source)
{end}
"""
    with python_child(code, path, source) as child:
        child.wait()
    mount.flush()
    assert_same(path.read_bytes(), TORN)
    assert list(quarantine.iterdir()) == []


def test_the_writer_s_threads_die_with_it(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    path = directory / "step.pt"
    path.write_bytes(GOOD)
    code = f"""{START}
fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
threads = [threading.Thread(target=os.write, args=(fd, source)) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
for _ in range(4): threading.Thread(target=signal.pause, daemon=True).start()
done()
signal.pause()
"""
    kill_in_the_middle(path, source, code)
    mount.flush()
    assert_same(path.read_bytes(), GOOD)
    assert_same(the_only(quarantine).read_bytes(), TORN * 4)


FORKS = (
    START
    + """
fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
os.write(fd, source)
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    done("child")
    wait()
    os._exit(0)
"""
)


def test_a_child_that_holds_the_file_does_not_finish_it(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    """A data loader's worker inherits the descriptor; it outlives its killed parent."""
    path = directory / "step.pt"
    path.write_bytes(GOOD)
    with python_child(f"{FORKS}\ndone('parent')\nsignal.pause()", path, source) as writer:
        assert writer.stdout is not None
        assert {writer.stdout.readline(), writer.stdout.readline()} == {"child\n", "parent\n"}
        writer.kill()
        writer.wait()
        tell(writer, "go")
        assert writer.stdout.readline() == ""  # the child has ended
        mount.flush()
        assert_same(path.read_bytes(), GOOD)
        assert_same(the_only(quarantine).read_bytes(), TORN)


def test_a_killed_child_that_wrote_nothing_spoils_nothing(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    path = directory / "step.pt"
    path.write_bytes(GOOD)
    code = f"""{FORKS}
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
os.close(fd)
done("parent")
"""
    with python_child(code, path, source) as writer:
        writer.wait()
    mount.flush()
    assert_same(path.read_bytes(), TORN)
    assert list(quarantine.iterdir()) == []


def test_what_was_synced_is_current(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    path = directory / "step.pt"
    path.write_bytes(GOOD)
    code = f"""{START}
fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
os.write(fd, source)
os.fsync(fd)
os.write(fd, source)
os.pwrite(fd, b"torn", 70_000)
done()
signal.pause()
"""
    kill_in_the_middle(path, source, code)
    mount.flush()
    assert_same(path.read_bytes(), TORN)
    expected = bytearray(TORN * 2)
    expected[70_000:70_004] = b"torn"
    assert_same(the_only(quarantine).read_bytes(), bytes(expected))


# In one go, so that blocks of both contents lie in one object.
IN_PLACE = f"""{START}
fd = os.open(path, os.O_RDWR | os.O_CREAT)
os.write(fd, open(sys.argv[2] + "-good", "rb").read())
os.fsync(fd)
os.pwrite(fd, source[:100_000], 500_000)
os.pwrite(fd, source, 3_000_000)
done()
signal.pause()
"""


def in_place() -> bytes:
    """What IN_PLACE makes of GOOD."""
    expected = bytearray(GOOD.ljust(3_000_000 + len(TORN), b"\0"))
    expected[500_000:600_000] = TORN[:100_000]
    expected[3_000_000:] = TORN
    return bytes(expected)


def change_as_the_server_dies(mount: Mount, path: Path) -> None:
    """Change the first bytes of a file to what they are, with a server that dies before it commits.

    The next one gives back what lies behind the file's last byte in its objects.
    """
    mount.allow_log("server .* died|took over|removed .* objects")
    with path.open("r+b", buffering=0) as opened:
        opened.write(GOOD[:100])
        mount.kill(mount.status().server_pid)
        os.listdir(mount.root)  # waits for the next server
        mount.note_processes()


@pytest.mark.parametrize("first", ["good", "torn"])
@pytest.mark.parametrize("server_dies", [False, True])
def test_a_rewrite_in_place_shares_blocks_that_stay(
    tmp_path: Path, source: Path, first: str, server_dies: bool
) -> None:
    """Both contents are in the same objects; each outlives the other, and then all space goes."""
    with mounted(devices=2) as mount:
        mount.allow_log(KILLED)
        path = mount.root / "step.pt"
        Path(f"{source}-good").write_bytes(GOOD)
        kill_in_the_middle(path, source, IN_PLACE)
        mount.flush()
        torn = the_only(mount.root / ".fpfs/partial")
        for _ in range(2):
            check_fpfs("fsck", mount.root)  # which counts what both take
            assert_same(path.read_bytes(), GOOD)
            assert_same(torn.read_bytes(), in_place())
            if server_dies:
                change_as_the_server_dies(mount, path)
            mount.remount()
        gone, kept = (path, torn) if first == "good" else (torn, path)
        gone.unlink()
        mount.flush()
        check_fpfs("fsck", mount.root)
        assert_same(kept.read_bytes(), GOOD if kept == path else in_place())
        kept.write_bytes(b"")
        mount.flush()
        assert mount.stored_bytes() == 0


@pytest.mark.parametrize("written_bytes", [3 * 2**20, 6 * 2**20])
def test_what_is_written_to_allocated_blocks_is_not_overwritten(
    source: Path, written_bytes: int
) -> None:
    """The file keeps its committed content, and not the blocks that the killed writer filled."""
    torn, last = (random_bytes(6 * 2**20, seed=seed) for seed in (3, 4))
    source.write_bytes(torn[:written_bytes])
    with mounted(devices=2) as mount:
        mount.allow_log(KILLED)
        path = mount.root / "step.pt"
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, len(torn))
        kill_in_the_middle(path, source, code=WRITES_IN_PLACE)
        mount.flush()
        check_fpfs("fsck", mount.root)
        assert path.read_bytes() == bytes(len(torn))
        quarantined = the_only(mount.root / ".fpfs/partial")
        assert_same(quarantined.read_bytes(), torn[:written_bytes].ljust(len(torn), b"\0"))
        assert quarantined.stat().st_blocks * 512 == written_bytes
        left = path.stat().st_blocks * 512
        assert len(torn) - written_bytes <= left < len(torn) - written_bytes + BLOCK
        with path.open("r+b") as file:
            file.write(last)
        mount.remount()
        check_fpfs("fsck", mount.root)
        assert_same(path.read_bytes(), last)
        assert_same(quarantined.read_bytes(), torn[:written_bytes].ljust(len(torn), b"\0"))
        with quarantined.open("r+b") as file:
            file.write(torn)
        mount.flush()
        check_fpfs("device", "drain", mount.root, "0", module=CTL)
        mount.remount()
        assert_same(path.read_bytes(), last)
        path.unlink()
        assert_same(quarantined.read_bytes(), torn)
        quarantined.unlink()
        mount.flush()
        assert mount.stored_bytes() == 0


def test_a_quarantined_save_can_be_taken(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    path = directory / "step.pt"
    path.write_bytes(GOOD)
    kill_in_the_middle(path, source)
    mount.flush()
    os.rename(the_only(quarantine), path)
    assert_same(path.read_bytes(), TORN)
    with path.open("r+b") as changed:
        changed.write(b"mine")
    mount.flush()
    assert_same(path.read_bytes(), b"mine" + TORN[4:])
    assert mount.status().quarantined == ()


def test_the_last_one_of_a_path_is_kept(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    path, other = directory / "step.pt", directory / "other.pt"
    path.write_bytes(GOOD)
    for turn in range(3):
        source.write_bytes(TORN[turn:])
        kill_in_the_middle(path, source)
        mount.flush()
        assert_same(the_only(quarantine).read_bytes(), TORN[turn:])
    for turn in range(2):
        # As fpfs.save writes it: for the same path.
        temporary = directory / os.fsdecode(make_temporary(b"step.pt"))
        source.write_bytes(TORN[turn:])
        kill_in_the_middle(temporary, source)
        mount.flush()
        assert the_only(quarantine).name.startswith("step.pt.")
        assert_same(the_only(quarantine).read_bytes(), TORN[turn:])
        assert os.listdir(directory) == ["step.pt"]
    kill_in_the_middle(other, source)
    mount.flush()
    assert len(list(quarantine.iterdir())) == 2
    found = mount.status().quarantined
    assert [(p.path, p.killed_by) for p in found] == [
        (f"{directory.name}/step.pt", "SIGKILL"),
        (f"{directory.name}/other.pt", "SIGKILL"),
    ]
    assert {p.name for p in found} == set(os.listdir(quarantine))


def test_who_opens_it_next_finds_what_was_before(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    path = directory / "step.pt"
    for turn in range(20):
        path.write_bytes(GOOD)
        kill_in_the_middle(path, source)
        with path.open("r+b") as opened:
            assert_same(opened.read(), GOOD)
            opened.seek(0)
            opened.write(b"%04d" % turn)
        assert_same(path.read_bytes(), b"%04d" % turn + GOOD[4:])
    mount.flush()
    assert_same(the_only(quarantine).read_bytes(), TORN)


def test_hard_links_show_the_same(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    """The content is that of all names; one of them that is to be whole is enough."""
    path, link = directory / "step.pt", directory / "latest"
    path.write_bytes(GOOD)
    os.link(path, link)
    kill_in_the_middle(link, source)
    mount.flush()
    assert_same(path.read_bytes(), GOOD)
    assert_same(link.read_bytes(), GOOD)
    assert path.stat().st_nlink == 2
    assert_same(the_only(quarantine).read_bytes(), TORN)


def test_readers_come_to_see_what_was_before(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    path = directory / "step.pt"
    path.write_bytes(GOOD)
    with path.open("rb") as reader:
        assert_same(reader.read(), GOOD)
        kill_in_the_middle(path, source)
        mount.flush()
        reader.seek(0)
        assert_same(reader.read(), GOOD)
        assert os.fstat(reader.fileno()).st_size == len(GOOD)


def test_extended_attributes_are_those_of_both(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    path = directory / "step.pt"
    path.write_bytes(GOOD)
    os.setxattr(path, "user.step", b"100")
    kill_in_the_middle(path, source)
    mount.flush()
    assert os.getxattr(path, "user.step") == b"100"
    assert os.getxattr(the_only(quarantine), "user.step") == b"100"


def test_after_a_crash_and_a_remount(source: Path) -> None:
    with mounted() as mount:
        mount.allow_log(KILLED)
        path = mount.root / "step.pt"
        path.write_bytes(GOOD)
        kill_in_the_middle(path, source)
        mount.flush()
        for again in (mount.remount, lambda: crash_and_mount(mount)):
            again()
            assert_same(path.read_bytes(), GOOD)
            assert_same(the_only(mount.root / ".fpfs/partial").read_bytes(), TORN)
            assert [p.path for p in mount.status().quarantined] == ["step.pt"]


def test_names_can_be_chosen(source: Path) -> None:
    with mounted(options=["whole=*.model:best-*"]) as mount:
        mount.allow_log(KILLED)
        names = ["a.model", "best-1", "a.pt"]
        for name in names:
            (mount.root / name).write_bytes(GOOD)
            kill_in_the_middle(mount.root / name, source)
        mount.flush()
        found = [(mount.root / name).read_bytes() for name in names]
        assert found == [GOOD, GOOD, TORN]
    with mounted(options=["whole=none"]) as mount:
        kill_in_the_middle(mount.root / "a.pt", source)
        mount.flush()
        assert_same((mount.root / "a.pt").read_bytes(), TORN)


def test_the_folder_itself(mount: Mount, quarantine: Path) -> None:
    root = mount.root
    own = root / ".fpfs"
    assert ".fpfs" not in os.listdir(root)
    assert sorted(os.listdir(own)) == ["partial", "uncommitted", "versions"]
    assert stat.S_IMODE(quarantine.stat().st_mode) == 0o1777
    for attempt in (
        lambda: own.rename(root / "other"),
        lambda: (own / "partial").rename(root / "other"),
        lambda: (own / "partial").rmdir(),
        lambda: (own / "new").mkdir(),
        lambda: (own / "new").write_bytes(b""),
        lambda: (own / "new").symlink_to("x"),
    ):
        with pytest.raises(PermissionError) as refused:
            attempt()
        assert refused.value.errno == errno.EPERM
    with pytest.raises(OSError, match="not empty"):
        own.rmdir()
    with pytest.raises(FileExistsError):
        own.mkdir()


def test_who_makes_it_next_makes_a_new_file(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    """The kernel still knows the name that was removed behind its back."""
    path = directory / "step.pt"
    for turn in range(30):
        kill_in_the_middle(path, source)
        content = b"%04d" % turn + GOOD
        with path.open("wb") as opened:
            opened.write(content)
        assert_same(path.read_bytes(), content)
        path.unlink()
    mount.flush()
    assert_same(the_only(quarantine).read_bytes(), TORN)


def test_who_syncs_it_next_is_no_killed_writer(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    path = directory / "step.pt"
    path.write_bytes(GOOD)
    kill_in_the_middle(path, source)
    with path.open("r+b", buffering=0) as opened:
        opened.write(b"mine")
        os.fsync(opened.fileno())
        assert_same(path.read_bytes(), b"mine" + GOOD[4:])
        opened.write(b"more")
    mount.flush()
    assert_same(path.read_bytes(), b"minemore" + GOOD[8:])
    assert_same(the_only(quarantine).read_bytes(), TORN)


def test_who_reads_or_cuts_it_next_finds_none(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    path = directory / "step.pt"
    for _ in range(10):
        kill_in_the_middle(path, source)
        with pytest.raises(FileNotFoundError):
            path.read_bytes()
        kill_in_the_middle(path, source)
        with pytest.raises(FileNotFoundError):
            os.truncate(path, 1)
    mount.flush()
    assert_same(the_only(quarantine).read_bytes(), TORN)


def test_who_reads_it_next_finds_what_was_before(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    path = directory / "step.pt"
    path.write_bytes(GOOD)
    for _ in range(20):
        kill_in_the_middle(path, source)
        assert_same(path.read_bytes(), GOOD)
    mount.flush()


def test_an_empty_file_that_was_closed_is_a_file(
    mount: Mount, quarantine: Path, directory: Path, source: Path
) -> None:
    """Also when it is made in two steps, or only synced."""
    path = directory / "step.pt"
    for make in (Path.touch, lambda path: os.mknod(path, stat.S_IFREG | 0o600)):
        make(path)
        kill_in_the_middle(path, source)
        assert path.read_bytes() == b""
        path.unlink()
    synced = "fd = os.open(path, os.O_CREAT | os.O_WRONLY); os.fsync(fd); done(); signal.pause()"
    kill_in_the_middle(path, source, START + synced)
    mount.flush()
    assert path.read_bytes() == b""


def test_what_power_loss_leaves_of_an_unfinished_checkpoint(source: Path) -> None:
    """Nothing of a new one, not even its name; the one before of one that was overwritten."""
    with mounted() as mount:
        names = ["new.pt", "old.pt", "closed.pt", "empty.pt", "synced.pt", "new.log"]
        (mount.root / "old.pt").write_bytes(GOOD)
        mount.flush()
        (mount.root / "closed.pt").write_bytes(GOOD)
        (mount.root / "empty.pt").touch()
        mount.flush()
        code = f"""{START}
files = [os.open(f"{{path}}/{{name}}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
         for name in ("new.pt", "old.pt", "synced.pt", "new.log")]
for fd in files: os.write(fd, source)
os.fsync(files[2])
done()
signal.pause()
"""
        with python_child(code, mount.root, source) as child:
            expect_line(child, "ready")
            mount.expect_log(r"new\.pt was made and never finished .*: it is removed")
            crash_and_mount(mount)
            found = {name: (mount.root / name).read_bytes() for name in os.listdir(mount.root)}
            assert sorted(found) == sorted(set(names) - {"new.pt"})
            assert found["old.pt"] == found["closed.pt"] == GOOD
            assert found["synced.pt"] == TORN
            assert found["empty.pt"] == found["new.log"] == b""


@pytest.mark.parametrize("good", [GOOD, SMALL])
def test_who_appends_next_appends_to_what_was_before(
    mount: Mount, quarantine: Path, directory: Path, source: Path, good: bytes
) -> None:
    """The kernel knows the size that the killed writer left."""
    path = directory / "step.pt"
    for _ in range(10):
        path.write_bytes(good)
        kill_in_the_middle(path, source)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.write(fd, b"more")
        os.close(fd)
        assert_same(path.read_bytes(), good + b"more")
    mount.flush()
    assert_same(the_only(quarantine).read_bytes(), TORN)


def test_other_names_keep_versions(mount: Mount, directory: Path, source: Path) -> None:
    """What a killed writer left takes their place as any content does."""
    path = directory / "train.log"
    check_fpfs("policy", "set", directory, "versions=2", module=CTL)
    path.write_bytes(GOOD)
    mount.flush()
    kill_in_the_middle(path, source)
    mount.flush()
    assert_same(path.read_bytes(), TORN)
    (kept,) = (mount.root / ".fpfs/versions" / directory.name).iterdir()
    assert_same(kept.read_bytes(), GOOD)
