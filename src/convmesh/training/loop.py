"""The training loop: epochs, updates, evaluation, checkpoints; the same for every engine."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from convmesh.config import RunConfig
from convmesh.engines.contract import Batch, Engine, Reader, TrainState, TrainStep, World
from convmesh.engines.reading_ahead import readers_of
from convmesh.profiling.recorder import RECORDER, SKIPPED_UPDATE
from convmesh.training.agree import agree
from convmesh.training.checkpoint import Checkpoint, Progress, prune_checkpoints, save_checkpoint
from convmesh.training.hand_over import hand_over_seconds
from convmesh.training.metrics import MetricsSink
from convmesh.training.precision import LossScaler
from convmesh.training.profiling import StepProfiler
from convmesh.training.run_folder import RunFolder
from convmesh.training.schedule import LearningRate
from convmesh.training.sync import check_sync

Key = tuple[int, int, int]


class TrainReaderLike(Reader, Protocol):
    """What the loop needs of a training reader."""

    num_updates: int
    num_dropped: int

    def keys(self, epoch: int, first_update: int = 0) -> list[Key]:
        """Keys of this rank's micro-batches of an epoch, from an update on."""
        ...

    def global_count(self, epoch: int, update: int) -> int:
        """Samples of a global batch."""
        ...

    def own_count(self, epoch: int, update: int) -> int:
        """Samples of a global batch that this rank computes."""
        ...


class EvalReaderLike(Reader, Protocol):
    """What the loop needs of an evaluation reader."""

    def keys(self) -> list[Key]:
        """Keys of this rank's evaluation batches."""
        ...


@dataclass
class _Interval:
    """What was measured since the last line of metrics, on this rank."""

    losses: list[Any] = field(default_factory=list)
    num_samples: int = 0
    num_updates: int = 0
    num_skipped_samples: int = 0
    step_seconds: float = 0.0
    data_seconds: float = 0.0
    communication_seconds: float = 0.0
    gradient_norm: Any = None
    since: float = field(default_factory=time.perf_counter)

    def sums(self) -> dict[str, float]:
        """This rank's part, as plain numbers; waits for the device."""
        return {
            "loss_sum": math.fsum(float(loss) for loss in self.losses),
            "num_skipped_samples": self.num_skipped_samples,
            "step_seconds": self.step_seconds,
            "data_seconds": self.data_seconds,
            "communication_seconds": self.communication_seconds,
        }


@dataclass
class Totals:
    """Sums over the whole run, for its summary."""

    num_samples: int = 0
    train_seconds: float = 0.0
    num_skipped_samples: int = 0
    num_sync_checks: int = 0


