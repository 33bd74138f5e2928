"""Figures of ``fpfs-ctl tune`` that its table shows."""

from __future__ import annotations

import random

from fpfs.cli.commands.tune import percent_of


def test_the_best_alone_has_all() -> None:
    generator = random.Random(1)
    for best in (generator.uniform(1e6, 1e10) for _ in range(10_000)):
        assert percent_of(best, best) == 100, best
        assert percent_of(best * (1 - 1e-9), best) == 99, best
        assert percent_of(best / 2, best) == 50, best
