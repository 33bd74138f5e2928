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


def refuse_empty(path: str, *, what: str, asked: str) -> None:
    """Refuse the empty string where a path is needed; resolved, it would be the working directory.

    `what` says what the path stands for. Scripts come to it by a variable that is not set.
    """
    if not path:
        raise Refused(
            asked=asked.strip(),
            wrong=f"the {what} is an empty string",
            remedy="name a directory (is a variable unset?)",
        )
