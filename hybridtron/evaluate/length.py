"""Instruments for length generalization, on a trained model (Buitrago Ruiz & Gu, section 3 and appendix F).

    position-wise perplexity   ppl(t) = exp(mean over rows of -log q(x_t | x_0 ... x_{t-1}))
    Effective Remembrance      EffRem_T(t) = mean over rows of d(q(. | x_0:T), q(. | x_t:T))
    deviation of the state     the standard deviation of h_t over rows and the entries of a head (a layer without heads)

with x_t:T the tokens x_t ... x_{T-1}, and d one of

    total variation            1/2 sum_v |p_v - q_v|
    Jensen-Shannon distance    sqrt(1/2 KL(p || m) + 1/2 KL(q || m)), m = (p + q) / 2, with logarithms to base 2
    cosine distance            1 - p.q / (|p| |q|)

A row is one stream that starts from zero states, whatever borders of documents lie in it; x_t:T is read as a text of
its own, whose first token has position 0. Text is fed in chunks with carried states, so memory does not grow with its
length, but for the keys and values of full and span attention. Not a run's held-out loss, which is `evaluate.py`'s.

Letters: B rows, L tokens read, T = L + 1 tokens of a row where each read one has a successor (T tokens read in the
remembrance, as in the paper), C tokens of a chunk, V vocabulary, X the axes of a state.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.data.batch import SeqInfo
from hybridtron.model.generate import NOTHING, Finish, Reader
from hybridtron.model.lm import LanguageModel
from hybridtron.model.stack import States
from hybridtron.parallel.loss import likeliest, linear_cross_entropy

CHUNK_VALUES = 2**27  # logits of a chunk, over all rows
LONGEST_CHUNK = 2048  # tokens

Advance = Callable[[int], object]
"""Called after each chunk with how many more tokens of every row have been read."""

OfLabels = Callable[[Tensor, LanguageModel, Tensor], Tensor]
"""From labels (C, B), the last stage and what its head reads: (C, B, ...), on every rank of the last stage."""


class Bin(NamedTuple):
    """The perplexity of the predictions that had `first` to `last` tokens before them."""

    first: int
    last: int
    perplexity: float


class Remembrance(NamedTuple):
    """How far the next token's distribution moves when the model is not shown the first `t` tokens."""

    t: int
    total_variation: float
    jensen_shannon: float
    cosine: float


class Deviation(NamedTuple):
    """Standard deviation of a layer's recurrent state after `position` tokens: one number a head, or one in all."""

    position: int
    layer: int
    deviations: tuple[float, ...]

    @property
    def overall(self) -> float:
        """One number for all heads: the root of their mean variance, each about the head's own mean."""
        return math.sqrt(sum(one * one for one in self.deviations) / len(self.deviations))


def unheard(_: int) -> None:
    pass


def position_losses(model: Reader, tokens_BT: Tensor, chunk: int, advance: Advance = unheard) -> Tensor:
    """Mean over rows of -log q, in nats: (L,) in float64 on the CPU, entry i for the prediction after i + 1 tokens."""
    return token_losses(model, tokens_BT, chunk, advance).mean(1)


def token_losses(model: Reader, tokens_BT: Tensor, chunk: int, advance: Advance = unheard) -> Tensor:
    """-log q of every prediction, in nats: (L, B) in float64 on the CPU."""
    return of_labels(model, tokens_BT, chunk, label_losses, (), advance)


@torch.no_grad()
def of_labels(
    model: Reader, tokens_BT: Tensor, chunk: int, make: OfLabels, each: tuple[int, ...], advance: Advance = unheard
) -> Tensor:
    """What is made of every token after the first, of shape `each`: (L, B, ...) in float64 on the CPU."""
    labels_LB, dtype = tokens_BT[:, 1:].T, torch.promote_types(model.dtype, torch.float32)
    found = []

    def wanted(start: int, end: int) -> Finish:
        return of_these(labels_LB[start:end].to(model.device))

    def of_these(labels_CB: Tensor) -> Finish:
        shape = (*labels_CB.shape, *each)
        return Finish(partial(make, labels_CB), shape, dtype, lambda here: of_these(labels_CB[here]))

    def see(end: int, made_CB: Tensor, states: States) -> None:
        found.append(made_CB.double().cpu())

    read_chunks(model, tokens_BT[:, :-1], chunk_ends(chunk, len(labels_LB)), wanted, see, advance)
    return torch.cat(found)


