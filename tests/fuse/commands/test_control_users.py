"""Who may ask the server what: other users, members of the control group, many and hostile ones."""

from __future__ import annotations

import grp
import json
import os
import random
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import hypothesis
import pytest
from hypothesis import strategies as st

from fpfs.core.protocol.control import peer, runtime_folders, socket_path
from fpfs.core.protocol.questions import AnyQuestion
from fpfs.daemon.control.limits import CONNECTIONS_ONE_MAX, REQUEST_BYTES_MAX
from fpfs.testing.mounted import Mount, check_fpfs, mounted, run_fpfs
from tests.support.seeds import IS_LONG, chosen_seed

NOBODY = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
MEMBER = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--groups=games")
GROUP = "games"
OWNERS_ONLY = (
    {"verb": "restart"},
    {"verb": "scrub"},
    {"verb": "policy", "ino": 1, "change": {"values": {"versions": "2"}}},
    {"verb": "policies", "ino": 1},
    {"verb": "apply", "changes": [[1, {"values": {"versions": "2"}}]]},
    {"verb": "restore", "directory": 1, "name": "eA==", "number": 1},
    {"verb": "commit", "ino": 1},
    {"verb": "tag", "device": "0", "added": ["fast"]},
    {"verb": "trace", "directory": 1, "name": "eA=="},
    {"verb": "read trace", "trace": 1},
    {"verb": "end trace", "trace": 1},
    {"verb": "add", "path": "/nowhere"},
    {"verb": "in progress"},
    {"verb": "start drain", "device": "0"},
    {"verb": "drain", "number": 0},
    {"verb": "end drain", "device": "0"},
    {"verb": "remove", "device": "0"},
)
"""Every question that only an owner may ask, complete but for the version."""
ASK = """
import json, socket, sys
connection = socket.socket(socket.AF_UNIX)
try:
    connection.connect(sys.argv[1])
    lines = connection.makefile("rw")
    for line in sys.stdin.read().splitlines():
        print(line, file=lines, flush=True)
        sys.stdout.write(lines.readline())
except OSError as error:
    sys.exit(error.strerror)
"""
LOOK = """
import json, os, sys
seen = []
for folder in json.load(sys.stdin):
    try:
        with os.scandir(folder) as entries:
            seen += [entry.stat(follow_symlinks=False).st_ino for entry in entries]
    except PermissionError:
        continue
print(json.dumps(seen))
"""

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def mount() -> Iterator[Mount]:
    """A mount of root's, which is open to others."""
    with mounted() as made:
        made.root.parent.chmod(0o755)
        yield made


def path_of_socket(mount: Mount) -> str:
    """Where the server of a mount of root's listens."""
    entry = mount.entry()
    assert entry is not None
    (folder,) = runtime_folders(0)
    return socket_path(entry.device, folder=folder, pid=mount.keeper_pid)


