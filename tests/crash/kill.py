"""Kills the server of a mount again and again while programs use it: ``make kill``.

``python -m tests.crash.kill [--kills N] [--seed S] [--workers N]`` prints what was done, and how
long the mount did not answer after each kill; the exit status is 1 if any program saw anything.

Concurrency: the workers are processes; the server is killed with SIGKILL at random moments, also
while another is still taking over.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fpfs.testing.mounted import REPOSITORY, Mount, mounted

GAP_S_MAX = 0.6
"""Longest time between two kills."""

TAKE_OVER_S = 0.2
"""Longest time until the next server is killed, too: about what it needs to take over."""


class Outcome(NamedTuple):
    """What became of the programs, and how long each kill was felt by a new request, in s."""

    operations: int
    restarts: int
    gaps_s: list[float]


@contextlib.contextmanager
def working(mount: Mount, *, count: int, seed: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Programs that use the mount; they end, checking everything, when the context does."""
    stop = mount.folder / "stop"
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.crash.worker", mount.root, str(seed + number), stop],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=REPOSITORY,
        )
        for number in range(count)
    ]
    try:
        yield workers
    finally:
        stop.touch()


def child_of(pid: int) -> int:
    """The server of a keeper, whether it answers yet or not; 0 between two of them."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else 0


def kill_server(mount: Mount, *, again_after_s: float | None) -> float:
    """Kill the server, and maybe the next one while it takes over.

    Returns how long the next request takes after that, in s.
    """
    for wait_s in (0.0, again_after_s):
        if wait_s is not None:
            time.sleep(wait_s)
            if server_pid := child_of(mount.keeper_pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server_pid, signal.SIGKILL)
    begun_s = time.monotonic()
    # A name that nobody asked for before: neither the kernel nor the channel knows of it.
    assert not (mount.root / f"never{begun_s}").exists()
    return time.monotonic() - begun_s


def kill_again_and_again(mount: Mount, *, kills: int, workers: int, seed: int) -> Outcome:
    """Kill `kills` times under `workers` programs. AssertionError when one saw anything."""
    chance = random.Random(seed)
    mount.allow_log(r"the writer of .* was cut off by SIGKILL")
    mount.allow_log(r"fpfs.keeper: server \d+ died \(signal 9\): starting another")
    gaps_s = []
    with working(mount, count=workers, seed=seed) as programs:
        for _ in range(kills):
            time.sleep(chance.uniform(0, GAP_S_MAX))
            again_after_s = chance.uniform(0, TAKE_OVER_S) if chance.random() < 0.3 else None
            gaps_s.append(kill_server(mount, again_after_s=again_after_s))
            if any(program.poll() is not None for program in programs):
                break
    operations = 0
    for program in programs:
        said, _ = program.communicate(timeout=300)
        assert program.returncode == 0, f"a program saw the kills (seed {seed}):\n{said}"
        operations += int(said.split()[-1])
    mount.note_processes()
    restarts = mount.status().restarts
    assert restarts >= kills, f"{kills} kills, but only {restarts} servers were replaced"
    return Outcome(operations, restarts, gaps_s)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    with mounted(devices=2) as mount:
        outcome = kill_again_and_again(
            mount, kills=chosen.kills, workers=chosen.workers, seed=chosen.seed
        )
    print(
        f"{len(outcome.gaps_s)} kills, {outcome.restarts} servers taken over,"
        f" {outcome.operations} operations without an error;"
        f" a request waited {statistics.median(outcome.gaps_s):.3f} s (median),"
        f" {max(outcome.gaps_s):.3f} s (most)"
    )


if __name__ == "__main__":
    main()
