"""Settings of MindSpore's kernels on CPU that are read from the environment. Imports no MindSpore."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

COLLECTIVE_SECONDS = 3600
"""How long a rank waits in a collective for one that compiles, evaluates or saves. msrun notices one that died."""

SCHEDULER_SECONDS = 10
"""How long msrun's scheduler takes to notice that a rank is gone."""


def environment() -> Mapping[str, str]:
    """What must be in the environment before MindSpore computes or communicates on a CPU.

    - ``ONEDNN_MAX_CPU_ISA``: with AVX-512 the oneDNN 3.10 of MindSpore 2.10 falls back to its reference code for every
      convolution larger than 1x1 (``ONEDNN_VERBOSE=1`` shows ``jit_uni_ncsp:conv+ref:any``): 236 ms instead of 8 ms for
      16 images of 256 channels and 4x4 pixels. AVX2 code has no such gap.
    - ``MS_CPU_COMM_OP_TIMEOUT``: a collective on CPU fails by default once another rank is 30 s late, which compiling
      ResNet-152 for a last, smaller batch can take.
    - ``MS_NODE_TIMEOUT``: how fast the scheduler leaves after a rank has died.
    - ``GLOG_v``: warnings and notes of MindSpore's own are not for our users.
    """
    settings = {
        "MS_CPU_COMM_OP_TIMEOUT": str(COLLECTIVE_SECONDS),
        "MS_RECEIVE_MSG_TIMEOUT": str(COLLECTIVE_SECONDS),
        "MS_NODE_TIMEOUT": str(SCHEDULER_SECONDS),
        "GLOG_v": "3",
    }
    if platform.machine().lower() in ("x86_64", "amd64"):
        settings["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    return settings


def prepare() -> None:
    """Sets what ``environment`` tells in this process; a variable that the user has set stays."""
    for name, value in environment().items():
        os.environ.setdefault(name, value)