def run_as(prefix: Sequence[str], code: str, argument: str | Path, *, given: str = "") -> str:
    """What a Python program prints that runs with other credentials, or why it failed."""
    done = subprocess.run(
        [*prefix, "python3", "-c", code, str(argument)],
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


def ask_as(
    prefix: Sequence[str], mount: Mount, *questions: dict[str, object]
) -> list[dict[str, Any]]:
    """The replies to questions of somebody else, who asks them by one connection."""
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    said = run_as(prefix, ASK, path_of_socket(mount), given=lines)
    return [json.loads(line) for line in said.splitlines()]


def test_what_is_the_owners_is_refused_to_others(mount: Mount) -> None:
    replies = ask_as(NOBODY, mount, *OWNERS_ONLY)
    assert [reply["error"] for reply in replies] == [
        f"only root and the mount's owner may ask for '{question['verb']}'"
        for question in OWNERS_ONLY
    ]
    owners = {kind.verb() for kind in get_args(AnyQuestion) if kind.owners}
    assert {question["verb"] for question in OWNERS_ONLY} == {*owners, "policy"}
    assert mount.status().restarts == 0
    shown = json.loads(check_fpfs("policy", "get", mount.root, "--json", module="fpfs.cli.ctl"))
    assert all(setting["is_default"] for setting in shown["settings"])


def test_others_see_what_the_mount_shows_them(mount: Mount) -> None:
    """Random permissions: what the server tells of is what can be listed and looked at."""
    dice = random.Random(chosen_seed())
    top = mount.root / "trees"
    top.mkdir()
    for _ in range(25):
        folders = [path for path in top.rglob("*") if path.is_dir()] or [top]
        folder = dice.choice([top, *folders])
        made = folder / f"d{dice.randrange(1 << 30)}"
        made.mkdir()
        (made / "file").write_bytes(b"x")
    for folder in sorted(top.rglob("d*")):
        os.chown(folder, dice.choice([0, 65534]), dice.choice([0, 65534]))
        folder.chmod(dice.choice([0o755, 0o711, 0o744, 0o700, 0o750, 0o070, 0o005]))
    everything = [path.stat().st_ino for path in top.rglob("*")]
    folders = json.dumps([str(path) for path in [top, *top.rglob("d*")]])
    seen = json.loads(run_as(NOBODY, LOOK, "", given=folders))
    question = {"verb": "describe", "inos": everything}
    (others,) = ask_as(NOBODY, mount, question)
    (owners,) = ask_as(("env",), mount, question)
    assert {file["ino"] for file in owners["result"]["files"]} == set(everything)
    assert sorted(file["ino"] for file in others["result"]["files"]) == sorted(seen)
    hidden = min(set(everything) - set(seen))
    replies = ask_as(
        NOBODY,
        mount,
        {"verb": "wait", "ino": hidden},
        {"verb": "runs", "ino": hidden},
        {"verb": "wait", "ino": 10**9},
        {"verb": "wait", "ino": min(seen)},
    )
    assert [bool(reply["error"]) for reply in replies] == [True, True, True, False]
    assert replies[0]["error"] == replies[2]["error"], "nor does it tell what there is"


def test_others_ask_of_directories_that_they_may_list(mount: Mount) -> None:
    """What holds in them, and what names there held before."""
    shown, hidden = mount.root / "shown", mount.root / "hidden"
    shown.mkdir(mode=0o755)
    hidden.mkdir(mode=0o711)
    for directory, is_told in ((shown, True), (hidden, False)):
        ino = directory.stat().st_ino
        replies = ask_as(
            NOBODY,
            mount,
            {"verb": "policy", "ino": ino},
            {"verb": "explain", "directory": ino, "name": "eA=="},
            {"verb": "versions", "directory": ino, "name": "eA=="},
        )
        assert [reply["error"] == "" for reply in replies] == [is_told] * 3


def test_what_others_are_told_names_no_files(mount: Mount) -> None:
    secret = mount.root / "secret"
    secret.mkdir(mode=0o700)
    mount.expect_log("was cut off by SIGKILL")
    code = (
        "import os, sys; f = open(sys.argv[1], 'wb'); f.write(b'x' * 1000); f.flush();"
        " os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, secret / "model.pt"], check=False)
    assert killed.returncode == -signal.SIGKILL
    check_fpfs("flush", mount.root, module="fpfs.cli.ctl")
    (owners,) = ask_as(("env",), mount, {"verb": "status"})
    (others,) = ask_as(NOBODY, mount, {"verb": "status"})
    assert [each["path"] for each in owners["result"]["quarantined"]] == ["secret/model.pt"]
    assert "model.pt" not in json.dumps(others)
    assert others["result"]["server_pid"] == mount.server_pid


def test_one_user_cannot_take_all_connections(mount: Mount) -> None:
    code = f"""
import socket, sys
kept = []
for _ in range({CONNECTIONS_ONE_MAX}):
    kept.append(socket.socket(socket.AF_UNIX))
    kept[-1].connect(sys.argv[1])
    kept[-1].sendall(b'{{"verb": "describe", "inos": []}}\\n')
    assert b'"error":""' in kept[-1].recv(1000)
one_more = socket.socket(socket.AF_UNIX)
one_more.connect(sys.argv[1])
print(one_more.recv(1000).decode(), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [*NOBODY, "python3", "-c", code, path_of_socket(mount)],
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as hog:
        assert hog.stdout is not None
        assert "too many connections" in hog.stdout.readline()
        assert mount.status().server_pid == mount.server_pid
        assert hog.stdin is not None
        hog.stdin.close()


@pytest.mark.parametrize("words", [(), ("noallow_other",)], ids=["open", "closed"])
def test_members_of_the_control_group_may_ask_what_the_owner_may(words: tuple[str, ...]) -> None:
    with mounted(options=(f"control_group={GROUP}", *words)) as made:
        made.root.parent.chmod(0o755)
        status = os.stat(path_of_socket(made))
        assert status.st_gid == grp.getgrnam(GROUP).gr_gid
        assert stat.S_IMODE(status.st_mode) == (0o660 if words else 0o666)
        change = {"verb": "policy", "ino": 1, "change": {"values": {"versions": "2"}}}
        (reply,) = ask_as(MEMBER, made, change)
        assert reply["error"] == ""
        shown = {each["key"]: each["value"] for each in reply["result"]["settings"]}
        assert shown["versions"] == "2"
        primary = ("setpriv", "--reuid=nobody", f"--regid={GROUP}", "--clear-groups")
        (reply,) = ask_as(primary, made, change)
        assert reply["error"] == ""
        if words:
            assert run_as(NOBODY, ASK, path_of_socket(made), given="{}\n") == "Permission denied\n"
        else:
            (reply,) = ask_as(NOBODY, made, change)
            assert reply["error"] == "only root and the mount's owner may ask for 'policy'"
        made.expect_log("died .signal 9.: starting another")
        os.kill(made.server_pid, signal.SIGKILL)
        assert made.status().restarts == 1
        (reply,) = ask_as(MEMBER, made, change)
        assert reply["error"] == "", "the next server knows the group"
        made.note_processes()


def test_members_of_the_control_group_change_no_devices(tmp_path: Path) -> None:
    """The server would write the contents of all files to a directory that a member chose."""
    alone = {kind.verb() for kind in get_args(AnyQuestion) if kind.owner_alone}
    added = tmp_path / "added"
    added.mkdir()
    questions = [
        {**question, **({"path": str(added)} if question["verb"] == "add" else {})}
        for question in OWNERS_ONLY
        if question["verb"] in alone
    ]
    assert [question["verb"] for question in questions] == [
        "add", "start drain", "drain", "end drain", "remove",
    ]  # fmt: skip
    with mounted(devices=2, options=(f"control_group={GROUP}",)) as made:
        made.root.parent.chmod(0o755)
        before = made.status().devices
        replies = ask_as(MEMBER, made, *questions)
        assert [(reply["error"], reply["remedy"]) for reply in replies] == [
            (
                f"only root and the mount's owner may ask for '{question['verb']}'",
                "ask as one of them: control_group lets nobody add, drain or remove devices",
            )
            for question in questions
        ]
        now = made.status().devices
        assert [(each.path, each.state) for each in now] == [
            (each.path, each.state) for each in before
        ]
        assert os.listdir(added) == []


def test_a_device_that_others_can_replace_is_not_added(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    for folder in (shared, shared / "device", tmp_path / "theirs"):
        folder.mkdir()
    shared.chmod(0o777)
    os.chown(tmp_path / "theirs", 65534, -1)
    (tmp_path / "link").symlink_to("shared/../theirs")
    with mounted(devices=1) as made:
        for path, wrong in (
            (shared / "device", f"everybody may write to {shared} (mode 0777); run chmod go-w"),
            (tmp_path / "theirs", f"{tmp_path / 'theirs'} belongs to nobody"),
            (tmp_path / "link", f"everybody may write to {shared}"),
        ):
            done = run_fpfs("device", "add", made.root, path, module="fpfs.cli.ctl")
            assert (done.returncode, done.stderr.count("\n")) == (1, 1)
            assert f"the device directory {path} is not safe from others: {wrong}" in done.stderr
        assert len(made.status().devices) == 1
    assert [*shared.joinpath("device").iterdir(), *tmp_path.joinpath("theirs").iterdir()] == []


def test_a_group_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for folder in ("device", "mount"):
        (tmp_path / folder).mkdir()
    words = ("-d", tmp_path / "device", "-o", "control_group=no-such-group", tmp_path / "mount")
    done = run_fpfs("mount", *words)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "control_group=no-such-group: there is no such group; getent group" in done.stderr


@pytest.mark.parametrize("count", [0, 200, 2000])
def test_a_peer_has_all_its_groups(count: int) -> None:
    groups = list(range(2000, 2000 + count))
    name = f"fpfs-test-{os.getpid()}-{count}"
    code = (
        f"import os, socket; os.setgroups({groups});"
        f" s = socket.socket(socket.AF_UNIX); s.connect('\\0{name}'); input()"
    )
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen()
        with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as other:
            connection, _ = listening.accept()
            with connection:
                found = peer(connection)
            assert other.stdin is not None
            other.stdin.write(b"\n")
    assert (found.uid, found.pid) == (0, other.pid)
    assert found.gids == {os.getegid(), *groups}


NUMBERS = st.integers(-(2**70), 2**70) | st.sampled_from([0, 1, 2, 3, 4, 5, 16, 17, 1 << 62])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
QUESTIONS = st.one_of(
    st.fixed_dictionaries({"verb": st.just("describe"), "inos": st.lists(NUMBERS, max_size=5)}),
    st.fixed_dictionaries({"verb": st.just("runs"), "ino": NUMBERS, "segment": NUMBERS}),
    st.fixed_dictionaries({"verb": st.just("wait"), "ino": NUMBERS, "below": st.booleans()}),
    st.fixed_dictionaries({"verb": st.just("versions"), "directory": NUMBERS, "name": st.text()}),
    st.fixed_dictionaries({"verb": st.just("scrub"), "ino": NUMBERS, "step": VALUES}),
    st.fixed_dictionaries({"verb": st.just("policy"), "ino": NUMBERS, "change": VALUES}),
    st.dictionaries(st.sampled_from(["verb", "ino", "inos", "version"]), VALUES),
)
LINES = st.one_of(
    QUESTIONS.map(lambda question: json.dumps(question).encode()),
    st.binary(max_size=300),
    st.integers(REQUEST_BYTES_MAX - 2, REQUEST_BYTES_MAX + 2).map(lambda size: b" " * size),
)


@hypothesis.settings(
    max_examples=150 if IS_LONG else 60,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(lines=st.lists(LINES, max_size=5), is_cut=st.booleans())
def test_a_mount_lives_on_whatever_is_sent(mount: Mount, lines: list[bytes], is_cut: bool) -> None:
    sent = b"".join(line.replace(b"\n", b" ") + b"\n" for line in lines)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(path_of_socket(mount))
        received = b""
        try:
            connection.sendall(sent[:-10] if is_cut else sent)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 20):
                received += piece
        except (BrokenPipeError, ConnectionResetError):
            pass
    for line in received.splitlines():
        reply = json.loads(line)
        assert "the server failed at it" not in reply["error"], reply
    assert mount.status().server_pid == mount.server_pid
