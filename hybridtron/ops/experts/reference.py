"""A mixture of experts: a router sends each token to K of E small MLPs, and adds up their weighted outputs.

    s = softmax(z) or sigmoid(z),   c = s + correction     z: the router's logits, in at least fp32
    groups: only experts in the `group_limit` groups with the largest sums of their two best c stay
    i_1..i_K = the K experts with the largest c; of equal c, the first
    w_k = s[i_k];   normalise: w_k / (w_1 + ... + w_K);   times scale
    y = w_1 mlp[i_1](x) + ... + w_K mlp[i_K](x)

An expert is a gated MLP without biases (`swiglu`: the first H of 2H rows of `gate_up` are the gate), or an MLP with
relu(up x)^2 (`squared_relu`: H rows). No token is dropped. An output is weighted before any other sum, so that under
tensor parallelism, where H is divided, y is a partial sum like that of a dense MLP.

Legend: T tokens, E experts, G groups of experts, K experts per token, D width, H hidden channels of an expert,
F rows of `gate_up`: 2H or H.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32
from hybridtron.ops.squared_relu import SquaredReLUInputs, squared_relu
from hybridtron.ops.swiglu import SwiGLUInputs, swiglu

ExpertActivation = Literal["swiglu", "squared_relu"]
TINY = 1e-20  # added to the sum that weights are divided by: a token whose scores are all 0 gets weights 0


@dataclass(frozen=True)
class Router:
    """The router's options.

    top_k         experts per token
    scores        how logits become scores
    normalise     divide a token's weights by their sum
    scale         factor of all weights
    groups        number of groups of consecutive experts; 1: no groups
    group_limit   number of groups that a token's experts may come from
    """

    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    group_limit: int = 1


class Routing(NamedTuple):
    """The router's result.

    experts_TK   each token's experts, in int64, the expert with the largest corrected score first
    weights_TK   their weights, in fp32 (float64 for float64 logits), differentiable in the logits
    loads_E      number of tokens that each expert gets, in int64
    scores_TE    all scores, without correction, differentiable in the logits
    entropy      sum over tokens of the entropy of a token's shares (scores / their sum), in float64 and nats
    """

    experts_TK: Tensor
    weights_TK: Tensor
    loads_E: Tensor
    scores_TE: Tensor
    entropy: Tensor


class ChoiceInputs(NamedTuple):
    """Scores in fp32 or float64, the correction that is added to them for the choice, and the router's options."""

    scores_TE: Tensor
    correction_E: Tensor | None
    options: Router


class ExpertsInputs(NamedTuple):
    """Tokens, their routing, and the weights of all experts."""

    x_TD: Tensor
    routing: Routing
    gate_up_EFD: Tensor
    down_EDH: Tensor
    activation: ExpertActivation


@torch.no_grad()
def expert_choice(inputs: ChoiceInputs) -> Tensor:
    """Return each token's experts (T, K), in int64, the expert with the largest corrected score first."""
    scores_TE, correction_E, options = inputs
    if correction_E is not None:
        scores_TE = scores_TE + correction_E.to(scores_TE.dtype)
    if options.group_limit < options.groups:
        scores_TE = scores_TE.masked_fill(~_in_best_groups(scores_TE, options), -torch.inf)
    return _largest(scores_TE, options.top_k)


def _in_best_groups(scores_TE: Tensor, options: Router) -> Tensor:
    """Return the mask (T, E) of experts in a token's best groups."""
    tokens, experts = scores_TE.shape
    size = experts // options.groups
    scores_TGS = scores_TE.view(tokens, options.groups, size)
    worth_TG = scores_TGS.sort(dim=-1, descending=True).values[..., :2].sum(-1)
    best_TL = _largest(worth_TG, options.group_limit)
    return torch.zeros_like(worth_TG, dtype=torch.bool).scatter_(1, best_TL, True).repeat_interleave(size, dim=1)


def _largest(scores_TN: Tensor, count: int) -> Tensor:
    """Return the indices of each row's largest scores. torch's topk would leave the order of equal scores open."""
    return scores_TN.sort(dim=-1, descending=True, stable=True).indices[:, :count].contiguous()


def experts(inputs: ExpertsInputs) -> Tensor:
    """Return y (T, D), in the dtype of x, with a loop over experts; weighted outputs are summed in at least fp32."""
    x_TD, routing, gate_up_EFD, down_EDH, activation = inputs
    weights_TK = routing.weights_TK
    y_TD = at_least_fp32(torch.zeros_like(x_TD))
    # unbind: the gradient of an indexed weight would be a tensor of all experts' size for each expert
    for expert, (gate_up_FD, down_DH) in enumerate(zip(gate_up_EFD.unbind(0), down_EDH.unbind(0), strict=True)):
        token_N, place_N = (routing.experts_TK == expert).nonzero(as_tuple=True)
        out_ND = F.linear(activated(F.linear(x_TD[token_N], gate_up_FD), activation), down_DH)
        weighted_ND = at_least_fp32(out_ND) * weights_TK[token_N, place_N, None].to(y_TD.dtype)
        y_TD = y_TD.index_add(0, token_N, weighted_ND)
    return y_TD.to(x_TD.dtype)


def activated(hidden_NF: Tensor, activation: ExpertActivation) -> Tensor:
    """Return the activation (N, H) of an expert's first projection (N, F)."""
    if activation == "squared_relu":
        return squared_relu(SquaredReLUInputs(hidden_NF))
    return swiglu(SwiGLUInputs(hidden_NF))
