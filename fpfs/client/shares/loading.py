"""Loads a checkpoint whose shares are on several nodes.

Ranks agree which checkpoint is the newest, and who sees which shares. Each reads those that it sees
itself, and the rest through a rank that does (`serving`).

Concurrency: as `save_shares`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from fpfs.client.paths import resolve_all
from fpfs.client.peers import Alone, Peers, RankFailed, Ranks, cause_of, peers_of
from fpfs.client.restoring import MapLocation, restore
from fpfs.client.shares.format import (
    MANIFEST,
    Damaged,
    Identity,
    Manifest,
    decode_manifest,
    encode_manifest,
    parse_name,
)
from fpfs.client.shares.reading import (
    AnyShare,
    Failure,
    Missing,
    OpenShare,
    Shares,
    SharesFile,
    check_found,
    newest_of,
    none_in,
    open_others,
    open_share,
    opened_shares,
    pass_over,
)
from fpfs.client.shares.serving import FarShare, Serving
from fpfs.client.topology import TIMEOUT_S

if TYPE_CHECKING:
    import torch.distributed as dist

    from fpfs.client.paths import Path

HOLDERS_MAX = 64
"""Of ranks that see a share, so many read it for others."""
FAR_BUFFER_BYTES = 4 * 1024 * 1024
"""So much is asked for at once of small tensors."""


def load_shares(
    directory: Path | Sequence[Path],
    *,
    group: dist.ProcessGroup | Alone | None = None,
    map_location: MapLocation = None,
    weights_only: bool | None = True,
    into: Any = None,
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """Load a checkpoint that `fpfs.save_shares` has saved, on any nodes, as many as there are now.

    directory: where this rank sees shares, if any, or several of these. It need not be there. The
        newest checkpoint that any rank sees is loaded; together the ranks see all its shares.
    group: whose ranks load it; all of them call this. What a rank does not see itself, another one
        that does reads for it and sends it. None: the default group of torch.distributed, if that
        is initialized. ALONE: this process sees all shares.
    map_location, weights_only, into: as `fpfs.load` has them; each rank may have others.
    timeout_s: seconds that a rank waits at most for another that it knows nothing of.

    Raises what `fpfs.load` raises, FileNotFoundError of a checkpoint or shares that no rank sees,
    `Damaged` (a ValueError) of files that are no shares, and RankFailed of what another rank has
    raised.
    """
    peers = peers_of(group, timeout_s=timeout_s, call="load_shares")
    with peers, contextlib.ExitStack() as stack:
        names = resolve_all(directory)
        shares, is_near = _open(peers, names, stack, timeout_s=timeout_s)
        sizes = {} if is_near else {"buffer_bytes": FAR_BUFFER_BYTES}
        file = stack.enter_context(SharesFile(shares, **sizes))
        state = restore(
            file,
            names[0],
            map_location=map_location,
            weights_only=weights_only,
            into=into,
            begin=peers.rank / peers.size,
        )
        peers.exchange("loaded", None, lambda ranks: ranks, of=type(None))
    return state


Unsound = dict[tuple[Identity, int], Failure]
"""What is wrong with shares of checkpoints, as a rank sees them."""


class _Newest(msgspec.Struct):
    """The newest checkpoint that a rank sees, and then the newest of all."""

    checkpoint: Identity | None
    rank: int
    """Who has its manifest."""
    failure: str
    """What is wrong with the manifests that the rank sees, if none can be read; otherwise ""."""


class _Seen(msgspec.Struct):
    """What a rank sees of the newest checkpoint."""

    manifest: bytes
    """Of the rank that was chosen for it."""
    shares: list[int]
    failures: dict[int, str]
    """What is wrong with those that cannot be opened."""


class _Sources(msgspec.Struct):
    """What all learn from what each sees."""

    manifest: bytes
    holders: list[list[int]]
    """Ranks that see each share, at most `HOLDERS_MAX`."""
    all_near: bool
    """Whether all ranks see all shares."""


def _open(
    peers: Peers, names: list[str], stack: contextlib.ExitStack, *, timeout_s: float
) -> tuple[Shares, bool]:
    """Open the shares of the newest checkpoint, for as long as `stack` is not left.

    Returns also whether this rank sees all of them.
    """
    if not isinstance(peers, Ranks):
        manifest, found = stack.enter_context(opened_shares(names))
        opened = [open_others(manifest, *each, names, stack) for each in enumerate(found)]
        return Shares(manifest, opened), True
    former, unsound = None, Unsound()
    while True:
        manifest, sources, seen = _agree(peers, names, former, unsound)
        far = {
            number: holders[peers.rank % len(holders)]
            for number, holders in enumerate(sources.holders)
            if holders and number not in seen
        }
        with contextlib.ExitStack() as opening:
            numbers = [number for number in range(len(manifest.shares)) if number not in far]
            near = _open_near(manifest, numbers, names, unsound, opening)
            gone = len(near) < len(numbers)
            some_gone = peers.exchange(
                "opened", gone, lambda ranks: [any(ranks)] * len(ranks), of=bool
            )
            if not some_gone:
                stack.enter_context(opening.pop_all())
                break
        # It may just have been replaced, or other ranks have what this one cannot open.
        former = manifest.checkpoint
    pass_over([failure for (of, _), failure in unsound.items() if of == manifest.checkpoint])
    if sources.all_near and manifest.copies == 1:
        opened = [open_others(manifest, *each, names, stack) for each in sorted(near.items())]
        return Shares(manifest, opened), True
    serving = stack.enter_context(Serving(peers, near, timeout_s=timeout_s))
    begun = {number: FarShare(serving, far[number], manifest, number) for number in far}
    # Of all at once.
    for share in begun.values():
        share.begin_opening()

    def places(number: int) -> Iterator[AnyShare]:
        far_shares = [begun[number]] if number in far else []
        # Of a checkpoint without copies, whoever sees a share sees the same file.
        if manifest.copies > 1:
            far_shares += [
                FarShare(serving, server, manifest, number)
                for server in sources.holders[number]
                if server not in (peers.rank, far.get(number))
            ]
        if number in near:
            yield from open_others(manifest, number, near[number], names, stack)
        yield from _open_far(far_shares)

    return Shares(manifest, [places(number) for number in range(len(manifest.shares))]), not far


def _open_far(shares: list[FarShare]) -> Iterator[FarShare]:
    """Yield a share as one rank after the other reads it, of those that can open it.

    Raises what is wrong with the last one.
    """
    for share in shares:
        try:
            share.open_to_load()
        except (OSError, Damaged) as failure:
            if share is shares[-1]:
                raise
            pass_over([failure])
        else:
            yield share


def _open_near(
    manifest: Manifest,
    numbers: list[int],
    names: list[str],
    unsound: Unsound,
    opening: contextlib.ExitStack,
) -> dict[int, OpenShare]:
    """Open shares that this rank sees, of those that are there and sound."""
    found = {}
    for number in numbers:
        try:
            share = open_share(manifest, number, names)
        except (OSError, Damaged) as failure:
            unsound[manifest.checkpoint, number] = failure
        else:
            if share is not None:
                found[number] = opening.enter_context(share)
    return found


def _agree(
    peers: Ranks, names: list[str], former: Identity | None, unsound: Unsound
) -> tuple[Manifest, _Sources, set[int]]:
    """Return the newest checkpoint, who sees its shares, and those that this rank sees.

    former: the one that had not all shares; if it still is the newest, this raises `Missing`, or
    what is wrong with a share that no rank can open.
    """
    own, chosen = _choose(peers, names)
    failures = {number: each for (of, number), each in unsound.items() if of == chosen.checkpoint}
    seen = _Seen(
        b"",
        [number for number in _seen(names, chosen.checkpoint) if number not in failures],
        {number: cause_of(failure) for number, failure in failures.items()},
    )
    if chosen.rank == peers.rank:
        assert own is not None
        seen.manifest = encode_manifest(own)

    def tell(found: list[_Seen]) -> list[_Sources]:
        content = found[chosen.rank].manifest
        holders: dict[int, list[int]] = {}
        for rank, each in enumerate(found):
            for share in each.shares:
                holders.setdefault(share, []).append(rank)
        manifest = decode_manifest(content, MANIFEST)
        if manifest.checkpoint == former:
            for rank, each in enumerate(found):
                for share, cause in each.failures.items():
                    if share not in holders:
                        raise RankFailed(rank, cause)
            check_found(manifest, holders.keys(), "any rank's directories")
        of_each = [holders.get(share, []) for share in range(len(manifest.shares))]
        all_near = all(len(ranks) == len(found) for ranks in of_each)
        return [_Sources(content, list(map(_some_of, of_each)), all_near)] * len(found)

    with _raising_own(peers, *failures.values()):
        sources = peers.exchange("seen", seen, tell, of=_Sources)
    return decode_manifest(sources.manifest, MANIFEST), sources, set(seen.shares)


def _some_of(holders: list[int]) -> list[int]:
    """At most `HOLDERS_MAX`, of all nodes: ranks of a node are neighbours."""
    return holders[:: -(-len(holders) // HOLDERS_MAX) or 1]


def _choose(peers: Ranks, names: list[str]) -> tuple[Manifest | None, _Newest]:
    """Return the newest checkpoint's manifest that this rank sees, and which is that of all."""
    own, failures = None, list[Failure]()
    try:
        own = newest_of(names)
    except (OSError, Damaged) as failure:
        failures.append(failure)

    def choose(found: list[_Newest]) -> list[_Newest]:
        complete = [each for each in found if each.checkpoint is not None]
        for each in found:
            if each.failure and not complete:
                raise RankFailed(each.rank, each.failure)
        if not complete:
            raise Missing(none_in(names))
        newest = max(each.checkpoint for each in complete if each.checkpoint is not None)
        chosen = next(each for each in complete if each.checkpoint == newest)
        return [chosen] * len(found)

    checkpoint = None if own is None else own.checkpoint
    mine = _Newest(checkpoint, peers.rank, "".join(map(cause_of, failures)))
    with _raising_own(peers, *failures):
        chosen = peers.exchange("newest", mine, choose, of=_Newest)
    pass_over(failures)
    return own, chosen


@contextlib.contextmanager
def _raising_own(peers: Ranks, *failures: Failure) -> Iterator[None]:
    """Raise what this rank has handed in, if rank 0 fails for it."""
    try:
        yield
    except RankFailed as failed:
        for failure in failures:
            if failed.rank == peers.rank and failed.cause == cause_of(failure):
                raise failure from None
        raise


def _seen(names: list[str], checkpoint: Identity | None) -> list[int]:
    """The shares of a checkpoint that are in directories."""
    found = set()
    for name in names:
        # A node that is new has none.
        with contextlib.suppress(FileNotFoundError):
            for file in os.listdir(name):
                share = parse_name(file)
                is_one = share is not None and share.checkpoint == checkpoint
                # A link that leads nowhere is none.
                if is_one and share is not None and os.path.exists(os.path.join(name, file)):
                    found.add(share.share)
    return sorted(found)


__all__ = ["load_shares"]
