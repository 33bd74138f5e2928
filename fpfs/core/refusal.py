"""A refused request of a user, as one line: what was asked, what is wrong, what to do."""

from __future__ import annotations


class Refused(Exception):
    """A command cannot do what was asked; `str()` is one line for the user.

    The errors of `fpfs.core.errors` carry an errno for a program; this one carries a sentence for
    a person, who asked by a command line, an fstab line or ``fpfs-ctl``.
    """

    def __init__(self, *, asked: str, wrong: str, remedy: str) -> None:
        """Make the line ``asked: wrong; remedy``; newlines from other programs are folded."""
        super().__init__(" ".join(f"{asked}: {wrong}; {remedy}".split()))
        self.asked = asked
        self.wrong = wrong
        self.remedy = remedy