def label_losses(labels_CB: Tensor, stage: LanguageModel, x_CBD: Tensor) -> Tensor:
    """-log q of labels, from what the last stage's head reads: what a `Finish` makes."""
    counted_CB = torch.ones_like(labels_CB, dtype=torch.bool)
    return linear_cross_entropy(x_CBD, stage.output_weight(), labels_CB, counted_CB, 0.0, stage.slice.tensor).per_token


@torch.no_grad()
def likeliest_tokens(model: Reader, tokens_BL: Tensor, chunk: int) -> Tensor:
    """The likeliest next token after each one, given those before: (B, L) on the CPU."""
    found = []

    def wanted(start: int, end: int) -> Finish:
        return of_these(range(end - start))

    def of_these(places: range) -> Finish:
        shape = len(places), len(tokens_BL)
        return Finish(_likeliest, shape, torch.int64, lambda here: of_these(places[here]))

    def see(start: int, tokens_CB: Tensor, states: States) -> None:
        found.append(tokens_CB.T.cpu())

    read_chunks(model, tokens_BL, chunk_ends(chunk, tokens_BL.shape[1]), wanted, see, unheard)
    return torch.cat(found, dim=1)


def _likeliest(stage: LanguageModel, x_CBD: Tensor) -> Tensor:
    return likeliest(x_CBD, stage.output_weight(), stage.slice.tensor)


def perplexity_bins(losses_L: Tensor, seq_len: int, per_doubling: int = 1) -> list[Bin]:
    """Perplexity up to the training length, from there to twice of it, to four times, and so on to the end.

    With more bins to a doubling, those that would hold no position are left out.
    """
    last = len(losses_L)
    grown = (int(seq_len * 2 ** (step / per_doubling)) for step in itertools.count())
    ends = sorted({0, *itertools.takewhile(lambda end: end < last, grown), last})
    return [
        Bin(before + 1, end, losses_L[before:end].double().mean().exp().item())
        for before, end in itertools.pairwise(ends)
    ]


