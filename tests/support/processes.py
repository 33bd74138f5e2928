"""Child processes of tests: run to the end with a deadline, or kept and killed in time.

Clients run in processes of their own, so that a hang costs one test and not the whole run, and so
that the test process itself holds few descriptors on a mount.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

DEADLINE_S = 300.0
"""Of a program that would otherwise hang: several times what one that loads torch takes beside two
others on a busy machine."""

KILLED = r"the writer of .* was cut off by SIG[A-Z]+: what it wrote, \d+ bytes, is \.fpfs/partial/"
"""What the server's log says of a writer that was killed."""


def run(
    *command: str | Path,
    cwd: Path | None = None,
    timeout_s: float = DEADLINE_S,
    environment: Mapping[str, str] | None = None,
    text_input: str | None = None,
) -> str:
    """Run a command and return its standard output; fail with both outputs unless it succeeds."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        timeout=timeout_s,
        env={**os.environ, **(environment or {})},
        input=text_input,
        stdin=subprocess.DEVNULL if text_input is None else None,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        check=False,
    )
    if done.returncode != 0:
        raise AssertionError(
            f"{' '.join(str(part) for part in command)}\n"
            f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
    return done.stdout


def run_program(
    program: Path,
    *arguments: str | Path,
    timeout_s: float = DEADLINE_S,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a Python program with this interpreter."""
    return run(
        sys.executable,
        "-W",
        "ignore",
        program,
        *arguments,
        timeout_s=timeout_s,
        environment={"PYTHONPATH": str(REPOSITORY), **(environment or {})},
    )


@contextlib.contextmanager
def python_child(
    code: str, *arguments: str | Path | int, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A Python child with pipes on stdin and stdout, killed and reaped at the end."""
    child = subprocess.Popen(
        [*prefix, sys.executable, "-c", code, *(str(argument) for argument in arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            yield child
        finally:
            if child.poll() is None:
                child.kill()


def expect_line(child: subprocess.Popen[str], expected: str) -> None:
    """Wait until the child says `expected` as its next line."""
    assert child.stdout is not None
    line = child.stdout.readline().rstrip("\n")
    assert line == expected, f"child said {line!r} instead of {expected!r}"


def tell(child: subprocess.Popen[str], line: str = "go") -> None:
    """Let a child that waits on its stdin go on."""
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()
