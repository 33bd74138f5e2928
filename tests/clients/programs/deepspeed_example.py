"""Runs a program that uses DeepSpeed, named first, without what DeepSpeed would compile.

It has a collective of its own for processors, which takes a minute to compile; gloo has it, too.
With the word "lasts" before the program's name the engine is not destroyed at the end.
"""

from __future__ import annotations

import os
import runpy
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

del sys.argv[0]
if sys.argv[0] == "lasts":
    del sys.argv[0]
    deepspeed.DeepSpeedEngine.destroy = lambda self: None
runpy.run_path(sys.argv[0], run_name="__main__")
