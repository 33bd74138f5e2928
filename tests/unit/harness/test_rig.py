"""The rig of the tests of names is joined as the server is."""

from __future__ import annotations

from pathlib import Path

import trio.testing

from fpfs.core.protocol.questions import PolicyChange
from tests.support.catalog.rig import LARGE, ROOT, rig


@trio.testing.trio_test
async def test_a_policy_that_is_set_holds_for_all_parts(tmp_path: Path) -> None:
    async with rig(tmp_path) as mount:
        await mount.policies.change(ROOT, PolicyChange(values={"versions": "2"}))
        for letter in (b"a", b"b"):
            await mount.write_file("file", letter * LARGE)
            await mount.commit.wait_queued()
        assert mount.versions.count == 1