class Loop:
    """Runs the updates of a run on one rank.

    Args:
        engine: A started engine.
        step: The trainable network.
        run: The run.
        world: Where this rank stands.
        train: Reader of training micro-batches.
        evaluation: Reader of evaluation batches.
        folder: The run folder; only rank 0 writes it.
        sink: Takes records on rank 0.
    """

    def __init__(  # noqa: PLR0913 - the parts of a run, each handed over once
        self,
        *,
        engine: Engine,
        step: TrainStep,
        run: RunConfig,
        world: World,
        train: TrainReaderLike,
        evaluation: EvalReaderLike,
        folder: RunFolder,
        sink: MetricsSink,
    ) -> None:
        self._engine = engine
        self._step = step
        self._run = run
        self._world = world
        self._train = train
        self._evaluation = evaluation
        self._folder = folder
        self._sink = sink
        self._rate = LearningRate(run, train.num_updates)
        self._scaler = LossScaler.of(run.precision)
        self._interval = _Interval()
        self._step_begun = 0.0
        self._profiler = self._step_profiler() if run.train.profile.steps else None
        self.progress = Progress()
        self.totals = Totals()

    def _step_profiler(self) -> StepProfiler:
        run, engine = self._run, self._engine

        def measured() -> float:
            batch = self._train.read(self._train.keys(0)[0])
            return hand_over_seconds(engine, batch, accumulation=run.strategy.accumulation)

        return StepProfiler(
            run.train.profile,
            engine=engine,
            world=self._world,
            run_folder=self._folder.root,
            hand_over=None if readers_of(run) else measured,
        )

    @property
    def num_updates(self) -> int:
        """Updates of the whole run."""
        whole = self._train.num_updates * self._run.train.epochs
        return min(whole, self._run.train.max_updates or whole)

    @property
    def num_skipped_updates(self) -> int:
        """Updates skipped because a gradient overflowed."""
        return self._scaler.num_skipped

    @property
    def num_dropped(self) -> int:
        """Samples that each epoch leaves out."""
        return self._train.num_dropped

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continues from a checkpoint."""
        self._step.import_state(checkpoint.state)
        self.progress = checkpoint.progress
        self.progress.resumed_from.append(self.progress.update)
        scale = self.progress.loss_scale
        if self._scaler.enabled and scale:
            self._scaler.scale = scale["scale"]
            self._scaler.num_quiet = int(scale["num_quiet"])
            self._scaler.num_skipped = int(scale["num_skipped"])

    def fit(self) -> None:
        """Runs all updates that are left.

        Raises:
            SyncError: If ranks hold different tensors.
            CheckpointError: If a checkpoint can't be written.
            ConvMeshError: If gradients stay infinite.
        """
        self._check_sync("at the start")
        while self.progress.update < self.num_updates:
            self._run_epoch()
        if self._profiler is not None:
            self._profiler.close()
        self._check_sync("at the end")

    def _run_epoch(self) -> None:
        progress, begun = self.progress, time.perf_counter()
        samples_before = int(progress.epoch_sums.get("num_samples", 0))
        self._interval = _Interval()
        for update, micro_batches in self._updates(progress.epoch, progress.update_in_epoch):
            self._run_update(update, micro_batches)
            self._after_update()
            if progress.update == self.num_updates:
                break
        self._log_step()
        seconds = time.perf_counter() - begun
        self.totals.train_seconds += seconds
        if progress.update_in_epoch == self._train.num_updates:
            self._finish_epoch(seconds, samples_before)

    def _updates(self, epoch: int, first_update: int) -> Iterator[tuple[int, list[Batch]]]:
        keys = self._train.keys(epoch, first_update)
        batches = self._engine.load(self._train, keys, num_workers=self._run.data.num_workers)
        for update, group in itertools.groupby(keys, key=lambda key: key[1]):
            if self._profiler is not None:
                self._profiler.before_step(self.progress.update)
            self._step_begun, cpu_begun = RECORDER.now(), time.thread_time()
            micro_batches = [next(batches) for _ in group]
            end = RECORDER.now()
            RECORDER.add("data", "micro-batches", start=self._step_begun, end=end)
            if self._profiler is not None:
                self._profiler.add_reading(time.thread_time() - cpu_begun)
            self._interval.data_seconds += end - self._step_begun
            yield update, micro_batches

    def _run_update(self, update: int, micro_batches: list[Batch]) -> None:
        progress, interval = self.progress, self._interval
        RECORDER.take_totals()
        global_count = self._train.global_count(progress.epoch, update)
        begun = time.perf_counter()
        result = self._step.update(
            micro_batches,
            global_count=global_count,
            learning_rate=self._rate.at(progress.update),
            loss_scale=self._scaler.scale,
            update_index=progress.update,
        )
        interval.step_seconds += time.perf_counter() - begun
        interval.communication_seconds += sum(
            seconds for (kind, _), seconds in RECORDER.take_totals().items() if kind == "communication"
        )
        self._scaler.after_update(overflow=result.overflow)
        if result.overflow:
            RECORDER.note("optimizer", SKIPPED_UPDATE)
        interval.losses.append(result.loss_sum)
        interval.gradient_norm = result.gradient_norm
        interval.num_samples += global_count
        interval.num_updates += 1
        interval.num_skipped_samples += sum(batch.num_skipped for batch in micro_batches)
        progress.update += 1
        progress.update_in_epoch += 1

    def _after_update(self) -> None:
        update, train = self.progress.update, self._run.train
        if self._profiler is not None:
            count = self._train.own_count(self.progress.epoch, self.progress.update_in_epoch - 1)
            self._profiler.after_step(update - 1, begun=self._step_begun, num_samples=count)
        if update % train.log_every_steps == 0:
            self._log_step()
        if train.check_sync_every and update % train.check_sync_every == 0:
            self._check_sync(f"after update {update}")
        if train.checkpoint_every_steps and update % train.checkpoint_every_steps == 0:
            self._log_step()
            self._save()
            self._interval = _Interval()

    def _log_step(self) -> None:
        interval, progress = self._interval, self.progress
        if not interval.num_updates:
            return
        of_rank: list[dict[str, float]] = self._engine.all_gather(interval.sums())
        of_shard = self._of_shard(of_rank)
        loss_sum = math.fsum(sums["loss_sum"] for sums in of_shard)
        num_skipped = int(sum(sums["num_skipped_samples"] for sums in of_shard))
        for name, value in (
            ("loss_sum", loss_sum),
            ("num_samples", interval.num_samples),
            ("num_skipped_samples", num_skipped),
        ):
            progress.epoch_sums[name] = progress.epoch_sums.get(name, 0) + value
        self.totals.num_samples += interval.num_samples
        self.totals.num_skipped_samples += num_skipped
        elapsed = time.perf_counter() - interval.since
        loss = loss_sum / interval.num_samples
        self._write(
            kind="step",
            update=progress.update,
            epoch=progress.epoch,
            num_updates=self.num_updates,
            loss=loss,
            learning_rate=self._rate.at(progress.update - 1),
            loss_scale=self._scaler.scale,
            skipped_updates=self._scaler.num_skipped,
            images_per_second=interval.num_samples / elapsed,
            step_seconds=[sums["step_seconds"] / interval.num_updates for sums in of_rank],
            data_seconds=[sums["data_seconds"] / interval.num_updates for sums in of_rank],
            communication_seconds=[sums["communication_seconds"] / interval.num_updates for sums in of_rank],
            gradient_norm=None if interval.gradient_norm is None else float(interval.gradient_norm),
            eta_seconds=(self.num_updates - progress.update) * elapsed / interval.num_updates,
        )
        if not math.isfinite(loss) and not self._scaler.enabled:
            self._event("warning", f"the loss is not finite after update {progress.update}; lower the learning rate")
        self._interval = _Interval()

    def _finish_epoch(self, seconds: float, samples_before: int) -> None:
        progress, sums = self.progress, self.progress.epoch_sums
        epoch, num_samples = progress.epoch, int(sums["num_samples"])
        self._write(
            kind="epoch",
            epoch=epoch,
            update=progress.update,
            loss=sums["loss_sum"] / num_samples,
            seconds=seconds,
            images_per_second=(num_samples - samples_before) / seconds,
            dropped_samples=self._train.num_dropped,
            skipped_samples=int(sums["num_skipped_samples"]),
        )
        progress.epoch, progress.update_in_epoch, progress.epoch_sums = epoch + 1, 0, {}
        last = progress.epoch == self._run.train.epochs
        if last or progress.epoch % self._run.train.eval_every_epochs == 0:
            self._evaluate(epoch)
        best = progress.best_update == progress.update
        if last or best or self._run.train.checkpoint_every_steps is None:
            self._save()

    def _evaluate(self, epoch: int) -> None:
        begun, sums, num_skipped = time.perf_counter(), [], 0
        keys = self._evaluation.keys()
        for batch in self._engine.load(self._evaluation, keys, num_workers=self._run.data.num_workers):
            sums.append(self._step.evaluate(batch))
            num_skipped += batch.num_skipped
        mine = {name: math.fsum(float(getattr(part, name)) for part in sums) for name in _EVAL_SUMS}
        of_rank = self._of_shard(self._engine.all_gather({**mine, "num_skipped": num_skipped}))
        loss_sum, num_correct, num_samples = (math.fsum(part[name] for part in of_rank) for name in _EVAL_SUMS)
        progress = self.progress
        progress.loss, progress.accuracy = loss_sum / num_samples, num_correct / num_samples
        if progress.best_accuracy is None or progress.accuracy > progress.best_accuracy:
            progress.best_accuracy, progress.best_update = progress.accuracy, progress.update
        self._write(
            kind="eval",
            epoch=epoch,
            update=progress.update,
            loss=progress.loss,
            accuracy=progress.accuracy,
            num_samples=int(num_samples),
            skipped_samples=sum(part["num_skipped"] for part in of_rank),
            seconds=time.perf_counter() - begun,
        )

    def _of_shard(self, of_rank: list[Any]) -> list[Any]:
        """One value per position on the data axis: other ranks of a position have seen the same samples."""
        return [of_rank[rank] for rank in self._world.mesh.groups("data")[0]]

    def _save(self) -> None:
        scaler = self._scaler
        self.progress.loss_scale = {
            "scale": scaler.scale,
            "num_quiet": scaler.num_quiet,
            "num_skipped": scaler.num_skipped,
        }
        state = self._step.export_state()
        agree(lambda: self._write_checkpoint(state) if self._world.rank == 0 else None, self._engine.all_gather)

    def _write_checkpoint(self, state: TrainState) -> None:
        begun, folder = time.perf_counter(), self._folder
        about = {"engine": self._engine.name, "mesh": dict(self._world.mesh.sizes), "versions": self._engine.versions()}
        path = save_checkpoint(folder.checkpoints, state, progress=self.progress, about=about)
        prune_checkpoints(folder.checkpoints, keep=self._run.train.keep, best_update=self.progress.best_update)
        self._write(
            kind="checkpoint",
            update=self.progress.update,
            path=str(path.relative_to(folder.root)),
            seconds=time.perf_counter() - begun,
            num_bytes=sum(file.stat().st_size for file in path.iterdir()),
        )

    def _check_sync(self, when: str) -> None:
        groups = self._world.mesh.groups("data")  # Only they hold the same parts of split tensors.
        check_sync(self._step.local_tensors(), all_gather=self._engine.all_gather, when=when, groups=groups)
        self.totals.num_sync_checks += 1

    def _event(self, level: str, text: str) -> None:
        self._write(kind="event", level=level, text=text)

    def _write(self, **record: Any) -> None:
        if self._world.rank == 0:
            self._sink.write(record)

    def collectives(self) -> list[dict[str, Any]]:
        """Collectives of the last update, as plain mappings."""
        return [asdict(count) for count in self._step.collectives()]


_EVAL_SUMS = ("loss_sum", "num_correct", "num_samples")
