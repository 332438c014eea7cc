"""Mixture of experts (equations in `architecture/moe.py`), a mixer without a state.

Each tensor-parallel rank has the router, and some inner channels of each expert. All ranks route all tokens. An
expert's output is weighted before the ranks' outputs are summed. So a rank's gradient of the router comes from its own
channels, like every gradient between `gather_input` and the sum, and the ranks' gradients are summed. For the same
reason the auxiliary losses have full value, but 1 / (number of ranks) of their gradient on each rank. Each rank also
has the projections to and from the experts' latent width, and projects its outputs back before the sum.

With `parallel.expert_tensor=1`, a rank has full experts and routes only its own tokens of the residual stream, which
sequence parallelism divides. Only the shared expert then gathers all tokens. With `parallel.expert`, ranks divide the
experts, and exchange rows of tokens (`parallel/experts.py`).

A row's capacity counts the choices of all its tokens, including tokens that other ranks route. Dropped choices have the
weight 0. If ranks divide the experts and each rank routes full rows, they exchange slots, so that dropped choices are
not sent. A rank that routes a part of a row would need slots for all of the part's choices, so it sends every choice,
including dropped choices. A rank with all experts computes dropped choices too.

Legend: B rows (sequences), L tokens, D width, T = L B tokens, E experts, K experts per token, P latent channels, C
channels of the shared expert on this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.moe import MoESpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, MixerOutput, Routed, State
from hybridtron.ops.experts import (
    ExpertOrder,
    ExpertsInputs,
    RouteInputs,
    Router,
    Routing,
    experts,
    route,
    row_ranks,
    rows_of,
    shares,
    slot_order,
    z_loss,
)
from hybridtron.ops.precision import at_least_fp32
from hybridtron.ops.squared_relu import SquaredReLUInputs, squared_relu
from hybridtron.ops.swiglu import SwiGLUInputs, swiglu
from hybridtron.parallel.context import all_reduce_shards
from hybridtron.parallel.experts import SentRows, outputs_of_owners, send_to_owners
from hybridtron.parallel.linear import (
    TensorGroup,
    all_reduce_sum,
    column_parallel,
    gather_input,
    row_parallel,
    sum_output,
)


class MoE(Mixer):
    """Router, experts, and a shared expert if the spec has one."""

    def __init__(self, spec: MoESpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        tensor = tensor.without_fp8()
        self.spec = spec
        self.tensor = tensor
        self.ranks = tensor.size
        self.expert_ranks = tensor.expert_ranks
        self.full_experts = self.expert_ranks.tensor.size < tensor.size
        limit = spec.groups if spec.group_limit is None else spec.group_limit
        scores: Any = spec.scores  # the spec has checked this name and the next
        self.activation: Any = spec.activation
        self.options = Router(spec.top_k, scores, spec.normalise, spec.scale, spec.groups, limit)
        width = sizes.width
        hidden = self.expert_ranks.tensor.share(spec.hidden)
        count = self.expert_ranks.expert.share(spec.experts)
        self.router = nn.Parameter(torch.empty(spec.experts, width))
        outer = spec.outer(sizes)
        self.gate_up = nn.Parameter(torch.empty(count, spec.matrices * hidden, outer))
        self.down = nn.Parameter(torch.empty(count, outer, hidden))
        if spec.latent:
            self.latent_in = nn.Parameter(torch.empty(outer, width))
            self.latent_out = nn.Parameter(torch.empty(width, outer))
        if spec.corrected:
            self.correction = nn.Parameter(torch.empty(spec.experts), requires_grad=False)
        if spec.shared:
            self.shared_gate_up = column_parallel(width, spec.matrices * spec.shared, tensor)
            self.shared_down = row_parallel(spec.shared, width, tensor)
        if spec.shared_gate:
            self.shared_gate = nn.Parameter(torch.empty(1, width))

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput:
        own_LBD = x_LBD
        if not self.tensor.routes_own_tokens or self.spec.shared:
            x_LBD = gather_input(x_LBD, self.tensor)
        if not self.tensor.routes_own_tokens:
            own_LBD = x_LBD
        x_TD = own_LBD.flatten(0, 1)
        logits_TE = F.linear(at_least_fp32(x_TD), at_least_fp32(self.router))
        correction_E = None
        if self.spec.corrected:
            correction_E = self.correction
        routing = route(RouteInputs(logits_TE, correction_E, self.options))
        kept = None
        if self.spec.capacity is not None and seq.key is not None:  # training
            kept = within_capacity(routing, self.spec, RowParts(seq, self.tensor))
            routing = kept.routing
        inputs = self._inputs(x_TD, routing)
        sent = self._sent(inputs, kept)
        shared_LBD = None
        if self.spec.shared:  # while rows are sent
            shared_LBD = self._shared(x_LBD)
        y_LBD = self._outputs(inputs, sent).view(own_LBD.shape)
        if not self.full_experts:
            y_LBD = sum_output(y_LBD, self.tensor)
        if shared_LBD is not None:
            y_LBD = y_LBD + shared_LBD
        if seq.key is None:  # evaluation and generation
            return MixerOutput(y_LBD, {}, {})
        return MixerOutput(y_LBD, {}, self._losses(logits_TE, routing, seq), routed(routing, kept))

    def _inputs(self, x_TD: Tensor, routing: Routing) -> ExpertsInputs:
        """Return the experts' inputs, in the latent width if there is one."""
        if self.spec.latent:
            x_TD = F.linear(x_TD, self.latent_in)
        return ExpertsInputs(x_TD, routing, self.gate_up, self.down, self.activation)

    def _sent(self, inputs: ExpertsInputs, kept: KeptChoices | None) -> SentRows | None:
        """Start to send rows to other ranks if ranks divide the experts."""
        if self.expert_ranks.expert.size == 1:
            return None
        slots = None
        if kept is not None and kept.has_full_rows:
            slots = kept.slots
        return send_to_owners(inputs, self.expert_ranks, slots)

    def _outputs(self, inputs: ExpertsInputs, sent: SentRows | None) -> Tensor:
        """Return each token's weighted sum of its experts' outputs, computed with this rank's inner channels."""
        if self.expert_ranks.expert.size == 1:
            y_TP = experts(inputs)
        else:
            y_TP = outputs_of_owners(inputs, self.expert_ranks, sent)
        if self.spec.latent:
            return F.linear(y_TP, self.latent_out)
        return y_TP

    def _shared(self, x_LBD: Tensor) -> Tensor:
        """Return the shared expert's output.

        The gate multiplies the inner channels and not the output, so that it is applied before the sum over ranks.
        """
        up_LBC = self.shared_gate_up(x_LBD)
        if self.spec.activation == "swiglu":
            inner_LBC = swiglu(SwiGLUInputs(up_LBC, 1.0))
        else:
            inner_LBC = squared_relu(SquaredReLUInputs(up_LBC))
        if self.spec.shared_gate:
            inner_LBC = inner_LBC * torch.sigmoid(F.linear(x_LBD, self.shared_gate))
        return self.shared_down(inner_LBC)

    def _losses(self, logits_TE: Tensor, routing: Routing, seq: SeqInfo) -> dict[str, Tensor]:
        """Return the auxiliary losses of each row (B,), which are means over the row's tokens.

        A frozen router has no losses, because they could only change the router's input.
        """
        if not self.router.requires_grad:
            return {}
        losses = {}
        rows = RowParts(seq, self.tensor)
        if self.spec.balance == "auxiliary":
            losses["balance"] = balance_of_rows(routing, self.spec, rows)
        if self.spec.z_loss:
            losses["router_z"] = self.spec.z_loss * z_loss_of_rows(logits_TE, rows)
        if self.ranks == 1:
            return losses
        return {name: loss / self.ranks + (loss - loss / self.ranks).detach() for name, loss in losses.items()}


