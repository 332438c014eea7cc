"""The training engine: the shards of a model on this rank, with the pipeline schedule and the optimizer.

A training step has two calls. `Engine.forward_backward` accumulates gradients over micro-batches, and `Engine.step`
updates the weights, or refuses the update if a loss or a gradient is faulty. The engine also computes losses for
evaluation, and gives checkpoints access to the training state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from hybridtron.config.pipeline_layout import with_overlap
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import StateMode
from hybridtron.config.update_rule import same_update_rule
from hybridtron.data.batch import Batch, step_key
from hybridtron.data.order.phase_order import phase_seed
from hybridtron.device import DTYPES, Stopwatch, compute_device, on_graph_stream
from hybridtron.engine.copied_weights import CopiedWeight, copied_weight, send_copies
from hybridtron.engine.corruption import CorruptionChecks
from hybridtron.engine.graphed import GraphedPasses
from hybridtron.engine.optimizer import Optimizer
from hybridtron.engine.routers import ChoiceValues, RouterMetrics, auxiliary_names, move_corrections, routers_of
from hybridtron.engine.schedule import BatchParts, StepLoss, run_schedule, run_unreduced
from hybridtron.engine.stage import build_stages, data_parallel, stop_before_finalizing
from hybridtron.engine.states import StateCarrier, state_blocks
from hybridtron.engine.step_guard import StepGuard
from hybridtron.inference.parallel_reader import training_reader
from hybridtron.inference.reader import Reader
from hybridtron.model.init import initialise
from hybridtron.parallel.blocks import full_rectangle, weight_blocks, writes
from hybridtron.parallel.fp8 import CachedWeight
from hybridtron.parallel.fp8_statistics import statistics_blocks, statistics_of
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.same_batch import same_batch
from hybridtron.parallel.sharding import cut, gather_full_tensors
from hybridtron.problems import ConfigError, Problem


class Engine:
    """Training engine for a model, on a single process or on one of many ranks.

    phase: the phase for which the engine is built; it can also train other phases that `supports` accepts
    load_weight: returns a checkpoint's full weight by name, unrounded if it has an fp32 master. Of the ranks that hold
        the same shard, one calls it for the weight; for a weight in bf16, ranks with elements of its master call it
        again. None to initialise the weights from the seed
    """

    def __init__(
        self,
        phase: ResolvedPhase,
        groups: Groups,
        load_weight: Callable[[str], Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.parallel = with_overlap(phase.config.parallel, groups.dense.copies.size)
        self.phase = phase.with_layout(self.parallel)
        self.arch = arch = phase.arch
        self.groups = groups
        self.config = config = self.phase.config
        self.trained = phase.trained
        self.device = compute_device()
        self.dtype = dtype or DTYPES[config.precision.name]
        self.stages = build_stages(arch, config, groups, dtype=self.dtype, device=self.device)
        for stage in self.stages:
            if load_weight is None:
                initialise(stage.model, config.run.seed)
            else:
                self._load_weights(list(stage.model.named_parameters()), load_weight)
            # This precedes `data_parallel`, in which Megatron allocates buffers for weights that require a gradient.
            for name, weight in stage.model.named_parameters():
                weight.requires_grad_(phase.learns(name))
        with on_graph_stream(config.run.cuda_graph):
            self.wrapped = data_parallel(self.stages, config, groups, self.dtype)
        self.passes_time = Stopwatch()  # of a step's forward and backward passes, until gradients are reduced
        stop_before_finalizing(self.stages, self.passes_time)
        self.optimizer = Optimizer(self.wrapped, config, groups, table=arch.table, dtype=self.dtype)
        if load_weight is not None:
            load_shard = partial(self._cut_weight, load_weight=load_weight)
            groups.control.together(partial(self.optimizer.load_masters, load_shard))
        modules = [(name, module) for stage in self.stages for name, module in stage.model.named_modules()]
        self.statistics = statistics_of(modules, self.stages[0].model.slice.tensor.backend.fp8, self.device)
        self.fp8_cached = [module for _, module in modules if isinstance(module, CachedWeight)]
        self.guard = StepGuard(config.optim.spike)
        weights = {name: weight for stage in self.stages for name, weight in stage.model.named_parameters()}
        self.checks = CorruptionChecks(self.optimizer, weights, groups)
        self.pending_copies: Sequence[Future[Any]] = ()  # a checkpoint's unfinished copies of weights and moments
        self._loss = StepLoss(torch.zeros(()), torch.zeros(()))  # sums of the current step
        # values of the last step, whether it was accepted or refused
        self.number_sums: list[float] = []  # sums of all ranks' `numbers` in `step`
        self.mean_loss = 0.0  # cross entropy per loss token; nan if there was no loss token
        self.learned = 0  # number of loss tokens
        # the mixers' auxiliary losses per loss token, by name
        self.auxiliary = dict.fromkeys(auxiliary_names(self.phase), 0.0)
        self.routers = routers_of(arch)
        self.router_metrics: dict[str, RouterMetrics] = {}  # by the layer's name; empty without experts
        self.carrier: StateCarrier | None = None
        self.graphed: GraphedPasses | None = None  # set by `use_graphs`
        self._seed, self._lanes = phase_seed(config.run.seed, 0), range(0)

    def _load_weights(self, weights: Sequence[tuple[str, nn.Parameter]], load_weight: Callable[[str], Tensor]) -> None:
        """Set weights. Of the ranks that hold the same shard, one loads it and sends it to the others, as at a restore.

        All processes call this together. If a rank can't load a weight, all ranks raise an error.
        """
        copied = self._copied(weights)

        def load() -> None:
            for (name, weight), shared in zip(weights, copied, strict=True):
                if shared.is_reader:
                    weight.data.copy_(self._cut_weight(name, load_weight))

        self.groups.control.together(load)
        send_copies(copied)  # only after all ranks have loaded their parts, so that no rank waits for one that failed

    def _copied(self, weights: Iterable[tuple[str, nn.Parameter]]) -> list[CopiedWeight]:
        """Return weights with the ranks that hold the same shards."""
        table = self.arch.table
        return [
            copied_weight(name, table[name].stored(name), weight.data, self.groups.meshes[table[name].family].copies)
            for name, weight in weights
        ]

    def _cut_weight(self, name: str, load_weight: Callable[[str], Tensor]) -> Tensor:
        """Return this rank's shard of a weight, from the full weight that `load_weight` returns."""
        parameter = self.arch.table[name]
        return cut(load_weight(name), parameter, self.groups.meshes[parameter.family])

    def supports(self, phase: ResolvedPhase) -> bool:
        """Return True if this engine can train a phase without being rebuilt."""
        same = phase.model == self.config.model and phase.precision == self.config.precision
        return same and phase.trained == self.trained and same_update_rule(phase.optim, self.config.optim)

    def start_phase(self, phase: ResolvedPhase, lanes: range) -> None:
        """Apply the phase's settings, and prepare the initial states for its rows.

        lanes: the row indices in the global batch that this process reads
        """
        self.phase = phase.with_layout(self.parallel)
        self.config = self.phase.config
        self.optimizer.settings = self.config.optim
        self._seed = phase_seed(self.config.run.seed, phase.index)
        self._lanes = lanes
        self.carrier = None
        if phase.states.mode is not StateMode.zero:
            chunks = [stage.model.slice.layers for stage in self.stages]
            self.carrier = StateCarrier(self.phase, chunks, lanes, self.groups, self.device)
        if self.graphed is not None:
            self.use_graphs()  # the z-loss may differ, and memory for the earlier phase's sizes is freed

    def forward_backward(self, batches: Sequence[Batch], step: int = 0) -> StepLoss:
        """Run the forward and backward passes of a step's micro-batches; accumulate gradients and return the loss.

        batches: this data-parallel rank's micro-batches
        step: the step's number in the phase, from 0, on which random choices depend
        """
        if self.carrier is not None:
            self.carrier.begin(step)
        self.passes_time.start()
        # discard the weights that were rounded to FP8 in the previous step, because the update has changed the weights
        for projection in self.fp8_cached:
            projection.forget()
        z_loss = self.config.optim.z_loss
        batches = self._with_random_keys(batches, step)
        if self.graphed is not None:
            self._loss = self.graphed.run(batches)
            return self._loss
        with self.statistics.step():
            loss = run_schedule(
                self.wrapped,
                batches,
                z_loss,
                self.groups,
                self.device,
                self.carrier,
                auxiliary=tuple(self.auxiliary),
                routers=self.routers,
            )
        self._loss = loss
        return loss

    def _with_random_keys(self, batches: Sequence[Batch], step: int) -> list[Batch]:
        """Return the micro-batches with their random keys.

        A lane is one row index in the global batch; in a step, it reads one or several chunks of tokens. A key depends
        on the seed, the phase, the step, the chunk and the micro-batch's first lane, so it is equal for every number of
        data-parallel ranks. The micro-batches with the first chunks of all lanes precede those with the second chunks,
        and so on.
        """
        rows = len(batches[0].tokens_BL)
        rows_of_rank = rows * len(batches)
        # Without `start_phase`, every row is a lane. While the batch grows, a step reads fewer lanes than `_lanes`.
        if self._lanes:
            lanes = min(len(self._lanes), rows_of_rank)
        else:
            lanes = rows_of_rank
        first = self.groups.data.rank * lanes
        positions = (divmod(number * rows, lanes) for number in range(len(batches)))
        keys = [step_key(self._seed, step, turn, first + row) for turn, row in positions]
        carried = self.carrier is not None
        return [batch.keyed(key, carried) for batch, key in zip(batches, keys, strict=True)]

    def compare_gradients(self, batches: Sequence[Batch], source: int, step: int) -> None:
        """Compute one micro-batch on every data-parallel rank, and compare the bits of its gradients.

        Call this before `forward_backward`, while all gradients are zero; at the end they are zero again. Neither
        carried states nor random choices of the step depend on this call.

        batches: this rank's micro-batches in the step
        source: index of the rank whose first micro-batch all ranks compute
        """
        own_batch = batches[0].chunks(self.phase.chunks_together)[0]
        batch = same_batch(own_batch, source, self.groups.data).keyed(step_key(self._seed, step, 0, 0), carried=False)
        z_loss = self.config.optim.z_loss
        run_unreduced(self.wrapped, batch, z_loss, self.groups, self.device, tuple(self.auxiliary), self.routers)
        self.checks.compare_gradients()
        self.optimizer.zero_grad()

    def invalidate_states(self) -> None:
        """Discard carried states that the next rows do not continue, after the run has skipped data."""
        if self.carrier is not None:
            self.carrier.invalidate()

    def step(self, lr: float, weight_decay: float | None = None, numbers: Sequence[float] = ()) -> tuple[float, bool]:
        """Update the weights, and adopt the step's final states and its FP8 statistics (amax history).

        The corrections of routers move by the step's loads, if the step has loss tokens. A refused step changes none
        of these values.

        weight_decay: None for the phase's value
        numbers: equally many on each rank; their sums over all ranks are in `number_sums` afterwards, without another
            wait and, with the distributed optimizer, without another reduction

        Returns the gradient norm before clipping, and True if the step was accepted.
        """
        added = self._loss.auxiliary
        top_k = {index: spec.top_k for index, spec in self.routers.items()}
        counted = ChoiceValues(self._loss.choices, top_k, self.groups.tensor.expert_ranks.expert.size)
        flags = self.checks.flags()
        squared_norm, number_sums = self.optimizer.squared_norm(numbers, flags)
        scalars = (squared_norm, self._loss.total, self._loss.tokens, *added.values())
        values = [value.reshape(1).double() for value in scalars]
        values += counted.flat
        ridden = len(numbers) + len(flags)
        if ridden:
            values.append(number_sums.double())
        # the only point in a step at which the host waits for the device
        squares, total, tokens, *rest = torch.cat(values).tolist()
        all_sums = rest[len(rest) - ridden :]
        self.number_sums = all_sums[: len(numbers)]
        self.checks.take_counts(all_sums[len(numbers) :])
        rest = rest[: len(rest) - ridden]
        sums = rest[: len(added)]
        self.router_metrics = counted.metrics(rest[len(added) :])
        grad_norm = squares**0.5
        self.learned = int(tokens)
        self.mean_loss = total / tokens if tokens else math.nan
        self.auxiliary = {
            name: total_loss / tokens if tokens else math.nan for name, total_loss in zip(added, sums, strict=True)
        }
        acceptable = self.guard.accepts(grad_norm, total)
        wait(self.pending_copies)  # the update changes weights and moments, so a checkpoint must have copied them
        accepted = self.optimizer.apply_update(lr, grad_norm, acceptable, weight_decay)
        self.checks.after_update(accepted)
        self.statistics.settle(accepted)
        if accepted and self.learned:  # the tokens of a step that learns nothing do not count
            move_corrections([stage.model for stage in self.stages], self._loss.choices)
        if accepted and self.carrier is not None:
            self.carrier.commit()
        return grad_norm, accepted

    @property
    def restarted_lanes(self) -> int | None:
        """Number of times in this phase that a lane's state was reset to zero because it was not finite.

        None if no states are carried. Reading the number synchronizes with the device.
        """
        if self.carrier is not None and self.carrier.carries_states:
            return int(self.carrier.restarts)
        return None

    @torch.no_grad()
    def loss(self, batches: Sequence[Batch]) -> StepLoss:
        """Return the loss without computing gradients, and without the z-loss. All rows start from zero states."""
        with self.statistics.evaluation():
            return run_schedule(self.wrapped, batches, 0.0, self.groups, self.device, forward_only=True)

    @torch.no_grad()
    def losses(self, batches: Sequence[tuple[int, Batch]], parts: int) -> StepLoss:
        """Return the losses for several parts of the data, without computing gradients. All ranks get the result.

        batches: pairs (the part's index, batch)
        parts: how many parts there are
        """
        batch_parts = BatchParts([part for part, _ in batches], parts)
        alone = [batch for _, batch in batches]
        with self.statistics.evaluation():
            return run_schedule(self.wrapped, alone, 0.0, self.groups, self.device, None, True, batch_parts)

    def reader(self) -> Reader:
        """Return an inference reader with the current weights. All processes must call this method together."""
        self._current_weights()
        return training_reader([stage.model for stage in self.stages], self.groups, self.dtype)

    def use_graphs(self) -> None:
        """Run the passes of later steps from CUDA graphs. Raises ConfigError on a CPU."""
        if self.device.type == "cpu":
            message = "is true, but this process has no CUDA device: use false"
            raise ConfigError([Problem("run.cuda_graph", "unavailable", message)])
        self.graphed = GraphedPasses(self.wrapped, self.config.optim.z_loss, self.groups, self.device)

    def compile(self) -> None:
        """Compile the stages with torch.compile, which fuses elementwise operations."""
        for stage in self.stages:
            stage.model.compile()

    def blocks(self) -> dict[str, list[Any]]:
        """Return this rank's shards of the training state: views of tensors, with their offsets in the full tensors.

        The keys are `model`, `optimizer`, `fp8` and `states`. Checkpoints are written from these views, and are loaded
        into them. All processes must call this method together.
        """
        groups = self.groups
        weights = []
        for name, weight in self._current_weights():
            parameter = self.optimizer.table[name]
            marked = cast(Any, weight)
            mesh = groups.meshes[parameter.family]
            # of several stages with the same weight, only the first writes it
            main = not marked.shared and writes(name, mesh, parameter.active_cuts(mesh.sizes))
            weights += weight_blocks(name, [full_rectangle(weight.data)], parameter, mesh, main)
        if self.carrier is None:
            states = []
        else:
            states = state_blocks(self.carrier, groups)
        everywhere = partial(writes, mesh=groups.dense, cuts=())
        fp8 = statistics_blocks(self.statistics, everywhere)
        return {"model": weights, "optimizer": self.optimizer.blocks(), "fp8": fp8, "states": states}

    def copied_weights(self) -> list[CopiedWeight]:
        """Return this rank's weights with the ranks that hold the same shards. All processes call this together."""
        return self._copied(self._current_weights())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full weight) for every weight, on the first process. All processes must iterate together."""
        shards = {name: partial(_on_cpu, weight) for name, weight in self._current_weights()}
        return gather_full_tensors(shards, self.optimizer.table, self.groups, self.dtype)

    def _current_weights(self) -> list[tuple[str, nn.Parameter]]:
        """Return this rank's weights after the last step. All processes must call this method together.

        With `parallel.overlap_param_gather`, a step on one data-parallel rank updates only this rank's shards of the
        weights. The next forward pass gathers the other ranks' updated shards; this method gathers them now.
        """
        if self.config.parallel.overlap_param_gather:
            for stage in self.wrapped:
                stage.start_param_sync(force_sync=True)
        return [pair for stage in self.stages for pair in stage.model.named_parameters()]


def _on_cpu(weight: Tensor) -> Tensor:
    return weight.detach().cpu()
