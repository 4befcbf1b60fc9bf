"""How many threads a rank computes with on CPU.

MindSpore has a number of its own for its kernels. Its convolutions are oneDNN's, which plans for all cores of the
machine unless it is told otherwise. Then each convolution of each rank keeps scratch memory for that many threads, and
hands a part of its work to threads for which a rank's own cores have no room. ResNet-50, 4 images of 128 pixels, in one
process of a machine with two cores: 570 MiB, and 364 MiB once oneDNN knows of one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import mindspore as ms

_LIBRARIES = "lib/libdnnl.so*"


def compute_with(num_threads: int) -> None:
    """Sets the threads of a rank on CPU; before it compiles anything, and in the thread that will.

    Args:
        num_threads: Threads. MindSpore's own kernels take the number once per process, and two threads at least.
    """
    with contextlib.suppress(RuntimeError):
        ms.device_context.cpu.op_tuning.threads_num(num_threads)
    plan_convolutions_for(num_threads)


def plan_convolutions_for(num_threads: int) -> None:
    """Tells oneDNN how many threads what this thread compiles from now on will have.

    That is a documented function of its interface for thread pools of others, which MindSpore is built with on Linux;
    where MindSpore is built otherwise nothing is told, and convolutions only keep more memory.

    Args:
        num_threads: Threads.
    """
    library = _onednn()
    if library is not None:
        library.dnnl_threadpool_interop_set_max_concurrency(ctypes.c_int(num_threads))


def planned_threads() -> int | None:
    """Threads that oneDNN plans for in this thread; None where it can't be asked."""
    library, found = _onednn(), ctypes.c_int()
    if library is None:
        return None
    library.dnnl_threadpool_interop_get_max_concurrency(ctypes.byref(found))
    return found.value


def _onednn() -> ctypes.CDLL | None:
    """The library that MindSpore computes with, if it has this interface."""
    name = min(Path(ms.__file__).parent.glob(_LIBRARIES), default=None)
    try:
        library = ctypes.CDLL(str(name)) if name is not None else None
    except OSError:
        return None
    return library if hasattr(library, "dnnl_threadpool_interop_set_max_concurrency") else None
