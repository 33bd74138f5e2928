"""Fixtures for tests of behaviour; the conftest.py of a folder imports those it needs."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fpfs.testing.mounted import Mount
from tests.support.failures.hostile import never_hanging
from tests.support.processes import REPOSITORY, run
from tests.support.ranks import Worlds, be_program
from tests.support.target import Target, open_target, plain_target


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """One mount (or plain directory) for all tests of a module."""
    with open_target() as opened:
        yield opened


@pytest.fixture
def directory(target: Target) -> Iterator[Path]:
    """A fresh directory of the target, for one test."""
    path = Path(tempfile.mkdtemp(prefix="test-", dir=target.root))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def plain() -> Iterator[Path]:
    """A directory of an ordinary filesystem, to compare with."""
    with plain_target() as opened:
        yield opened.root


@pytest.fixture
def mount(target: Target) -> Mount:
    """The mount of fpfs under `target`; skips on a plain directory, which promises less."""
    if not isinstance(target, Mount):
        pytest.skip("only fpfs promises this")
    return target


@pytest.fixture
def folder(mount: Mount, tmp_path: Path) -> Iterator[Path]:
    """A folder of one test on the mount; when that hangs, the mount's connection is aborted."""
    with never_hanging(mount):
        made = mount.root / tmp_path.name
        made.mkdir()
        yield made
        for path in (mount.root / ".fpfs/partial").iterdir():
            path.unlink()


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """An empty device directory and an empty mountpoint."""
    device, mountpoint = tmp_path / "device", tmp_path / "mount"
    device.mkdir()
    mountpoint.mkdir()
    return device, mountpoint


Example = Callable[..., str]
"""Runs an example of the given name on a folder, by as many `ranks` under torchrun, or by itself if
they are 0; returns what the first rank has printed."""


@pytest.fixture(params=["forked", pytest.param("launched", marks=pytest.mark.long)])
def run_example(request: pytest.FixtureRequest, forks: Worlds) -> Example:
    """Programs forked from one that has imported torch, or started, which takes longer."""

    def fork(name: str, folder: Path, *, ranks: int = 0) -> str:
        path = REPOSITORY / "examples" / name
        values = forks.start(max(ranks, 1), be_program, path, ranks > 0, folder).values()
        # Packages that are imported may log there, as DeepSpeed does.
        others = [line for each in values[1:] for line in each.splitlines()]
        assert all(line.startswith("[") for line in others), others
        return str(values[0])

    def launch(name: str, folder: Path, *, ranks: int = 0) -> str:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        words = torchrun if ranks else ()
        path = REPOSITORY / "examples" / name
        return run(
            sys.executable, *words, path, folder, environment={"PYTHONPATH": str(REPOSITORY)}
        )

    return fork if request.param == "forked" else launch
