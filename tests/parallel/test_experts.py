"""Ranks that divide experts compute what one process computes, whatever tokens each of them has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridtron.architecture.base import EXPERTS, ModelSizes
from hybridtron.architecture.moe import MoESpec
from hybridtron.architecture.table import architecture
from hybridtron.config.schema import ParallelConfig
from hybridtron.data.batch import SeqInfo
from hybridtron.inference.parallel_reader import training_reader
from hybridtron.inference.reader import reader
from hybridtron.mixers import moe
from hybridtron.mixers.moe import MoE
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel, ModelSlice
from hybridtron.ops.experts import (
    ExpertOrder,
    ExpertsInputs,
    RouteInputs,
    Router,
    reference,
    route,
    row_ranks,
    slot_order,
)
from hybridtron.parallel.context import seq_of_shard
from hybridtron.parallel.experts import ExpertRanks, Flight, RowCounts, outputs_of_owners, send_to_owners
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.pool import Seat
from hybridtron.proving.audit.cases import small_model
from tests.distributed import run_distributed

WIDTH = 6
HIDDEN = 5
COUNT = 8
MOST = 2  # tokens of a row that an expert computes, with a capacity
ROUTER = Router(top_k=2, scores="sigmoid", normalise=True)
LAYOUTS = {
    "ep2": (2, ParallelConfig(expert=2)),
    "cp2-ep2": (2, ParallelConfig(context=2, expert=2)),
    "tp2-dp2-ep2": (4, ParallelConfig(tensor=2, expert=2)),
    "tp2-ep2-et1": (2, ParallelConfig(tensor=2, sequence=True, expert=2, expert_tensor=1)),
    "pp2-dp2-ep2": (4, ParallelConfig(pipeline=2, expert=2)),
}


class Job(NamedTuple):
    """Tokens of each rank, and a router that sends them to experts."""

    tokens: tuple[int, ...]
    only: int | None = None  # the expert to which all choices but one per token go


JOBS = {
    "even": Job((7, 7)),
    "uneven": Job((1, 12)),
    "no tokens": Job((0, 5)),
    "one expert": Job((6, 3), only=7),
    "four ranks": Job((4, 0, 9, 1)),
}


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((COUNT, WIDTH), (COUNT, 2 * HIDDEN, WIDTH), (COUNT, WIDTH, HIDDEN))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def tokens_of(job: Job, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(job.tokens[rank], WIDTH, generator=generator, dtype=torch.float64)


def inputs_of(x_TD: Tensor, job: Job, router: Tensor, gate_up: Tensor, down: Tensor) -> ExpertsInputs:
    logits_TE = x_TD @ router.T
    if job.only is not None:
        logits_TE = logits_TE + 100 * (torch.arange(COUNT) == job.only)
    return ExpertsInputs(x_TD, route(RouteInputs(logits_TE, None, ROUTER)), gate_up, down, "swiglu")


def sent(seat: Seat, job: Job) -> list[Tensor]:
    """Return outputs, the gradient of the tokens, and the gradients of this rank's experts."""
    with seat.groups(ParallelConfig(expert=seat.world_size)) as groups:
        ranks = groups.tensor.expert_ranks
        router, gate_up, down = weights()
        own = [weight.chunk(seat.world_size)[seat.rank].clone().requires_grad_() for weight in (gate_up, down)]
        x_TD = tokens_of(job, seat.rank).requires_grad_()
        inputs = inputs_of(x_TD, job, router, *own)
        y_TD = outputs_of_owners(inputs, ranks, send_to_owners(inputs, ranks, None))
        y_TD.square().sum().backward()
        return [y_TD.detach(), *(t.grad for t in (x_TD, *own) if t.grad is not None)]


@pytest.mark.gloo
@pytest.mark.parametrize("name", JOBS)
def test_exchanged_rows_give_the_outputs_and_gradients_of_one_process(name: str) -> None:
    job = JOBS[name]
    router, gate_up, down = weights()
    learned = [gate_up.requires_grad_(), down.requires_grad_()]
    x_TD = torch.cat([tokens_of(job, rank) for rank in range(len(job.tokens))]).requires_grad_()
    y_TD = reference.experts(inputs_of(x_TD, job, router, *learned))
    y_TD.square().sum().backward()
    ranks = run_distributed(sent, len(job.tokens), job)
    expected = [y_TD.detach(), *(t.grad for t in (x_TD, *learned))]
    for number, whole in enumerate(expected):
        assert whole is not None
        torch.testing.assert_close(torch.cat([rank[number] for rank in ranks]), whole, rtol=1e-10, atol=1e-10)


