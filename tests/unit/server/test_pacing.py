"""Answers that many ask for: shared, begun after they were asked for, and paced."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from fpfs.daemon.control.coalesce import SHARE, Paced

WORK_S = 1.0


@pytest.fixture
def autojump_clock() -> trio.testing.MockClock:
    """A clock that jumps when nothing happens."""
    return trio.testing.MockClock(autojump_threshold=0)


class Work:
    """Takes a second each time; counts."""

    def __init__(self) -> None:
        self.began: list[float] = []

    async def __call__(self) -> float:
        """Return when it began."""
        self.began.append(trio.current_time())
        await trio.sleep(WORK_S)
        return self.began[-1]


@trio.testing.trio_test
async def test_all_who_ask_meanwhile_share_an_answer_that_began_after(
    autojump_clock: trio.testing.MockClock,
) -> None:
    work = Work()
    paced = Paced(work)
    answers: list[tuple[float, float]] = []

    async def ask(delay_s: float) -> None:
        await trio.sleep(delay_s)
        asked_s = trio.current_time()
        answers.append((asked_s, await paced.ask()))

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(ask, number / 100)
    assert len(answers) == 200
    assert all(began_s >= asked_s for asked_s, began_s in answers)
    assert len(work.began) == 2, "the first, and one for all who came while it was at work"


@trio.testing.trio_test
async def test_work_takes_no_more_than_its_share(
    autojump_clock: trio.testing.MockClock,
) -> None:
    work = Work()
    paced = Paced(work)
    for _ in range(5):
        await paced.ask()
    gaps = [after - before for before, after in zip(work.began, work.began[1:], strict=False)]
    assert gaps == pytest.approx([WORK_S / SHARE] * 4)


@trio.testing.trio_test
async def test_an_error_is_told_to_all_and_one_who_leaves_leaves_the_rest_alone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def fail() -> int:
        await trio.sleep(WORK_S)
        raise OSError("no device")

    paced = Paced(fail)
    errors: list[str] = []

    async def ask() -> None:
        try:
            await paced.ask()
        except OSError as error:
            errors.append(str(error))

    with trio.move_on_after(WORK_S / 2):
        await paced.ask()
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
    assert errors == ["no device"] * 3
