"""What single decisions of the MindSpore engine give, each against stock ``data_parallel``, in turn in one run.

Run from the repository: ``python -m benchmarks.mindspore_data_parallel``. `benchmarks.data_parallel` compares engines.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from benchmarks.contenders.work import Work
from benchmarks.data_parallel import NUM_RANKS, RIVALS, Contender, duel
from tests.multiprocess.ranks import RankPool

RESULTS = Path(__file__).parent / "results" / "mindspore_data_parallel.md"

VARIANTS: tuple[tuple[str, dict[str, dict[str, Any]], dict[str, str]], ...] = (
    ("as it is", {}, {}),
    ("MCCL instead of shared memory", {}, {"CONVMESH_SHARED_MEMORY": "0"}),
    ("MCCL, one bucket", {"strategy": {"bucket_bytes": 2**30}}, {"CONVMESH_SHARED_MEMORY": "0"}),
    ("MCCL, buckets of 4 MiB", {"strategy": {"bucket_bytes": 4 * 2**20}}, {"CONVMESH_SHARED_MEMORY": "0"}),
    ("MCCL, float16 gradients", {"precision": {"gradient_reduction": "float16"}}, {}),
    ("sharded optimizer", {"strategy": {"optimizer_sharding": True}}, {}),
)
"""Title, sections of the run file that differ, and variables of the ranks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=3, help="updates of each contender per round")
    parser.add_argument("--batch", type=int, default=16, help="samples per rank")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--network", default="resnet50")
    options = parser.parse_args()
    work = Work(options.network, options.image_size, options.batch, {})
    ours, stock = RIVALS["mindspore"]
    lines = [
        "# Data parallel training on MindSpore: what each decision gives",
        "",
        f"{options.network} at {options.image_size} px, {options.batch} images per rank, {NUM_RANKS} ranks with one "
        f"thread each on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start. Each row took turns with "
        f"stock data_parallel, {options.rounds} rounds of {options.updates} updates; medians, ranges in brackets."
        " Stock runs with the same `ONEDNN_MAX_CPU_ISA`, as ConvMesh sets it.",
        "",
        "| ConvMesh | images/s | ratio to stock | images per second of processor time | ratio to stock |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    stock_pool = RankPool("mindspore", NUM_RANKS)
    try:
        for title, changes, variables in VARIANTS:
            contender = Contender(title, ours.module, ours.kind, changes)
            lines.append(_row(contender, stock, stock_pool, variables, work=work, options=options))
            print(lines[-1], flush=True)
    finally:
        stock_pool.close()
    RESULTS.parent.mkdir(exist_ok=True)
    # What was measured by hand, after the first table, stays.
    _, _, by_hand = RESULTS.read_text().partition("\n\nOther work") if RESULTS.exists() else ("", "", "")
    lines += ["", f"Other work{by_hand.rstrip()}"] if by_hand else []
    RESULTS.write_text("\n".join(lines) + "\n")
    print(f"Written to {RESULTS}")


def _row(
    contender: Contender,
    stock: Contender,
    stock_pool: RankPool,
    variables: dict[str, str],
    *,
    work: Work,
    options: argparse.Namespace,
) -> str:
    os.environ.update(variables)
    pool = RankPool("mindspore", NUM_RANKS)
    for name in variables:
        del os.environ[name]
    try:
        result = duel(
            (pool, stock_pool),
            (contender, stock),
            work=work,
            num_rounds=options.rounds,
            num_updates=options.updates,
        )
        return next(iter(result.rows()))
    finally:
        pool.close()


if __name__ == "__main__":
    main()
