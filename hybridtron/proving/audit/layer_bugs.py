"""The class `Bug`, and planted bugs in adapters, token mixing, parallel branches, multipliers and shared weights.

A planted bug replaces attributes of the package, to test whether the audit finds the resulting wrong gradients. The
dictionaries ADAPTER_BUGS, BESIDE_BUGS and SHARING_BUGS describe each bug's effect.

Letters in names of tensors: L tokens, B sequences, D channels in the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.nn import functional

from hybridtron.data.batch import SeqInfo
from hybridtron.engine.stage import mark_for_megatron
from hybridtron.mixers.mamba2 import Mamba2
from hybridtron.model.lm import LanguageModel, ModelOut
from hybridtron.model.stack import ParallelBranch, Residual, ResidualOut, Stack, StackOut, States, SubLayerInputs
from hybridtron.ops.dropout import channel_numbers, token_numbers
from hybridtron.ops.swiglu import SwiGLUInputs, swiglu
from hybridtron.ops.token_mix import TokenMixInputs, token_mix
from hybridtron.parallel.adapters import adapter_of
from hybridtron.parallel.dora import row_lengths
from hybridtron.parallel.linear import RowParallel, TensorGroup
from hybridtron.parallel.mesh import RankGroup

Replaced = dict[str, Any]  # dotted path of an attribute -> its replacement


@dataclass(frozen=True)
class Bug:
    """A planted bug: its effect, the replaced attributes, and an audit case whose gradients the bug changes.

    The case is given by the names of its architecture and its layout (`cases.py`).
    """

    effect: str
    replaced: Replaced
    architecture: str
    layout: str


def marked(substring: str, mark: str, value: bool | float) -> Replaced:
    """Return a replacement that overrides one mark on some weights.

    Marks are attributes that megatron-core and the engine read from a weight. After a stage has set its marks, the
    replacement sets `mark` to `value` on all weights whose name contains `substring`. If the mark `partial_over_tensor`
    is False, the weight's gradient is not summed over tensor-parallel ranks.
    """

    def set_mark(model: LanguageModel, copied: Mapping[str, bool]) -> None:
        mark_for_megatron(model, copied)
        for name, weight in model.named_parameters():
            if substring in name:
                setattr(weight, mark, value)

    return {"hybridtron.engine.stage.mark_for_megatron": set_mark}


def _inside_shares(inputs: TokenMixInputs) -> tuple[Tensor, ...]:
    """Mix tokens as if a document began in the middle of the sequence: the token there then has no predecessor.

    With two sequence-parallel ranks, the middle is the boundary between the ranks' tokens.
    """
    length, rows, _ = inputs.x_LBD.shape
    halves_BL = (torch.arange(length, device=inputs.x_LBD.device) >= length // 2).int().expand(rows, -1)
    documents_BL = halves_BL if inputs.documents_BL is None else 2 * inputs.documents_BL + halves_BL
    return token_mix(inputs._replace(documents_BL=documents_BL))


SHIFT_BORDER: Replaced = {"hybridtron.mixers.rwkv6.token_mix": _inside_shares}
CHANNEL_SHIFT_BORDER: Replaced = {"hybridtron.mixers.rwkv6_channel_mix.token_mix": _inside_shares}
ADAPTERS = "hybridtron.parallel.adapters"


def _added_after_the_sum(self: RowParallel, x: Tensor) -> Tensor:
    summed = reduce_from_tensor_model_parallel_region(functional.linear(x, self.weight), group=self.tp_group)
    adapter = adapter_of(self)
    if adapter is None:
        return summed
    return summed + adapter.added(x)


ADAPTER_GRADIENT = marked("q.adapter.A", "partial_over_tensor", False)
ADAPTER_AFTER_SUM: Replaced = {"hybridtron.parallel.linear.RowParallel.forward": _added_after_the_sum}
DROPOUT_OF_RANK: Replaced = {
    f"{ADAPTERS}.token_numbers": lambda seed, *rest: token_numbers(seed + torch.distributed.get_rank(), *rest)
}
DROPOUT_OF_OWN_CHANNELS: Replaced = {
    f"{ADAPTERS}.channel_numbers": lambda seed, first, *rest: channel_numbers(seed, 0, *rest)
}
DROPOUT_OF_SHARE: Replaced = {
    f"{ADAPTERS}.token_numbers": lambda seed, positions_BL, first: token_numbers(seed, positions_BL, 0)
}
LENGTHS_OF_RANK: Replaced = {
    f"{ADAPTERS}.row_lengths": lambda W, A, B, scale, _: row_lengths(W, A, B, scale, RankGroup())
}
LENGTH_GRADIENT = marked("adapter.M", "partial_over_tensor", False)

ADAPTER_BUGS = {
    "adapter_gradient": Bug(
        "gradients of an adapter's A are not summed over ranks with different rows of B",
        ADAPTER_GRADIENT,
        "adapters",
        "tp2",
    ),
    "adapter_after_sum": Bug(
        "an adapter's output is added after the all-reduce, so it is not summed over ranks",
        ADAPTER_AFTER_SUM,
        "adapters",
        "tp2",
    ),
    "lengths_of_rank": Bug(
        "DoRA's row lengths cover only the rank's own input channels", LENGTHS_OF_RANK, "adapters-dora", "tp2"
    ),
    "length_gradient": Bug(
        "gradients of DoRA's learned row lengths are not summed over ranks", LENGTH_GRADIENT, "adapters-dora", "tp2-sp"
    ),
    "dropout_of_rank": Bug("each rank draws a different dropout mask", DROPOUT_OF_RANK, "adapters-dropout", "tp2"),
    "dropout_of_own_channels": Bug(
        "every rank uses the dropout mask of the first rank's channels",
        DROPOUT_OF_OWN_CHANNELS,
        "adapters-dropout",
        "tp2-sp",
    ),
    "dropout_of_share": Bug(
        "every sequence shard uses the dropout mask of the first shard's tokens",
        DROPOUT_OF_SHARE,
        "adapters-dropout",
        "cp2",
    ),
}


_residual = Residual.forward
_beside = ParallelBranch.forward
_stack = Stack.forward
_multiplied = Mamba2._multiplied


def _showing(shown: Callable[[ResidualOut], Tensor]) -> Replaced:
    """Return a replacement with which a sub-layer passes `shown(out)` as the normed input to its parallel branches."""

    def forward(self: Residual, inputs: SubLayerInputs) -> ResidualOut:
        out = _residual(self, inputs)
        if out.normed_LBD is None:
            return out
        return out._replace(normed_LBD=shown(out))

    return {"hybridtron.model.stack.Residual.forward": forward}


def _normed(out: ResidualOut) -> Tensor:
    assert out.normed_LBD is not None
    return out.normed_LBD


def _twice_under_sequence_parallelism(self: ParallelBranch, inputs: SubLayerInputs) -> ResidualOut:
    out = _beside(self, inputs)
    tensor = cast(TensorGroup, self.mixer.tensor)
    times = 2 if tensor.sequence else 1
    return out._replace(stream=out.stream._replace(pending_LBD=times * out.stream.latest_LBD))


def _settled_before_the_last(self: Stack, *inputs: Any) -> StackOut:
    """Return a stage's output. If the last sub-layer is a parallel branch, its output is left out."""
    out = _stack(self, *inputs)
    last = list(self.values())[-1]
    if isinstance(last, ParallelBranch):
        return out._replace(x_LBD=out.x_LBD - cast(Tensor, last.added_LBD))
    return out