def remembrance_points(length: int) -> list[int]:
    """Where to look: at eighths of the length, twice before them, and then ever closer to the end by halves."""
    halves = (length - (length >> power) for power in range(length.bit_length()))
    return sorted({length // 32, length // 16, *(eighth * length // 8 for eighth in range(8)), *halves})


def fitting_chunk(model: ModelConfig, rows: int, ranks: int = 1) -> int:
    """Tokens of a chunk, such that the logits of all rows take half a GiB in fp32 at most, and where chunks may end.

    A power of two, or a multiple of what the model reads in, once at least; on each of the ranks that divide a chunk.
    """
    fits = max(1, CHUNK_VALUES // (rows * model.vocab_size))
    together = architecture(model).reads_in
    fitting = min(LONGEST_CHUNK, 1 << (fits.bit_length() - 1))
    return max(1, fitting // together) * together * ranks


def attention_at_eval(model: ModelConfig) -> dict[str, str]:
    """Which attention each letter of the pattern runs outside training: full, or a window or span with its tokens."""
    arch = architecture(model)
    kinds = {letter: spec.attention_at_eval for letter, spec in zip(arch.letters, arch.specs, strict=True)}
    return {letter: kind for letter, kind in kinds.items() if kind is not None}


@torch.no_grad()
def effective_remembrance(
    model: Reader, tokens_BT: Tensor, ts: Sequence[int], chunk: int, advance: Advance = unheard
) -> list[Remembrance]:
    """For each t below T, the mean over rows of how far q(. | x_t:T) is from q(. | x_0:T).

    Costs a reading of T tokens, and one of T - t for each t above 0.
    """
    length = tokens_BT.shape[1]
    if wrong := [t for t in ts if not 0 <= t < length]:
        raise ValueError(f"t must be in 0..{length - 1}, and {wrong} are not")
    whole_BV = _next_token(model, tokens_BT, chunk, advance)
    measured = []
    for t in ts:
        recent_BV = _next_token(model, tokens_BT[:, t:], chunk, advance) if t else whole_BV
        measured.append(Remembrance(t, *(d_B.mean().item() for d_B in distances(whole_BV, recent_BV))))
    return measured


def distances(p_BV: Tensor, q_BV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Total variation, Jensen-Shannon distance (base 2) and cosine distance of distributions, each (B,)."""
    middle_BV = ((p_BV + q_BV) / 2).clamp_min(torch.finfo(p_BV.dtype).tiny)  # where it is 0, both are
    divergence_B = sum(torch.xlogy(one_BV, one_BV / middle_BV).sum(-1) / 2 for one_BV in (p_BV, q_BV))
    bits_B = torch.as_tensor(divergence_B).clamp_min(0) / torch.log(p_BV.new_tensor(2.0))  # rounding may go below 0
    cosine_B = torch.cosine_similarity(p_BV, q_BV, dim=-1)
    return (p_BV - q_BV).abs().sum(-1) / 2, bits_B.sqrt(), (1 - cosine_B).clamp_min(0)


@torch.no_grad()
def state_deviation(
    model: Reader, tokens_BT: Tensor, step: int, chunk: int, advance: Advance = unheard
) -> list[Deviation]:
    """Deviations of every layer with a recurrent state after `step` tokens, twice as many, ...: [] without any layer.

    Rows are taken together, about their common mean, as fitted noise takes lanes together.
    """
    length = tokens_BT.shape[1]
    positions = range(step, length + 1, step)
    measured = []

    def see(end: int, nothing: Tensor, states: States) -> None:
        if end in positions:
            own = {layer: _moments(state["ssm"]) for layer, state in states.items() if "ssm" in state}
            for layer, moments_H3 in model.of_all(own).items():
                measured.append(Deviation(end, layer, _deviations(moments_H3)))

    read_chunks(model, tokens_BT, sorted({*chunk_ends(chunk, length), *positions}), _nothing, see, advance)
    return measured


def _moments(h_BX: Tensor) -> Tensor:
    """Mean and variance over rows of each head's entries (B, H, P, N), or each channel's (B, E, N), and its kind."""
    over = (0, *range(2, h_BX.dim()))
    variance_H, mean_H = torch.var_mean(h_BX.double(), over, correction=0)
    return torch.stack([mean_H, variance_H, torch.full_like(mean_H, h_BX.dim())], dim=1)


def _deviations(moments_H3: Tensor) -> tuple[float, ...]:
    """Of each head; of all channels together, whose variance is the mean of theirs and the variance of their means."""
    mean_H, variance_H, axes_H = moments_H3.T
    if axes_H[0] == 4:
        return tuple(variance_H.sqrt().tolist())
    return ((variance_H.mean() + mean_H.var(correction=0)).sqrt().item(),)


def _next_token(model: Reader, tokens_BL: Tensor, chunk: int, advance: Advance) -> Tensor:
    """The distribution of the token that follows the rows, (B, V) in float64."""
    batch, length = tokens_BL.shape
    kept: list[Tensor] = []

    def wanted(start: int, end: int) -> Finish:
        if end < length:
            return NOTHING
        return Finish(LanguageModel.next_logits, (batch, model.vocab_size), model.dtype)

    def see(end: int, logits_BV: Tensor, states: States) -> None:
        kept[:] = [logits_BV]

    read_chunks(model, tokens_BL, chunk_ends(chunk, length), wanted, see, advance)
    return torch.softmax(kept[0].double(), dim=-1)


def read_rows(model: Reader, tokens_BL: Tensor, chunk: int, advance: Advance) -> None:
    """For what is seen on the way alone."""
    read_chunks(model, tokens_BL, chunk_ends(chunk, tokens_BL.shape[1]), _nothing, lambda *seen: None, advance)


def _nothing(start: int, end: int) -> Finish:
    return NOTHING


def chunk_ends(chunk: int, length: int) -> list[int]:
    """Where chunks of a row end."""
    return [*range(chunk, length, chunk), length]


def read_chunks(
    model: Reader,
    tokens_BL: Tensor,
    ends: Iterable[int],
    wanted: Callable[[int, int], Finish],
    see: Callable[[int, Tensor, States], None],
    advance: Advance,
) -> None:
    """Feed the rows in chunks that end where `ends` say, and show `see` each one's end, what was wanted and the states.

    A callback and no generator, so that what a chunk brought is gone before the next one is read.
    """
    states, start = None, 0
    for end in ends:
        tokens_BC = tokens_BL[:, start:end].to(model.device)
        seq = SeqInfo.stream(len(tokens_BC), end - start, start, model.device)
        found, states = model.forward(tokens_BC, states, seq, wanted(start, end))
        see(end, found, states)
        del found
        advance(end - start)
        start = end
