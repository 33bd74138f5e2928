"""Where random numbers begin: at the same in every short run, at others in each long one."""

from __future__ import annotations

import os
import random

IS_LONG = os.environ.get("FPFS_LONG") == "1"
"""Whether this is `make test-long`."""

SHORT_SEED = 1


def chosen_seed() -> int:
    """FPFS_SEED where it is given; it is printed, so that who sees a failure can repeat it."""
    if "FPFS_SEED" in os.environ:
        seed = int(os.environ["FPFS_SEED"])
    else:
        seed = random.SystemRandom().getrandbits(31) if IS_LONG else SHORT_SEED
    print(f"FPFS_SEED={seed}")
    return seed
