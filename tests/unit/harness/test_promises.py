"""The judge of power cuts: what it lets pass, and what it calls broken.

A history here is a row of calls, each a word and its place: begun at 10, 20, …, returned 5 later.
"""

from __future__ import annotations

from tests.crash.power.promises import (
    EMPTY,
    Call,
    Entry,
    Found,
    History,
    broken_former_version,
    broken_promise,
    dangling_pointer,
    names_after,
)
from tests.crash.power.workload import Word

MODE = 0o644


def history(*about: dict[str, object]) -> History:
    """The calls of a program."""
    calls = []
    for number, words in enumerate(about, start=1):
        word = Word(program=0, number=number, **words)  # type: ignore[arg-type]
        calls.append(Call(word, 10 * number, 10 * number + 5))
    return History(calls)


def create(path: str, file: int) -> dict[str, object]:
    return {"name": "create", "path": path, "file": file}


def close(file: int, digest: str) -> dict[str, object]:
    return {"ends_version": True, "file": file, "digest": digest}


def fsync(file: int, digest: str) -> dict[str, object]:
    return {**close(file, digest), "durable": True}


def rename(path: str, other: str) -> dict[str, object]:
    return {"name": "rename", "path": path, "other": other}


SYNC_FOLDER: dict[str, object] = {"durable": True}


def found(**digests: str) -> dict[str, Found]:
    """Files, by name."""
    return {path: Found("file", MODE, digest) for path, digest in digests.items()}


def accepted(told: History, cut: int, *candidates: dict[str, Found]) -> list[bool]:
    """Whether each of the candidates may be found after a cut."""
    return [not broken_promise(told, cut, candidate) for candidate in candidates]


def test_until_something_is_synced_all_of_the_past_may_be_there() -> None:
    told = history(create("a", 1), close(1, "one"), close(1, "two"))
    states = [found(), found(a=EMPTY), found(a="one"), found(a="two")]
    assert accepted(told, 9, *states) == [True, False, False, False]
    assert accepted(told, 12, *states) == [True, True, False, False]
    assert accepted(told, 22, *states) == [True, True, True, False]
    assert accepted(told, 99, *states) == [True, True, True, True]
    assert accepted(told, 99, found(a="torn"), found(b="one")) == [False, False]


def test_what_was_synced_is_there_once_that_was_answered() -> None:
    told = history(create("a", 1), close(1, "one"), fsync(1, "two"), close(1, "three"))
    states = [found(), found(a="one"), found(a="two"), found(a="three")]
    assert accepted(told, 34, *states) == [True, True, True, False]
    assert accepted(told, 36, *states) == [False, False, True, False]
    assert accepted(told, 99, *states) == [False, False, True, True]


def test_a_synced_folder_covers_names_and_versions() -> None:
    told = history(create("a", 1), close(1, "one"), SYNC_FOLDER, create("b", 2))
    states = [found(a=EMPTY), found(a="one"), found(a="one", b=EMPTY)]
    assert accepted(told, 99, *states) == [False, True, True]


def test_a_wait_for_one_file_covers_its_last_version() -> None:
    waited = {"durable": True, "file": 1}
    told = history(create("a", 1), create("b", 2), close(1, "one"), close(2, "two"), waited)
    assert accepted(told, 99, found(a="one", b=EMPTY), found(a=EMPTY, b=EMPTY)) == [True, False]


def test_versions_keep_their_order() -> None:
    told = history(create("a", 1), create("b", 2), close(1, "one"), close(2, "two"))
    states = [found(a="one", b=EMPTY), found(a=EMPTY, b="two"), found(a="one", b="two")]
    assert accepted(told, 99, *states) == [True, False, True]


def test_names_may_be_ahead_of_versions_but_not_behind() -> None:
    told = history(create("a", 1), close(1, "one"), create("b", 2), close(2, "two"))
    assert accepted(told, 99, found(a=EMPTY, b=EMPTY), found(a=EMPTY)) == [True, True]
    # The second version is there, without the first one's name; then without the first one.
    assert accepted(told, 99, found(b="two"), found(a=EMPTY, b="two")) == [False, False]


def test_a_rename_is_not_ahead_of_versions() -> None:
    told = history(
        create("a", 1), create("b", 2), close(1, "one"), close(2, "two"), rename("b", "c")
    )
    states = [found(a="one", c="two"), found(a=EMPTY, c="two"), found(a="one", c=EMPTY)]
    assert accepted(told, 99, *states) == [True, False, False]


def remove(path: str) -> dict[str, object]:
    return {"name": "remove", "path": path}


