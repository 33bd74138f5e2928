"""Nodes with mount, network and clocks of their own: links that are slow or cut, nodes that die."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fpfs import client
from fpfs.client.shares import copying, network, reading, saving
from fpfs.testing.mounted import Mount, mounted
from tests.support.failures import links
from tests.support.failures.links import Network
from tests.support.ranks import Worlds
from tests.support.states import same

WHY_NOT = links.why_not()
pytestmark = [
    pytest.mark.clients,
    pytest.mark.root,
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]

CUT_OFF = r"the writer of .*\.(share|manifest\.json) was cut off by SIGKILL: "
LIMIT_S = 8.0
"""How long a rank is waited for of which nothing is known."""
NEVER_S = 900.0
YEAR_2100_S = 4_102_444_800


@pytest.fixture(scope="module")
def mounts() -> Iterator[list[Mount]]:
    """One for each of four nodes."""
    with mounted(devices=2) as a, mounted() as b, mounted() as c, mounted() as d:
        found = [a, b, c, d]
        for mount in found:
            mount.allow_log(CUT_OFF)
        yield found


@pytest.fixture(params=[2, 4])
def nodes(request: pytest.FixtureRequest) -> Iterator[Network]:
    """That many nodes."""
    with links.network(request.param) as made:
        yield made


@pytest.fixture
def two() -> Iterator[Network]:
    """Two nodes."""
    with links.network(2) as made:
        yield made


@pytest.fixture
def places(mounts: list[Mount], request: pytest.FixtureRequest) -> list[str]:
    """A directory to save to for each node."""
    name = request.node.name.replace("/", "-")
    return [str(mount.root / name) for mount in mounts]


def state_of(step: int) -> dict[str, Any]:
    """The same on all ranks, some MiB, of one step."""
    torch.manual_seed(step)
    return {"step": step, **{str(number): torch.randn(300_001) for number in range(8)}}


def place_of(places: list[str], nodes: int) -> str:
    return places[dist.get_rank() * nodes // dist.get_world_size()]


def save(
    places: list[str],
    nodes: int,
    step: int,
    copies: int,
    limit_s: float = NEVER_S,
    beside: bool = False,
) -> None:
    """As a rank: save; beside training, if so."""
    place = place_of(places, nodes)
    if not beside:
        client.save_shares(state_of(step), place, copies=copies, timeout_s=limit_s)
        return
    with client.AsyncSaver(timeout_s=limit_s) as saver:
        error = saver.save_shares(state_of(step), place, copies=copies).durable.exception(NEVER_S)
    assert error is None


def load(places: list[str], nodes: int, step: int, limit_s: float = NEVER_S) -> None:
    """As a rank: load."""
    loaded = client.load_shares(place_of(places, nodes), timeout_s=limit_s)
    assert same(loaded, state_of(step))
    empty = {name: torch.zeros(300_001) for name in list(loaded)[1:3]}
    into = client.load_shares(place_of(places, nodes), into=empty, timeout_s=limit_s)
    assert all(same(into[name], loaded[name]) for name in empty)


def test_nodes_with_networks_of_their_own(forks: Worlds, nodes: Network, places: list[str]) -> None:
    count = nodes.nodes
    forks.start(count * 2, save, places, count, 1, 1, network=nodes).values()
    forks.start(count, load, places, count, 1, network=nodes).values()
    forks.start(count, save, places, count, 2, 2, network=nodes).values()
    # Another node has a copy of what the first had.
    others = [f"{places[0]} is lost", *places[1:]]
    forks.start(count, load, others, count, 2, network=nodes).values()


@pytest.mark.parametrize(
    ("mbit_per_s", "limit_s"),
    [(40, NEVER_S), pytest.param(4, LIMIT_S, marks=pytest.mark.long)],
    ids=["", "slower than silence is waited for"],
)
def test_a_slow_link(
    forks: Worlds, two: Network, places: list[str], mbit_per_s: int, limit_s: float
) -> None:
    two.slow(1, mbit_per_s=mbit_per_s)
    forks.start(2, save, places, 2, 1, 2, limit_s, network=two).values()
    (copy,) = Path(places[1]).glob("00000-*.share")
    copy_bytes = copy.stat().st_size
    assert limit_s == NEVER_S or copy_bytes * 8 / 1e6 / mbit_per_s > limit_s
    saved = two.slowed(1)
    copy.rename(f"{places[1]}/lost")
    forks.start(2, load, places, 2, 1, limit_s, network=two).values()
    loaded = two.slowed(1)
    assert saved.bytes > copy_bytes
    assert loaded.bytes > saved.bytes + copy_bytes
    assert loaded.held_back > saved.held_back > 0


def test_clocks_that_differ(forks: Worlds, two: Network, places: list[str]) -> None:
    """Numbers tell what is newest, and no node's clock. (Those that count from a begin differ.)"""
    forks.start(2, save, places, 2, 1, 2, network=two).values()
    former = f"{places[0]} before"
    shutil.copytree(places[0], former)
    forks.start(2, save, places, 2, 2, 2, network=two).values()
    # As a node has it that missed the second one, and whose clock was years ahead.
    for path in [*Path(former).iterdir(), Path(former)]:
        os.utime(path, (YEAR_2100_S, YEAR_2100_S))
    shutil.rmtree(places[0])
    os.rename(former, places[0])
    forks.start(2, load, places, 2, 2, network=two).values()
    assert client.load(places[:2])["step"] == 2
    forks.start(2, save, places, 2, 3, 2, network=two).values()
    assert [client.load(place)["step"] for place in places[:2]] == [3, 3]
    assert [len(os.listdir(place)) for place in places[:2]] == [3, 3]


