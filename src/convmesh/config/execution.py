"""Who decides how an update is run: what a plan says, and after it the run file's ``strategy``."""

from __future__ import annotations

import dataclasses

from convmesh.config.schema import RunConfig
from convmesh.plan.load import patterns_of
from convmesh.plan.plan import Execution


def execution_of(run: RunConfig) -> Execution:
    """What a run file's ``strategy`` says about running an update; nothing is left open."""
    strategy = run.strategy
    return Execution(
        accumulation=strategy.accumulation,
        optimizer_sharding=strategy.optimizer_sharding,
        bucket_bytes=strategy.bucket_bytes,
        recompute=patterns_of(strategy.recompute),
    )


def with_execution(run: RunConfig, execution: Execution) -> RunConfig:
    """The run as a plan wants it.

    Args:
        run: The run.
        execution: What the plan says; where it says nothing, the run stays as it is.

    Returns:
        The run, with the plan's settings in its ``strategy``.
    """
    settled = execution.over(execution_of(run))
    settings = {entry.name: getattr(settled, entry.name) for entry in dataclasses.fields(settled)}
    if execution.recompute is None:
        del settings["recompute"]
    return dataclasses.replace(run, strategy=dataclasses.replace(run.strategy, **settings))