@contextmanager
def noted_messages() -> Iterator[list[int]]:
    """Yield a list that gets the number of rows in each message of an exchange, while the block runs."""
    messages: list[int] = []
    whole = dist.all_to_all_single

    def noted(received: Tensor, sent: Tensor, *sizes: Any, **options: Any) -> Any:
        messages.append(len(sent))
        return whole(received, sent, *sizes, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", noted)
        yield messages


def with_capacity(seat: Seat, tokens: int) -> tuple[list[Tensor], list[int]]:
    """Return output and gradients of rows within a capacity, and the numbers of rows in this rank's messages."""
    with noted_messages() as messages, seat.groups(ParallelConfig(expert=seat.world_size)) as groups:
        router, gate_up, down = weights()
        own = [weight.chunk(seat.world_size)[seat.rank].clone().requires_grad_() for weight in (gate_up, down)]
        x_TD = tokens_of(Job((tokens,) * seat.world_size), seat.rank).requires_grad_()
        inputs, slots = kept_inputs(x_TD, router, *own)
        ranks = groups.tensor.expert_ranks
        y_TD = outputs_of_owners(inputs, ranks, send_to_owners(inputs, ranks, slots))
        y_TD.square().sum().backward()
        return [y_TD.detach(), *(t.grad for t in (x_TD, *own) if t.grad is not None)], messages


def kept_inputs(x_TD: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> tuple[ExpertsInputs, ExpertOrder]:
    """Return inputs of two rows in which an expert computes at most two tokens of each row."""
    inputs = inputs_of(x_TD, Job(()), router, gate_up, down)
    experts_TK = inputs.routing.experts_TK
    ranks_TK = row_ranks(experts_TK, 2, COUNT).ranks_TK
    kept_TK = ranks_TK < MOST
    routing = inputs.routing._replace(weights_TK=inputs.routing.weights_TK * kept_TK)
    return inputs._replace(routing=routing), slot_order(experts_TK, ranks_TK, kept_TK, (2, COUNT, MOST))


@pytest.mark.gloo
def test_rows_within_a_capacity_need_no_message_about_their_numbers() -> None:
    """Four messages: rows there and back, and their gradients."""
    tokens = 16
    ranks = run_distributed(with_capacity, 2, tokens)
    router, gate_up, down = weights()
    learned = [gate_up.requires_grad_(), down.requires_grad_()]
    outputs = []
    tokens_of_ranks = [tokens_of(Job((tokens,) * 2), rank).requires_grad_() for rank in range(2)]
    for x_TD in tokens_of_ranks:
        inputs, _ = kept_inputs(x_TD, router, *learned)
        assert (inputs.routing.weights_TK == 0).any()
        outputs.append(reference.experts(inputs))
    torch.cat(outputs).square().sum().backward()
    of_tokens = torch.cat([x.grad for x in tokens_of_ranks if x.grad is not None])
    expected = [torch.cat(outputs).detach(), of_tokens, *(t.grad for t in learned)]
    for number, whole in enumerate(expected):
        assert whole is not None
        torch.testing.assert_close(torch.cat([rank[0][number] for rank in ranks]), whole, rtol=1e-10, atol=1e-10)
    assert [messages for _, messages in ranks] == [[2 * COUNT * MOST] * 4] * 2


def messages_of_mixer(seat: Seat, parallel: ParallelConfig) -> list[int]:
    """Return the numbers of rows in a rank's messages of a forward pass in training, of two rows with 12 tokens."""
    spec = MoESpec(experts=COUNT, top_k=2, hidden=HIDDEN, capacity=1.25)
    with noted_messages() as messages, seat.groups(parallel) as groups:
        mixer = MoE(spec, ModelSizes(WIDTH, 1), groups.tensor).double()
        for weight in mixer.parameters():
            torch.nn.init.normal_(weight)
        seq = replace(SeqInfo.stream(2, 12), key=1)
        if groups.context.size > 1:
            seq = seq_of_shard(seq, groups.context)
        tokens = 12 // (parallel.context * parallel.tensor)
        mixer(torch.randn(tokens, 2, WIDTH, dtype=torch.float64), None, seq)
    return messages


@pytest.mark.gloo
@pytest.mark.parametrize("layout", ["ep2", "cp2-ep2", "tp2-ep2-et1"])
def test_slots_are_sent_by_ranks_with_full_rows_alone(layout: str) -> None:
    """Slots are for 4 tokens of each of 2 rows and each expert. With parts of rows, numbers and choices are sent."""
    _, parallel = LAYOUTS[layout]
    for messages in run_distributed(messages_of_mixer, 2, parallel):
        if layout == "ep2":
            assert messages == [2 * COUNT * 4] * 2
        else:
            assert len(messages) == 3
            assert messages[:2] == [2, 2 * 6 * 2]


def both_passes(mixer: MoE) -> list[Tensor]:
    """Return the outputs, and the gradients of tokens and weights."""
    seq = replace(SeqInfo.stream(2, 12), key=1)
    x_LBD = torch.randn(12, 2, WIDTH, generator=torch.Generator().manual_seed(3)).requires_grad_()
    y_LBD = mixer(x_LBD, None, seq).y_LBD
    return [y_LBD, *torch.autograd.grad(y_LBD.square().sum(), (x_LBD, *mixer.parameters()))]


def in_background(seat: Seat) -> tuple[list[str], bool]:
    """Return the order of messages and the shared expert in both passes, and whether bits are those without overlap."""
    spec = MoESpec(experts=COUNT, top_k=2, hidden=HIDDEN, shared=HIDDEN, shared_gate=True)
    events: list[str] = []
    start, wait = Flight.start, Flight.wait

    def noted_start(flight: Flight, sent_ND: Tensor, rows: RowCounts) -> None:
        events.append("start")
        start(flight, sent_ND, rows)

    def noted_wait(flight: Flight) -> Tensor:
        events.append("wait")
        return wait(flight)

    with pytest.MonkeyPatch.context() as patch, seat.groups(ParallelConfig(expert=2)) as groups:
        mixer = MoE(spec, ModelSizes(WIDTH, 1), groups.tensor)
        for weight in mixer.parameters():
            torch.nn.init.normal_(weight)
        patch.setattr(moe, "send_to_owners", lambda *_: None)
        patch.setattr(moe, "outputs_of_owners", sent_after_the_shared_expert)
        one_by_one = both_passes(mixer)
        patch.undo()
        patch.setattr(Flight, "start", noted_start)
        patch.setattr(Flight, "wait", noted_wait)
        mixer.shared_down.register_forward_hook(lambda *_: events.append("shared"))
        mixer.shared_gate_up.register_full_backward_hook(lambda *_: events.append("gradient of shared"))
        overlapped = both_passes(mixer)
    return events, all(torch.equal(a, b) for a, b in zip(overlapped, one_by_one, strict=True))


def sent_after_the_shared_expert(inputs: ExpertsInputs, ranks: ExpertRanks, _: None) -> Tensor:
    return outputs_of_owners(inputs, ranks, send_to_owners(inputs, ranks, None))


@pytest.mark.gloo
def test_shared_expert_is_computed_while_rows_and_their_gradients_are_sent() -> None:
    to_owners = ["start", "shared", "wait"]
    back = ["start", "wait"]
    of_gradients = ["start", "gradient of shared", "wait"]
    for events, has_same_bits in run_distributed(in_background, 2):
        assert events == [*to_owners, *back, *back, *of_gradients]
        assert has_same_bits


def place(seat: Seat, parallel: ParallelConfig) -> tuple[int, int, int]:
    with seat.groups(parallel) as groups:
        mesh = groups.meshes[EXPERTS]
        return mesh.dimensions["expert_tensor"].rank, mesh.dimensions["expert"].rank, mesh.copies.rank


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("parallel", "places"),
    [
        (ParallelConfig(tensor=2, expert=2), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]),
        (
            ParallelConfig(tensor=2, sequence=True, expert=2, expert_tensor=1),
            [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)],
        ),
        (ParallelConfig(context=2, expert=2), [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]),
    ],
    ids=["tensor", "full-experts", "context"],
)
def test_ranks_side_by_side_divide_the_experts(parallel: ParallelConfig, places: list[tuple[int, int, int]]) -> None:
    assert run_distributed(place, 4, parallel) == places


