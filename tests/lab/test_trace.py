"""What a trace shows of torch.save over four devices: each is busy, with two chunks at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fpfs.testing import lab
from fpfs.testing.mounted import mounted
from tests.fuse.commands.test_trace import DEADLINE_S, tracing
from tests.support.chrome_traces import Span, check_format, most_at_once, spans_of

REASON = lab.unavailable_reason()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.long,
    pytest.mark.clients,
]

MIB = 2**20
DEVICES = 4
MIB_PER_S = 50
SAVE_MIB = 128
PROGRAM = f"""
import sys, torch
torch.save({{str(n): torch.ones({16 * MIB // 4}) for n in range({SAVE_MIB // 16})}}, sys.argv[1])
"""


def test_a_save_keeps_every_device_busy_with_two_chunks(tmp_path: Path) -> None:
    with (
        lab.lab(
            device_count=DEVICES, mib_per_s=MIB_PER_S, size_bytes=512 * MIB, parent=tmp_path
        ) as made,
        mounted(devices=_folders(made), parent=tmp_path) as mount,
    ):
        output = tmp_path / "trace.json"
        file = mount.root / "model.pt"
        with tracing(file, output) as process:
            subprocess.run([sys.executable, "-c", PROGRAM, str(file)], check=True)
            process.communicate(timeout=2 * DEADLINE_S)
        assert process.returncode == 0
        document = json.loads(output.read_bytes())
    check_format(document)
    assert document["otherData"]["events_lost"] == 0
    in_flight = [
        span
        for span in spans_of(document, "transfer part")
        if span.name == "in flight" and span.about["length"] == MIB
    ]
    began_us = min(span.began_us for span in in_flight)
    ended_us = max(span.ended_us for span in in_flight)
    by_device = {
        device: [span for span in in_flight if span.about["device"] == device]
        for device in range(DEVICES)
    }
    for device, spans in by_device.items():
        # Double buffering: the device never has to wait for the next chunk.
        assert most_at_once(spans) >= 2, device
        assert busy_us(spans) > 0.8 * (ended_us - began_us), device
    firsts = [min(span.began_us for span in spans) for spans in by_device.values()]
    lasts = [max(span.ended_us for span in spans) for spans in by_device.values()]
    assert max(firsts) < min(lasts), "all four at once"
    chunks = spans_of(document, "chunk")
    assert sum(span.about["length"] for span in chunks) >= SAVE_MIB * MIB


def _folders(made: lab.Lab) -> list[Path]:
    """A fresh device directory on each of the lab's filesystems."""
    folders = [mountpoint / "device" for mountpoint in made.mountpoints]
    for folder in folders:
        folder.mkdir()
    return folders


def busy_us(spans: list[Span]) -> float:
    """How long at least one of these lasted."""
    total = last_end = 0.0
    for span in sorted(spans, key=lambda span: span[:2]):
        total += max(0.0, span.ended_us - max(span.began_us, last_end))
        last_end = max(last_end, span.ended_us)
    return total
