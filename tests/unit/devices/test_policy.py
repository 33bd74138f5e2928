"""Settings, what they must be together, and the layouts that they lead to."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpfs.core.engine import BLOCK_BYTES
from fpfs.core.placement import Placer, conforms, rank_of
from fpfs.core.policy import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    KEYS,
    PROFILES,
    Acknowledge,
    First,
    Policy,
    parse_setting,
)
from fpfs.core.policy_rules import DeviceFacts, MountFacts, check_policy, choose_devices
from fpfs.core.refusal import Refused
from fpfs.core.units import format_exact, parse_size_bytes
from tests.support.seeds import chosen_seed

MIB = 1024 * 1024
THREE = (DeviceFacts(4, ("fast", "new")), DeviceFacts(5, ("fast",)), DeviceFacts(7))
MOUNT = MountFacts(devices=THREE, slot_bytes=MIB, staging_bytes=64 * MIB, depth=16)

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "width": st.integers(0, 65_535),
    "devices": st.lists(
        st.from_regex(r"[a-z][a-z0-9_.-]{0,9}|[0-9]{1,5}", fullmatch=True), unique=True
    )
    .filter(lambda words: "all" not in words)
    .map(tuple),
    "chunk": st.integers(CHUNK_BYTES_MIN // BLOCK_BYTES, CHUNK_BYTES_MAX // BLOCK_BYTES).map(
        lambda blocks: blocks * BLOCK_BYTES
    ),
    "depth": st.integers(0, 1024),
    "buffers": st.sampled_from([0, 2, 3, 1024]),
    "versions": st.integers(0, 1000),
    "readahead": st.integers(0, 16).map(lambda mebibytes: mebibytes * MIB),
    "commit_marker": st.text(
        st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=40
    ).filter(lambda name: name not in (".", "..")),
    "whole": st.lists(
        st.text(
            st.characters(exclude_characters=":/\0", exclude_categories=("Cs",)),
            min_size=1,
            max_size=9,
        )
    )
    .filter(lambda patterns: patterns != ["none"])
    .map(tuple),
}


@given(st.data())
def test_what_is_shown_is_read_back(data: st.DataObject) -> None:
    for key, kind in KEYS.items():
        words: Any = kind.parse  # an enum, where there are words
        value = data.draw(VALUES[key] if key in VALUES else st.sampled_from(list(words)))
        text = kind.show(value)
        assert parse_setting(key, text, asked="") == text
        assert getattr(Policy().with_settings([{key: text}]), kind.field) == value


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("width", "0"),
        ("width", "65536"),
        ("width", "-1"),
        ("width", "1.5"),
        ("width", ""),
        ("devices", ""),
        ("devices", "a,,b"),
        ("devices", "a,a"),
        ("devices", "all,a"),
        ("devices", "a b"),
        ("devices", "/nvme0"),
        ("chunk", "64K"),
        ("chunk", "100K"),
        ("chunk", "2G"),
        ("chunk", "x"),
        ("chunk", "-1M"),
        ("first", "second"),
        ("depth", "0"),
        ("depth", "1025"),
        ("buffers", "1"),
        ("buffers", "1025"),
        ("ack", "never"),
        ("whole", ""),
        ("whole", "a::b"),
        ("whole", "a/b"),
        ("whole", "x" * 5000),
        ("readahead", "0"),
        ("readahead", "512K"),
        ("readahead", "1.5M"),
        ("readahead", "17M"),
        ("reads", "slow"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_is_allowed(key: str, text: str) -> None:
    with pytest.raises(Refused) as refused:
        parse_setting(key, text, asked="policy set /run")
    said = f"policy set /run: {key} cannot be '{text}'; take {KEYS[key].allowed}"
    assert str(refused.value) == " ".join(said.split())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"devices": "fast,none"}, "no device has the number or tag 'none'; take of 4, fast, new"),
        ({"width": "4"}, "width cannot be 4: devices=all are 3; take a number from 1 to 3, or all"),
        ({"devices": "fast", "width": "3"}, "width cannot be 3: devices=fast are 2"),
        ({"chunk": "1088K"}, "chunk cannot be 1088K: staging buffers hold 1M; take a multiple"),
        ({"depth": "17"}, "depth cannot be 17: this mount's devices take 16; take a number from 1"),
        ({"buffers": "22"}, "buffers cannot be 22: staging holds 64 for 3 devices; take a number"),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(Refused) as refused:
        check_policy(Policy().with_settings([settings]), MOUNT, asked="policy")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"devices": "fast,7", "width": "3"},
        {"devices": "4"},
        {"chunk": "16M"},
        {"chunk": "1G"},
        {"chunk": "960K"},
        {"depth": "16", "buffers": "21"},
        {"width": "1", "buffers": "64"},
        *PROFILES.values(),
    ],
)
def test_values_that_fit_are_taken(settings: dict[str, str]) -> None:
    check_policy(Policy().with_settings([settings]), MOUNT, asked="policy")


def test_profiles_are_settings() -> None:
    for settings in PROFILES.values():
        for key, text in settings.items():
            assert parse_setting(key, text, asked="") == text


def test_the_nearest_setting_holds() -> None:
    defaults = Policy(chunk_bytes=4 * MIB, ack=Acknowledge.CLOSE)
    policy = defaults.with_settings(
        [{"width": "2"}, {"width": "1", "first": "rank"}, {"ack": "early"}]
    )
    assert (policy.width, policy.first, policy.ack) == (2, First.RANK, Acknowledge.EARLY)
    assert policy.chunk_bytes == 4 * MIB


@given(st.integers(0, 2**62))
def test_exact_sizes_are_read_back(size_bytes: int) -> None:
    assert parse_size_bytes(format_exact(size_bytes), name="") == size_bytes


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (0, [((4, 5, 7), 0), ((4, 5, 7), 1), ((4, 5, 7), 2), ((4, 5, 7), 0)]),
        (2, [((4, 5), 0), ((5, 7), 0), ((7, 4), 0), ((4, 5), 0)]),
    ],
)
def test_new_files_start_on_devices_in_turn(
    width: int, expected: list[tuple[tuple[int, ...], int]]
) -> None:
    placer = Placer()
    for devices, first in expected:
        layout = placer.layout(Policy(width=width), b"x", THREE)
        assert (layout.devices, layout.first, layout.chunk_bytes) == (devices, first, MIB)


def test_a_rank_in_the_name_chooses_the_first_device() -> None:
    placer = Placer()
    policy = Policy(width=1, first=First.RANK)
    chosen = [placer.layout(policy, b"rank%d.pt" % rank, THREE).devices for rank in (0, 1, 2, 3)]
    assert chosen == [(4,), (5,), (7,), (4,)]
    without = [placer.layout(policy, b"model.pt", THREE).devices for _ in range(3)]
    assert without == [(4,), (5,), (7,)]
    wide = placer.layout(Policy(first=First.RANK), b"__1_0.distcp", THREE)
    assert (wide.devices, wide.first) == ((4, 5, 7), 1)


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        (b"__3_0.distcp", 3),
        (b"mp_rank_07_model_states.pt", 7),
        (b"zero_pp_rank_2_mp_rank_00_optim_states.pt", 2),
        (b"bf16_zero_pp_rank_11_mp_rank_00_optim_states.pt", 11),
        (b"model-00002-of-00005.safetensors", 2),
        (b"rank12.pt", 12),
        (b"shard-4.bin", 4),
        (b"step100.pt", None),
        (b"pytorch_model.bin", None),
        (b"\xff\xfe", None),
        (b"rank" + b"9" * 200, 999_999_999),
    ],
)
def test_ranks_of_names_that_libraries_write(name: bytes, rank: int | None) -> None:
    assert rank_of(name) == rank


def test_the_least_used_devices_come_first_and_those_alike_in_turn() -> None:
    placer = Placer()
    policy = Policy(width=2, first=First.LEAST_USED)
    free = {4: 10 << 30, 5: 90 << 30, 7: 50 << 30}
    assert [placer.layout(policy, b"", THREE, free).devices for _ in range(3)] == [(5, 7)] * 3
    alike = {4: 90 << 30, 5: (90 << 30) - MIB, 7: (90 << 30) - 2 * MIB}
    policy = Policy(width=1, first=First.LEAST_USED)
    found = [placer.layout(policy, b"", THREE, alike).devices[0] for _ in range(6)]
    assert sorted(found) == [4, 4, 5, 5, 7, 7]
    lost = {4: 5 << 30, 5: 1 << 30}  # nothing is known of the third: it is lost
    assert placer.layout(Policy(first=First.LEAST_USED), b"", THREE, lost).devices == (4, 5, 7)


def test_devices_that_take_no_chunks_are_avoided() -> None:
    draining = (THREE[0], THREE[1]._replace(accepts=False), THREE[2])
    assert choose_devices(Policy(), draining) == (4, 7)
    assert choose_devices(Policy(devices=("fast",)), draining) == (4,)
    only = tuple(device._replace(accepts=False) for device in THREE)
    assert choose_devices(Policy(), only) == (4, 5, 7)
    # A tag that nobody has any more, and a width that there are too few devices for.
    assert choose_devices(Policy(devices=("gone",)), THREE) == (4, 5, 7)
    layout = Placer().layout(Policy(devices=("fast",), width=3), b"", THREE)
    assert sorted(layout.devices) == [4, 5]


def test_layouts_of_a_policy_conform_to_it() -> None:
    seed = chosen_seed()
    chance = random.Random(seed)
    placer = Placer()
    for _ in range(500):
        devices = [
            DeviceFacts(number, tuple(chance.sample(["a", "b"], chance.randrange(3))))
            for number in range(chance.randint(1, 5))
        ]
        policy = Policy(
            width=chance.randrange(4),
            devices=tuple(chance.sample(["a", "b", "0", "3"], chance.randrange(3))),
            chunk_bytes=chance.choice([MIB, 2 * MIB]),
            first=chance.choice(list(First)),
        )
        layout = placer.layout(policy, b"rank%d" % chance.randrange(9), devices, {0: 5, 1: 9})
        assert conforms(layout, policy, devices), f"seed {seed}"
        other = Policy(chunk_bytes=policy.chunk_bytes * 2)
        assert not conforms(layout, other, devices)
        narrower = msgspec.structs.replace(layout, devices=layout.devices[1:])
        assert not conforms(narrower, policy, devices), f"seed {seed}"
