"""Expert parallelism: ranks divide the routed experts, and send each other the rows of tokens.

In training, ranks have different tokens. A rank sorts its choices by expert, so that the rows for each owner of experts
lie side by side, and sends them to the owners. An owner sorts the received rows by expert, computes its experts, and
sends the outputs back. The sender weights the outputs and sums them per token:

    rows of choices -> exchange -> rows of own experts -> MLPs -> exchange -> weighted sums

The backward pass of an exchange is the exchange in the opposite direction. So all ranks must run the same number of
forward and backward passes in the same order, even if a rank gets no rows in a pass. Rows are sent in the background:
a caller may compute something else, such as a shared expert, between `send_to_owners` and `outputs_of_owners`. Its
gradients are then computed while the gradients of rows are sent.

With a capacity, and ranks that route full rows (sequences), every rank sends the same number of rows to each rank: the
slots of its sequences, filled or not (`ops/experts/capacity.py`). Then no numbers of rows are exchanged, and the host
waits for nothing.

A reader (generation, evaluation) gives all ranks the same tokens. Then each rank computes the choices that fell on its
own experts, and the ranks' results are summed.

Legend: T tokens, K experts per token, E experts, N rows, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hybridtron.ops.experts import (
    ExpertOrder,
    ExpertOrderInputs,
    ExpertsInputs,
    FromExpertsInputs,
    Routing,
    RowMLPInputs,
    ToExpertsInputs,
    expert_order,
    from_experts,
    mlp_of_rows,
    to_experts,
)
from hybridtron.parallel.mesh import ONE_RANK, RankGroup


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that divide the routed experts.

    expert: ranks that each have some of the experts
    tensor: ranks that each have some inner channels of every expert
    same_tokens: all these ranks have the same tokens, and compute without gradients
    """

    expert: RankGroup = ONE_RANK
    tensor: RankGroup = ONE_RANK
    same_tokens: bool = False


class RowCounts(NamedTuple):
    """Numbers of rows that this rank sends to each rank and receives from each rank, in the order of ranks.

    spare_sent, spare_received: rows behind those that are sent, and zero rows behind those that are received
    """

    sent: Sequence[int]
    received: Sequence[int]
    group: dist.ProcessGroup | None
    spare_sent: int = 0
    spare_received: int = 0

    @property
    def back(self) -> RowCounts:
        """The numbers in the opposite direction."""
        return RowCounts(self.received, self.sent, self.group, self.spare_received, self.spare_sent)


@dataclass
class Flight:
    """Exchange of rows between ranks that has started. The received rows are valid after `wait`."""

    rows: RowCounts
    received_ND: Tensor | None = None
    handle: dist.Work | None = None

    def start(self, sent_ND: Tensor, rows: RowCounts) -> None:
        """Start to send rows. The tensor for received rows may be read after `wait`."""
        count = sum(rows.received)
        received_ND = sent_ND.new_empty(count + rows.spare_received, sent_ND.shape[1])
        received_ND[count:] = 0
        sent_ND = sent_ND[: len(sent_ND) - rows.spare_sent].contiguous()
        sizes = (list(rows.received), list(rows.sent))
        self.handle = dist.all_to_all_single(received_ND[:count], sent_ND, *sizes, group=rows.group, async_op=True)
        self.received_ND = received_ND

    def wait(self) -> Tensor:
        """Wait for the message, and return the received rows."""
        received_ND = self.received_ND
        assert received_ND is not None, "a message starts before the wait for it"
        assert self.handle is not None
        self.handle.wait()
        self.handle = self.received_ND = None
        return received_ND


class SentRows(NamedTuple):
    """Rows on their way to the owners of their experts.

    order, own_order: the order of this rank's choices, and of the rows that it receives; None: slots need no order
    """

    pending_ND: Tensor
    flight: Flight
    order: ExpertOrder
    own_order: ExpertOrder | None


def send_to_owners(inputs: ExpertsInputs, ranks: ExpertRanks, slots: ExpertOrder | None) -> SentRows | None:
    """Start to send rows to the owners of their experts. None: ranks with the same tokens send none.

    `inputs` has the weights of this rank's experts, and the routing over all experts. `slots` has the order of
    choices by slots, of which all ranks have the same number; None: each rank sends as many rows as it has choices.
    """
    if ranks.same_tokens:
        return None
    routing = inputs.routing
    if slots is not None:
        count = (len(slots.source_N) - 1) // ranks.expert.size
        counts = [count] * ranks.expert.size
        rows = RowCounts(counts, counts, ranks.expert.group, spare_sent=1)  # not sent: the place of dropped choices
        pending_ND, flight = depart(to_experts(ToExpertsInputs(inputs.x_TD, slots)), rows)
        return SentRows(pending_ND, flight, slots, None)
    order = expert_order(ExpertOrderInputs(routing.experts_TK, routing.loads_E))
    rows_ND = to_experts(ToExpertsInputs(inputs.x_TD, order))
    received_RE, rows = exchanged_loads(routing, ranks.expert)
    pending_ND, flight = depart(rows_ND, rows)
    return SentRows(pending_ND, flight, order, order_of_received(received_RE, sum(rows.received)))