def routed(routing: Routing, kept: KeptChoices | None) -> Routed:
    """Return a pass's loads, the sum over tokens of the entropy of the scores, and the number of dropped choices."""
    dropped = routing.loads_E.new_zeros(())
    if kept is not None:
        dropped = (~kept.kept_TK).sum()
    return Routed(routing.loads_E, routing.entropy, dropped)


class RowParts(NamedTuple):
    """This rank's part of each row, whose tokens it routes. Other ranks route the row's other parts."""

    seq: SeqInfo
    tensor: TensorGroup

    @property
    def count(self) -> int:
        """Number of parts of each row."""
        parts = 1 if self.seq.shard is None else self.seq.shard.size
        return parts * self.tensor.size if self.tensor.routes_own_tokens else parts

    def of_rows(self, x_TC: Tensor) -> Tensor:
        """Reshape the values of this rank's tokens to (rows, tokens, channels)."""
        return x_TC.unflatten(0, (-1, len(self.seq.positions_BL))).transpose(0, 1)

    @property
    def index(self) -> int:
        """Number of the row's earlier parts."""
        index = 0
        if self.seq.shard is not None:
            index = self.seq.shard.rank
        if self.tensor.routes_own_tokens:
            index = index * self.tensor.size + self.tensor.rank
        return index

    def before(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over the row's earlier parts, without gradients."""
        if self.count == 1:
            return torch.zeros_like(x)
        parts = x.new_zeros(self.count, *x.shape)
        parts[self.index] = x
        return self.summed(parts)[: self.index].sum(0)

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum over all parts, on every rank; the ranks' gradients are summed too."""
        if self.seq.shard is not None:
            x = all_reduce_shards(x, self.seq.shard)
        if self.tensor.routes_own_tokens:
            x = all_reduce_sum(x, self.tensor)
        return x


class KeptChoices(NamedTuple):
    """The choices within the experts' capacity.

    routing: the routing, in which other choices have the weight 0
    kept_TK: True for choices within the capacity
    ranks_TK: number of the row's earlier tokens on this rank that chose the same expert
    sizes: rows, experts, and slots of each expert for each row, for exchanges between ranks
    has_full_rows: True if this rank routes all tokens of its rows; the layout decides it, so ranks agree
    """

    routing: Routing
    kept_TK: Tensor
    ranks_TK: Tensor
    sizes: tuple[int, int, int]
    has_full_rows: bool

    @property
    def slots(self) -> ExpertOrder:
        """The choices sorted by slot, for exchanges between ranks."""
        return slot_order(self.routing.experts_TK, self.ranks_TK, self.kept_TK, self.sizes)


def within_capacity(routing: Routing, spec: MoESpec, parts: RowParts) -> KeptChoices:
    """Return the choices within the capacity of a spec, which is a multiple of an expert's mean load in a row.

    A choice is kept if fewer earlier tokens of its row chose the same expert than the capacity allows.
    """
    rows = len(parts.seq.positions_BL)
    experts_TK = routing.experts_TK
    count = len(routing.loads_E)
    length = len(experts_TK) // rows
    most = spec.most_of_row(length * parts.count)
    ranks_TK, loads_BE = row_ranks(experts_TK, rows, count)
    earlier = parts.before(loads_BE).flatten()
    kept_TK = ranks_TK + earlier[rows_of(experts_TK, rows) * count + experts_TK] < most
    kept = routing._replace(weights_TK=routing.weights_TK * kept_TK)
    return KeptChoices(kept, kept_TK, ranks_TK, (rows, count, most), parts.count == 1)


def balance_of_rows(routing: Routing, spec: MoESpec, parts: RowParts) -> Tensor:
    """Return each row's balance loss (B,), over all tokens of the row, on every rank that has some of them.

    The loss is coefficient * E * sum over e of f_e p_e. f_e is the fraction of choices that fell on expert e, and p_e
    is the mean of the scores' shares. A loss of each row is independent of the layout: it does not matter which rows
    share a micro-batch or a rank.
    """
    shares_TE = routing.scores_TE
    if spec.scores != "softmax":  # softmax's scores sum to 1 already
        shares_TE = shares(shares_TE)
    shares_BLE = parts.of_rows(shares_TE)
    length = shares_BLE.shape[1] * parts.count
    sums_BE = parts.summed(shares_BLE.sum(1))
    chosen_BN = parts.of_rows(routing.experts_TK).flatten(1)
    ones_BN = torch.ones_like(chosen_BN, dtype=sums_BE.dtype)
    loads_BE = parts.summed(torch.zeros_like(sums_BE).scatter_add(1, chosen_BN, ones_BN))
    factor = spec.coefficient * spec.experts / (length * length * spec.top_k)
    return factor * (loads_BE * sums_BE).sum(1)


def z_loss_of_rows(logits_TE: Tensor, parts: RowParts) -> Tensor:
    """Return the z-loss of each row (B,), over all tokens of the row, on every rank that has some of them."""
    return parts.summed(z_loss(parts.of_rows(logits_TE))) / parts.count
