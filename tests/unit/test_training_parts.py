"""The small parts of training: loss scale, learning rate, metrics, sync check, verdicts, rank places."""

import json
import math
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convmesh.config import parse_config
from convmesh.config.schema import LossScaleConfig, PrecisionConfig
from convmesh.errors import ConvMeshError, DataError, RunFolderError, SyncError
from convmesh.training.agree import OtherRankError, agree
from convmesh.training.metrics import CallbackSink, Fanout, JsonLinesSink
from convmesh.training.precision import LossScaler
from convmesh.training.ranks import RankPlace, find_rank
from convmesh.training.schedule import LearningRate
from convmesh.training.sync import check_sync


def scaler(**settings):
    return LossScaler.of(PrecisionConfig(compute="float16", loss_scale=LossScaleConfig(**settings)))


def run(**sections):
    return parse_config({"model": {"name": "cnn-small"}, "data": {"source": "digits"}, **sections})


def test_the_scale_falls_at_once_and_rises_after_a_quiet_window():
    it = scaler(initial=1024, factor=4, window=3)
    it.after_update(overflow=True)
    assert (it.scale, it.num_skipped) == (256, 1)
    for _ in range(2):
        it.after_update(overflow=False)
    it.after_update(overflow=True)
    assert it.scale == 64
    for _ in range(3):
        it.after_update(overflow=False)
    assert (it.scale, it.num_skipped) == (256, 2)


def test_without_float16_the_scale_is_one_and_stays():
    it = LossScaler.of(PrecisionConfig(compute="bfloat16"))
    for _ in range(500):
        it.after_update(overflow=False)
    assert it.scale == 1
    with pytest.raises(ConvMeshError, match="learning_rate"):
        it.after_update(overflow=True)


def test_overflow_without_scaling_left_ends_the_run():
    it = scaler(initial=4)
    it.after_update(overflow=True)
    it.after_update(overflow=True)
    with pytest.raises(ConvMeshError, match="not finite"):
        it.after_update(overflow=True)


def test_warm_up_and_cosine():
    rate = LearningRate(
        run(
            optimizer={"learning_rate": 0.4},
            schedule={"name": "cosine", "warmup_epochs": 2, "final_ratio": 0.1},
            train={"epochs": 10},
        ),
        updates_per_epoch=5,
    )
    assert [rate.at(update) for update in (0, 4, 9)] == pytest.approx([0.04, 0.2, 0.4])
    assert rate.at(10) == pytest.approx(0.4)
    assert rate.at(30) == pytest.approx(0.04 + 0.36 / 2)
    assert rate.at(50) == pytest.approx(0.04)


def test_steps():
    rate = LearningRate(
        run(
            optimizer={"learning_rate": 1},
            schedule={"name": "steps", "milestones": [1, 2.5], "gamma": 0.5},
            train={"epochs": 4},
        ),
        updates_per_epoch=4,
    )
    assert [rate.at(update) for update in (0, 3, 4, 9, 10, 15)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


@given(st.integers(0, 400), st.sampled_from(["constant", "cosine"]), st.floats(0, 5))
def test_the_rate_stays_within_zero_and_the_peak(update, name, warmup):
    settings = run(schedule={"name": name, "warmup_epochs": warmup}, train={"epochs": 10})
    assert 0 <= LearningRate(settings, updates_per_epoch=37).at(update) <= 0.1 + 1e-12


def test_metrics_are_lines_of_strict_json(tmp_path):
    seen = []
    sink = Fanout(JsonLinesSink(tmp_path / "m.jsonl"), CallbackSink(seen.append))
    sink.write({"kind": "step", "loss": math.nan, "seconds": [1.0, math.inf]})
    sink.close()
    again = JsonLinesSink(tmp_path / "m.jsonl")
    again.write({"kind": "epoch"})
    again.close()
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert lines == [{"kind": "step", "loss": None, "seconds": [1.0, None]}, {"kind": "epoch"}]
    assert math.isnan(seen[0]["loss"])


def test_metrics_on_a_full_disk_are_a_sentence():
    with pytest.raises(RunFolderError, match="No space left"):
        JsonLinesSink(Path("/dev/full")).write({"kind": "step"})


def on_ranks(number, function):
    """Runs ``function(rank, all_gather)`` on threads that stand for ranks; returns results or errors."""
    barrier, slots, results = threading.Barrier(number), [None] * number, [None] * number

    def rank_main(rank):
        def all_gather(value):
            slots[rank] = value
            barrier.wait(timeout=10)
            everything = list(slots)
            barrier.wait(timeout=10)
            return everything

        try:
            results[rank] = function(rank, all_gather)
        except ConvMeshError as error:
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_difference_names_the_first_tensor_and_the_ranks():
    def check(rank, all_gather):
        tensors = {"a": np.zeros(3), "b": np.full(3, float(rank == 2)), "c": np.full(2, float(rank))}
        check_sync(tensors, all_gather=all_gather, when="after update 40")

    results = on_ranks(4, check)
    assert all(isinstance(error, SyncError) for error in results)
    assert "'b' after update 40: rank 2 differs" in str(results[0])
    assert len({str(error) for error in results}) == 1


def test_equal_tensors_pass_whatever_their_memory_order():
    def check(rank, all_gather):
        array = np.arange(6.0).reshape(2, 3)
        check_sync({"a": np.asfortranarray(array) if rank else array}, all_gather=all_gather)

    assert on_ranks(2, check) == [None, None]


def test_one_failing_rank_ends_all_with_its_error():
    def work(rank, all_gather):
        def action():
            if rank == 1:
                raise DataError("file x is corrupt")
            return rank

        return agree(action, all_gather)

    results = on_ranks(3, work)
    assert isinstance(results[1], DataError)
    assert isinstance(results[0], OtherRankError)
    assert str(results[2]) == "rank 1 failed: file x is corrupt."


def test_agree_returns_what_each_rank_made():
    assert on_ranks(2, lambda rank, all_gather: agree(lambda: rank * 10, all_gather)) == [0, 10]


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"RANK": "x", "WORLD_SIZE": "2"}, None),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            RankPlace("torchrun", 3, 4, 1, 2),
        ),
        ({"RANK_ID": "1", "MS_WORKER_NUM": "2", "DEVICE_ID": "1"}, RankPlace("msrun", 1, 2, 1, 2)),
        (
            {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"},
            RankPlace("Slurm", 5, 8, 1, 4),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
    ],
)
def test_the_rank_is_read_from_what_started_it(environment, place):
    assert find_rank(environment) == place
