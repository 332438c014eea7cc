"""Mixture of experts (equations in `architecture/moe.py`), a mixer without a state.

Each tensor-parallel rank has the router and all experts, with some of their inner channels. All ranks route all tokens.
An expert's output is weighted before the ranks' outputs are summed. So a rank's gradient of the router comes from its
own channels, like every gradient between `gather_input` and the sum, and the ranks' gradients are summed. For the same
reason the auxiliary losses have full value, but 1 / (number of ranks) of their gradient on each rank.

Legend: B rows (sequences), L tokens, D width, T = L B tokens, E experts, K experts per token, C channels of the shared
expert on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.moe import MoESpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, MixerOutput, Routed, State
from hybridtron.ops.experts import ExpertsInputs, Router, Routing, experts, route, z_loss
from hybridtron.ops.precision import at_least_fp32
from hybridtron.ops.swiglu import SwiGLUInputs, swiglu
from hybridtron.parallel.context import all_reduce_shards
from hybridtron.parallel.linear import TensorGroup, column_parallel, gather_input, row_parallel, sum_output

TINY = 1e-20  # added to a sum of scores that may all be 0


class MoE(Mixer):
    """Router, experts, and a shared expert if the spec has one."""

    def __init__(self, spec: MoESpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        tensor = tensor.without_fp8()
        self.spec = spec
        self.tensor = tensor
        self.ranks = tensor.size
        limit = spec.groups if spec.group_limit is None else spec.group_limit
        scores: Any = spec.scores  # the spec has checked this name and the next
        self.activation: Any = spec.activation
        self.options = Router(spec.top_k, scores, spec.normalise, spec.scale, spec.groups, limit)
        width = sizes.width
        hidden = tensor.share(spec.hidden)
        self.router = nn.Parameter(torch.empty(spec.experts, width))
        self.gate_up = nn.Parameter(torch.empty(spec.experts, spec.matrices * hidden, width))
        self.down = nn.Parameter(torch.empty(spec.experts, width, hidden))
        if spec.corrected:
            self.correction = nn.Parameter(torch.empty(spec.experts), requires_grad=False)
        if spec.shared:
            self.shared_gate_up = column_parallel(width, spec.matrices * spec.shared, tensor)
            self.shared_down = row_parallel(spec.shared, width, tensor)
        if spec.shared_gate:
            self.shared_gate = nn.Parameter(torch.empty(1, width))

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput:
        x_LBD = gather_input(x_LBD, self.tensor)
        x_TD = x_LBD.flatten(0, 1)
        logits_TE = F.linear(at_least_fp32(x_TD), at_least_fp32(self.router))
        routing = route(logits_TE, self.correction if self.spec.corrected else None, self.options)
        y_TD = experts(ExpertsInputs(x_TD, routing, self.gate_up, self.down, self.activation))
        y_LBD = sum_output(y_TD.view(x_LBD.shape), self.tensor)
        if self.spec.shared:
            y_LBD = y_LBD + self._shared(x_LBD)
        if seq.key is None:  # evaluation and generation
            return MixerOutput(y_LBD, {}, {})
        return MixerOutput(y_LBD, {}, self._losses(logits_TE, routing, seq), routed(routing))

    def _shared(self, x_LBD: Tensor) -> Tensor:
        """Return the shared expert's output.

        Its gate multiplies the inner channels, not the output, so that it too precedes the sum over ranks.
        """
        up_LBC = self.shared_gate_up(x_LBD)
        if self.spec.activation == "swiglu":
            inner_LBC = swiglu(SwiGLUInputs(up_LBC, 1.0))
        else:
            inner_LBC = F.relu(up_LBC).square()
        if self.spec.shared_gate:
            inner_LBC = inner_LBC * torch.sigmoid(F.linear(x_LBD, self.shared_gate))
        return self.shared_down(inner_LBC)

    def _losses(self, logits_TE: Tensor, routing: Routing, seq: SeqInfo) -> dict[str, Tensor]:
        """Return the auxiliary losses of each row (B,), which are means over the row's tokens.

        A frozen router has none: they could only change what the router reads.
        """
        if not self.router.requires_grad:
            return {}
        losses = {}
        if self.spec.balance == "auxiliary":
            losses["balance"] = self.spec.coefficient * balance_of_rows(routing, seq)
        if self.spec.z_loss:
            losses["router_z"] = self.spec.z_loss * z_loss_of_rows(logits_TE, seq)
        return {name: loss / self.ranks + (loss - loss / self.ranks).detach() for name, loss in losses.items()}


def routed(routing: Routing) -> Routed:
    """Return the loads of a forward pass, and the sum over tokens of the entropy of the scores."""
    scores_TE = shares(routing.scores_TE.detach())
    return Routed(routing.loads_E, -torch.xlogy(scores_TE, scores_TE).sum(dtype=torch.float64))


def shares(scores_TE: Tensor) -> Tensor:
    """Return the scores divided by their sum over experts, which is 1 for softmax already."""
    return scores_TE / (scores_TE.sum(-1, keepdim=True) + TINY)


def balance_of_rows(routing: Routing, seq: SeqInfo) -> Tensor:
    """Return E sum_e f_e p_e of each row (B,), over all tokens of the row, on every rank that has some of them.

    f_e is the fraction of choices that fell on expert e, p_e the mean of the scores' shares. A loss of each row is
    independent of the layout: it does not matter which rows share a micro-batch or a rank.
    """
    (rows, length) = seq.positions_BL.shape
    sums_BE = shares(routing.scores_TE).unflatten(0, (length, rows)).sum(0)
    chosen_BN = routing.experts_TK.unflatten(0, (length, rows)).transpose(0, 1).flatten(1)
    ones_BN = torch.ones_like(chosen_BN, dtype=sums_BE.dtype)
    loads_BE = torch.zeros_like(sums_BE).scatter_add(1, chosen_BN, ones_BN)
    if seq.shard is not None:
        length = length * seq.shard.size
        sums_BE = all_reduce_shards(sums_BE, seq.shard)
        loads_BE = all_reduce_shards(loads_BE, seq.shard)
    top_k = routing.experts_TK.shape[1]
    count = sums_BE.shape[1]
    return count * (loads_BE * sums_BE).sum(1) / (length * length * top_k)


def z_loss_of_rows(logits_TE: Tensor, seq: SeqInfo) -> Tensor:
    """Return the z-loss of each row (B,), over all tokens of the row, on every rank that has some of them."""
    (rows, length) = seq.positions_BL.shape
    loss_B = z_loss(logits_TE.unflatten(0, (length, rows)).transpose(0, 1))
    if seq.shard is None:
        return loss_B
    return all_reduce_shards(loss_B, seq.shard) / seq.shard.size
