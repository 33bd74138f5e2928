"""Processes that end while something is under way: it is finished first, or named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fpfs import client
from tests.support.failures.hostile import MEMORY
from tests.support.states import only_value


def end(code: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """What a process has left that runs so much, and ends."""
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        check=False,
        timeout=120,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


SAVES = """
import atexit, functools, multiprocessing, os, sys, threading, time, torch

def save(name):
    from fpfs.client import AsyncSaver
    path = os.path.join(sys.argv[1], name)
    saving = AsyncSaver().save({"step": torch.full((10**7,), 3)}, path)
    saving.durable.add_done_callback(functools.partial(tell, path))

def tell(path, _):
    time.sleep(0.2)
    os.link(path, path + ".done")

def save_behind_the_main_thread(name):
    threading.main_thread().join()
    save(name)

atexit.register(save, "in a handler")
"""

BESIDE = """
multiprocessing.get_context("fork").Process(target=save, args=("in a forked process",)).start()
save("in the main thread")
threading.Thread(target=save_behind_the_main_thread, args=("in another thread",)).start()
atexit.register(save, "in a handler that was registered later")
"""


@pytest.mark.parametrize("beside", ["", BESIDE])
def test_the_end_of_the_process_waits(tmp_path: Path, beside: str) -> None:
    """Also for what is done when a save has ended."""
    ended = end(SAVES + beside, tmp_path)
    assert ended.returncode == 0, ended.stderr
    names = ["in a handler"]
    if beside:
        names += [
            "in a forked process",
            "in a handler that was registered later",
            "in another thread",
            "in the main thread",
        ]
    assert sorted(os.listdir(tmp_path)) == sorted([*names, *(f"{name}.done" for name in names)])
    for name in names:
        assert only_value([client.load(tmp_path / name)["step"]]) == 3


HANGS = (
    MEMORY
    + """
import torch
from fpfs.client import AsyncSaver, async_saving
async_saving.SAY_AFTER_S = 0.1
memory = (ctypes.c_float * (SIZE // 4)).from_address(paged_out().value)
parameter = torch.nn.Parameter(torch.frombuffer(memory, dtype=torch.float32))
saver = AsyncSaver(
    optimizers=torch.optim.SGD([parameter]), staging_bytes=0, timeout_s=float(sys.argv[2])
)
saver.save({"parameter": parameter}, sys.argv[1])
# The process stays for as many seconds as its exit status says: threads want the interpreter back,
# which is gone.
libc.on_exit(libc.sleep, None)
"""
)
"""Ends while native threads write memory that nobody ever fills in, which the kernel waits for."""


def test_the_end_of_the_process_gives_up_what_hangs(path: Path) -> None:
    ended = end(HANGS + "sys.exit(1)", path, "0.5")
    assert ended.returncode == 1, ended.stderr
    *_, said, given_up = ended.stderr.splitlines()
    assert said.startswith(f"the process ends when this save has: <Saving {path}: under way, 0 of ")
    assert given_up == f"{path} is given up: no byte was moved for 1 s, and the process ends"
    assert not path.exists()


GIVEN_UP = """
import atexit, sys, threading, torch
from fpfs.client import AsyncSaver, replacement, writing

go = threading.Event()

def hold(of, name):
    function = getattr(of, name)

    def when_let_go(*arguments, **options):
        go.wait()
        return function(*arguments, **options)

    setattr(of, name, when_let_go)

if sys.argv[3] == "write":
    hold(writing, "write_pieces")
else:
    hold(replacement.Replacement, "complete")
saver = AsyncSaver(timeout_s=0.5, strict=False)
saver.save({"step": torch.full((10**7,), 3)}, sys.argv[1])

@atexit.register
def save_another():
    memory = saver._under_way[0].memory
    saver._timeout_s = 60
    saver.save({"step": torch.full((10**7,), 4)}, sys.argv[2])
    go.set()
    assert saver._under_way[0].memory is not memory
"""


@pytest.mark.parametrize("hangs", ["write", "flush"])
def test_what_was_given_up_gets_no_name(path: Path, tmp_path: Path, hangs: str) -> None:
    """Though it goes on when another save has begun, nor has it what that one saves."""
    other = tmp_path / "other"
    ended = end(GIVEN_UP, path, other, hangs)
    assert ended.returncode == 0, ended.stderr
    _, said = (line for line in ended.stderr.splitlines() if str(path) in line)
    assert said == f"{path} is given up: no byte was moved for 1 s, and the process ends"
    assert only_value([client.load(other)["step"]]) == 4
    assert "Traceback" not in ended.stderr
    assert not path.exists()


def test_an_interrupt_gives_up_what_is_waited_for(path: Path) -> None:
    interrupt = "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\nsys.exit(1)"
    ended = end(HANGS + interrupt, path, "600")
    assert ended.returncode == 1, ended.stderr
    assert f"{path} is given up: interrupted, and the process ends" in ended.stderr
    assert not path.exists()


def test_the_end_of_the_process_names_what_fails(path: Path) -> None:
    code = (
        "import resource, signal, sys, torch; from fpfs.client import AsyncSaver\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "AsyncSaver().save({'step': torch.full((10**7,), 3)}, sys.argv[1])"
    )
    ended = end(code, path)
    assert ended.returncode == 0, ended.stderr
    assert f"{path} was not saved: OSError: [Errno 27] " in ended.stderr
    assert os.listdir(path.parent) == []
