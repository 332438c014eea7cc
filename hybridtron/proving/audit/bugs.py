"""Bugs to try the audit with: each is put into a module of the product while a worker runs, and must be found.

All are mistakes that train without a word: a sum left out or made twice, a cut in the wrong order, a wrong divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from hybridtron.architecture.base import Cut, Parameter
from hybridtron.data.batch import Batch
from hybridtron.engine import engine, schedule, stage
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.loss import Loss
from hybridtron.parallel import cut as cutting
from hybridtron.parallel.cut import Mesh
from hybridtron.parallel.linear import TensorGroup

Replaced = dict[str, Any]  # where an attribute stands -> what stands there instead


@dataclass(frozen=True)
class Bug:
    """What goes wrong, what is replaced for it, and where it shows: an architecture and a layout of the table."""

    effect: str
    replaced: Callable[[], Replaced]
    architecture: str
    layout: str


@contextmanager
def injected(name: str | None) -> Iterator[None]:
    """The product with this bug in it; without one, the product."""
    with ExitStack() as stack:
        for where, instead in ({} if name is None else BUGS[name].replaced()).items():
            stack.enter_context(patch(where, instead))
        yield


def _x_proj_backward() -> Replaced:
    return {"hybridtron.mixers.mamba.sum_gradients": lambda x, tensor: x}


def _group_norm() -> Replaced:
    return {"hybridtron.mixers.mamba2.sum_shares": lambda x, tensor: x * tensor.size}


def _group_norm_backward() -> Replaced:
    """A sum whose gradient stays on its rank."""
    return {"hybridtron.parallel.linear.sum_gradients": lambda x, tensor: x}


def _marked(change: Callable[[LanguageModel, str, Tensor], None]) -> Replaced:
    """Another mark on some weights, after all have theirs."""
    mark = stage.mark_for_megatron

    def marked(model: LanguageModel) -> None:
        mark(model)
        for name, weight in model.named_parameters():
            change(model, name, weight)

    return {"hybridtron.engine.stage.mark_for_megatron": marked}


def _kv_gradient() -> Replaced:
    return _marked(lambda _, name, weight: _unsum(weight) if "kv" in name else None)


def _bc_gradient() -> Replaced:
    return _marked(lambda _, name, weight: _unsum(weight) if ".bc_" in name else None)


def _norm_gradient() -> Replaced:
    return _marked(lambda _, name, weight: _unsum(weight) if name.endswith("norm.weight") else None)


def _unsum(weight: Any) -> None:
    weight.partial_over_tensor = False


def _double_norm_gradient() -> Replaced:
    def sum_again(_: LanguageModel, name: str, weight: Any) -> None:
        weight.partial_over_tensor |= name.endswith("norm.weight")

    return _marked(sum_again)


def _decay() -> Replaced:
    def undecide(_: LanguageModel, __: str, weight: Any) -> None:
        if hasattr(weight, "undecayed"):
            del weight.undecayed

    return _marked(undecide)


def _norm_counts_copies() -> Replaced:
    def claim(_: LanguageModel, __: str, weight: Any) -> None:
        weight.tensor_model_parallel = True

    return _marked(claim)


def _tied_gradient() -> Replaced:
    build = stage.build_stages

    def built(*arguments: Any) -> list[stage.Stage]:
        stages = build(*arguments)
        for chunk in stages:
            chunk.share_embeddings_and_output_weights = False
        return stages

    return {"hybridtron.engine.engine.build_stages": built}


def _micro_batch_scale() -> Replaced:
    run = engine.run_schedule

    def scaled(stages: Any, batches: Sequence[Batch], *rest: Any, forward_only: bool = False) -> schedule.StepLoss:
        loss = run(stages, batches, *rest, forward_only=forward_only)
        for chunk in stages:
            chunk.scale_gradients(1 / len(batches))
        return loss

    return {"hybridtron.engine.engine.run_schedule": scaled}


def _masked_tokens() -> Replaced:
    loss_of = schedule._loss_of

    def mean_of(
        x_LBD: Tensor, model: LanguageModel, batch: Batch, chunks: int, z_loss: float, tensor: TensorGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        total, tokens, report = loss_of(x_LBD, model, batch, chunks, z_loss, tensor)
        return total / tokens.clamp(min=1), torch.ones_like(tokens), report

    return {"hybridtron.engine.schedule._loss_of": mean_of}


def _swapped_virtual_chunks() -> Replaced:
    stages_of = stage.stages_of

    def swapped(config: Any) -> tuple[range, ...]:
        first, *inner, last = stages_of(config)
        return (first, *reversed(inner), last)

    return {"hybridtron.engine.stage.stages_of": swapped}


def _cut_otherwise(wrong: Callable[[Tensor, Parameter, Mesh], Tensor]) -> Replaced:
    """Another way to cut, wherever weights are filled."""
    return {"hybridtron.model.init.cut": wrong, "hybridtron.engine.engine.cut": wrong}


def _at_rank(mesh: Mesh, rank: int) -> Mesh:
    return {**mesh, "tensor": replace(mesh["tensor"], rank=rank)}


def _vocabulary_order() -> Replaced:
    def wrong(whole: Tensor, parameter: Parameter, mesh: Mesh) -> Tensor:
        is_vocabulary = len(whole) > 64 and parameter.cuts == (Cut(0),) and not parameter.parts
        other_rank = _at_rank(mesh, mesh["tensor"].size - 1 - mesh["tensor"].rank)
        return cutting.cut(whole, parameter, other_rank if is_vocabulary else mesh)

    return _cut_otherwise(wrong)


def _conv_cut() -> Replaced:
    def wrong(whole: Tensor, parameter: Parameter, mesh: Mesh) -> Tensor:
        is_convolution = whole.dim() == 2 and whole.shape[1] == 4 and not parameter.fp32
        return cutting.cut(whole, parameter, _at_rank(mesh, 0) if is_convolution else mesh)

    return _cut_otherwise(wrong)


def _fused_cut() -> Replaced:
    def wrong(whole: Tensor, parameter: Parameter, mesh: Mesh) -> Tensor:
        return cutting.cut(whole, replace(parameter, parts=()), mesh)

    return _cut_otherwise(wrong)


def _missing_reduction() -> Replaced:
    return {"hybridtron.parallel.linear.RowParallel.forward": lambda self, x: functional.linear(x, self.weight)}


def _missing_z_loss() -> Replaced:
    loss = schedule.linear_cross_entropy

    def without(x_LBD: Tensor, weight_VD: Tensor, labels: Tensor, mask: Tensor, _: float, tensor: TensorGroup) -> Loss:
        return loss(x_LBD, weight_VD, labels, mask, 0.0, tensor)

    return {"hybridtron.engine.schedule.linear_cross_entropy": without}


BUGS = {
    "x_proj_backward": Bug("gradients of dt, B and C are not summed over ranks", _x_proj_backward, "samba", "tp2"),
    "kv_gradient": Bug("replicated key/value heads keep their rank's part", _kv_gradient, "mamba-swa-mlp", "tp2"),
    "bc_gradient": Bug("replicated B and C keep their rank's part", _bc_gradient, "mamba2", "tp2"),
    "group_norm": Bug("the gated norm's mean is that of its rank's heads", _group_norm, "mamba2", "tp2-sp"),
    "group_norm_backward": Bug("its gradient stays on its rank", _group_norm_backward, "mamba2", "tp2"),
    "norm_gradient": Bug("norms keep the gradient of their rank's tokens", _norm_gradient, "mamba-mlp", "tp2-sp"),
    "double_norm_gradient": Bug("norms' whole gradients are summed", _double_norm_gradient, "mamba-mlp", "tp2"),
    "tied_gradient": Bug("first and last stage keep their own embedding's gradient", _tied_gradient, "samba", "pp2"),
    "micro_batch_scale": Bug("gradients are divided by micro-batches too", _micro_batch_scale, "llama", "dp2"),
    "masked_tokens": Bug("a mean over micro-batches, not over tokens", _masked_tokens, "llama", "dp2"),
    "swapped_virtual_chunks": Bug(
        "inner chunks are in the wrong order", _swapped_virtual_chunks, "mamba", "pp2-virtual2"
    ),
    "vocabulary_order": Bug("ranks hold each other's tokens", _vocabulary_order, "mamba", "tp2"),
    "conv_cut": Bug("every rank holds the first rank's convolution", _conv_cut, "mamba-swa-mlp", "tp2"),
    "fused_cut": Bug("fused projections are cut as one block", _fused_cut, "mamba-mlp", "tp2"),
    "missing_reduction": Bug("outputs of row-parallel layers are not summed", _missing_reduction, "llama", "tp2"),
    "missing_z_loss": Bug("the z-loss is left out", _missing_z_loss, "llama", "pp2"),
    "decay": Bug("A_log is decayed, as megatron-core does by shape", _decay, "mamba", "pp2"),
    "norm_counts_copies": Bug(
        "what both ranks hold counts twice in the gradient norm", _norm_counts_copies, "samba", "tp2"
    ),
}