def outputs_of_owners(inputs: ExpertsInputs, ranks: ExpertRanks, sent: SentRows | None) -> Tensor:
    """Compute the rows that have arrived, exchange the outputs, and return each token's weighted sum (T, D)."""
    if sent is None:
        return _summed(inputs, ranks.expert)
    received_ND = arrive(sent.pending_ND, sent.flight)
    if sent.own_order is None:
        out_ND = _outputs_of_slots(inputs, ranks.expert, received_ND)
    else:
        own_order = sent.own_order
        sorted_ND = to_experts(ToExpertsInputs(received_ND, own_order))
        mlp = RowMLPInputs(sorted_ND, own_order.ends_E, inputs.gate_up_EFD, inputs.down_EDH, inputs.activation)
        out_ND = to_experts(ToExpertsInputs(mlp_of_rows(mlp), inverse(own_order)))
    returned_ND = arrive(*depart(out_ND, sent.flight.rows.back))
    return from_experts(FromExpertsInputs(returned_ND, inputs.routing.weights_TK, sent.order))


def _outputs_of_slots(inputs: ExpertsInputs, ranks: RankGroup, received_ND: Tensor) -> Tensor:
    """Compute the rows of all slots, filled or not."""
    own_experts = len(inputs.gate_up_EFD)
    sorted_ND = received_ND.unflatten(0, (ranks.size, own_experts, -1)).transpose(0, 1).flatten(0, 2)
    counts_E = torch.arange(1, own_experts + 1, dtype=torch.int32, device=received_ND.device)
    ends_E = counts_E * (len(received_ND) // own_experts)
    mlp = RowMLPInputs(sorted_ND, ends_E, inputs.gate_up_EFD, inputs.down_EDH, inputs.activation)
    return mlp_of_rows(mlp).unflatten(0, (own_experts, ranks.size, -1)).transpose(0, 1).flatten(0, 2)


def exchanged_loads(routing: Routing, ranks: RankGroup) -> tuple[Tensor, RowCounts]:
    """Return the loads that each rank puts on this rank's experts (R, E / R), and the numbers of rows to exchange.

    `routing` has the choices of this rank's own tokens. The host waits for the numbers, which are sizes of messages.
    """
    sent_RE = routing.loads_E.view(ranks.size, -1)
    received_RE = torch.empty_like(sent_RE)
    dist.all_to_all_single(received_RE, sent_RE.contiguous(), group=ranks.group)
    sent, received = torch.stack([sent_RE.sum(1), received_RE.sum(1)]).tolist()
    return received_RE, RowCounts(sent, received, ranks.group)


def order_of_received(received_RE: Tensor, count: int) -> ExpertOrder:
    """Return the order by expert of `count` received rows, which lie in the order of ranks, then of experts."""
    experts = torch.arange(received_RE.shape[1], device=received_RE.device).expand_as(received_RE)
    experts_N = experts.flatten().repeat_interleave(received_RE.flatten(), output_size=count)
    return expert_order(ExpertOrderInputs(experts_N[:, None], received_RE.sum(0)))


def inverse(order: ExpertOrder) -> ExpertOrder:
    """Return the inverse of an order, for rows with one choice each (K = 1)."""
    return ExpertOrder(order.place_TK.flatten(), order.source_N[:, None], order.ends_E)


def depart(rows_ND: Tensor, rows: RowCounts) -> tuple[Tensor, Flight]:
    """Start to send rows to their ranks. The returned tensor is for `arrive` alone."""
    flight = Flight(rows)
    return _Depart.apply(rows_ND, flight), flight  # type: ignore[return-value]


def arrive(pending_ND: Tensor, flight: Flight) -> Tensor:
    """Wait for the rows that the ranks have sent here, and return them."""
    return _Arrive.apply(pending_ND, flight)  # type: ignore[return-value]


class _Depart(torch.autograd.Function):
    """Autograd function that starts an all-to-all. Its backward pass waits for the gradients that have come back.

    Between the two, autograd computes gradients of what was computed between `depart` and `arrive`: of functions that
    are ready, it runs the last one of the forward pass first.
    """

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.start(rows_ND, flight.rows)
        assert flight.received_ND is not None
        return flight.received_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.wait(), None


class _Arrive(torch.autograd.Function):
    """Autograd function that waits for an all-to-all. Its backward pass starts to send the rows' gradients back.

    It returns no gradient of its own: `_Depart` takes the gradients from the flight.
    """

    @staticmethod
    def forward(ctx: Any, pending_ND: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.wait()
        return pending_ND.view_as(pending_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        flight: Flight = ctx.flight
        flight.start(grads[0], flight.rows.back)
        return grads[0], None  # a gradient of the right size


def _summed(inputs: ExpertsInputs, ranks: RankGroup) -> Tensor:
    """Compute the choices that fell on this rank's experts, and sum the ranks' results for the same tokens."""
    x_TD, routing, gate_up_EFD, down_EDH, activation = inputs
    order = expert_order(ExpertOrderInputs(routing.experts_TK, routing.loads_E))
    ends = [0, *order.ends_E.tolist()]
    part = ranks.part(len(routing.loads_E))
    first = ends[part.start]
    stop = ends[part.stop]
    rows_ND = to_experts(ToExpertsInputs(x_TD, order))
    own_ends_E = order.ends_E[part.start : part.stop] - first
    own_ND = mlp_of_rows(RowMLPInputs(rows_ND[first:stop], own_ends_E, gate_up_EFD, down_EDH, activation))
    out_ND = torch.zeros_like(rows_ND)
    out_ND[first:stop] = own_ND
    y_TD = from_experts(FromExpertsInputs(out_ND, routing.weights_TK, order))
    dist.all_reduce(y_TD, group=ranks.group)
    return y_TD
