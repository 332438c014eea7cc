"""Replay of a refused step on one process: forward and backward passes with the step's batch and earlier weights.

A refused step is a step whose update was discarded, because its loss or gradients were abnormal. The weights come from
the newest checkpoint before the step. If there is no such checkpoint, the run's initial weights are used. The steps
between that checkpoint and the refused step are not repeated, so the loss differs a little from the recorded loss. If
the batch itself causes a NaN, an infinity or a spike, the replay shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hybridtron.checkpoint import folder as checkpoints
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.restore import restore_newest, restore_states
from hybridtron.config.load import load_saved
from hybridtron.config.pipeline_layout import ProcessLaunch
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.config.schema import ParallelConfig
from hybridtron.device import megatron_context
from hybridtron.engine.engine import Engine
from hybridtron.ops.dispatch import force_on_all_threads
from hybridtron.parallel.groups import start, stop
from hybridtron.problems import Unusable
from hybridtron.train.phase_engines import PhaseEngines
from hybridtron.train.refused import RefusedBatch, key_of, read_batch
from hybridtron.train.start import check_fp8, initial_weights, weights_of


@dataclass(frozen=True)
class Replayed:
    """Results of a replayed step: the mean loss, the gradient norm, and the gradient norm of each layer."""

    loss: float
    grad_norm: float
    layers: Mapping[str, float]


class Replay:
    """A refused step with an engine that holds earlier weights, ready for replays with any implementations of ops.

    `checkpoint` is the checkpoint with the weights; None if they are the run's initial weights.
    """

    def __init__(self, engine: Engine, refused: RefusedBatch, checkpoint: Checkpoint | None, number: int) -> None:
        self.engine = engine
        self.refused = refused
        self.checkpoint = checkpoint
        self.number = number  # the step's index in its phase, from 0

    def run(self, implementations: Mapping[str, str]) -> Replayed:
        """Repeat the forward and backward passes; `implementations` names the implementation of each op."""
        batches = [batch.to(self.engine.device) for batch in self.refused.batches]
        with force_on_all_threads(implementations):
            try:
                loss = self.engine.forward_backward(batches, self.number)
                norms = self.engine.optimizer.norms()
                squares, _ = self.engine.optimizer.squared_norm()
            finally:
                self.engine.optimizer.zero_grad()  # the next replay adds its gradients to zeros, also after a failure
        suffix = ".grad_norm"
        layers = {name.removesuffix(suffix): norm for name, norm in norms.items() if name.endswith(suffix)}
        return Replayed(loss.mean.item(), squares.item() ** 0.5, layers)


@contextmanager
def replay_of(run_dir: Path, folder: Path) -> Iterator[Replay]:
    """Yield the Replay for the batch in `folder`, on this process alone.

    Raises Unusable if the folder has no complete batch, or if the run has no checkpoint for the replay.
    """
    config = load_saved(run_dir / "config.yaml")
    parallel = ParallelConfig(
        transformer_engine=config.parallel.transformer_engine,
        gradient_accumulation_fusion=config.parallel.gradient_accumulation_fusion,
    )
    config = replace(config, parallel=parallel)
    plan = RunPlan.of(config)
    check_fp8(plan)
    key = key_of(folder)
    phase = plan.phases[key.phase]
    refused = read_batch(folder, phase.states.chunks // phase.chunks_together)
    checkpoint = newest_before(run_dir, phase, refused.step)
    try:
        with megatron_context():
            groups = start(config.parallel, launch=ProcessLaunch(0, 1))
            torch.manual_seed(config.run.seed)
            engines = PhaseEngines(plan, groups)
            if checkpoint is None:
                initial = initial_weights(config)
                engines.build(phase, None if initial is None else weights_of(initial, phase))
            else:
                # `restore_newest` renames broken checkpoints in the folder that is its last argument. A replay must not
                # do this in the run's folder, so the argument is `folder`, which has no checkpoints.
                restore_newest([checkpoint], engines.engine_for, folder)
            engine = engines.current
            engine.start_phase(phase, range(phase.lanes))
            if checkpoint is not None and checkpoint.meta.step > phase.start_step and engine.carrier is not None:
                restore_states(engine.carrier, groups, checkpoint)
            yield Replay(engine, refused, checkpoint, refused.step - phase.start_step - 1)
    finally:
        stop()


def newest_before(run_dir: Path, phase: ResolvedPhase, step: int) -> Checkpoint | None:
    """Return the run's newest checkpoint in a phase and before a step.

    The checkpoint at the phase's start counts. If the run's first phase has no such checkpoint, return None: a replay
    can use the run's initial weights. If a later phase has no such checkpoint, raise Unusable.
    """
    for checkpoint in checkpoints.valid_checkpoints(run_dir):
        if phase.start_step <= checkpoint.meta.step < step:
            return checkpoint
    if phase.index > 0:
        fault = f"has no checkpoint of {phase.settings.name} before step {step}, as the replay of this step needs"
        raise Unusable(f"{run_dir} {fault}: name a batch of a later step", code="no-file")
    return None
