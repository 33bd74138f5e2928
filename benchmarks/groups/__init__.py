"""The groups of contenders, in the order in which they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.groups import (
    catalogs,
    checksums,
    client,
    control_clients,
    dcp,
    frameworks,
    gpu,
    libraries,
    loading,
    memory,
    names,
    nodes,
    parallel,
    planning,
    ranks,
    recovery,
    restart,
    saving,
    scale,
    striping,
    training,
    tuning,
)

if TYPE_CHECKING:
    from benchmarks.framework import Group

GROUPS: tuple[Group, ...] = (
    *saving.GROUPS,
    *libraries.GROUPS,
    *parallel.GROUPS,
    *loading.GROUPS,
    *client.GROUPS,
    *dcp.GROUPS,
    *frameworks.GROUPS,
    *gpu.GROUPS,
    *ranks.GROUPS,
    *nodes.GROUPS,
    *planning.GROUPS,
    *scale.GROUPS,
    *checksums.GROUPS,
    *striping.GROUPS,
    *training.GROUPS,
    *tuning.GROUPS,
    *names.GROUPS,
    *catalogs.GROUPS,
    *control_clients.GROUPS,
    *restart.GROUPS,
    *recovery.GROUPS,
    *memory.GROUPS,
)
