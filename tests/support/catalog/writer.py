"""A process that changes a catalog of two copies until it is killed, and says what was answered.

``python -m tests.support.catalog.writer FOLDER FIRST SEED``: makes files as
`tests.support.catalog.catalogs.change` does, numbered from FIRST. Writes ``a N`` when number N was
answered, ``d N`` when everything up to N is durable, a line each.
"""

from __future__ import annotations

import os
import random
import sys
from functools import partial
from pathlib import Path

import trio

from tests.support.catalog.catalogs import change, open_catalog


def _say(kind: str, number: int) -> None:
    os.write(1, f"{kind} {number}\n".encode())


async def _write(folder: Path, first: int, seed: int) -> None:
    random_numbers = random.Random(seed)
    catalog = open_catalog(folder)
    number = first
    while True:
        for _ in range(random_numbers.choice((1, 3, 40))):
            is_long = random_numbers.random() < 0.1
            operation = partial(change, name=b"n%06d" % number, number=number)
            await (catalog.write_many(operation) if is_long else catalog.write(operation))
            _say("a", number)
            number += 1
        await catalog.make_durable()
        _say("d", number - 1)
        # Now and then long enough for a checkpoint to come in between.
        if random_numbers.random() < 0.05:
            await trio.sleep(0.21)


if __name__ == "__main__":
    trio.run(_write, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
