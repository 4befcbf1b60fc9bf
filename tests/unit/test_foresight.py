"""What a profile foretells of other settings: no more communication goes than was seen, and handing over takes time."""

from __future__ import annotations

import dataclasses

import pytest
from tests.unit.test_advice import Case

from convmesh.config.load import with_settings
from convmesh.training.foresight import Foresight, Machine


def test_no_more_communication_is_saved_than_was_seen() -> None:
    case = Case(strategy__bucket_bytes=1)
    observed = case.observed(transfers=(case.gradients(),))
    communication = observed.communication_seconds
    # The other half ran while the slowest rank was still working.
    late = dataclasses.replace(observed, step_seconds=observed.step_seconds - communication / 2)
    usual = dataclasses.replace(case.setting, run=with_settings(case.setting.run, {"strategy.bucket_bytes": "25MiB"}))

    whole, half = (
        Foresight(case.setting, observed=seen, graph=case.graph, cluster=case.cluster) for seen in (observed, late)
    )

    saved = observed.step_seconds - whole.seconds(usual)
    assert 0 < saved < communication
    assert late.step_seconds - half.seconds(usual) == pytest.approx(saved / 2, rel=0.02)


def test_what_workers_have_read_is_handed_over_micro_batch_by_micro_batch() -> None:
    case = Case(strategy__accumulation=4)
    rest = case.prediction.seconds.total
    hand_over = 0.02 * rest
    machine = Machine(cores=8, num_ranks=2, cpu_seconds=rest, hand_over_seconds=hand_over)

    advised = case.advise(reading=0.5 * rest, machine=machine).advised

    piece = next(piece for piece in advised.pieces if piece.kind == "workers")
    assert piece.predicted_seconds == pytest.approx(rest + 4 * hand_over)
    # Where a worker reads already, handing over is part of what ranks were seen to wait for.
    one = Case(strategy__accumulation=4, data__num_workers=1)
    foresight = one.foresight(reading=4 * hand_over, machine=machine)
    two = dataclasses.replace(one.setting, run=with_settings(one.setting.run, {"data.num_workers": 2}))
    assert foresight.seconds(two) == pytest.approx(foresight.seconds(one.setting), rel=0.1)
