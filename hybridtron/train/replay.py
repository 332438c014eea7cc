"""Replay of a refused step on one process: forward and backward passes with its batch and the weights before it.

The weights are those of the newest checkpoint before the step, or those that the run started from. Steps between are
not repeated, so the loss differs a little from the recorded one; NaN, infinity and a spike of one batch come back.
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
from hybridtron.config.layout import ProcessLaunch
from hybridtron.config.load import load_saved
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.config.schema import ParallelConfig
from hybridtron.device import megatron_context
from hybridtron.engine.engine import Engine
from hybridtron.ops.dispatch import force_on_all_threads
from hybridtron.parallel.groups import start, stop
from hybridtron.problems import Unusable
from hybridtron.train.engines import Engines
from hybridtron.train.refused import RefusedBatch, key_of, read_batch
from hybridtron.train.start import check_fp8, given_weights, weights_of


@dataclass(frozen=True)
class Replayed:
    """Results of a replayed step: the mean loss, the gradient norm, and the gradient norm of each layer."""

    loss: float
    grad_norm: float
    layers: Mapping[str, float]


class Replay:
    """A refused step, ready to be repeated with any implementations of ops."""

    def __init__(self, engine: Engine, refused: RefusedBatch, checkpoint: Checkpoint | None, number: int) -> None:
        self.engine = engine
        self.refused = refused
        self.checkpoint = checkpoint
        self.number = number  # of the step in its phase, from 0

    def run(self, implementations: Mapping[str, str]) -> Replayed:
        """Repeat the forward and backward passes with these implementations of ops."""
        batches = [batch.to(self.engine.device) for batch in self.refused.batches]
        with force_on_all_threads(implementations):
            loss = self.engine.forward_backward(batches, self.number)
            norms = self.engine.optimizer.norms()
            squares = self.engine.optimizer.squared_norm().item()
            self.engine.optimizer.zero_grad()
        suffix = ".grad_norm"
        layers = {name.removesuffix(suffix): norm for name, norm in norms.items() if name.endswith(suffix)}
        return Replayed(loss.mean.item(), squares**0.5, layers)


@contextmanager
def replay_of(run_dir: Path, folder: Path) -> Iterator[Replay]:
    """Yield the replay of a kept batch, on this process alone, until the block ends. Raises Unusable."""
    config = load_saved(run_dir / "config.yaml")
    config = replace(config, parallel=ParallelConfig(transformer_engine=config.parallel.transformer_engine))
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
            engines = Engines(plan, groups)
            if checkpoint is None:
                initial = given_weights(config)
                engines.build(0, None if initial is None else weights_of(initial, phase))
            else:
                restore_newest([checkpoint], engines.engine_for, folder)  # archives nothing, which it may do in a run
            engine = engines.now
            engine.start_phase(phase.index, range(phase.lanes))
            if checkpoint is not None and checkpoint.meta.step > phase.start_step and engine.carrier is not None:
                restore_states(engine.carrier, groups, checkpoint)
            yield Replay(engine, refused, checkpoint, refused.step - phase.start_step - 1)
    finally:
        stop()


def newest_before(run_dir: Path, phase: ResolvedPhase, step: int) -> Checkpoint | None:
    """Return the run's newest checkpoint before a step of a phase; None if the run started from its first weights."""
    for checkpoint in checkpoints.valid_checkpoints(run_dir):
        if phase.start_step <= checkpoint.meta.step < step:
            return checkpoint
    if phase.index > 0:
        fault = f"has no checkpoint of {phase.settings.name} before step {step}, from which to replay it"
        raise Unusable(f"{run_dir} {fault}: name a batch of a later step", code="no-file")
    return None
