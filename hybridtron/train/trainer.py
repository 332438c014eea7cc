"""The training loop: phases, steps, checkpoints, and the points at which hooks run (`train/hooks.py`).

A run consists of phases, which may differ in their data, lengths and learning rates. All models and parallel layouts
share this loop; the engine does the work that depends on the model or the layout.

A refused step is a step whose update the engine discards, because its loss or gradients are abnormal. After too many
refused steps in a row the run rolls back to a checkpoint (`rollback.py`). A start is one launch of the run: a run that
was interrupted is started again, and resumes from a checkpoint.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import torch

from hybridtron.checkpoint import folder as checkpoints
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.finite import NotFinite
from hybridtron.checkpoint.local import LocalCheckpoint
from hybridtron.checkpoint.restore import restore_newest, restore_states, verify_weights
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.config.units import parse_steps
from hybridtron.data.batch import Batch
from hybridtron.data.loader import Loader, build_loader
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from hybridtron.train import rollback
from hybridtron.train.corruption import CheckFailed, CorruptionWatch
from hybridtron.train.hooks import Hook, RunContext, StepContext
from hybridtron.train.local_checkpoints import SavePlace, SaveTimes, is_own, local_writer, reject_after
from hybridtron.train.lr import learning_rate, weight_decay
from hybridtron.train.metrics import Decision, StepMetrics
from hybridtron.train.outcome import Preempted
from hybridtron.train.phase_engines import PhaseEngines
from hybridtron.train.preempt import REASONS, StopRequests
from hybridtron.train.profile import most_memory_gib, profile_if_chosen
from hybridtron.train.report import announce_end, announce_reading, announce_run, sample_report
from hybridtron.train.rollback import Rollback, RollbackRequested
from hybridtron.train.skipped_data import BatchKey, SkippedData
from hybridtron.train.slow_ranks import RankTimes
from hybridtron.train.start import candidates, check_same_data, weights_of
from hybridtron.train.supervisor.sections import Section
from hybridtron.train.throughput import Throughput
from hybridtron.train.time_log import TimeLog
from hybridtron.train.watchdog import Watchdog

LOG = logging.getLogger(__name__)
# section of the time log -> section of a hook's work
HOOKS = {"start": Section.start, "hooks": Section.export}


class Trainer:
    """Trains a run, on one process or as one rank of several. Only the first rank logs.

    `start` is the checkpoint from which the run resumes, or None for a new run. `initial` is the checkpoint with a new
    run's initial weights (`run.weights`), or None for random weights.
    """

    def __init__(
        self,
        plan: RunPlan,
        groups: Groups,
        *,
        start: Checkpoint | None,
        initial: Checkpoint | None,
        hooks: Sequence[Hook],
        requests: StopRequests,
        watchdog: Watchdog,
        time_log: TimeLog,
    ) -> None:
        self.plan = plan
        self.config = config = plan.config
        self.run_dir = run_dir = plan.run_dir
        self.groups = groups
        self.phases = plan.phases
        self.last = plan.last_step
        self.hooks = hooks
        self.requests = requests
        self.watchdog = watchdog
        self.time_log = time_log
        watchdog.beat("building the model", Section.start)
        torch.manual_seed(config.run.seed)
        self.engines = PhaseEngines(plan, groups)
        self.rank_times = RankTimes(groups)
        self.corruption = CorruptionWatch(config.run, groups, run_dir)
        if initial is not None:
            verify_weights(initial, groups, "run.weights")
        self.start: Checkpoint | None = None
        self.resume_step = 0  # the step of the checkpoint that was restored last; 0 if there is none
        self.skipped_data = SkippedData()
        if start is not None:
            self.start = self.restored(candidates(start, config))
            self.resume_step = self.start.meta.step
            self.skipped_data = SkippedData(self.start.meta.windows)
        elif initial is not None:
            self.engines.build(self.phases[0], weights_of(initial, self.phases[0]))
        else:
            self.engines.build(self.phases[0])
        time_log.resume(self.resume_step)
        self.corruption.start_from(self.resume_step, is_own(self.start, run_dir))
        self.rollback = Rollback(config, run_dir, self.start)
        self.progress = watchdog.failures.progress
        self.progress.step = self.resume_step
        local = local_writer(config, groups)
        self.saver = Saver(
            plan, run_dir, groups, local=local, patience_s=config.run.timeout, on_written=self.report_checkpoint
        )
        self.offer_to_mirror()  # an earlier start may have ended before it copied this folder
        self.skipped = 0  # how many steps were refused in this start

    @property
    def engine(self) -> Engine:
        """The current phase's engine."""
        return self.engines.current

    def restored(self, checkpoints: Iterable[Checkpoint]) -> Checkpoint:
        """Restore the first valid checkpoint, and return it.

        If the current engine does not fit the phase that continues from the checkpoint, a new engine is built.
        """
        return restore_newest(checkpoints, self.engines.engine_for, self.run_dir)

    def fit(self) -> None:
        """Train all remaining steps, and roll back when training fails.

        Raises Preempted if the run was asked to stop before its last step.
        """
        if self.groups.is_first:
            announce_run(self.config, self.engine, self.resume_step, self.last)
        self.run = RunContext(self.plan, self.groups, self.resume_step, beat=self.beat_of_hook)
        try:
            for hook in self.hooks:
                hook.on_run_start(self.run)
            trained = False
            while not trained:
                try:
                    self.train_phases()
                    trained = True
                except RollbackRequested as request:
                    with self.time_log.spent_on("rollbacks"):
                        self.roll_back(request)
            with self.time_log.spent_on("checkpoints"):
                self.saver.finish()  # wait until the last checkpoint is written, since hooks may read it
            with self.time_log.spent_on("hooks"):
                self.watchdog.beat("the work after the run", Section.export)
                for hook in self.hooks:
                    hook.on_run_end(self.run)
        finally:
            for hook in self.hooks:
                hook.close()
        if self.saver.mirror is not None:
            self.watchdog.beat("the last copy of a checkpoint to checkpoint.mirror", Section.export)
            with self.time_log.spent_on("checkpoints"):
                self.saver.mirror.finish()
        if self.groups.is_first:
            self.report_end(checkpoints.folder_of(self.run_dir, self.last))

    def train_phases(self) -> None:
        """Train the remaining steps of each phase, in order."""
        for phase in self.phases:
            if phase.end_step > self.resume_step and phase.start_step < self.last:
                self.load_phase_start(phase)
                self.train_phase(phase)

    def resumes_within(self, phase: ResolvedPhase) -> bool:
        """Return True if some of the phase's steps were done before this start or the last rollback."""
        return phase.start_step < self.resume_step

    def reached_by_training(self, phase: ResolvedPhase) -> bool:
        """Return True if training reaches the phase's beginning from an earlier phase.

        Return False if this start, or the last rollback, continues at the phase's beginning or within the phase.
        """
        return phase.start_step > self.resume_step

    def load_phase_start(self, phase: ResolvedPhase) -> None:
        """Restore the checkpoint at a phase's beginning if the phase needs another engine, weights or moments.

        Nothing is restored if this start or the last rollback continues in this phase: the engine already fits.
        """
        if not self.reached_by_training(phase) or not self.engines.needs_rebuild(phase):
            return
        self.watchdog.beat(f"the start of phase {phase.settings.name}", Section.resume)
        self.saver.finish()  # wait until the checkpoint that is opened below is written
        boundary = Checkpoint.open(checkpoints.folder_of(self.run_dir, phase.start_step))
        self.start = self.restored([boundary])
        self.resume_step = phase.start_step
        self.corruption.restored(self.resume_step)

    def train_phase(self, phase: ResolvedPhase) -> None:
        """Train the remaining steps of one phase. An evaluation and a checkpoint follow the last step."""
        loader = self.loader_of(phase)
        self.enter_phase(phase, loader)
        first = max(self.resume_step, phase.start_step)
        last = min(self.last, phase.end_step)
        save_times = SaveTimes(self.config, phase)
        evaluate_every = parse_steps(self.config.run.eval_every, phase.settings.tokens_per_step)
        with closing(self.read(loader, phase, first, last)) as steps, self.time_log.spent_on("steps"):
            for step in range(first + 1, last + 1):
                self.watchdog.beat(f"step {step}", Section.start if step == first + 1 else Section.step)
                waiting_since = time.perf_counter()
                batches = next(steps)
                with profile_if_chosen(step, self.config.run.profile, self.run_dir / "logs", self.groups.rank):
                    metrics = self.train_step(step, phase, batches, waiting_since)
                self.record_progress(metrics)  # an evaluation announces itself with this step
                self.time_log.count_step(metrics, not self.engine.guard.refused)
                # The check does not wait: the last checkpoint's tensors were copied before this step's update.
                self.check_saved()
                data = self.batch_key(step, phase)
                context = StepContext(self.run, phase, self.engine, loader, step, batches, data)
                if step == last or step % evaluate_every == 0:
                    with self.time_log.spent_on("evaluation"):
                        self.watchdog.beat(f"the evaluation at step {step}", Section.evaluation)
                        for hook in self.hooks:
                            metrics = hook.on_evaluation(context, metrics)
                for hook in self.hooks:
                    metrics = hook.on_step(context, metrics)
                self.record_progress(metrics)
                refused = self.engine.guard.refused
                rollback.check_refused(step, step == self.last, self.engine.guard, self.config.optim)
                stop = self.requests.agreed(self.engine.number_sums[: len(REASONS)])  # all ranks get the same value
                place = save_times.after(step, refused > 0, at_once=step == last or bool(stop))
                if place is not None:
                    self.save(step, loader, metrics, place)
                if stop or step == last:
                    self.check_saved()  # no further step will check this checkpoint
                if stop and step < self.last:
                    self.watchdog.beat(f"the end of the checkpoint of step {step}", Section.settle)
                    with self.time_log.spent_on("checkpoints"):
                        self.saver.finish()
                    raise Preempted(step, stop)
        self.watchdog.beat(f"the end of the checkpoint of step {last}", Section.settle)
        with self.time_log.spent_on("checkpoints"):
            self.saver.settle()  # wait until the phase's last checkpoint is written, since hooks may read it
        with self.time_log.spent_on("hooks"):
            self.watchdog.beat(f"the work after phase {phase.settings.name}", Section.export)
            for hook in self.hooks:
                hook.on_phase_end(StepContext(self.run, phase, self.engine, loader, last))

    def enter_phase(self, phase: ResolvedPhase, loader: Loader) -> None:
        """Prepare the engine and the hooks for a phase, at its beginning or where the run resumes within it."""
        if self.start is not None and not self.reached_by_training(phase):
            for difference in check_same_data(self.start, self.config, phase, loader.fingerprint):
                if self.groups.is_first:
                    LOG.info("run.accept_data_changes=true: %s %s", difference.key, difference.message)
        self.engine.start_phase(phase, loader.lanes)
        if not self.resumes_within(phase):
            self.engine.guard.restart()
        elif self.engine.carrier is not None and self.start is not None:
            restore_states(self.engine.carrier, self.groups, self.start)
        step = max(self.resume_step, phase.start_step)
        for hook in self.hooks:
            hook.on_phase_start(StepContext(self.run, phase, self.engine, loader, step))
        if self.groups.is_first:
            announce_reading(loader, phase)
        self.masked = loader.sources.masked
        self.throughput = Throughput(phase, self.groups.world_size)

    def beat_of_hook(self, doing: str) -> None:
        """Announce the start of a hook's work."""
        self.watchdog.beat(doing, HOOKS.get(self.time_log.section, Section.evaluation))

    def record_progress(self, metrics: StepMetrics) -> None:
        """Update the progress that outcome.json will report."""
        self.progress.step = metrics.step
        self.progress.loss = metrics.loss
        self.progress.tokens = metrics.tokens
        self.progress.validation = metrics.validation or self.progress.validation

    def train_step(self, step: int, phase: ResolvedPhase, batches: list[Batch], asked: float) -> StepMetrics:
        """Train one step and return its metrics.

        `asked` is the time at which the step's data was requested, in seconds of `time.perf_counter`.
        """
        arrived = time.perf_counter()
        lr = learning_rate(self.phases, phase.index, phase.phase_tokens_at(step))
        number = step - phase.start_step - 1
        guard = self.engine.guard
        # The carried states do not fit this step's rows (sequences) in two cases: if the last step was refused, because
        # that step's final states were discarded, and if data was skipped directly before this step.
        if guard.refused or self.skipped_data.jumps(phase.index, number):
            self.engine.invalidate_states()
        self.corruption.begin_step(self.engine, step, number, batches)
        self.engine.forward_backward(batches, number)
        if self.config.run.layer_norms:
            layers = self.engine.optimizer.norms()  # before the update, which resets the gradients
        else:
            layers = None
        decay = weight_decay(self.phases, phase.index, lr)
        flags = self.requests.flags()
        grad_norm, accepted = self.engine.step(lr, decay, [*flags, *self.rank_times.numbers(asked)])
        self.corruption.end_step(self.engine, step, self.saver)
        self.rank_times.take(self.engine.number_sums[len(flags) :])
        self.rank_times.record(arrived - asked, self.engine.passes_time.seconds())
        self.skipped += not accepted
        if guard.why is not None:
            data = self.batch_key(step, phase)
            self.report_decision(rollback.refusal_event(step, guard, self.engine.mean_loss, norm=grad_norm, data=data))
        step_time = time.perf_counter() - asked
        speed = phase.tokens_of(step) / step_time
        tflops, mfu = self.throughput.rates(speed)
        return StepMetrics(
            step=step,
            phase=phase.settings.name,
            tokens=phase.tokens_at(step),
            loss=self.engine.mean_loss,
            grad_norm=grad_norm,
            lr=lr,
            step_time=step_time,
            data_wait=arrived - asked,
            tokens_per_second=speed,
            tflops_per_device=tflops,
            mfu=mfu,
            memory_gib=most_memory_gib(),
            skipped=self.skipped,
            learned=self.engine.learned if self.masked else None,
            imbalance=self.throughput.imbalance(batches),
            auxiliary=self.engine.auxiliary or None,
            routers={layer: router._asdict() for layer, router in self.engine.router_metrics.items()} or None,
            restarted_lanes=self.engine.restarted_lanes,
            layers=layers,
            rank_times=self.rank_times.metrics(),
            slow_ranks=self.rank_times.slow_metrics(),
        )

    def batch_key(self, step: int, phase: ResolvedPhase) -> BatchKey:
        """Return the key of the batch that a step reads."""
        return BatchKey(phase.index, self.skipped_data.data_step(phase.index, step - phase.start_step - 1))

    def save(self, step: int, loader: Loader, metrics: StepMetrics, place: SavePlace) -> None:
        """Write the checkpoint of a step. Raises RollbackRequested if a value in the checkpoint is not finite.

        With `SavePlace.local` each node writes its part to its own disk.
        """
        began = time.perf_counter()
        with self.requests.saving(), self.time_log.spent_on("checkpoints"):
            if metrics.validation is None:
                measured = math.nan
            else:
                measured = next(iter(metrics.validation.values()))
            if math.isfinite(measured):
                validation = measured
            else:
                validation = None
            meta = meta_of(self.engine, step, loader.fingerprint, validation, self.skipped_data.all)
            try:
                self.watchdog.beat("the end of the last checkpoint", Section.settle)
                self.saver.settle()
                if place is SavePlace.local:
                    self.watchdog.beat(f"the local checkpoint of step {step}", Section.local_save)
                    self.saver.save_locally(self.engine, meta, loader.sources.tokenizer_file)
                else:
                    self.watchdog.beat(f"the checkpoint of step {step}", Section.save)
                    self.saver.save(self.engine, meta, loader.sources.tokenizer_file)
            except NotFinite as fault:
                raise rollback.not_saved(step, fault) from fault
        if place is SavePlace.local:
            return  # only times of checkpoints in the run's folder are counted, and decide their interval
        self.time_log.count_save(time.perf_counter() - began)
        self.requests.longest_save = max(self.requests.longest_save, self.saver.longest_s)

    def check_saved(self) -> None:
        """Raise RollbackRequested if the checkpoint being written in the background has a value that is not finite."""
        try:
            self.saver.check()
        except NotFinite as fault:
            raise rollback.not_saved(self.saver.step, fault) from fault

    def roll_back(self, request: RollbackRequested) -> None:
        """Restore the newest usable checkpoint, and skip the data of later steps, unless data can't be the cause.

        The failed step's batch is the last batch that is skipped.
        """
        self.watchdog.beat(f"rolling back from step {request.step}", Section.resume)
        failed = request.step
        if isinstance(request, CheckFailed):
            failed -= 1  # the step has not been counted
            with suppress(NotFinite):  # a checkpoint with such values was removed
                self.saver.settle()
            self.corruption.archive_suspects(request, self.saver.local)
        self.saver.settle()  # a checkpoint that is still being written may become the newest usable checkpoint
        self.start = self.restored(self.rollback.checkpoints(request, self.saver.written))
        self.resume_step = self.start.meta.step
        self.offer_to_mirror()  # the newest copy may be of a checkpoint that is not used any more
        reject_after(self.resume_step, self.saver.local, self.groups.control, self.run_dir)
        self.time_log.count_rollback(failed, self.resume_step)
        times = self.rollback.count(request, self.resume_step)
        self.corruption.start_from(self.resume_step)
        if request.skips_data:
            self.skipped_data = self.skipped_data.and_failed(self.phases, self.resume_step, request.step)
        self.report_decision(rollback.rollback_event(request, self.resume_step, times, self.skipped_data))

    def offer_to_mirror(self) -> None:
        """Make the checkpoint from which training continues the newest copy in the mirror.

        If training continues from a local checkpoint, this is the newest checkpoint in the run's folder.
        """
        if self.saver.mirror is None or not is_own(self.start, self.run_dir):
            return
        start = self.start
        if isinstance(start, LocalCheckpoint):
            start = checkpoints.newest(self.run_dir)
        if start is not None:
            self.saver.mirror.offer(start.folder)

    def report_decision(self, decision: Decision) -> None:
        """Pass a decision, which is a refused step or a rollback, to the hooks."""
        for hook in self.hooks:
            hook.on_decision(decision)

    def report_checkpoint(self, step: int) -> None:
        """Call the hooks' `on_checkpoint` for a checkpoint that was written."""
        for hook in self.hooks:
            hook.on_checkpoint(step, checkpoints.folder_of(self.run_dir, step))

    def read(self, loader: Loader, phase: ResolvedPhase, first: int, last: int) -> Generator[list[Batch]]:
        """Yield each step's micro-batches, for the steps `first` + 1 to `last`, without skipped data."""
        for steps in self.skipped_data.runs(phase.index, first - phase.start_step, last - phase.start_step):
            yield from loader.iterate(steps.start, steps.stop)

    def loader_of(self, phase: ResolvedPhase) -> Loader:
        """Build this rank's loader: first on the first rank, then on each node's first rank, then on the others.

        So only the first rank prepares the corpus: building a loader prepares it if it is not prepared yet. And only
        the first rank of a node compares sizes and digests of the data with its manifest.
        """
        data = self.groups.data
        control = self.groups.control
        build = partial(build_loader, phase, data.rank, data.size, self.groups.shard_index)
        if self.groups.is_first:
            turn = 0
        elif control.leads:
            turn = 1
        else:
            turn = 2
        loader = None
        for number in range(3):
            if number == turn:
                loader = build(checked=not control.leads)
            if number < 2:
                control.barrier()
        assert loader is not None
        return loader

    def report_end(self, checkpoint: Path) -> None:
        """Log the end of the run; on a single process also log a text sample."""
        announce_end(self.progress, self.run_dir, checkpoint, self.time_log.spent())
        run = self.config.run
        if run.sample_tokens and self.groups.world_size == 1:
            LOG.info(sample_report(self.engine.stages[0].model, checkpoint, run, self.progress.tokens))
