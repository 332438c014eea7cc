"""Routing, the order of choices, and rows to and from experts, by our own Triton kernels (`kernels*.py`).

The kernels have run in Triton's interpreter only.
"""

from __future__ import annotations

from typing import Any

import torch

from hybridtron.ops.dispatch import left_to_torch_compile
from hybridtron.ops.experts.permutation import ExpertOrderInputs, FromExpertsInputs, ToExpertsInputs
from hybridtron.ops.kernel_launch import own_kernels

MOST_CHANNELS = 2**14  # a program has all channels, or the scores of all experts, of a token
MOST_EXPERTS = 2**10  # a program counts the choices of all experts, or with a capacity of all pairs of row and expert


def _reason(channels: int) -> str | None:
    if channels > MOST_CHANNELS:
        return f"the kernels take at most {MOST_CHANNELS} channels"
    return left_to_torch_compile()


def _route_unsupported(inputs: Any) -> str | None:
    if inputs.logits_TE.shape[1] > MOST_CHANNELS:
        return f"the kernels take at most {MOST_CHANNELS} experts"
    return left_to_torch_compile()


def _order_unsupported(inputs: ExpertOrderInputs) -> str | None:
    if len(inputs.loads_E) > MOST_EXPERTS:
        return f"the kernels count for at most {MOST_EXPERTS} experts, or pairs of a row and an expert"
    return left_to_torch_compile()


def _from_unsupported(inputs: FromExpertsInputs) -> str | None:
    if inputs.weights_TK.dtype != torch.float32:
        return "the kernels take weights in fp32"
    return _reason(inputs.rows_ND.shape[1])


def _to_unsupported(inputs: ToExpertsInputs) -> str | None:
    return _reason(inputs.x_TD.shape[1])


ROUTE = own_kernels("hybridtron.ops.experts.kernels_route:route", _route_unsupported)
ORDER = own_kernels("hybridtron.ops.experts.kernels_order:expert_order", _order_unsupported)
TO = own_kernels("hybridtron.ops.experts.kernels:to_experts", _to_unsupported)
FROM = own_kernels("hybridtron.ops.experts.kernels:from_experts", _from_unsupported)
