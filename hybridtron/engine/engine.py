"""The model of a run on this process's place in the layout, ready to take steps: stages, schedule and optimizer."""

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
from hybridtron.parallel.cut import cut, mesh_sizes
from hybridtron.parallel.fp8 import CachedWeight
from hybridtron.parallel.fp8_statistics import statistics_blocks, statistics_of
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.whole import gathered


class Engine:
    """Takes steps over micro-batches, on one process or on one rank of many.

    It is built for a phase, and serves others that have the same model, precision and trained weights. `whole` reads a
    weight of a checkpoint by its name; without it the weights start as the seed says.
    """

    def __init__(
        self,
        config: Config,
        groups: Groups,
        whole: Callable[[str], Tensor] | None = None,
        dtype: torch.dtype | None = None,
        phase: int = 0,
    ) -> None:
        parallel = with_overlap(config.parallel, groups.copies.size)
        self.phases, self.groups = resolve(replace(config, parallel=parallel)), groups
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
                    weight.data.copy_(cut(whole(name), stage.model.table[name], groups.mesh))
            for name, weight in stage.model.named_parameters():
                weight.requires_grad_(self.phases[phase].learns(name))
        self.wrapped = data_parallel(self.stages, config, self.dtype)
        self.optimizer = Optimizer(self.wrapped, config, groups, self.dtype)
        modules = [(name, module) for stage in self.stages for name, module in stage.model.named_modules()]
        self.statistics = statistics_of(modules, self.stages[0].model.slice.tensor.products.fp8, self.device)
        self.rounded = [module for _, module in modules if isinstance(module, CachedWeight)]
        self.guard = Guard(config.optim.spike)
        self.readers: Sequence[Future[Any]] = ()  # of weights and moments, which no update may overtake
        self._loss = StepLoss(torch.zeros(()), torch.zeros(()))  # of the step under way
        self.mean_loss = 0.0  # of the last step that was taken or refused; nan where nothing was learned
        self.learned = 0  # tokens that counted in it
        names = {name for spec in architecture(config.model).specs for name in spec.auxiliary}
        self.auxiliary = dict.fromkeys(sorted(names), 0.0)  # losses that mixers added to it, by name
        self.carrier: Carrier | None = None
        self._seed, self._lanes = phase_seed(config.run.seed, 0), range(0)

    def serves(self, phase: int) -> bool:
        """Whether a phase can be trained without building another one."""
        wanted = self.phases[phase]
        same = wanted.model == self.config.model and wanted.precision == self.config.precision
        return same and wanted.trained == self.trained

    def start_phase(self, index: int, lanes: range) -> None:
        """Take the phase's settings; its rows start from states as it says, and this process reads these lanes."""
        phase = self.phases[index]
        self.config = phase.config
        self.optimizer.settings = self.config.optim
        self._seed, self._lanes = phase_seed(self.config.run.seed, index), lanes
        self.carrier = None
        if phase.states.mode is not StateMode.zero:
            chunks = [stage.model.slice.layers for stage in self.stages]
            self.carrier = Carrier(phase, chunks, lanes, self.groups, self.device)

    def forward_backward(self, batches: Sequence[Batch], step: int = 0) -> StepLoss:
        """The loss of a step of the phase and its gradients; each rank brings its own lanes' micro-batches."""
        if self.carrier is not None:
            self.carrier.begin(step)
        for projection in self.rounded:
            projection.forget()
        z_loss, batches = self.config.optim.z_loss, self._keyed(batches, step)
        with self.statistics.step():
            given = (batches, z_loss, self.groups, self.device, self.carrier)
            loss = run_schedule(self.wrapped, *given, auxiliary=tuple(self.auxiliary))
        self._loss = loss
        return loss

    def _keyed(self, batches: Sequence[Batch], step: int) -> list[Batch]:
        """The micro-batches with their keys: functions of the seed, the phase, the step and the rows of all ranks.

        Micro-batch n holds the rows from n * rows on of this rank's: `turn` chunks of its lanes come before, and it
        begins at lane `row` of them. Without `start_phase` a rank reads each of its rows once, by its data rank.
        """
        rows = len(batches[0].tokens_BL)
        rows_of_rank = rows * len(batches)
        # one chunk of each lane at a time; while a batch grows, a step reads fewer lanes than the phase has
        lanes = min(len(self._lanes), rows_of_rank) if self._lanes else rows_of_rank
        first = self.groups.data_rank * lanes
        positions = (divmod(number * rows, lanes) for number in range(len(batches)))
        keys = [step_key(self._seed, step, turn, first + row) for turn, row in positions]
        carried = self.carrier is not None
        return [batch.keyed(key, carried) for batch, key in zip(batches, keys, strict=True)]

    def invalidate_states(self) -> None:
        """What is read next does not continue where the last accepted step ended."""
        if self.carrier is not None:
            self.carrier.invalidate()

    def step(self, lr: float, weight_decay: float | None = None) -> tuple[float, bool]:
        """Update the weights, and commit the states that the rows ended in and FP8's largest values.

        A refused step changes nothing of these. Without a weight decay of its own the step takes the phase's.
        """
        added = self._loss.auxiliary
        read = (self.optimizer.squared_norm(), self._loss.total, self._loss.tokens, *added.values())
        # the one place of a step at which the host waits for the device
        squares, total, tokens, *sums = torch.stack([value.reshape(()).double() for value in read]).tolist()
        grad_norm, self.learned = squares**0.5, int(tokens)
        self.mean_loss = total / tokens if tokens else math.nan
        self.auxiliary = {name: one / tokens if tokens else math.nan for name, one in zip(added, sums, strict=True)}
        wanted = self.guard.accepts(grad_norm, total)
        wait(self.readers)
        accepted = self.optimizer.take(lr, grad_norm, wanted, weight_decay)
        self.statistics.settle(accepted)
        if accepted and self.carrier is not None:
            self.carrier.commit()
        return grad_norm, accepted

    @property
    def restarted_lanes(self) -> int | None:
        """Lanes that restarted from zero in this phase so far; None where no state is carried. Waits for the device."""
        return int(self.carrier.restarts) if self.carrier is not None and self.carrier.holds else None

    @torch.no_grad()
    def loss(self, batches: Sequence[Batch]) -> StepLoss:
        """The loss alone, without the z-loss, every row from zero."""
        with self.statistics.evaluation():
            return run_schedule(self.wrapped, batches, 0.0, self.groups, self.device, forward_only=True)

    @torch.no_grad()
    def losses(self, batches: Sequence[tuple[int, Batch]], parts: int) -> StepLoss:
        """The loss alone of each of `parts` parts, the same on all ranks; a batch is of the part named with it."""
        parted = Parted([part for part, _ in batches], parts)
        alone = [batch for _, batch in batches]
        with self.statistics.evaluation():
            return run_schedule(self.wrapped, alone, 0.0, self.groups, self.device, None, True, parted)

    def reader(self) -> Reader:
        """The model as the last step left it, to read with; all processes call this together."""
        self._current_weights()
        return shared_reader([stage.model for stage in self.stages], self.config.model, self.groups, self.dtype)

    def compile(self) -> None:
        """Let torch.compile fuse what lies between the matrix products and the sequence ops."""
        for stage in self.stages:
            stage.model.compile()

    def blocks(self) -> dict[str, list[Any]]:
        """What this process holds of all that training depends on, as views with their places in the whole tensors.

        Under `model`, `optimizer`, `fp8` and `states`: what a checkpoint is written from, and read into. All processes
        call this together.
        """
        groups, weights = self.groups, []
        for name, weight in self._current_weights():
            parameter, marked = self.optimizer.table[name], cast(Any, weight)
            cuts = parameter.active_cuts(mesh_sizes(groups.mesh))
            main = not marked.shared and writes(name, groups, cuts, copied_over_data=True)
            weights += weight_blocks(name, [full_rectangle(weight.data)], parameter, groups.mesh, main)
        states = [] if self.carrier is None else state_blocks(self.carrier, groups)
        everywhere = partial(writes, groups=groups, cuts=(), copied_over_data=True)
        fp8 = statistics_blocks(self.statistics, everywhere)
        return {"model": weights, "optimizer": self.optimizer.blocks(), "fp8": fp8, "states": states}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, whole, on the first process; all processes walk through this together."""
        shares = {name: partial(_on_cpu, weight) for name, weight in self._current_weights()}
        return gathered(shares, parameter_table(self.config.model), self.groups, self.dtype)

    def _current_weights(self) -> list[tuple[str, nn.Parameter]]:
        """What this process holds of the weights, as the last step left them; all processes call this together.

        With `parallel.overlap_param_gather` a step leaves other data-parallel ranks' shares as they were, until the
        next forward pass asks for them. Code that reads or writes weights outside of one must not be ahead of that.
        """
        if self.config.parallel.overlap_param_gather:
            for stage in self.wrapped:
                stage.start_param_sync(force_sync=True)
        return [pair for stage in self.stages for pair in stage.model.named_parameters()]


def _on_cpu(weight: Tensor) -> Tensor:
    return weight.detach().cpu()
