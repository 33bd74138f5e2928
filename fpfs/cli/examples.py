"""What the help of both commands shows of each: examples; and how all help is laid out.

Invariants:
  * Every command has an example, and every example can be read by its command.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping

from cyclopts import App

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "fpfs mount": (
        "fpfs mount -d /nvme0/fpfs -d /nvme1/fpfs /ckpt",
        "fpfs mount -d /nvme0/fpfs --ack close --staging 4G /ckpt",
    ),
    "fpfs umount": ("fpfs umount /ckpt",),
    "fpfs format": ("fpfs format -d /nvme0/fpfs -d /nvme1/fpfs",),
    "fpfs fsck": (
        "fpfs fsck /nvme0/fpfs /nvme1/fpfs",
        "fpfs fsck --repair --data /nvme0/fpfs /nvme1/fpfs",
    ),
    "fpfs export": (
        "fpfs export /nvme0/fpfs /nvme1/fpfs /elsewhere",
        "fpfs export --path run7/last.pt /nvme0/fpfs /nvme1/fpfs /elsewhere",
    ),
    "fpfs version": ("fpfs version",),
    "fpfs-ctl status": ("fpfs-ctl status /ckpt", "fpfs-ctl status /ckpt --json"),
    "fpfs-ctl stat": ("fpfs-ctl stat /ckpt/run7/last.pt", "fpfs-ctl stat --json /ckpt/run7/*.pt"),
    "fpfs-ctl ls": ("fpfs-ctl ls /ckpt/run7", "fpfs-ctl ls --all --json /ckpt"),
    "fpfs-ctl wait": ("fpfs-ctl wait /ckpt/last.pt", "fpfs-ctl wait --timeout 60 /ckpt/run7"),
    "fpfs-ctl flush": ("fpfs-ctl flush /ckpt",),
    "fpfs-ctl restart": ("fpfs-ctl restart /ckpt",),
    "fpfs-ctl scrub": ("fpfs-ctl scrub /ckpt/run7", "fpfs-ctl scrub --rate 500M /ckpt"),
    "fpfs-ctl fsck": ("fpfs-ctl fsck /ckpt", "fpfs-ctl fsck --data /ckpt"),
    "fpfs-ctl recovery": ("fpfs-ctl recovery /ckpt",),
    "fpfs-ctl versions": ("fpfs-ctl versions /ckpt/run7/last.pt",),
    "fpfs-ctl restore": ("fpfs-ctl restore /ckpt/run7/last.pt@7",),
    "fpfs-ctl commit": ("fpfs-ctl commit /ckpt/run7/step100",),
    "fpfs-ctl completion": ("fpfs-ctl completion bash > ~/.local/share/fpfs.bash",),
    "fpfs-ctl top": ("fpfs-ctl top /ckpt",),
    "fpfs-ctl trace": ("fpfs-ctl trace /ckpt/run7/last.pt -o trace.json",),
    "fpfs-ctl tune": ("fpfs-ctl tune /ckpt", "fpfs-ctl tune --apply --bytes 2G /ckpt/run7"),
    "fpfs-ctl plan": (
        "fpfs-ctl plan /ckpt/run7/last.pt --ranks 4",
        "fpfs-ctl plan --simulate 140G --ranks 64 --per-node 8 --writers node",
    ),
    "fpfs-ctl gather": ("fpfs-ctl gather /node0/step100 /node1/step100 -o /elsewhere/step100.pt",),
    "fpfs-ctl verify": (
        "fpfs-ctl verify /node0/step100 /node1/step100",
        "fpfs-ctl verify --json /shared/step100",
    ),
    "fpfs-ctl policy": ("fpfs-ctl policy set /ckpt/run7 versions=2 commit=group",),
    "fpfs-ctl policy get": ("fpfs-ctl policy get /ckpt/run7",),
    "fpfs-ctl policy set": (
        "fpfs-ctl policy set /ckpt/run7 versions=2 chunk=4M",
        "fpfs-ctl policy set /ckpt/run7 --profile safe",
    ),
    "fpfs-ctl policy unset": ("fpfs-ctl policy unset /ckpt/run7 versions",),
    "fpfs-ctl policy list": ("fpfs-ctl policy list /ckpt",),
    "fpfs-ctl policy explain": ("fpfs-ctl policy explain /ckpt/run7/last.pt",),
    "fpfs-ctl policy profiles": ("fpfs-ctl policy profiles",),
    "fpfs-ctl policy export": ("fpfs-ctl policy export /ckpt -o policies.toml",),
    "fpfs-ctl policy apply": ("fpfs-ctl policy apply /ckpt policies.toml",),
    "fpfs-ctl device": ("fpfs-ctl device list /ckpt",),
    "fpfs-ctl device add": ("fpfs-ctl device add /ckpt /nvme2/fpfs",),
    "fpfs-ctl device drain": (
        "fpfs-ctl device drain /ckpt 2",
        "fpfs-ctl device drain --rate 200M /ckpt /nvme2/fpfs",
        "fpfs-ctl device drain --cancel /ckpt 2",
    ),
    "fpfs-ctl device list": ("fpfs-ctl device list /ckpt",),
    "fpfs-ctl device remove": ("fpfs-ctl device remove /ckpt 2",),
    "fpfs-ctl device tag": ("fpfs-ctl device tag /ckpt 2 +fast -spare",),
}
"""By command: lines to type."""


def commands_of(app: App, name: str = "") -> Iterator[tuple[str, App]]:
    """Yield an app and every command below it, by the words that name it."""
    name = name or app.name[0]
    yield name, app
    seen = set()
    for word in sorted(app):
        below = app[word]
        if not word.startswith("-") and id(below) not in seen:
            seen.add(id(below))
            yield from commands_of(below, f"{name} {word}")


def lay_out(app: App) -> None:
    """Let the help of all commands show plain text, with examples.

    Help is text for people, in which stars and bars mean nothing.
    """
    app.help_format = "plaintext"
    for name, each in commands_of(app):
        examples = "".join(f"\n  {line}" for line in EXAMPLES.get(name, ()))
        each.help_epilogue = f"Examples:{examples}" if examples else " "
        function = each.default_command
        if function is not None and function.__doc__:
            function.__doc__ = _joined(inspect.cleandoc(function.__doc__))
        elif each.help:
            each.help = _joined(inspect.cleandoc(each.help))


def _joined(text: str) -> str:
    """Put the lines of each paragraph into one: the terminal's width decides where they break."""
    text = re.sub(r"\n(?:Parameters\n-+\n)", "\0", text)  # what describes parameters stays apart
    body, *rest = text.split("\0")
    return "\n\nParameters\n----------\n".join([_paragraphs(body), *map(_parameters, rest)])


def _paragraphs(text: str) -> str:
    return re.sub(r"(?<=[^\n])\n(?=[^\n\s-])", " ", re.sub(r"\n {2,}(?=\S)", " ", text)).rstrip()


def _parameters(text: str) -> str:
    return re.sub(r"(\n {4}[^\n]*)(?:\n {4}(?=\S))", r"\1 ", text)