def at(module: Any, name: str, action: Callable[[], None], *, after: int = 0) -> None:
    """Do something when a function is called for the first time, or later."""
    function = getattr(module, name)
    calls = 0

    def act_and_call(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after + 1:
            action()
        return function(*arguments, **keywords)

    setattr(module, name, act_and_call)


MOMENTS: dict[str, tuple[Any, str, int]] = {
    "agreeing": (saving, "agree", 0),
    "making a share": (saving.Replacement, "reserve", 0),
    "writing": (saving, "write", 0),
    "finishing a share": (saving.SharesSave, "_finish_share", 0),
    "copying": (copying, "write_memory", 0),
    "naming a share": (saving.Replacement, "take_name", 0),
    "writing the manifest": (saving.SharesSave, "_write_manifest", 0),
    "removing the former": (saving.SharesSave, "_remove_former", 0),
    "reading": (reading.OpenShare, "start", 1),
    "connecting": (network, "connect", 0),
}
OF_LOADS = ("reading", "connecting")
OF_COMPLETE = ("writing the manifest", "removing the former")
"""When rank 0 makes the checkpoint complete, and afterwards."""
HOW = ("cut", "killed")


def cases(short: Sequence[tuple[Any, ...]], *values: Sequence[Any]) -> list[Any]:
    """What happens, when, to which node, and more; those that are not in `short` take their time.

    Among them each of `values` with each of the others.
    """
    return [
        pytest.param(*case, marks=() if case in short else pytest.mark.long)
        for case in itertools.product(*values)
    ]


SAVES = cases(
    [
        ("cut", "writing", 1, False),
        ("cut", "copying", 0, True),
        ("killed", "finishing a share", 1, True),
        ("killed", "writing the manifest", 0, False),
    ],
    HOW,
    [name for name in MOMENTS if name not in OF_LOADS],
    (0, 1),
    (False, True),
)
LOADS = cases(
    [("cut", "reading", 0), ("cut", "connecting", 1), ("killed", "reading", 1)],
    HOW,
    OF_LOADS,
    (0, 1),
)


def do_badly(
    what: str,
    moment: str,
    bad: int,
    places: list[str],
    nodes: list[Any],
    loads: bool,
    beside: bool,
) -> None:
    """As a rank: save or load, when one node's link is cut, or its ranks are killed."""
    made = Network(*nodes)

    def act() -> None:
        if what == "cut":
            made.cut(bad)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    if place_of(places, made.nodes) == places[bad]:
        module, name, after = MOMENTS[moment]
        at(module, name, act, after=after)
    if loads:
        load(places, made.nodes, 1, LIMIT_S)
    else:
        save(places, made.nodes, 2, 2, LIMIT_S, beside)


def lose(
    forks: Worlds,
    nodes: Network,
    places: list[str],
    what: str,
    moment: str,
    bad: int,
    *,
    loads: bool,
    beside: bool = False,
    ranks: int = 1,
) -> None:
    """Lose a node while all save or load; all ranks end, of what they can know."""
    given = (what, moment, bad, places, list(nodes), loads, beside)
    world = forks.start(nodes.nodes * ranks, do_badly, *given, network=nodes)
    errors = [str(outcome.error) for outcome in world.outcomes()]
    if what == "killed":
        assert str(-signal.SIGKILL) in errors[bad * ranks : (bad + 1) * ranks]
        errors = [error for error in errors if error != str(-signal.SIGKILL)]
    for error in errors:
        assert error.startswith("RankFailed: rank "), errors


def be_back(two: Network, what: str, bad: int) -> None:
    if what == "cut":
        two.join(bad)


@pytest.mark.parametrize(("what", "moment", "bad", "beside"), SAVES)
def test_a_node_that_is_lost_while_it_saves(
    forks: Worlds, two: Network, places: list[str], what: str, moment: str, bad: int, beside: bool
) -> None:
    """What is complete on a node is loaded there, and on all the newest that rank 0 has."""
    forks.start(2, save, places, 2, 1, 2, network=two).values()
    lose(forks, two, places, what, moment, bad, loads=False, beside=beside)
    # A rank writes on while its link is cut.
    is_complete = moment in OF_COMPLETE and (
        bad == 1 or what == "cut" or moment == "removing the former"
    )
    for place in places[:2]:
        loaded = client.load(place)
        assert same(loaded, state_of(loaded["step"]))
        assert loaded["step"] in ((1, 2) if is_complete else (1,))
    assert client.load(places[:2])["step"] == (2 if is_complete else 1)
    be_back(two, what, bad)
    forks.start(2, save, places, 2, 3, 2, network=two).values()
    assert [len(os.listdir(place)) for place in places[:2]] == [3, 3]
    assert same(client.load(places[1 - bad]), state_of(3))


@pytest.mark.long
@pytest.mark.parametrize("what", HOW)
def test_one_of_four_nodes_is_lost(forks: Worlds, places: list[str], what: str) -> None:
    """Each has two ranks; the others have copies of what it had."""
    with links.network(4) as four:
        forks.start(8, save, places, 4, 1, 2, network=four).values()
        lose(forks, four, places, what, "copying", 2, loads=False, ranks=2)
        assert same(client.load(places), state_of(1))
        be_back(four, what, 2)
        forks.start(8, save, places, 4, 3, 2, network=four).values()
        others = [place if node != 2 else f"{place} is lost" for node, place in enumerate(places)]
        forks.start(4, load, others, 4, 3, network=four).values()


@pytest.mark.parametrize(("what", "moment", "bad"), LOADS)
def test_a_node_that_is_lost_while_it_loads(
    forks: Worlds, two: Network, places: list[str], what: str, moment: str, bad: int
) -> None:
    forks.start(2, save, places, 2, 1, 1, network=two).values()
    lose(forks, two, places, what, moment, bad, loads=True)
    be_back(two, what, bad)
    forks.start(2, load, places, 2, 1, network=two).values()
