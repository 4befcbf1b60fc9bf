"""Timers round the raw collectives of both engines, which know nothing of the recorder; it is held against them."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

BLOCKING = {
    "torch": (
        ("torch.distributed", ("all_reduce", "broadcast", "all_to_all_single")),
        ("convmesh.engines.shared_exchange:SharedExchange", ("gather", "reduce_scatter", "all_reduce")),
    ),
    "mindspore": (
        ("convmesh.engines.mindspore.collectives:_FusedSum", ("__call__",)),
        ("convmesh.engines.mindspore.shared_memory:SharedSum", ("__call__",)),
        ("convmesh.engines.shared_exchange:SharedExchange", ("gather", "reduce_scatter", "all_reduce")),
    ),
}
"""Functions that take the time of a collective, unless PyTorch's are told to work beside."""


@dataclass
class RawTimer:
    """Seconds for which collectives keep a rank.

    Attributes:
        blocked_seconds: In collectives that block, since ``end_step``.
        depth: Of collectives within collectives; only the outermost counts.
        sent: When each collective that works beside was begun, since ``end_step``.
        done: When each of them was done.
        steps: Seconds of each step that has ended.
    """

    blocked_seconds: float = 0.0
    depth: int = 0
    sent: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def end_step(self) -> None:
        """Counts what works beside the backward from the last one on: then nothing is left to compute."""
        if self.sent:
            self.blocked_seconds += max(self.done) - self.sent[-1]
        self.steps.append(self.blocked_seconds)
        self.blocked_seconds, self.sent, self.done = 0.0, [], []

    def timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            begun = time.monotonic()
            if keywords.get("async_op"):
                work = original(*arguments, **keywords)
                self.sent.append(begun)
                work.get_future().add_done_callback(lambda _: self.done.append(time.monotonic()))
                return work
            self.depth += 1
            try:
                return original(*arguments, **keywords)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.blocked_seconds += time.monotonic() - begun

        return call


@contextlib.contextmanager
def raw_timer(engine: str) -> Iterator[RawTimer]:
    """Times the raw collectives of an engine."""
    timer = RawTimer()
    with contextlib.ExitStack() as stack:
        for path, names in BLOCKING[engine]:
            module, _, attribute = path.partition(":")
            owner: Any = importlib.import_module(module)
            owner = getattr(owner, attribute) if attribute else owner
            for name in names:
                stack.enter_context(mock.patch.object(owner, name, timer.timed(getattr(owner, name))))
        yield timer
