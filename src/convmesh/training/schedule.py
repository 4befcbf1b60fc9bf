"""Learning rate per update."""

from __future__ import annotations

import math
from dataclasses import dataclass

from convmesh.config.schema import RunConfig


@dataclass(frozen=True)
class LearningRate:
    """The learning rate as a function of the update.

    Warm-up: linear from ``peak / warmup`` to ``peak`` (Goyal et al., 2017). Then constant, in steps, or cosine:
    ``end + (peak - end) * (1 + cos(pi * progress)) / 2`` (Loshchilov & Hutter, SGDR, 2017).

    Args:
        run: The run.
        updates_per_epoch: Updates of one epoch.
    """

    run: RunConfig
    updates_per_epoch: int

    def at(self, update: int) -> float:
        """The learning rate of an update, counted from 0 over the whole run."""
        peak, schedule = self.run.optimizer.learning_rate, self.run.schedule
        num_warmup = round(schedule.warmup_epochs * self.updates_per_epoch)
        if update < num_warmup:
            return peak * (update + 1) / num_warmup
        if schedule.name == "steps":
            num_passed = sum(update >= round(epoch * self.updates_per_epoch) for epoch in schedule.milestones)
            return peak * math.pow(schedule.gamma, num_passed)
        if schedule.name == "cosine":
            num_left = max(1, self.run.train.epochs * self.updates_per_epoch - num_warmup)
            progress = min(1.0, (update - num_warmup) / num_left)
            end = peak * schedule.final_ratio
            return end + (peak - end) * (1 + math.cos(math.pi * progress)) / 2
        return peak
