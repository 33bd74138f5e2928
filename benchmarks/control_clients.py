"""``python -m benchmarks.control_clients MOUNTPOINT COUNT``: clients that ask all the time.

Each of COUNT connections asks one question a second, evenly spread over it, until standard input
ends; then the number of answers is printed. They are one process, so that it is the server's work
that is measured, and not that of so many interpreters.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import sys
import time

from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import AskStatus, DescribeFiles, Question
from fpfs.core.protocol.reports import FilesShown, Status

PERIOD_S = 1.0
ANSWER_S = 30.0


def ask_until_told(mountpoint: str, count: int) -> int:
    """Ask until standard input ends; returns how many answers came."""
    root = os.stat(mountpoint).st_ino
    questions: tuple[Question[Status] | Question[FilesShown], ...] = (
        AskStatus(),
        DescribeFiles(inos=(root,)),
    )
    answered = 0
    with contextlib.ExitStack() as stack:
        entry = find_fpfs(mountpoint, asked="benchmark")
        clients = [
            stack.enter_context(ControlClient(entry, asked="benchmark")) for _ in range(count)
        ]
        print("connected", flush=True)
        began_s = time.monotonic()
        asked: dict[int, Question[Status] | Question[FilesShown]] = {}
        for number in itertools.count():
            wait_s = began_s + number * PERIOD_S / count - time.monotonic()
            if select.select([sys.stdin], [], [], max(wait_s, 0))[0]:
                break
            index = number % count
            if index in asked:
                clients[index].receive(asked[index].answer, timeout_s=ANSWER_S)
                answered += 1
            asked[index] = questions[(number // count + index) % len(questions)]
            clients[index].send(asked[index])
    return answered


if __name__ == "__main__":
    print(ask_until_told(sys.argv[1], int(sys.argv[2])), flush=True)
