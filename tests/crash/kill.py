"""Kills the server of a mount again and again while programs use it: ``make kill``.

``python -m tests.crash.kill [--kills N] [--seed S] [--workers N] [--savers N] [--loaders N]``
prints what was done, and how long the mount did not answer after each kill; the exit status is 1 if
any program saw anything.

The server is killed with SIGKILL at random moments, the next one also while it takes over; stopped
for seconds; made to restart, and killed in that: once each, then as chance says. After every
`ROUND_KILLS` kills keeper and server are killed together: then the programs get errors, and the
next mount has to have everything that was acknowledged to them.

Concurrency: the programs are processes (`worker`, `checkpoints`); one thread disturbs them.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import enum
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fpfs.daemon.mount.live_upgrade import CHECK_S
from fpfs.testing.mounted import REPOSITORY, Mount, mounted
from tests.crash.gone import EXIT_GONE

GAP_S_MAX = 0.6
"""Longest time between two disturbances."""

TAKE_OVER_S = 0.2
"""Longest time until the next server is killed, too: about what it needs to take over."""

STOPPED_S_MAX = 3.0
RESTART_S = 2.0 * CHECK_S
"""The program that is installed is asked what it is first, which may take so long by itself."""
END_S = 300.0
ROUND_KILLS = 50
"""Kills of servers until the keeper is killed with one."""


class Disturbance(enum.StrEnum):
    """What can happen to a server."""

    KILL = "killed"
    KILL_TWICE = "killed, and the next one while it took over"
    STOP = "stopped for a while"
    STOP_AND_KILL = "stopped for a while and killed"
    RESTART = "restarted"
    RESTART_AND_KILL = "restarted, and the next one killed while it took over"
    KILL_ALL = "killed with the keeper"


WEIGHTS = {
    Disturbance.KILL: 50,
    Disturbance.KILL_TWICE: 25,
    Disturbance.STOP: 5,
    Disturbance.STOP_AND_KILL: 8,
    Disturbance.RESTART: 6,
    Disturbance.RESTART_AND_KILL: 6,
}


class Team(NamedTuple):
    """How many programs of each kind use the mount."""

    workers: int = 2
    savers: int = 0
    loaders: int = 0


class Outcome(NamedTuple):
    """What was done and what the programs did; how long each kill was felt by a request, in s."""

    kills: int
    operations: collections.Counter[str]
    restarts: int
    gaps_s: list[float]
    done: collections.Counter[Disturbance]
    verified: int
    """Programs whose mount was taken away, and of which all that was acknowledged was found."""


class Program:
    """One program that uses the mount."""

    def __init__(self, mount: Mount, *, role: str, seed: int) -> None:
        """Start it."""
        self.role = role
        self._root, self._seed = mount.root, seed
        self._stop = mount.folder / "stop"
        self._record = mount.folder / f"record{seed}"
        self.process = self._start(role)

    def _start(self, role: str) -> subprocess.Popen[str]:
        module = ["worker"] if role == "work" else ["checkpoints", role]
        words = [f"tests.crash.{module[0]}", *module[1:], self._root, str(self._seed)]
        return subprocess.Popen(
            [sys.executable, "-m", *words, self._stop, self._record],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=REPOSITORY,
        )

    def wait_ready(self) -> None:
        """Return when it uses the mount."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said == "ready\n", f"{self.role} {self._seed}: {said}{self.process.stdout.read()}"

    def end(self) -> int:
        """Wait for its end; returns how much it did. AssertionError when it saw anything."""
        said, _ = self.process.communicate(timeout=END_S)
        assert self.process.returncode == 0, f"{self.role} {self._seed} saw the kills:\n{said}"
        return int(said.split()[-1])

    def lose_mount(self) -> int:
        """Wait for its end, which its mount has come to; returns how much it did."""
        said, _ = self.process.communicate(timeout=END_S)
        if self.process.returncode == -signal.SIGBUS and self.role != "work":
            return 0  # what is mapped cannot be read any more
        assert self.process.returncode == EXIT_GONE, f"{self.role} {self._seed}:\n{said}"
        return int(said.split()[-1])

    def verify(self) -> bool:
        """Look for what was acknowledged to it on the next mount; False where nothing was."""
        if self.role == "save":
            self.process = self._start("verify")
            assert self.end() > 0, "a saver saved nothing"
        elif self.role == "work":
            from tests.crash.worker import verify

            verify(self._root, self._seed, self._record)
        return self.role != "load"


@contextlib.contextmanager
def using(mount: Mount, team: Team, *, seed: int, base: int) -> Iterator[list[Program]]:
    """Programs that use the mount; they are told to end when the context does."""
    stop = mount.folder / "stop"
    stop.unlink(missing_ok=True)
    roles = ["work"] * team.workers + ["save"] * team.savers
    programs = [Program(mount, role=role, seed=seed + number) for number, role in enumerate(roles)]
    programs += [Program(mount, role="load", seed=base) for _ in range(team.loaders)]
    try:
        for program in programs:
            program.wait_ready()
        yield programs
    finally:
        stop.touch()


def child_of(pid: int) -> int:
    """The server of a keeper, whether it answers yet or not; 0 between two of them."""
    # While it starts, a program that the keeper has become may run others, such as ldconfig.
    program = os.readlink(f"/proc/{pid}/exe")
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/{child}/exe") == program:
                return int(child)
    return 0


def signal_server(mount: Mount, number: signal.Signals) -> int:
    """Send the server a signal; returns 1 if there was one."""
    server_pid = child_of(mount.keeper_pid)
    if not server_pid:
        return 0
    try:
        os.kill(server_pid, number)
    except ProcessLookupError:
        return 0
    return 1


