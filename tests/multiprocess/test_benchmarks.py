"""The benchmarks that start ranks still run, and measure what they say."""

from __future__ import annotations

import pytest
from benchmarks import channel_parallel, exactness, peers
from benchmarks.contenders.convolution import SPLITS, Answer, Sizes

from convmesh.engines import is_installed

pytestmark = pytest.mark.skipif(not is_installed("torch"), reason="torch is not installed")


@pytest.mark.timeout(300)
def test_peers_are_judged() -> None:
    court = peers.Court(Sizes(num_samples=2, side=4), time_limit_seconds=60)
    by_split = {case.split: case for case in SPLITS}
    try:
        ours = {split: court.hear("ConvMesh", by_split[split]) for split in ("samples", "in_channels", "groups")}
        theirs = {split: court.hear("DTensor", by_split[split]) for split in ("samples", "groups")}
    finally:
        court.close()
    assert [verdict.word for verdict in ours.values()] == ["exact"] * 3, ours
    assert [verdict.word for verdict in theirs.values()] == ["exact", "refused"], theirs


@pytest.mark.parametrize(
    ("differences", "refusal", "word"),
    [
        ({"output": 0.0, "input gradient": 1e-15, "weight gradient": 1e-12}, "", "exact"),
        ({"output": 0.0, "input gradient": 0.5, "weight gradient": 0.0}, "", "silently wrong"),
        ({"output": float("nan")}, "", "silently wrong"),
        ({"output": "of shape (1,) instead of (2,)"}, "No.", "silently wrong, then an error"),
        ({"output": 0.0}, "No.", "refused"),
        ({}, "No.", "refused"),
    ],
)
def test_verdicts(differences: dict[str, float | str], refusal: str, word: str) -> None:
    answers = [Answer({"output": 0.0, "input gradient": 0.0, "weight gradient": 0.0}, ""), Answer(differences, refusal)]
    assert str(peers.judge(answers)) == word


@pytest.mark.timeout(300)
def test_channel_parallel_measures_what_a_rank_keeps() -> None:
    network = channel_parallel.Network("tiny", "wide_field", image_size=32, global_batch=2)
    one, two = channel_parallel.Contender("one"), channel_parallel.Contender("channel", 2)
    found = channel_parallel.measure(network, (one, two), num_rounds=1, num_steps=1)
    share = found[two].most("saved_bytes") / found[one].most("saved_bytes")
    assert 0.5 < share < channel_parallel.GOALS[2]
    assert found[two].most("optimizer_bytes") == found[two].most("parameter_bytes")
    assert found[two].most("sent_bytes") > 0
    text = "\n".join(channel_parallel.section(network, found))
    assert "| channel=2 |" in text
    assert ": reached." in text
    for seconds in found[two].seconds:
        assert min(seconds.step, seconds.compute, seconds.wire) > 0


def test_exactness_tells_each_case_and_what_it_lacks() -> None:
    cases = list(exactness.all_cases())
    assert len({case.name for case in cases}) == len(cases) == 18
    worst = [{"kind": kind, "difference": 1e-6, "allowed": 1e-4} for kind in ("output", "gradient", "change", "buffer")]
    told = {"worst": worst, "collectives": [{"passed": True}], "passed": True, "inconclusive": False}
    told["conditions"] = {"learning_rate": 0.01}
    answers = {
        cases[0]: told,
        cases[1]: {**told, "passed": False, "inconclusive": True},
        cases[2]: {**told, "passed": False, "collectives": [{"passed": False}]},
        cases[3]: {"error": "not done after 9 s"},
    }
    rows = exactness.table(answers).splitlines()[2:]
    assert rows[0].endswith("| 1e-06 of 1e-04 | as told | equal |")
    assert [row.rpartition(" | ")[2] for row in rows] == [
        "equal |",
        "inconclusive |",
        "DIFFERS |",
        "not done after 9 s |",
    ]
    assert "NOT as told" in rows[2]
