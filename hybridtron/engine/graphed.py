"""Both passes of a micro-batch as a CUDA graph: a recorded list of kernels, which the GPU runs without the host.

The host launches a step's kernels one by one. Where kernels are short, the GPU waits for the host. A graph is launched
as a whole (`run.cuda_graph`). It runs the same kernels with the same scalar arguments and the same addresses each time.
So everything that differs between micro-batches is copied to fixed memory before a launch: tokens, labels, mask,
positions, documents, and the numbers from which dropout is drawn. Document boundaries are padded to a power of two;
there is a graph for each power. Gradients, the loss and the number of loss tokens are added up in fixed memory.

`hybridtron rehearse --capture` shows without a GPU whether the passes can be captured. No GPU has captured them so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridtron.data.batch import Batch, DeviceNumbers
from hybridtron.device import GraphMemory, captured, on_graph_stream
from hybridtron.engine.schedule import StepLoss, run_both_passes
from hybridtron.ops.attention.flex import forget_masks
from hybridtron.parallel.groups import Groups
from hybridtron.problems import ConfigError, Problem, first_line

WARM_UP = 3  # micro-batches that are launched one kernel at a time before the capture: kernels are compiled meanwhile
FEWEST_BOUNDARIES = 64


class StepSums:
    """Sums over a step's micro-batches, in fixed memory.

    loss: the cross entropy and the number of loss tokens
    tokens: the number of loss tokens, as Megatron counts them
    """

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros(1, 2, dtype=torch.float64, device=device)
        self.tokens = torch.zeros((), dtype=torch.int32, device=device)

    def clear(self) -> None:
        """Set the sums to zero."""
        self.loss.zero_()
        self.tokens.zero_()


class StaticPasses:
    """Both passes of a micro-batch in fixed memory. A call runs them, and adds to the gradients and the step's sums.

    like: a micro-batch; all micro-batches must have its sizes
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        like: Batch,
        sums: StepSums,
        z_loss: float,
        groups: Groups,
        device: torch.device,
    ) -> None:
        self.batch = like.moved(partial(_fixed_memory, device=device))
        self.numbers = DeviceNumbers()
        self.sums = sums
        self._stages = stages
        self._run: Callable[[Batch], Tensor] = partial(
            run_both_passes, stages, z_loss=z_loss, groups=groups, device=device
        )

    def fill(self, batch: Batch) -> None:
        """Copy a micro-batch to the fixed memory."""
        for fixed, value in zip(_tensors(self.batch), _tensors(batch), strict=True):
            fixed.copy_(value, non_blocking=True)
        self.batch = self.batch.keyed(batch.seq.key or 0, batch.seq.carried)
        self.numbers.refill(batch.seq.key or 0)

    def __call__(self) -> None:
        # New tensor objects over the same memory: caches by tensor object would return an earlier batch's values.
        fresh = self.batch.moved(lambda tensor: tensor.view_as(tensor))
        fresh = replace(fresh, seq=replace(fresh.seq, numbers=self.numbers))
        config: Any = self._stages[0].config
        finalize = config.finalize_model_grads_func
        config.finalize_model_grads_func = self._count_tokens  # gradients are finalized once, after all micro-batches
        try:
            self.sums.loss[0] += self._run(fresh)
        finally:
            config.finalize_model_grads_func = finalize

    def _count_tokens(
        self, stages: Any, tokens: Tensor, pg_collection: Any = None, force_all_reduce: bool = False
    ) -> None:
        """Count loss tokens. During the passes, this function replaces Megatron's, which finalizes gradients."""
        self.sums.tokens += tokens


class GraphedPasses:
    """Runs micro-batches' passes: the host launches the kernels of the first few, and CUDA graphs run the others."""

    def __init__(self, stages: Sequence[nn.Module], z_loss: float, groups: Groups, device: torch.device) -> None:
        self.sums = StepSums(device)
        self.graphs: dict[tuple[Any, ...], MicroBatchGraph] = {}
        self._stages = stages
        self._groups = groups
        self._memory = GraphMemory()
        self._new_passes = partial(StaticPasses, stages, sums=self.sums, z_loss=z_loss, groups=groups, device=device)

    def run(self, batches: Sequence[Batch]) -> StepLoss:
        """Run both passes of a step's micro-batches; accumulate gradients and return the loss."""
        self.sums.clear()
        for batch in map(with_padded_boundaries, batches):
            sizes = tuple(tensor.shape for tensor in _tensors(batch))
            if sizes not in self.graphs:
                self.graphs[sizes] = MicroBatchGraph(self._new_passes(batch), self._memory)
            self.graphs[sizes].run(batch)
        config: Any = self._stages[0].config
        config.finalize_model_grads_func(list(self._stages), self.sums.tokens)
        summed = self.sums.loss[0].clone()
        dist.all_reduce(summed, group=self._groups.dense.copies.group)
        return StepLoss(summed[0], summed[1])


class MicroBatchGraph:
    """The passes of micro-batches with equal sizes: launched by the host at first, then captured and replayed."""

    def __init__(self, passes: StaticPasses, memory: GraphMemory) -> None:
        self.passes = passes
        self.memory = memory
        self.launched = 0  # number of micro-batches whose kernels the host has launched
        self.replay: Callable[[], None] | None = None

    def run(self, batch: Batch) -> None:
        """Run both passes of a micro-batch."""
        self.passes.fill(batch)
        if self.launched < WARM_UP:
            with on_graph_stream():
                self.passes()
            self.launched += 1
            return
        if self.replay is None:
            self.replay = _captured(self.passes, self.memory)
        self.replay()


def _captured(passes: StaticPasses, memory: GraphMemory) -> Callable[[], None]:
    """Capture the passes. Raises ConfigError with torch's reason if torch can't capture them."""
    forget_masks()
    try:
        return captured(passes, memory)
    except RuntimeError as error:
        message = f"is true, but torch can't capture the passes ({first_line(error)}): use false"
        raise ConfigError([Problem("run.cuda_graph", "unavailable", message)]) from error
    finally:
        forget_masks()


def with_padded_boundaries(batch: Batch) -> Batch:
    """Return the micro-batch with document boundaries that are padded to a power of two, and without spans."""
    seq = batch.seq
    if seq.documents_BL is not None and seq.boundaries_E is None:
        seq = seq.with_boundaries()
    if seq.boundaries_E is None:
        count = 0
    else:
        count = max(FEWEST_BOUNDARIES, 1 << (len(seq.boundaries_E) - 1).bit_length())
    return replace(batch, seq=seq.padded(count))


def _fixed_memory(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _tensors(batch: Batch) -> list[Tensor]:
    """Return the tensors of a micro-batch that continues no row."""
    seq = batch.seq
    values = (batch.tokens_BL, batch.labels_BL, batch.mask_BL, seq.positions_BL, seq.documents_BL, seq.boundaries_E)
    return [value for value in values if value is not None]
