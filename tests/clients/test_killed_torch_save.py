"""torch.save, unmodified, killed in the middle of overwriting a checkpoint: by signals, by the OOM
killer. The checkpoint before stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fpfs.testing.mounted import Mount, mounted
from tests.support.memory_group import limited_memory
from tests.support.processes import expect_line
from tests.support.states import only_value

pytestmark = pytest.mark.clients

TENSORS = 48
TENSOR_BYTES = 4 * 2**20
TORN_BYTES = range(TENSOR_BYTES, TENSORS * TENSOR_BYTES)
# What it writes when it goes on, until it looks for signals, is not the end either.
MIDDLE_BYTES = range(TENSOR_BYTES, (TENSORS - 2) * TENSOR_BYTES)
LIMIT_BYTES = 1024 * 2**20
TIMEOUT_S = 120

# Saves one step after the other into one file. SIGUSR1 makes it take memory, without end, between
# two tensors that torch.save writes.
SAVES = f"""
import signal, sys, torch
def take_memory(number, frame):
    taken = []
    while True:
        taken.append(b"x" * (16 << 20))
signal.signal(signal.SIGUSR1, take_memory)
state = {{str(i): torch.zeros({TENSOR_BYTES // 4}, dtype=torch.int32) for i in range({TENSORS})}}
step = 0
while True:
    for tensor in state.values():
        tensor.fill_(step)
    torch.save(state, sys.argv[1])
    print("saved", step, flush=True)
    if step == 0:
        sys.stdin.readline()
    step += 1
"""


@pytest.fixture
def own() -> Iterator[Mount]:
    """A mount where writers are killed."""
    with mounted(devices=2) as mount:
        mount.expect_log(r"the writer of step\.pt was cut off by SIG[A-Z]+: what it wrote, ")
        yield mount


@contextlib.contextmanager
def saving(path: Path, *, group: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A program that saves over and over, after its first save; in a cgroup if there is one."""
    command = [sys.executable, "-c", SAVES, str(path)]
    if group is not None:
        command = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *command]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            expect_line(program, "saved 0")
            yield program
        finally:
            program.kill()


def stop_in_the_middle(program: subprocess.Popen[str], path: Path) -> None:
    """Stop it when it has written some tensors and not all."""
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        if path.stat().st_size not in MIDDLE_BYTES:
            continue
        program.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(program.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        if path.stat().st_size in MIDDLE_BYTES:
            return
        program.send_signal(signal.SIGCONT)
    raise AssertionError("it was never seen in the middle of a save")


def step_of(path: Path) -> int:
    """The step that a checkpoint is of, whose tensors are all there and of one step."""
    state = torch.load(path)
    assert len(state) == TENSORS
    return only_value(state.values())


def last_saved(program: subprocess.Popen[str]) -> int:
    """The last step that it said it saved, when it has ended."""
    assert program.stdout is not None
    return int(("saved 0", *program.stdout.read().splitlines())[-1].removeprefix("saved "))


def check_what_is_left(mount: Mount, path: Path, *, last: int) -> None:
    """The checkpoint before is current and whole, and the torn one is named where it should be."""
    mount.flush()
    assert step_of(path) == last
    (torn,) = (mount.root / ".fpfs/partial").iterdir()
    assert torn.stat().st_size in TORN_BYTES
    with pytest.raises(RuntimeError, match="zip archive"):
        torch.load(torn)
    (save,) = mount.status().quarantined
    assert (save.path, save.name) == ("step.pt", torn.name)
    assert re.fullmatch(r"step\.pt\.\d{8}T\d{6}Z\.\d+", torn.name)


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGSEGV],
)
def test_a_signal_in_the_middle_leaves_the_checkpoint_before(own: Mount, number: int) -> None:
    path = own.root / "step.pt"
    with saving(path) as program:
        stop_in_the_middle(program, path)
        program.send_signal(number)
        program.send_signal(signal.SIGCONT)
        assert program.wait(TIMEOUT_S) == -number
        last = last_saved(program)
    check_what_is_left(own, path, last=last)
    assert own.status().quarantined[0].killed_by == signal.Signals(number).name


def test_the_oom_killer_in_the_middle_leaves_the_checkpoint_before(own: Mount) -> None:
    path = own.root / "step.pt"
    with limited_memory(LIMIT_BYTES) as group, saving(path, group=group) as program:
        stop_in_the_middle(program, path)
        program.send_signal(signal.SIGUSR1)
        program.send_signal(signal.SIGCONT)
        assert program.wait(TIMEOUT_S) == -signal.SIGKILL
        kills = [line for line in oom_events(group) if line.startswith("oom_kill ")]
        assert kills == ["oom_kill 1"]
        last = last_saved(program)
    check_what_is_left(own, path, last=last)


def oom_events(group: Path) -> list[str]:
    """What the kernel counts of a memory cgroup: version 2's file, or version 1's."""
    files = [group / name for name in ("memory.events", "memory.oom_control")]
    return next(path for path in files if path.exists()).read_text().splitlines()
