"""Every number behind one operator's choice: what it costs, where figures come from, what else it could do."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from rich.console import RenderableType
from rich.table import Table

from convmesh.errors import ConfigError
from convmesh.graph import Node
from convmesh.plan.collectives import operator_collectives
from convmesh.planner.predict import at_micro_batch
from convmesh.planner.prediction import OperatorCost, Prediction
from convmesh.planner.seconds import CostModel
from convmesh.report.plan_view import layer_words
from convmesh.training.auto_plan import Planned
from convmesh.units import format_bytes


def explanation(planned: Planned, name: str) -> list[RenderableType]:
    """Explains one operator of the chosen plan.

    Args:
        planned: What the search has found.
        name: The operator.

    Returns:
        Lines and a table of the alternatives.

    Raises:
        ModelError: If the network has no such operator.
        ConfigError: If no plan was chosen.
    """
    node = planned.graph.node(name)
    chosen = planned.found.chosen
    if chosen is None or chosen.prediction is None:
        raise ConfigError("there is no plan to explain: nothing fits")
    prediction = chosen.prediction
    cost = next(entry for entry in prediction.operators if entry.node == name)
    lines = ["", *_facts(prediction, cost, node), *_figures(planned, prediction, cost)]
    return [*lines, _alternatives(planned, name)]


def _facts(prediction: Prediction, cost: OperatorCost, node: Node) -> Iterator[str]:
    entry = prediction.candidate.resolved.operators[node.name]
    yield f"{node.name}: {layer_words(node, entry)}; its output is {entry.output}"
    if cost.signature is not None:
        yield f"  on the slowest rank: {cost.signature.text}"
        flops = cost.signature.cost
        yield (
            f"  {flops.flops_forward:,} FLOPs forward, {flops.flops_backward:,} backward; "
            f"{format_bytes(cost.signature.num_bytes('forward'))} and "
            f"{format_bytes(cost.signature.num_bytes('backward'))} through memory"
        )


def _figures(planned: Planned, prediction: Prediction, cost: OperatorCost) -> Iterator[str]:
    model = planned.pricer.model
    again = " (twice: recomputed)" if cost.recomputed else ""
    yield f"  per micro-batch: {cost.forward_seconds:.4g} s forward{again}, {cost.backward_seconds:.4g} s backward"
    if cost.signature is not None:
        yield f"    from: {model.explain(cost.signature)}"
    yield from _communication(prediction, model, cost.node)
    yield (
        f"  adds {format_bytes(cost.kept_bytes)} to what is kept for the backward; "
        "a tensor that several operators keep counts at the first"
    )


def _communication(prediction: Prediction, model: CostModel, name: str) -> Iterator[str]:
    resolved = at_micro_batch(prediction.candidate, model.cluster).resolved
    group = model.group(resolved, "channel")
    for kind, num_bytes in operator_collectives(resolved, [resolved.graph.node(name)])[name]:
        seconds = model.collectives.seconds(kind, num_bytes, group)
        where = model.collectives.origin(kind, group)
        yield f"  {kind} of {format_bytes(num_bytes)} among {group.num_ranks} ranks: {seconds:.4g} s; from: {where}"


def _alternatives(planned: Planned, name: str) -> RenderableType:
    """What the whole update would take if this operator ran otherwise, all others being chosen anew."""
    chosen = planned.found.chosen
    assert chosen is not None
    assert chosen.prediction is not None
    priced = planned.pricer.price(chosen.outline)
    tables = priced.tables
    start = tables.first_place(name)
    taken = chosen.prediction.candidate.resolved.operators[name]
    table = Table(
        "it could be", "input", "output", "s / update at least", title="The ways of this operator on this mesh"
    )
    table.columns[3].justify = "right"
    for number, way in enumerate(tables.ways[name]):
        costs = np.array(priced.seconds)
        own = slice(start, start + len(tables.ways[name]))
        kept = costs[start + number]
        costs[own] = math.inf
        costs[start + number] = kept
        found = tables.problem.solve(costs)
        seconds = "impossible" if found is None else f"{found.cost + priced.fixed_seconds:.4g}"
        words = layer_words(planned.graph.node(name), way.resolved)
        mark = " (chosen)" if way.resolved == taken else ""
        sources = ", ".join(map(str, way.sources))
        table.add_row(words + mark, sources, str(way.resolved.output), seconds)
    return table
