"""Nodes with a mount and a network of their own: links that are slow or cut, nodes that die."""

from __future__ import annotations

import itertools
import os
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

CUT_OFF = r"the writer of \.fpfs-save-.*\.(share|manifest\.json) was cut off by SIGKILL: "
LIMIT_S = 8.0
"""How long a rank is waited for of which nothing is known."""
NEVER_S = 900.0


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


def save(places: list[str], nodes: int, step: int, copies: int, limit_s: float = NEVER_S) -> None:
    """As a rank: save."""
    place = place_of(places, nodes)
    client.save_shares(state_of(step), place, copies=copies, timeout_s=limit_s)


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


def test_a_slow_link(forks: Worlds, two: Network, places: list[str]) -> None:
    two.slow(1, mbit_per_s=40)
    forks.start(2, save, places, 2, 1, 2, network=two).values()
    os.rename(next(Path(places[1]).glob("00000-*.share")), f"{places[1]}/lost")
    forks.start(2, load, places, 2, 1, network=two).values()


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
    "reading": (reading.OpenShare, "start", 1),
    "connecting": (network, "connect", 0),
}
OF_LOADS = ("reading", "connecting")


def cases(moments: Sequence[str], short: Sequence[tuple[str, str, int]]) -> list[Any]:
    """What happens, when, and to which node; those that are not in `short` take their time."""
    return [
        pytest.param(*case, marks=() if case in short else pytest.mark.long)
        for case in itertools.product(("cut", "killed"), moments, (0, 1))
    ]


SAVES = cases(
    [name for name in MOMENTS if name not in OF_LOADS],
    [("cut", "writing", 1), ("cut", "copying", 0), ("killed", "finishing a share", 1)],
)
LOADS = cases(OF_LOADS, [("cut", "reading", 0), ("cut", "connecting", 1), ("killed", "reading", 1)])


def do_badly(
    what: str, moment: str, bad: int, places: list[str], nodes: list[Any], loads: bool
) -> None:
    """As a rank: save or load, when one node's link is cut, or its ranks are killed."""
    made = Network(*nodes)

    def act() -> None:
        if what == "cut":
            made.cut(bad)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == bad:
        module, name, after = MOMENTS[moment]
        at(module, name, act, after=after)
    if loads:
        load(places, made.nodes, 1, LIMIT_S)
    else:
        save(places, made.nodes, 2, 2, LIMIT_S)


def lose(
    forks: Worlds,
    two: Network,
    places: list[str],
    what: str,
    moment: str,
    bad: int,
    *,
    loads: bool,
) -> None:
    """Lose a node while both save or load; all ranks end, of what they can know."""
    given = (what, moment, bad, places, list(two), loads)
    errors = [
        str(outcome.error) for outcome in forks.start(2, do_badly, *given, network=two).outcomes()
    ]
    if what == "killed":
        assert errors.pop(bad) == str(-signal.SIGKILL)
    for error in errors:
        assert error.startswith("RankFailed: rank "), errors


def be_back(two: Network, what: str, bad: int) -> None:
    if what == "cut":
        two.join(bad)


@pytest.mark.parametrize(("what", "moment", "bad"), SAVES)
def test_a_node_that_is_lost_while_it_saves(
    forks: Worlds, two: Network, places: list[str], what: str, moment: str, bad: int
) -> None:
    forks.start(2, save, places, 2, 1, 2, network=two).values()
    lose(forks, two, places, what, moment, bad, loads=False)
    for place in places[:2]:
        assert same(client.load(place), state_of(1))
    be_back(two, what, bad)
    forks.start(2, save, places, 2, 3, 2, network=two).values()
    assert [len(os.listdir(place)) for place in places[:2]] == [3, 3]
    assert same(client.load(places[1 - bad]), state_of(3))


@pytest.mark.parametrize(("what", "moment", "bad"), LOADS)
def test_a_node_that_is_lost_while_it_loads(
    forks: Worlds, two: Network, places: list[str], what: str, moment: str, bad: int
) -> None:
    forks.start(2, save, places, 2, 1, 1, network=two).values()
    lose(forks, two, places, what, moment, bad, loads=True)
    be_back(two, what, bad)
    forks.start(2, load, places, 2, 1, network=two).values()
