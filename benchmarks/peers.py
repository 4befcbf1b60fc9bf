"""What becomes of one split convolution: ConvMesh and PyTorch's DTensor, each on two ranks against one device.

Run from the repository: ``python -m benchmarks.peers``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders.convolution import SPLITS, Answer, Sizes, SplitConvolution
from tests.multiprocess.ranks import RankPool, RanksFailedError

RESULTS = Path(__file__).parent / "results" / "peers.md"
PEERS = ("DTensor", "ConvMesh")
NUM_RANKS = 2
TOLERANCE = 1e-9
"""Largest relative difference of an exact result, in float64."""


@dataclass(frozen=True)
class Verdict:
    """What a peer made of a split.

    Args:
        word: "exact", "silently wrong", "refused" or "hangs".
        reason: What is wrong by how much, or the first sentence of the refusal; empty if exact.
        fails_later: Whether an error follows what was silently wrong.
    """

    word: str
    reason: str = ""
    fails_later: bool = False

    def __str__(self) -> str:
        return f"{self.word}, then an error" if self.fails_later else self.word


class Court:
    """Hears cases on ranks that are started anew after a failure.

    Args:
        sizes: Of the input.
        time_limit_seconds: After which a case counts as hanging.
    """

    def __init__(self, sizes: Sizes, *, time_limit_seconds: float) -> None:
        self._sizes = sizes
        self._time_limit_seconds = time_limit_seconds
        self._pool: RankPool | None = None

    def hear(self, peer: str, case: SplitConvolution) -> Verdict:
        """One peer's verdict on one case."""
        if self._pool is None:
            self._pool = RankPool("torch", NUM_RANKS)
        try:
            answers = self._pool.run(
                "benchmarks.contenders.peer_ranks:compare",
                timeout_seconds=self._time_limit_seconds,
                peer=peer,
                split=case,
                sizes=self._sizes,
            )
        except RanksFailedError as error:
            self.close()
            if "was not done after" not in str(error):
                raise
            return Verdict("hangs", f"not done after {self._time_limit_seconds:g} s")
        if len({answer.refusal for answer in answers}) > 1:
            self.close()  # What some ranks still had to tell the others would disturb the next case.
        return judge(answers)

    def close(self) -> None:
        """Ends the ranks."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None


def judge(answers: Sequence[Answer]) -> Verdict:
    """The verdict from what each rank saw; an error after a wrong output does not undo that it was given silently."""
    refusal = next((answer.refusal for answer in answers if answer.refusal), "")
    wrong: dict[str, str] = {}
    for answer in answers:
        for name, difference in answer.differences.items():
            if isinstance(difference, str):
                wrong.setdefault(name, f"{name} {difference}")
            elif not difference <= TOLERANCE:
                wrong.setdefault(name, f"{name} off by {difference:.0%}")
    if wrong:
        after = f"; then an error: {refusal}" if refusal else ""
        return Verdict("silently wrong", ", ".join(wrong.values()) + after, bool(refusal))
    return Verdict("refused", refusal) if refusal else Verdict("exact")


def table(verdicts: dict[str, dict[str, Verdict]]) -> Iterator[str]:
    """Markdown: a row per split, then the reasons.

    Args:
        verdicts: Title of the split to peer to verdict.
    """
    yield f"| split | PyTorch {importlib.metadata.version('torch').partition('+')[0]} DTensor | ConvMesh |"
    yield "|---|---|---|"
    for title, of_peer in verdicts.items():
        yield f"| {title} | {' | '.join(str(of_peer[peer]) for peer in PEERS)} |"
    for peer in PEERS:
        words = [of_peer[peer].word for of_peer in verdicts.values()]
        counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
        yield ""
        yield f"{peer}: {counts}."
        yield ""
        for title, of_peer in verdicts.items():
            if of_peer[peer].reason:
                yield f"- {title}: {of_peer[peer].reason}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="after which a case counts as hanging")
    options = parser.parse_args()
    court = Court(Sizes(), time_limit_seconds=options.seconds)
    verdicts: dict[str, dict[str, Verdict]] = {}
    try:
        for case in SPLITS:
            verdicts[case.title] = {peer: court.hear(peer, case) for peer in PEERS}
            print(case.title, *verdicts[case.title].values(), sep=" | ", flush=True)
    finally:
        court.close()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join([*_header(Sizes()), "", *table(verdicts), ""]))
    print(f"Written to {RESULTS}")


def _header(sizes: Sizes) -> list[str]:
    return [
        "# One convolution, split",
        "",
        f"Nine splits of a convolution of {sizes.num_channels} to {sizes.num_channels} channels on "
        f"{sizes.num_samples} samples of {sizes.side} x {sizes.side} pixels over {NUM_RANKS} ranks. Exact: output, "
        f"input gradient and weight gradient differ from one device's by at most {TOLERANCE:g} of their norm, in "
        "float64. Silently wrong: one of them is given and differs by more; where an error follows, the output was "
        "wrong and the backward fails. Refused: an error is raised before any of them is given. "
        "Made by `python -m benchmarks.peers`.",
        "",
        f"Ran on: CPU with Gloo, {os.cpu_count()} cores; torch {importlib.metadata.version('torch')}, "
        f"convmesh {importlib.metadata.version('convmesh')}; Python {platform.python_version()}.",
    ]


if __name__ == "__main__":
    main()