def test_a_removal_is_not_ahead_of_versions_of_others() -> None:
    told = history(
        create("old", 1), fsync(1, "x"), create("new", 2), close(2, "y"), remove("old"),
        create("later", 3),
    )  # fmt: skip
    assert accepted(
        told,
        1000,
        found(old="x", new=EMPTY, later=EMPTY),
        found(new="y", later=EMPTY),
        found(old="x", new="y"),
        found(new=EMPTY, later=EMPTY),
        found(new=EMPTY),
        found(old="x", new="y", later=EMPTY),
    ) == [True, True, True, False, False, False]


def test_what_is_empty_or_has_a_successor_need_not_come_back() -> None:
    told = history(
        create("old", 1), fsync(1, "x"), create("new", 2), close(2, "y"), remove("old"),
        create("old", 3), close(3, "z"), create("empty", 4), remove("empty"),
    )  # fmt: skip
    assert accepted(
        told,
        1000,
        found(old="x", new=EMPTY),
        found(old="x", new=EMPTY, empty=EMPTY),
        found(old="z", new="y"),
        found(old=EMPTY, new="y"),
        found(old=EMPTY, new=EMPTY),
        found(old="z", new=EMPTY),
    ) == [True, True, True, True, False, False]


def test_modes_and_kinds_are_compared() -> None:
    told = history(create("a", 1), {"name": "chmod", "path": "a", "mode": 0o600}, SYNC_FOLDER)
    right = {"a": Found("file", 0o600, EMPTY)}
    assert accepted(told, 99, right, found(a=EMPTY), {"a": Found("folder")}) == [True, False, False]


def test_names_follow_links_and_folders() -> None:
    told = history(
        {"name": "mkdir", "path": "d"},
        create("d/a", 1),
        {"name": "link", "path": "d/a", "other": "second"},
        {"name": "chmod", "path": "second", "mode": 0o600},
        {"name": "symlink", "path": "d/s"},
        rename("d", "e"),
        {"name": "remove", "path": "second"},
        {"name": "mkdir", "path": "f"},
        {"name": "rmdir", "path": "f"},
    )
    file = Entry("file", 1, 0o600)
    expected = {"e": Entry("folder"), "e/a": file, "e/s": Entry("symlink")}
    assert names_after(told.names) == expected


def test_a_pointer_names_what_is_whole() -> None:
    told = history(create("a", 1), close(1, "one"), create("latest", 2), close(2, "pointer"))

    def names_what_is_whole(content: bytes, state: dict[str, Found]) -> bool:
        return not dangling_pointer(told, state, pointer="latest", content=content)

    assert names_what_is_whole(b"a", found(a="one"))
    assert names_what_is_whole(b"", found())
    assert not names_what_is_whole(b"a", found(a=EMPTY))
    assert not names_what_is_whole(b"a", found())
    assert not names_what_is_whole(b"b", found(a="one"))


def test_what_is_kept_must_have_been_whole_once() -> None:
    told = history(create("a", 1), close(1, "x"), close(1, "y"), close(1, EMPTY))
    assert broken_former_version(told, found(one="x", two="y")) == ""
    assert "three" in broken_former_version(told, found(one="x", three="z"))
    assert "nothing" in broken_former_version(told, found(nothing=EMPTY))


def test_a_removal_may_wait_for_what_another_program_closed() -> None:
    told = history(create("a", 1), fsync(1, "one"), remove("a"), create("b", 2))
    other = history(create("x", 1), close(1, "one"), SYNC_FOLDER)
    states = [found(b=EMPTY), found(a="one", b=EMPTY)]
    for cut, others, expected in (
        (99, [], [True, False]),
        (99, [other], [True, False]),  # the other's version is durable by then
        (44, [history(create("x", 1), close(1, "one"))], [True, True]),
        (44, [history(create("x", 1), SYNC_FOLDER, SYNC_FOLDER, close(1, "one"))], [True, False]),
    ):
        assert [not broken_promise(told, cut, state, others=others) for state in states] == expected


def test_removals_that_wait_for_others_are_the_last_ones_and_after_every_rename() -> None:
    told = history(
        create("a", 1), create("b", 2), fsync(1, "one"), fsync(2, "two"), remove("a"), remove("b")
    )
    others = [history(close(1, "one"))]
    states = [found(a="one", b="two"), found(b="two"), found(a="one"), found()]
    accepted_states = [not broken_promise(told, 99, state, others=others) for state in states]
    assert accepted_states == [True, True, False, True]
    told = history(create("a", 1), create("b", 2), fsync(1, "one"), remove("a"), rename("b", "c"))
    states = [found(a="one", c=EMPTY), found(c=EMPTY), found(a="one", b=EMPTY)]
    accepted_states = [not broken_promise(told, 99, state, others=others) for state in states]
    assert accepted_states == [False, True, True]