def small() -> LanguageModel:
    return LanguageModel(architecture(small_model("eMx", tied=True, heads={}))).double()


def own_part(groups: Groups) -> LanguageModel:
    layers = {(1, 0): None, (2, 0): range(2), (2, 1): range(2, 3)}[groups.pipeline.size, groups.pipeline.rank]
    last = groups.pipeline.rank == groups.pipeline.size - 1
    part = ModelSlice(layers, groups.pipeline.rank == 0, last, groups.tensor, groups.meshes)
    return LanguageModel(architecture(small_model("eMx", tied=True, heads={})), part).double()


def read(seat: Seat, parallel: ParallelConfig, tokens_BL: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the next logits by the reader that shares a training model's weights, and the rank's weights."""
    with seat.groups(parallel) as groups:
        part = own_part(groups)
        initialise(part, seed=2)
        logits_BV, _ = training_reader([part], groups, torch.float64).read(tokens_BL, None, SeqInfo.stream(3, 11))
        return logits_BV, {name: weight.detach() for name, weight in part.named_parameters()}


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layout", [name if name == "tp2-ep2-et1" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_readers_with_divided_experts_give_the_logits_of_one_process(layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    whole = small()
    initialise(whole, seed=2)
    tokens_BL = torch.randint(96, (3, 11), generator=torch.Generator().manual_seed(4))
    expected_BV, _ = reader(whole.eval()).read(tokens_BL, None, SeqInfo.stream(3, 11))
    for logits_BV, weights_of_rank in run_distributed(read, world, parallel, tokens_BL):
        torch.testing.assert_close(logits_BV, expected_BV, rtol=1e-9, atol=1e-9)
        gate_up = weights_of_rank.get("layers.0.mixer.gate_up")
        assert gate_up is None or len(gate_up) == 4, "a rank has only its own experts"
