"""Adds many small gradients to Megatron's gradient buffers with few kernel launches.

Megatron adds a weight's gradient to its buffer as soon as autograd has computed the gradient. On a GPU, this is one
kernel for every weight in every micro-batch, and most weights in a recurrent mixer are vectors, whose kernels take
longer to launch than to run. Here, small gradients are kept until the backward pass ends, and are then added together.
The sums' bits do not change.

With `parallel.overlap_grad_reduce`, Megatron starts to reduce a bucket of gradients during the backward pass. Kept
gradients are added before that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

# Number of elements. It is the chunk size of torch's multi-tensor kernels, so a smaller tensor is a single chunk.
SMALL = 2**16


class KeptGradients:
    """Gradients from the current backward pass that Megatron's buffers still lack, with their weights.

    Backward passes must not be nested: a pass that starts inside another would discard the gradients that the outer
    pass has kept. So activations are recomputed with `use_reentrant=False`.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[Any, Tensor]] = []
        self.backward_pass = -1

    def keep(self, weight: Any) -> None:
        """Keep the weight's gradient, and mark it as added, so that Megatron does not add it.

        Autograd calls this after it has computed the gradient, and before it calls Megatron's own hook.
        """
        current = torch._C._current_graph_task_id()
        if current != self.backward_pass:
            self.backward_pass = current
            # Gradients are left only if an earlier backward pass has raised an exception. Their weights are marked as
            # added until `taken` removes the marks, so `taken` is called before a mark is read below.
            self.taken()
            torch.autograd.Variable._execution_engine.queue_callback(self.add)
        if weight.grad_added_to_main_grad:
            return  # the operation that has computed the gradient has added it too
        self.pairs.append((weight, weight.grad))
        weight.grad_added_to_main_grad = True

    def add(self) -> None:
        """Add all kept gradients to the buffers."""
        by_dtypes = defaultdict[tuple[torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]](list)
        for weight, gradient in self.taken():
            by_dtypes[weight.main_grad.dtype, gradient.dtype].append((weight.main_grad, gradient))
        for pairs in by_dtypes.values():
            totals, gradients = zip(*pairs, strict=True)
            add_together(totals, gradients)

    def taken(self) -> list[tuple[Any, Tensor]]:
        """Return all kept weights and gradients, and keep none."""
        pairs = self.pairs
        self.pairs = []
        for weight, _ in pairs:
            weight.grad_added_to_main_grad = False  # for the next micro-batch
        return pairs


def add_together(totals: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> None:
    """Add each gradient to its total in place. All totals have one dtype, and all gradients have one dtype.

    On a GPU, `torch._foreach_add_` starts a kernel for every tensor if the dtypes differ, but `torch._foreach_copy_`
    does not do so. So the gradients are cast first.
    """
    if totals[0].is_cuda and totals[0].dtype != gradients[0].dtype:
        gradients = cast_together(gradients, totals[0].dtype)
    torch._foreach_add_(totals, gradients)


def cast_together(gradients: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Copy the gradients to this dtype; the copies share one allocation."""
    flat = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients), dtype=dtype)
    parts = flat.split([gradient.numel() for gradient in gradients])
    copies = tuple(part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True))
    torch._foreach_copy_(copies, gradients)
    return copies


def add_small_gradients_together(stage: DistributedDataParallel) -> None:
    """Make a stage add the gradients of its small weights together."""
    kept = KeptGradients()
    for weight in stage.param_to_bucket_group:
        if weight.numel() <= SMALL:
            weight.register_post_accumulate_grad_hook(kept.keep)
    if stage.ddp_config.overlap_grad_reduce:
        for group in (*stage.bucket_groups, *stage.expert_parallel_bucket_groups):
            group.start_grad_sync = partial(_after, kept.add, group.start_grad_sync)


def _after(add: Callable[[], None], start: Callable[..., None], force_all_reduce: bool = False) -> None:
    """Call `add`, then Megatron's `start`."""
    add()
    start(force_all_reduce=force_all_reduce)
