"""Durations in buckets, and how long acknowledged bytes take to be durable."""

from __future__ import annotations

import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
import trio.testing
from hypothesis import given

from fpfs import _native
from fpfs.core.statistics import BUCKETS, DURATION_BOUNDS_NS, DurationHistogram, Durations
from fpfs.daemon.commit.lag import STEPS_MAX, CommitSteps, StepKind
from tests.support.catalog.rig import LARGE, rig


def test_the_bounds_are_the_engines() -> None:
    assert len(DURATION_BOUNDS_NS) == _native.DURATION_BOUNDS
    assert DURATION_BOUNDS_NS[0] == _native.DURATION_UNIT_NS


@given(st.integers(min_value=-10, max_value=1 << 40))
def test_a_duration_falls_below_its_bound(duration_ns: int) -> None:
    histogram = DurationHistogram()
    histogram.record(duration_ns)
    counted = histogram.read()
    (bucket,) = [index for index, count in enumerate(counted.counts) if count]
    assert bucket == BUCKETS - 1 or duration_ns <= DURATION_BOUNDS_NS[bucket]
    assert bucket == 0 or duration_ns > DURATION_BOUNDS_NS[bucket - 1]
    assert counted.count == 1
    assert counted.sum_ns == max(0, duration_ns)


def test_what_came_since() -> None:
    histogram = DurationHistogram()
    histogram.record(500)
    before = histogram.read()
    histogram.record(1500)
    since = histogram.read().since(before)
    assert since.count == 1
    assert since.sum_ns == 1500
    assert before.since(before) == Durations()


def test_steps_that_nobody_takes_are_bounded_and_counted() -> None:
    steps = CommitSteps()
    steps.add(StepKind.DRAIN, 5, 0)
    steps.watch(5)
    for _ in range(STEPS_MAX + 3):
        steps.add(StepKind.DRAIN, 5, 1)
        steps.add(StepKind.DRAIN, 6, 2)
    assert steps.lost == 3
    assert [step.began_ns for step in steps.take()] == [1] * STEPS_MAX
    assert steps.take() == []
    steps.watch(0)
    steps.add(StepKind.DRAIN, 5, 1)
    assert steps.take() == []


@pytest.mark.parametrize("size", [10, LARGE])
@trio.testing.trio_test
async def test_a_version_is_durable_with_the_flush_after_its_transaction(
    size: int, tmp_path: Path
) -> None:
    async with rig(tmp_path, durable_within_s=10_000) as mount:
        durability = mount.commit.durability
        handle = await mount.create("file")
        inode = await mount.resolve("file")
        mount.commit.steps.watch(inode.ino)
        began_ns = time.monotonic_ns()
        mount.engine.write(handle, 0, bytes(size))
        written_ns = time.monotonic_ns()
        mount.engine.write(handle, size, b"more")
        assert mount.engine.unsaved(inode.ino).bytes_uncommitted == size + 4
        await mount.commit.make_current(inode)
        assert mount.engine.unsaved(inode.ino).bytes_uncommitted == 0
        assert durability.waiting == 1
        assert began_ns <= durability.oldest_ns_by_ino()[inode.ino] <= written_ns
        assert durability.oldest_ns_by_ino().keys() == {inode.ino}
        assert durability.ack_to_durable().count == 0
        await mount.catalog.make_durable()
        assert durability.waiting == 0
        assert durability.oldest_ns() == 0
        took = durability.ack_to_durable()
        assert took.count == 1
        assert 0 < took.sum_ns <= time.monotonic_ns() - began_ns
        steps = mount.commit.steps.take()
        assert [step.kind for step in steps] == [
            StepKind.DRAIN,
            StepKind.TRANSACTION,
            StepKind.LOG_FLUSH,
        ]
        times = [time_ns for step in steps for time_ns in (step.began_ns, step.ended_ns)]
        assert times == sorted(times)
        assert began_ns <= times[0]


@trio.testing.trio_test
async def test_a_flush_covers_what_was_current_before_it(tmp_path: Path) -> None:
    async with rig(tmp_path, durable_within_s=10_000) as mount:
        durability = mount.commit.durability
        for count in range(1, 4):
            await mount.write_file(f"file{count}", b"content")
            await mount.commit.wait_queued()
            assert durability.waiting == count
        await mount.catalog.make_durable()
        assert durability.waiting == 0
        assert durability.ack_to_durable().count == 3


@trio.testing.trio_test
async def test_a_version_without_new_bytes_is_not_counted(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.write_file("file", b"content")
        await mount.commit.make_names_durable()
        inode = await mount.resolve("file")
        await mount.namespace.files.truncate(inode, 3)
        await mount.commit.make_names_durable()
        assert mount.commit.statistics().committed == 2
        assert mount.commit.durability.ack_to_durable().count == 1
        assert mount.commit.durability.waiting == 0
