"""PyTorch's Kineto traces (``.json``, ``.json.gz``), of GPUs and of CPUs.

What becomes what:

| in the trace | here |
|---|---|
| kernels, copies and fills on a GPU; without any, operators on a CPU, the outermost of each thread | compute |
| kernels named ``nccl...``; on a CPU the annotations ``gloo:...`` | communication |
| ``enumerate(DataLoader)#...`` | data; operators inside belong to it |
| ``Optimizer.step#...`` | optimizer; operators or kernels inside belong to it |
| ``ProfilerStep#N``; without any, the time from one optimizer step's end to the next | steps |
| ``[memory]`` | memory in use: of the GPUs if there are any |
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convmesh.errors import ProfileError
from convmesh.profiling.events import EventBuilder, RankEvents
from convmesh.profiling.importing.clean import inside, outermost, relabelled
from convmesh.profiling.importing.stream import ChromeTrace
from convmesh.profiling.intervals import Cover

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ANNOTATIONS = ("user_annotation", "gpu_user_annotation")
_STEP = re.compile(r"ProfilerStep\s*#(\d+)")
_HOST_COMMUNICATION = ("c10d::", "record_param_comms", "nccl:", "gloo:")
_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "int": 4, "long": 8, "byte": 1, "char": 1, "bool": 1, "short": 2,
    "c10::half": 2, "c10::bfloat16": 2, "long int": 8, "unsigned char": 1, "signed char": 1,
}  # fmt: skip


class KinetoImport:
    """Reads the trace of one rank.

    Args:
        path: The file.
        rank: Its rank, where the file does not say.
        steps_of: Events whose steps count instead of those that the file tells, in seconds since 1970.
    """

    def __init__(self, path: Path, *, rank: int, steps_of: RankEvents | None = None) -> None:
        self._path = path
        self._steps_of = steps_of
        self._trace = ChromeTrace(path)
        header = self._trace.header()
        about = header.get("distributedInfo")
        self._origin = 1e-9 * float(header.get("baseTimeNanoseconds") or 0)
        self._about: Mapping[str, Any] = about if isinstance(about, Mapping) else {}
        self._builder = EventBuilder(int(self._about.get("rank", rank)))
        self._device_memory: list[tuple[float, int]] = []
        self._host_memory: list[tuple[float, int]] = []
        self._optimizers: list[tuple[float, float]] = []
        self._device_optimizers: list[tuple[float, float]] = []
        self._steps: dict[int, tuple[float, float]] = {}
        self._has_device = False

    @property
    def says_rank(self) -> bool:
        """Whether the file itself names its rank."""
        return "rank" in self._about

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a reader of the figures should know."""
        return tuple(self._trace.remarks)

    def read(self) -> RankEvents:
        """Reads the events.

        Raises:
            ProfileError: If the file is damaged or holds nothing that can be analysed.
        """
        for event in self._trace.events():
            if "ts" in event:
                self._take(event)
        for time, num_bytes in self._device_memory or self._host_memory:
            self._builder.add_memory(time, num_bytes)
        self._add_steps()
        events = self._builder.build()
        if not events.num_events:
            raise ProfileError(
                f"'{self._path}' holds no operator and no kernel", fix="Profile with activity CPU or CUDA"
            )
        return self._cleaned(events)

    def _take(self, event: Mapping[str, Any]) -> None:
        phase, category, name = event.get("ph"), event.get("cat"), str(event.get("name", ""))
        start = self._origin + 1e-6 * float(event["ts"])
        arguments = event.get("args") if isinstance(event.get("args"), Mapping) else {}
        if phase == "i" and name == "[memory]":
            self._take_memory(start, arguments or {})
        elif phase == "X":
            end = start + 1e-6 * float(event.get("dur") or 0)
            lane = f"{event.get('pid')}/{event.get('tid')}"
            if category in _DEVICE:
                self._take_device(name, arguments or {}, start, end)
            elif category == "cpu_op" and not name.startswith(_HOST_COMMUNICATION):
                self._builder.add("compute", name, start=start, end=end, lane=f"host {lane}")
            elif category in _ANNOTATIONS:
                self._take_annotation(name, arguments or {}, start, end, device=category.startswith("gpu"), lane=lane)

    def _take_device(self, name: str, arguments: Mapping[str, Any], start: float, end: float) -> None:
        self._has_device = True
        lane = f"stream {arguments.get('stream', '')}".rstrip()
        if not name.startswith("nccl"):
            self._builder.add("compute", name, start=start, end=end, lane=lane)
            return
        group = str(arguments.get("Process Group Description") or arguments.get("Process Group Name") or "")
        width = _BYTES.get(str(arguments.get("dtype", "")).lower(), 0)
        elements = arguments.get("In msg nelems")
        num_bytes = width * int(elements) if isinstance(elements, int | float) else 0
        title = str(arguments.get("Collective name") or name)
        self._builder.add(
            "communication", title, start=start, end=end, lane=lane, axis=_group_name(group), num_bytes=num_bytes
        )

    def _take_annotation(
        self, name: str, arguments: Mapping[str, Any], start: float, end: float, *, device: bool, lane: str
    ) -> None:
        step = _STEP.match(name)
        if step and not device:
            self._steps[int(step.group(1))] = (start, end)
        elif name.startswith("gloo:"):
            num_bytes = _input_bytes(arguments)
            self._builder.add("communication", name[5:], start=start, end=end, lane=f"host {lane}", num_bytes=num_bytes)
        elif name.startswith("enumerate(DataLoader)") and not device:
            self._builder.add("data", "DataLoader", start=start, end=end, lane=f"host {lane}")
        elif name.startswith("Optimizer.step"):
            (self._device_optimizers if device else self._optimizers).append((start, end))

    def _take_memory(self, time: float, arguments: Mapping[str, Any]) -> None:
        total = arguments.get("Total Allocated")
        if isinstance(total, int | float):
            samples = self._host_memory if arguments.get("Device Type") == 0 else self._device_memory
            samples.append((time, int(total)))

    def _add_steps(self) -> None:
        steps = self._steps
        if self._steps_of is not None:
            known = self._steps_of
            numbers = known.step_S.tolist()
            bounds = zip(known.step_start_S.tolist(), known.step_end_S.tolist(), strict=True)
            steps = dict(zip(numbers, bounds, strict=True))
        elif not steps:
            ends = sorted(end for _, end in self._optimizers)
            # What came before the first optimizer step ended is a part of a step at most.
            steps = dict(enumerate(itertools.pairwise(ends), start=1))
        if not steps:
            raise ProfileError(
                f"'{self._path}' does not tell where steps begin",
                expected="annotations ProfilerStep#N, or at least two steps of a torch.optim optimizer",
                fix="Call profiler.step() after each step, with a schedule",
            )
        for number, (start, end) in steps.items():
            self._builder.add_step(number, start=start, end=end)

    def _cleaned(self, events: RankEvents) -> RankEvents:
        if self._has_device:
            host = np.array([text.startswith("host ") for text in (*events.names, "")])
            # Operators of the host only launch kernels; what the device does counts.
            events = events.kept(~(events.of_kind("compute") & host[events.lane_E]))
        else:
            data = events.of_kind("data")
            loads = inside(events, Cover(events.start_E[data], events.end_E[data]))
            events = outermost(events.kept(~(loads & events.of_kind("compute"))), "compute")
        spans = np.array((self._device_optimizers if self._has_device else self._optimizers) or np.zeros((0, 2)))
        updates = inside(events, Cover(spans[:, 0], spans[:, 1]))
        return relabelled(events, updates & events.of_kind("compute"), "optimizer")


def _group_name(group: str) -> str:
    return "" if group in ("0", "default_pg", "undefined") else group


def _input_bytes(arguments: Mapping[str, Any]) -> int:
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(dims, list) or not isinstance(types, list):
        return 0
    total = 0
    for shape, kind in zip(dims, types, strict=False):
        if isinstance(shape, list) and all(isinstance(size, int) for size in shape):
            total += math.prod(shape) * _BYTES.get(str(kind).lower(), 0)
    return total
