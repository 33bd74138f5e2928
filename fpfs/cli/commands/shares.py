"""``fpfs-ctl gather`` and ``verify``: the shares that several nodes have of a checkpoint."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

import msgspec
from cyclopts import Parameter

from fpfs.cli.asking import Json, print_json
from fpfs.cli.commands.fsck import progress_bar
from fpfs.cli.show import add_figures, add_texts, ending_by_signal, new_table, open_console, say
from fpfs.core.lazy import NUMPY
from fpfs.core.refusal import Refused, refuse_empty
from fpfs.core.units import format_size

if TYPE_CHECKING:
    from fpfs.client.shares.format import Manifest
    from fpfs.client.shares.gathering import Checked

T = TypeVar("T")
Progress: TypeAlias = Callable[[int, int], None]


class Gathered(msgspec.Struct, kw_only=True, frozen=True):
    """What ``fpfs-ctl gather --json`` prints."""

    file: str
    bytes: int


class ShareReport(msgspec.Struct, kw_only=True, frozen=True):
    """A share: `path` null, it is in no directory; `problem` null, all is well."""

    share: int
    node: str
    bytes: int
    path: str | None
    problem: str | None


class SharesReport(msgspec.Struct, kw_only=True, frozen=True):
    """What ``fpfs-ctl verify --json`` prints: the checkpoint, and what there is of its shares.

    `copies`: how many nodes were to have each share; `copies_lost`: how many that makes in all that
    are in none of the directories, or damaged.
    """

    checkpoint: str
    bytes: int
    ranks: int
    copies: int
    copies_lost: int
    whole: bool
    shares: tuple[ShareReport, ...]


def gather(
    directory: str,
    /,
    *directories: str,
    output: Annotated[str, Parameter(name=["--output", "-o"])],
    json: Json = False,
) -> int:
    """Make one ordinary torch.save file of the shares that nodes have of a checkpoint.

    Together the directories have all shares, and a manifest. Each byte is checked by CRC32. The
    file takes its name when it is whole and durable.

    Parameters
    ----------
    directory
        Where shares are.
    directories
        More of these.
    output
        The file to make.
    """
    names = _named(directory, directories, asked="gather")
    refuse_empty(output, what="output", asked="gather")

    def make(progress: Progress) -> int:
        # Imported late: only commands of checkpoints need numpy.
        from fpfs.client.shares.gathering import gather

        return gather(names, output, progress=progress)

    count = _run("gather", make, output=os.path.realpath(output))
    if json:
        print_json(Gathered(file=output, bytes=count))
    else:
        say(open_console(), f"{output}: {format_size(count)}")
    return 0


def verify(directory: str, /, *directories: str, json: Json = False) -> int:
    """Check the shares that nodes have of a checkpoint, by their CRC32s.

    Exits with 1 if a share is damaged, or in none of the directories. Of a checkpoint of which more
    nodes than one keep each share, it says how many copies are lost.

    Parameters
    ----------
    directory
        Where shares are.
    directories
        More of these.
    """
    names = _named(directory, directories, asked="verify")

    def check(progress: Progress) -> tuple[Manifest, list[Checked]]:
        from fpfs.client.shares.gathering import verify

        return verify(names, progress=progress)

    manifest, found = _run("verify", check)
    shares = tuple(
        ShareReport(
            share=each.share,
            node=each.node,
            bytes=each.bytes,
            path=each.path,
            problem=each.problem,
        )
        for each in found
    )
    sound = Counter(each.share for each in shares if each.problem is None)
    lost = [max(0, manifest.copies - sound[number]) for number in range(len(manifest.shares))]
    report = SharesReport(
        checkpoint=f"{manifest.checkpoint.number}-{manifest.checkpoint.token}",
        bytes=manifest.bytes,
        ranks=manifest.ranks,
        copies=manifest.copies,
        copies_lost=sum(lost),
        whole=len(sound) == len(manifest.shares),
        shares=shares,
    )
    if json:
        print_json(report)
    else:
        _show(report)
    return int(any(each.problem is not None for each in shares))


def _show(report: SharesReport) -> None:
    console = open_console()
    table = new_table()
    add_figures(table, "share")
    add_texts(table, "node")
    add_figures(table, "bytes")
    add_texts(table, "where", "")
    for each in report.shares:
        table.add_row(
            str(each.share),
            each.node,
            format_size(each.bytes),
            each.path or "",
            each.problem or "is well",
        )
    console.print(table)
    outcome = "whole" if report.whole else "NOT WHOLE"
    if report.copies > 1 and report.copies_lost:
        of_all = report.copies * len({each.share for each in report.shares})
        outcome += f", COPIES LOST: {report.copies_lost} of {of_all}"
    say(console, f"checkpoint {report.checkpoint}: {format_size(report.bytes)}, {outcome}")


def _named(directory: str, directories: tuple[str, ...], *, asked: str) -> list[str]:
    names = [directory, *directories]
    for name in names:
        refuse_empty(name, what="directory", asked=asked)
    return names


def _run(asked: str, action: Callable[[Progress], T], *, output: str | None = None) -> T:
    """Show a bar while something is done, and what is wrong as a line."""
    remedy = "name directories that have all shares"
    try:
        from fpfs.client.paths import NotLocal
        from fpfs.client.shares.format import Damaged
    except ModuleNotFoundError as error:
        raise Refused(asked=asked, wrong=f"{error.name} is missing", remedy=NUMPY) from None
    try:
        with ending_by_signal(), progress_bar() as bar:
            return action(bar.update)
    except Damaged as error:
        raise Refused(
            asked=asked, wrong=str(error), remedy="take another copy of it, or checkpoint"
        ) from None
    except NotLocal as error:
        raise Refused(asked=asked, wrong=str(error), remedy=remedy) from None
    except OSError as error:
        wrong = error.strerror or str(error)
        if error.filename is not None and error.strerror:
            wrong = f"{error.filename}: {wrong}"
            named = os.path.realpath(error.filename)
            if output is not None and named in (output, os.path.dirname(output)):
                remedy = "have the output in a directory that is there, is yours, and has room"
        raise Refused(asked=asked, wrong=wrong, remedy=remedy) from None


__all__ = ["Gathered", "SharesReport", "gather", "verify"]