def _noting(self: ParallelBranch, inputs: SubLayerInputs) -> ResidualOut:
    out = _beside(self, inputs)
    self.added_LBD = out.stream.latest_LBD
    return out


def _without_one_part(self: Mamba2, *parts: Tensor) -> tuple[Tensor, ...]:
    return (*_multiplied(self, *parts)[:2], *parts[2:3], *_multiplied(self, *parts)[3:])


UN_NORMED = _showing(lambda out: out.stream.x_LBD)
NORM_GRADIENT_OF_FIRST = _showing(lambda out: _normed(out).detach())
TWICE: Replaced = {"hybridtron.model.stack.ParallelBranch.forward": _twice_under_sequence_parallelism}
LOST_AT_BORDER: Replaced = {
    "hybridtron.model.stack.ParallelBranch.forward": _noting,
    "hybridtron.model.stack.Stack.forward": _settled_before_the_last,
}
MULTIPLIER_OF_ONE_PART: Replaced = {"hybridtron.mixers.mamba2.Mamba2._multiplied": _without_one_part}
GATE_MULTIPLIER: Replaced = {
    "hybridtron.mixers.swiglu.swiglu": lambda inputs: swiglu(SwiGLUInputs(inputs.gate_up)),
}
BESIDE_BUGS = {
    "beside_un_normed": Bug(
        "a parallel branch reads the residual stream without the norm", UN_NORMED, "falcon-h1", "tp2"
    ),
    "beside_norm_gradient": Bug(
        "a parallel branch gives no gradient to the norm before it", NORM_GRADIENT_OF_FIRST, "falcon-h1", "tp2-sp"
    ),
    "beside_twice": Bug(
        "with sequence parallelism, the output of a parallel branch is added twice", TWICE, "falcon-h1", "tp2-sp"
    ),
    "beside_lost_at_border": Bug(
        "the output of a parallel branch is lost at the end of a stage", LOST_AT_BORDER, "falcon-h1", "pp4"
    ),
    "multiplier_of_one_part": Bug(
        "Mamba-2's step size is not multiplied by its multiplier", MULTIPLIER_OF_ONE_PART, "falcon-h1", "tp2"
    ),
    "gate_multiplier": Bug(
        "the gate of an MLP is not multiplied by its multiplier", GATE_MULTIPLIER, "falcon-h1", "cp2"
    ),
}


