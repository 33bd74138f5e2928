"""Names of devices: what a number, a directory or a tag stands for, and changes of tags."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpfs.core.device_names import TagChange, describe_devices, devices_named, is_tag, parse_tags
from fpfs.core.refusal import Refused


class Device(NamedTuple):
    """What a device is found by."""

    number: int
    path: str
    tags: frozenset[str] = frozenset()


DEVICES = (
    Device(0, "/nvme0", frozenset({"fast", "old"})),
    Device(1, "/nvme1", frozenset({"fast"})),
    Device(4, "/disk"),
)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("0", (0,)),
        ("04", (4,)),
        ("2", ()),
        ("/disk", (4,)),
        ("/disk/", (4,)),
        ("disk", ()),
        ("/disk/objects", ()),
        ("fast", (0, 1)),
        ("old", (0,)),
        ("Fast", ()),
        ("", ()),
        ("99999999999999", ()),
    ],
)
def test_what_a_name_stands_for(name: str, numbers: tuple[int, ...]) -> None:
    assert devices_named(name, DEVICES) == numbers


@given(st.text(max_size=40))
def test_no_tag_is_a_number_or_a_directory(word: str) -> None:
    if is_tag(word):
        tagged = Device(7, f"/{word}", frozenset({word}))
        assert devices_named(word, [tagged, Device(8, "/x")]) == (7,)
        assert not word.isdigit()
        assert "/" not in word


def test_what_there_is_is_said() -> None:
    assert describe_devices(DEVICES) == "devices 0, 1, 4 and tags fast, old"
    assert describe_devices(DEVICES[2:]) == "devices 4"


def test_changes_of_tags() -> None:
    change = parse_tags(["+fast", "-slow", "+a.b_c-1"], asked="tag")
    assert change == TagChange(("fast", "a.b_c-1"), ("slow",))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no tag is named"),
        (["fast"], "'fast' is no change of tags"),
        (["+1"], "'+1' is no change of tags"),
        (["+"], "'+' is no change of tags"),
        (["+a/b"], "'+a/b' is no change of tags"),
        (["+a" * 40], "is no change of tags"),
        (["+fast", "-fast"], "fast is named twice"),
    ],
)
def test_what_is_no_change_of_tags(words: list[str], said: str) -> None:
    with pytest.raises(Refused, match="^tag: ") as refused:
        parse_tags(words, asked="tag")
    assert said in str(refused.value)
