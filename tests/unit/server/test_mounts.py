"""The mount table as the kernel writes it."""

from pathlib import Path

from fpfs.core.mounts import (
    is_below,
    mount_at,
    mount_containing,
    parse_mountinfo,
    resolve_mountpoint,
)

TEXT = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 25 0:27 / /dev/shm rw,relatime shared:5 master:2 - tmpfs tmpfs rw,size=24684084k
90 27 0:61 / /mnt/a\\040b\\134c rw,nosuid - fuse.fpfs /nvme0\\040x rw,user_id=1000,group_id=100
91 27 0:62 / /ckpt rw - fuse.fpfs fpfs-0011 rw,user_id=0,group_id=0,allow_other
"""


def test_entries_with_escapes_and_optional_fields() -> None:
    root, shared, mine, roots = parse_mountinfo(TEXT)
    assert (root.device, root.mountpoint, root.filesystem_type) == ("254:0", "/", "ext4")
    assert (shared.mountpoint, shared.source) == ("/dev/shm", "tmpfs")
    assert (mine.mountpoint, mine.source, mine.device) == ("/mnt/a b\\c", "/nvme0 x", "0:61")
    assert [entry.is_fpfs for entry in (root, shared, mine, roots)] == [False, False, True, True]
    assert [entry.owner_uid for entry in (root, mine, roots)] == [0, 1000, 0]


def test_below_compares_whole_names() -> None:
    assert is_below("/a/b", "/a")
    assert is_below("/a", "/a")
    assert is_below("/a", "/")
    assert not is_below("/ab", "/a")
    assert not is_below("/a", "/a/b")


def test_a_path_is_found_on_its_mount(tmp_path: Path) -> None:
    assert mount_containing("/proc/self").filesystem_type == "proc"
    assert mount_containing("/proc").mountpoint == "/proc"
    entry = mount_at("/proc")
    assert entry is not None
    assert entry.filesystem_type == "proc"
    assert mount_at(str(tmp_path)) is None


def test_a_mountpoint_itself_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    (folder / "inner").symlink_to("/nowhere")
    assert resolve_mountpoint(str(tmp_path / "link" / "inner")) == str(folder / "inner")


def test_a_path_may_hold_what_ends_lines_elsewhere() -> None:
    path = "/mnt/a\x0bb\x0cc\x1cd\x85e\u2028f"
    (entry,) = parse_mountinfo(f"91 27 0:62 / {path} rw - fuse.fpfs fpfs rw,user_id=0\n")
    assert entry.mountpoint == path
