"""The router's choice, and rows to and from experts, by our own Triton kernels (`kernels_choice`, `kernels`).

The kernels have run in Triton's interpreter only.
"""

from __future__ import annotations

import torch

from hybridtron.ops.dispatch import left_to_torch_compile
from hybridtron.ops.experts.permutation import FromExpertsInputs, ToExpertsInputs
from hybridtron.ops.experts.reference import ChoiceInputs
from hybridtron.ops.kernel_launch import own_kernels

MOST_CHANNELS = 2**14  # a program has all channels of a token


def _reason(channels: int) -> str | None:
    if channels > MOST_CHANNELS:
        return f"the kernels take at most {MOST_CHANNELS} channels"
    return left_to_torch_compile()


def _choice_unsupported(inputs: ChoiceInputs) -> str | None:
    if inputs.scores_TE.dtype != torch.float32:
        return "the kernel takes scores in fp32"
    return left_to_torch_compile()


def _from_unsupported(inputs: FromExpertsInputs) -> str | None:
    if inputs.weights_TK.dtype != torch.float32:
        return "the kernels take weights in fp32"
    return _reason(inputs.rows_ND.shape[1])


def _to_unsupported(inputs: ToExpertsInputs) -> str | None:
    return _reason(inputs.x_TD.shape[1])


CHOICE = own_kernels("hybridtron.ops.experts.kernels_choice:expert_choice", _choice_unsupported)
TO = own_kernels("hybridtron.ops.experts.kernels:to_experts", _to_unsupported)
FROM = own_kernels("hybridtron.ops.experts.kernels:from_experts", _from_unsupported)