class Disturber:
    """Does to the server of one mount each thing once, then what chance says, and notes it."""

    def __init__(self, mount: Mount, chance: random.Random) -> None:
        """Begin."""
        self._mount = mount
        self._chance = chance
        self._first = chance.sample(list(WEIGHTS), len(WEIGHTS))
        self.kills = 0
        self.gaps_s: list[float] = []
        self.done: collections.Counter[Disturbance] = collections.Counter()

    def disturb(self) -> None:
        """Wait for a moment, do something, and wait until the mount answers."""
        time.sleep(self._chance.uniform(0, GAP_S_MAX))
        chosen = self._chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        what = self._first.pop() if self._first else chosen
        match what:
            case Disturbance.KILL | Disturbance.KILL_TWICE:
                self._kill()
            case Disturbance.STOP | Disturbance.STOP_AND_KILL:
                signal_server(self._mount, signal.SIGSTOP)
                time.sleep(self._chance.uniform(0, STOPPED_S_MAX))
                if what is Disturbance.STOP_AND_KILL:
                    self._kill()
                signal_server(self._mount, signal.SIGCONT)
            case _:
                self._restart(and_kill=what is Disturbance.RESTART_AND_KILL)
        if what is Disturbance.KILL_TWICE:
            time.sleep(self._chance.uniform(0, TAKE_OVER_S))
            self._kill()
        self.done[what] += 1
        self._wait_for_answer(counts=what is not Disturbance.STOP)

    def _kill(self) -> None:
        self.kills += signal_server(self._mount, signal.SIGKILL)

    def _restart(self, *, and_kill: bool) -> None:
        before = child_of(self._mount.keeper_pid)
        command = [sys.executable, "-m", "fpfs.cli.ctl", "restart", str(self._mount.root)]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL) as restart:
            if and_kill:
                while child_of(self._mount.keeper_pid) in (0, before):
                    has_ended = restart.poll() is not None
                    is_another = child_of(self._mount.keeper_pid) not in (0, before)
                    assert is_another or not has_ended, "the restart ended without another server"
                time.sleep(self._chance.uniform(0, TAKE_OVER_S))
                self._kill()
            assert restart.wait(RESTART_S) == 0, "fpfs-ctl restart failed"

    def _wait_for_answer(self, *, counts: bool) -> None:
        begun_s = time.monotonic()
        # A name that nobody asked for before: neither the kernel nor the channel knows of it.
        assert not (self._mount.root / f"never{begun_s}").exists()
        if counts:
            self.gaps_s.append(time.monotonic() - begun_s)


def kill_again_and_again(mount: Mount, *, kills: int, team: Team, seed: int) -> Outcome:
    """Kill `kills` times under a team of programs. AssertionError when one saw anything."""
    chance = random.Random(seed)
    for line in (
        r"the writer of .* was cut off by (SIGKILL|the end of the mount)",
        r"fpfs.keeper: server \d+ died \(signal 9\): starting another",
        r"was made and never finished when the last mount ended: it is removed",
    ):
        mount.allow_log(line)
    outcome = Outcome(0, collections.Counter(), 0, [], collections.Counter(), 0)
    if team.loaders:
        made = Program(mount, role="make", seed=seed).process
        assert made.wait(END_S) == 0
    for first in range(0, kills, ROUND_KILLS):
        is_last = first + ROUND_KILLS >= kills
        count = min(ROUND_KILLS, kills - first)
        disturber = Disturber(mount, chance)
        with using(mount, team, seed=seed + 100 * first, base=seed) as programs:
            while disturber.kills < count and all(p.process.poll() is None for p in programs):
                disturber.disturb()
            mount.note_processes()
            restarts = mount.status().restarts
            if not is_last:
                mount.kill(mount.keeper_pid, mount.server_pid)
                disturber.done[Disturbance.KILL_ALL] += 1
                # Before they are told to end: one that had just come to that would see no loss.
                for program in programs:
                    outcome.operations[program.role] += program.lose_mount()
        if is_last:
            for program in programs:
                outcome.operations[program.role] += program.end()
        verified = 0 if is_last else verify_next_mount(mount, programs)
        outcome.done.update(disturber.done)
        outcome.gaps_s.extend(disturber.gaps_s)
        outcome = outcome._replace(
            kills=outcome.kills + disturber.kills,
            restarts=outcome.restarts + restarts,
            verified=outcome.verified + verified,
        )
    return outcome


def verify_next_mount(mount: Mount, programs: list[Program]) -> int:
    """Mount again after keeper and server were killed; returns how many programs lost nothing."""
    mount.tear_down()
    mount.mount()
    verified = sum(program.verify() for program in programs)
    for folder in [*mount.root.glob("worker*"), *mount.root.glob("saver*")]:
        shutil.rmtree(folder)
    return verified


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--savers", type=int, default=4)
    parser.add_argument("--loaders", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    team = Team(chosen.workers, chosen.savers, chosen.loaders)
    with mounted(devices=2) as mount:
        outcome = kill_again_and_again(mount, kills=chosen.kills, team=team, seed=chosen.seed)
    report(outcome)


def report(outcome: Outcome) -> None:
    """Print what was done."""
    for what, count in sorted(outcome.done.items()):
        print(f"{count:6} servers were {what}")
    for role, count in sorted(outcome.operations.items()):
        print(f"{count:6} operations of programs that {role}, without an error or a wrong byte")
    print(
        f"{outcome.verified:6} programs whose mount was killed: all that they were told was there"
    )
    print(
        f"{outcome.kills} kills, {outcome.restarts} servers took over;"
        f" a request waited {statistics.median(outcome.gaps_s):.3f} s (median),"
        f" {max(outcome.gaps_s):.3f} s (most)"
    )


if __name__ == "__main__":
    main()
