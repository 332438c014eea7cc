"""The engine: a run's model on this rank of the layout, with its schedule and optimizer, ready to take steps.

A step is `forward_backward`, which accumulates gradients over micro-batches, and then `step`, which updates the weights
or refuses to. The engine also evaluates, and exposes its state for checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hybridtron.architecture.table import architecture, parameter_table
from hybridtron.config.layout import with_overlap
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, StateMode
from hybridtron.data.batch import Batch, step_key
from hybridtron.data.order.phase_order import phase_seed
from hybridtron.device import DTYPES, compute_device
from hybridtron.engine.guard import Guard
from hybridtron.engine.optim import Optimizer
from hybridtron.engine.schedule import Parted, StepLoss, run_schedule
from hybridtron.engine.serving import shared_reader
from hybridtron.engine.stage import build_stages, data_parallel
from hybridtron.engine.states import Carrier
from hybridtron.engine.stored_states import state_blocks
from hybridtron.model.generate import Reader
from hybridtron.model.init import initialise
from hybridtron.parallel.blocks import full_rectangle, weight_blocks, writes
from hybridtron.parallel.cut import cut
from hybridtron.parallel.fp8 import CachedWeight
from hybridtron.parallel.fp8_statistics import statistics_blocks, statistics_of
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.whole import gathered


class Engine:
    """Training engine for a model, on one process or on one rank of many.

    An engine is built for a phase. It can train other phases with the same model, precision and trained weights
    (`serves`). `whole` is a function that returns a checkpoint's full weight by name; without it the weights are
    initialised from the seed.
    """

    def __init__(
        self,
        config: Config,
        groups: Groups,
        whole: Callable[[str], Tensor] | None = None,
        dtype: torch.dtype | None = None,
        phase: int = 0,
    ) -> None:
        parallel = with_overlap(config.parallel, groups.dense.copies.size)
        self.phases = resolve(replace(config, parallel=parallel))
        self.groups = groups
        self.config = config = self.phases[phase].config
        self.trained = self.phases[phase].trained
        self.device = compute_device()
        self.dtype = dtype or DTYPES[config.precision.name]
        self.stages = build_stages(config, groups, self.dtype, self.device)
        for stage in self.stages:
            if whole is None:
                initialise(stage.model, config.run.seed)
            else:
                for name, weight in stage.model.named_parameters():
                    parameter = stage.model.table[name]
                    weight.data.copy_(cut(whole(name), parameter, groups.meshes[parameter.family]))
            for name, weight in stage.model.named_parameters():
                weight.requires_grad_(self.phases[phase].learns(name))
        self.wrapped = data_parallel(self.stages, config, groups, self.dtype)
        self.optimizer = Optimizer(self.wrapped, config, groups, self.dtype)
        modules = [(name, module) for stage in self.stages for name, module in stage.model.named_modules()]
        self.statistics = statistics_of(modules, self.stages[0].model.slice.tensor.products.fp8, self.device)
        self.rounded = [module for _, module in modules if isinstance(module, CachedWeight)]
        self.guard = Guard(config.optim.spike)
        self.readers: Sequence[Future[Any]] = ()  # copies of weights and moments; an update waits until they are done
        self._loss = StepLoss(torch.zeros(()), torch.zeros(()))  # sums of the current step
        self.mean_loss = 0.0  # per token, of the last step, accepted or refused; nan if no token counted
        self.learned = 0  # tokens that counted in that loss
        names = {name for spec in architecture(config.model).specs for name in spec.auxiliary}
        self.auxiliary = dict.fromkeys(sorted(names), 0.0)  # auxiliary losses that mixers added to it, by name
        self.carrier: Carrier | None = None
        self._seed, self._lanes = phase_seed(config.run.seed, 0), range(0)

    def serves(self, phase: int) -> bool:
        """Check if this engine can train a phase without being rebuilt."""
        resolved = self.phases[phase]
        same = resolved.model == self.config.model and resolved.precision == self.config.precision
        return same and resolved.trained == self.trained

    def start_phase(self, index: int, lanes: range) -> None:
        """Apply the phase's settings, and prepare its carried or drawn states; this process reads `lanes`."""
        phase = self.phases[index]
        self.config = phase.config
        self.optimizer.settings = self.config.optim
        self._seed = phase_seed(self.config.run.seed, index)
        self._lanes = lanes
        self.carrier = None
        if phase.states.mode is not StateMode.zero:
            chunks = [stage.model.slice.layers for stage in self.stages]
            self.carrier = Carrier(phase, chunks, lanes, self.groups, self.device)

    def forward_backward(self, batches: Sequence[Batch], step: int = 0) -> StepLoss:
        """Run forward and backward passes of a step's micro-batches; return the loss and accumulate the gradients.

        Each data-parallel rank provides its own lanes' micro-batches. `step` counts from the phase's start and seeds
        the random choices.
        """
        if self.carrier is not None:
            self.carrier.begin(step)
        for projection in self.rounded:
            projection.forget()
        z_loss = self.config.optim.z_loss
        batches = self._keyed(batches, step)
        with self.statistics.step():
            loss = run_schedule(
                self.wrapped,
                batches,
                z_loss,
                self.groups,
                self.device,
                self.carrier,
                auxiliary=tuple(self.auxiliary),
            )
        self._loss = loss
        return loss

    def _keyed(self, batches: Sequence[Batch], step: int) -> list[Batch]:
        """Return the micro-batches with their random keys, which depend on seed, phase, step and global row.

        Micro-batch n holds this rank's rows from n * rows on: `turn` chunks of its lanes come before, and it begins at
        lane `row` of them. Without `start_phase` a rank reads each of its rows once, by its data rank.
        """
        rows = len(batches[0].tokens_BL)
        rows_of_rank = rows * len(batches)
        # one chunk of each lane at a time; during a ramp, a step reads fewer lanes than the phase has
        if self._lanes:
            lanes = min(len(self._lanes), rows_of_rank)
        else:
            lanes = rows_of_rank
        first = self.groups.data.rank * lanes
        positions = (divmod(number * rows, lanes) for number in range(len(batches)))
        keys = [step_key(self._seed, step, turn, first + row) for turn, row in positions]
        carried = self.carrier is not None
        return [batch.keyed(key, carried) for batch, key in zip(batches, keys, strict=True)]

    def invalidate_states(self) -> None:
        """Mark carried states as stale, after data was skipped."""
        if self.carrier is not None:
            self.carrier.invalidate()

    def step(self, lr: float, weight_decay: float | None = None) -> tuple[float, bool]:
        """Update the weights; commit the carried states and FP8's amax history.

        A refused step leaves all of these unchanged. `weight_decay` defaults to the phase's. Returns the gradient norm
        before clipping, and True if the step was accepted.
        """
        added = self._loss.auxiliary
        scalars = (self.optimizer.squared_norm(), self._loss.total, self._loss.tokens, *added.values())
        # the only point in a step at which the host waits for the device
        squares, total, tokens, *sums = torch.stack([value.reshape(()).double() for value in scalars]).tolist()
        grad_norm = squares**0.5
        self.learned = int(tokens)
        self.mean_loss = total / tokens if tokens else math.nan
        self.auxiliary = {
            name: total_loss / tokens if tokens else math.nan for name, total_loss in zip(added, sums, strict=True)
        }
        acceptable = self.guard.accepts(grad_norm, total)
        wait(self.readers)
        accepted = self.optimizer.take(lr, grad_norm, acceptable, weight_decay)
        self.statistics.settle(accepted)
        if accepted and self.carrier is not None:
            self.carrier.commit()
        return grad_norm, accepted

    @property
    def restarted_lanes(self) -> int | None:
        """Number of lanes restarted from zero in this phase so far; None if no state is carried. Synchronizes."""
        if self.carrier is not None and self.carrier.holds:
            return int(self.carrier.restarts)
        return None

    @torch.no_grad()
    def loss(self, batches: Sequence[Batch]) -> StepLoss:
        """Return the loss without gradients and without the z-loss. All rows start from zero states."""
        with self.statistics.evaluation():
            return run_schedule(self.wrapped, batches, 0.0, self.groups, self.device, forward_only=True)

    @torch.no_grad()
    def losses(self, batches: Sequence[tuple[int, Batch]], parts: int) -> StepLoss:
        """Return the losses without gradients, summed per part; equal on all ranks.

        Each batch is paired with its part's number, below `parts`.
        """
        parted = Parted([part for part, _ in batches], parts)
        alone = [batch for _, batch in batches]
        with self.statistics.evaluation():
            return run_schedule(self.wrapped, alone, 0.0, self.groups, self.device, None, True, parted)

    def reader(self) -> Reader:
        """Return a reader with the current weights. All processes must call this together."""
        self._current_weights()
        return shared_reader([stage.model for stage in self.stages], self.config.model, self.groups, self.dtype)

    def compile(self) -> None:
        """Compile the stages with torch.compile, which fuses operations between matrix products and sequence ops."""
        for stage in self.stages:
            stage.model.compile()

    def blocks(self) -> dict[str, list[Any]]:
        """Return this rank's shards of the full training state, as views with their offsets in the full tensors.

        The groups are `model`, `optimizer`, `fp8` and `states`. A checkpoint is written from these views and read into
        them. All processes must call this together.
        """
        groups = self.groups
        weights = []
        for name, weight in self._current_weights():
            parameter = self.optimizer.table[name]
            marked = cast(Any, weight)
            mesh = groups.meshes[parameter.family]
            main = not marked.shared and writes(name, mesh, parameter.active_cuts(mesh.sizes))
            weights += weight_blocks(name, [full_rectangle(weight.data)], parameter, mesh, main)
        if self.carrier is None:
            states = []
        else:
            states = state_blocks(self.carrier, groups)
        everywhere = partial(writes, mesh=groups.dense, cuts=())
        fp8 = statistics_blocks(self.statistics, everywhere)
        return {"model": weights, "optimizer": self.optimizer.blocks(), "fp8": fp8, "states": states}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every full weight on the first process. All processes must iterate together."""
        shares = {name: partial(_on_cpu, weight) for name, weight in self._current_weights()}
        return gathered(shares, parameter_table(self.config.model), self.groups, self.dtype)

    def _current_weights(self) -> list[tuple[str, nn.Parameter]]:
        """Return this rank's weights as the last step left them. All processes must call this together.

        With `parallel.overlap_param_gather`, a step updates only this data-parallel rank's shards; the others are
        gathered in the next forward pass. So call this before touching weights outside a forward pass.
        """
        if self.config.parallel.overlap_param_gather:
            for stage in self.wrapped:
                stage.start_param_sync(force_sync=True)
        return [pair for stage in self.stages for pair in stage.model.named_parameters()]


def _on_cpu(weight: Tensor) -> Tensor:
    return weight.detach().cpu()
