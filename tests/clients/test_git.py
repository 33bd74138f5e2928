"""git: commits, clone, branches, gc and fsck of a repository on the mount."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.contents import random_bytes, tree
from tests.support.processes import run
from tests.support.target import Target

pytestmark = pytest.mark.clients

ENVIRONMENT = {
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
}


def git(repository: Path, *arguments: str | Path) -> str:
    return run("git", *arguments, cwd=repository, environment=ENVIRONMENT)


def fill(worktree: Path, *, seed: int) -> None:
    """Some text files in folders, a link, an executable and a larger binary."""
    for number in range(40):
        folder = worktree / f"folder{number % 5}"
        folder.mkdir(exist_ok=True)
        (folder / f"file{number}.txt").write_text(f"line {seed} {number}\n" * (number * seed))
    link = worktree / "link"
    link.unlink(missing_ok=True)
    link.symlink_to(f"folder{seed % 5}")
    (worktree / "run.sh").write_text("#!/bin/sh\n")
    (worktree / "run.sh").chmod(0o755)
    (worktree / "weights.bin").write_bytes(random_bytes(700_001, seed=seed))


def make_repository(repository: Path, *, commits: int) -> None:
    repository.mkdir()
    git(repository, "init", "-q", "-b", "main")
    for seed in range(1, commits + 1):
        fill(repository, seed=seed)
        git(repository, "add", "-A")
        git(repository, "commit", "-q", "-m", f"change {seed}")


def content(worktree: Path) -> dict[str, object]:
    """Names, modes and contents of a worktree without .git and without times."""
    return {
        name: (entry[0], entry[-1])
        for name, entry in tree(worktree).items()
        if name.split("/")[0] != ".git"
    }


def test_commit_gc_and_fsck(target: Target, directory: Path) -> None:
    repository = directory / "repository"
    make_repository(repository, commits=4)
    head, before = git(repository, "rev-parse", "HEAD"), content(repository)
    git(repository, "gc", "-q", "--aggressive", "--prune=now")
    target.remount()
    git(repository, "fsck", "--full", "--strict")
    assert git(repository, "rev-parse", "HEAD") == head
    assert git(repository, "status", "--porcelain") == ""
    assert content(repository) == before
    git(repository, "checkout", "-q", "HEAD~2")
    git(repository, "checkout", "-q", "main")
    assert content(repository) == before


def test_clone_from_and_to_a_plain_directory(directory: Path, plain: Path) -> None:
    """There and back again with packing over a pipe: the commits stay the same."""
    make_repository(plain / "origin", commits=3)
    git(directory, "clone", "-q", "--no-local", plain / "origin", directory / "copy")
    assert content(directory / "copy") == content(plain / "origin")
    git(directory / "copy", "checkout", "-q", "-b", "topic", "HEAD~1")
    fill(directory / "copy", seed=9)
    git(directory / "copy", "commit", "-q", "-a", "-m", "topic")
    git(directory / "copy", "push", "-q", "origin", "topic")
    git(plain, "clone", "-q", "-b", "topic", plain / "origin", plain / "back")
    assert content(plain / "back") == content(directory / "copy")


def test_clone_with_hard_links(directory: Path) -> None:
    make_repository(directory / "origin", commits=2)
    git(directory, "clone", "-q", "--local", directory / "origin", directory / "copy")
    git(directory / "copy", "fsck", "--full")
    assert content(directory / "copy") == content(directory / "origin")


def test_worktree_and_merge(directory: Path) -> None:
    repository = directory / "repository"
    make_repository(repository, commits=2)
    git(repository, "worktree", "add", "-q", "-b", "side", directory / "side", "HEAD~1")
    (directory / "side" / "new.txt").write_text("new\n")
    git(directory / "side", "add", "new.txt")
    git(directory / "side", "commit", "-q", "-m", "side")
    git(repository, "merge", "-q", "--no-edit", "side")
    assert (repository / "new.txt").read_text() == "new\n"
    git(repository, "fsck", "--full")