SHARED_GRADIENT: Replaced = {
    "hybridtron.engine.stage.SharedGradients.sum_over_stages": lambda *_: None,
}
_forward = LanguageModel.forward
Received = tuple[Tensor, Tensor]
"""Residual stream and embedding, as a stage receives them from the previous stage."""


def taken_as(changed: Callable[[Tensor, Tensor], Received]) -> Replaced:
    """Return a replacement with which a stage uses `changed(stream, embedding)` instead of the tensors it receives.

    A stage receives the residual stream and the embedding as one tensor, concatenated along the first dimension.
    """

    def forward(
        model: LanguageModel,
        tokens_BL: Tensor,
        states: States | None,
        seq: SeqInfo,
        x_LBD: Tensor | None = None,
        logits: bool = True,
    ) -> ModelOut:
        if x_LBD is not None:
            x_LBD = torch.cat(changed(*x_LBD.chunk(2)))
        return _forward(model, tokens_BL, states, seq, x_LBD, logits)

    return {"hybridtron.model.lm.LanguageModel.forward": forward}


LOST_EMBEDDING = taken_as(lambda stream_LBD, embedded_LBD: (stream_LBD, embedded_LBD.detach()))
STREAM_TWICE = taken_as(lambda stream_LBD, _: (stream_LBD, stream_LBD))
COPIES_COUNT: Replaced = marked("shared.", "shared", False)
PAIR_GRADIENT: Replaced = marked("_A.weight", "partial_over_tensor", False)

SHARING_BUGS = {
    "shared_gradient": Bug("gradients of shared weights are not summed over stages", SHARED_GRADIENT, "zamba2", "pp2"),
    "lost_embedding": Bug("the embedding's gradient ends at a stage boundary", LOST_EMBEDDING, "zamba2", "pp2"),
    "stream_twice": Bug("a stage uses the residual stream as the embedding", STREAM_TWICE, "zamba2", "pp2"),
    "copies_count": Bug("the gradient norm counts a shared weight on every stage", COPIES_COUNT, "zamba2", "pp2"),
    "pair_gradient": Bug(
        "gradients of the shared block's low-rank A are not summed over ranks", PAIR_GRADIENT, "zamba2", "tp2"
    ),
}
