"""Instruments for length generalization, on a trained model (Buitrago Ruiz & Gu, section 3 and appendix F).

    position-wise perplexity   ppl(t) = exp(mean over rows of -log q(x_t | x_0 ... x_{t-1}))
    Effective Remembrance      EffRem_T(t) = mean over rows of d(q(. | x_0:T), q(. | x_t:T))
    deviation of the state     the standard deviation of h_t over rows and a head's entries (a layer without heads)

with x_t:T the tokens x_t ... x_{T-1}, and d one of

    total variation            1/2 sum_v |p_v - q_v|
    Jensen-Shannon distance    sqrt(1/2 KL(p || m) + 1/2 KL(q || m)), m = (p + q) / 2, with logarithms to base 2
    cosine distance            1 - p.q / (|p| |q|)

A row is one stream that starts from zero states; document boundaries in it are ignored. x_t:T is read as a separate
text, whose first token has position 0. Text is read in chunks with carried states, so memory does not grow with its
length, except for the keys and values in full and span attention. A run's held-out loss is computed in
`train/evaluate.py`.

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

CHUNK_VALUES = 2**27  # largest number of logits in a chunk, over all rows
LONGEST_CHUNK = 2048  # tokens

Advance = Callable[[int], object]
"""Progress callback: called after each chunk with the number of tokens that it has in every row."""

OfLabels = Callable[[Tensor, LanguageModel, Tensor], Tensor]
"""Computes (C, B, ...) from labels (C, B), the last stage and its head's input, on every rank of that stage."""


class Bin(NamedTuple):
    """Perplexity over predictions with `first` to `last` tokens before them."""

    first: int
    last: int
    perplexity: float


class Remembrance(NamedTuple):
    """Distances between the next token's distributions with all tokens shown and without the first `t`."""

    t: int
    total_variation: float
    jensen_shannon: float
    cosine: float


class Deviation(NamedTuple):
    """A recurrent state's standard deviations after `position` tokens: one per head, or one in all."""

    position: int
    layer: int
    deviations: tuple[float, ...]

    @property
    def overall(self) -> float:
        """One number for all heads: the root of their mean variance, each about the head's own mean."""
        return math.sqrt(sum(deviation * deviation for deviation in self.deviations) / len(self.deviations))


def unheard(_: int) -> None:
    pass


def position_losses(model: Reader, tokens_BT: Tensor, chunk: int, advance: Advance = unheard) -> Tensor:
    """Compute the mean over rows of -log q, in nats: (L,) in float64 on the CPU; entry i has i + 1 tokens before it."""
    return token_losses(model, tokens_BT, chunk, advance).mean(1)


def token_losses(model: Reader, tokens_BT: Tensor, chunk: int, advance: Advance = unheard) -> Tensor:
    """Compute -log q for every prediction, in nats: (L, B) in float64 on the CPU."""
    return of_labels(model, tokens_BT, chunk, label_losses, (), advance)


@torch.no_grad()
def of_labels(
    model: Reader, tokens_BT: Tensor, chunk: int, make: OfLabels, each: tuple[int, ...], advance: Advance = unheard
) -> Tensor:
    """Apply `make` to every token after the first; results with shape `each` are stacked: (L, B, ...), float64, CPU."""
    labels_LB = tokens_BT[:, 1:].T
    dtype = torch.promote_types(model.dtype, torch.float32)
    chunk_results = []

    def wanted(start: int, end: int) -> Finish:
        return of_these(labels_LB[start:end].to(model.device))

    def of_these(labels_CB: Tensor) -> Finish:
        shape = (*labels_CB.shape, *each)
        return Finish(partial(make, labels_CB), shape, dtype, lambda here: of_these(labels_CB[here]))

    def see(end: int, made_CB: Tensor, states: States) -> None:
        chunk_results.append(made_CB.double().cpu())

    read_chunks(model, tokens_BT[:, :-1], chunk_ends(chunk, len(labels_LB)), wanted, see, advance)
    return torch.cat(chunk_results)


def label_losses(labels_CB: Tensor, stage: LanguageModel, x_CBD: Tensor) -> Tensor:
    """Compute -log q for labels from the input to the last stage's head, (C, B)."""
    counted_CB = torch.ones_like(labels_CB, dtype=torch.bool)
    return linear_cross_entropy(x_CBD, stage.output_weight(), labels_CB, counted_CB, 0.0, stage.slice.tensor).per_token


@torch.no_grad()
def likeliest_tokens(model: Reader, tokens_BL: Tensor, chunk: int) -> Tensor:
    """Return the likeliest next token after each token, given all before it: (B, L) on the CPU."""
    chunk_tokens = []

    def wanted(start: int, end: int) -> Finish:
        return of_these(range(end - start))

    def of_these(places: range) -> Finish:
        shape = len(places), len(tokens_BL)
        return Finish(_likeliest, shape, torch.int64, lambda here: of_these(places[here]))

    def see(start: int, tokens_CB: Tensor, states: States) -> None:
        chunk_tokens.append(tokens_CB.T.cpu())

    read_chunks(model, tokens_BL, chunk_ends(chunk, tokens_BL.shape[1]), wanted, see, unheard)
    return torch.cat(chunk_tokens, dim=1)


def _likeliest(stage: LanguageModel, x_CBD: Tensor) -> Tensor:
    return likeliest(x_CBD, stage.output_weight(), stage.slice.tensor)


def perplexity_bins(losses_L: Tensor, seq_len: int, per_doubling: int = 1) -> list[Bin]:
    """Compute perplexity up to the training length, from there to its double, to four times, and so on to the end.

    With several bins per doubling, empty bins are left out.
    """
    last = len(losses_L)
    bin_ends = (int(seq_len * 2 ** (step / per_doubling)) for step in itertools.count())
    ends = sorted({0, *itertools.takewhile(lambda end: end < last, bin_ends), last})
    return [
        Bin(before + 1, end, losses_L[before:end].double().mean().exp().item())
        for before, end in itertools.pairwise(ends)
    ]


def remembrance_points(length: int) -> list[int]:
    """Choose values for t: eighths of the length, two below the first eighth, and ever closer to the end by halves."""
    halves = (length - (length >> power) for power in range(length.bit_length()))
    return sorted({length // 32, length // 16, *(eighth * length // 8 for eighth in range(8)), *halves})


def fitting_chunk(model: ModelConfig, rows: int, ranks: int = 1) -> int:
    """Choose a chunk's length in tokens, so that all rows' logits take at most half a GiB in fp32.

    It is a multiple of the model's `reads_in`, where chunks may end, for each of the ranks that divide a chunk.
    """
    max_tokens = max(1, CHUNK_VALUES // (rows * model.vocab_size))
    multiple = architecture(model).reads_in
    power_of_two = min(LONGEST_CHUNK, 1 << (max_tokens.bit_length() - 1))
    return max(1, power_of_two // multiple) * multiple * ranks


def attention_at_eval(model: ModelConfig) -> dict[str, str]:
    """Describe the attention that each letter runs outside training: full, or a window or span with its size."""
    arch = architecture(model)
    kinds = {letter: spec.attention_at_eval for letter, spec in zip(arch.letters, arch.specs, strict=True)}
    return {letter: kind for letter, kind in kinds.items() if kind is not None}


@torch.no_grad()
def effective_remembrance(
    model: Reader, tokens_BT: Tensor, ts: Sequence[int], chunk: int, advance: Advance = unheard
) -> list[Remembrance]:
    """Compute, for each t below T, the distances between q(. | x_t:T) and q(. | x_0:T), averaged over rows.

    Costs reading T tokens once, and T - t tokens for each t above 0.
    """
    length = tokens_BT.shape[1]
    if wrong_ts := [t for t in ts if not 0 <= t < length]:
        raise ValueError(f"t must be in 0..{length - 1}, and {wrong_ts} are not")
    whole_BV = _next_token(model, tokens_BT, chunk, advance)
    measured = []
    for t in ts:
        if t:
            recent_BV = _next_token(model, tokens_BT[:, t:], chunk, advance)
        else:
            recent_BV = whole_BV
        measured.append(Remembrance(t, *(d_B.mean().item() for d_B in distances(whole_BV, recent_BV))))
    return measured


def distances(p_BV: Tensor, q_BV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute total variation, Jensen-Shannon (base 2) and cosine distance between distributions, each (B,)."""
    middle_BV = ((p_BV + q_BV) / 2).clamp_min(torch.finfo(p_BV.dtype).tiny)  # where it is 0, p and q are too
    divergence_B = sum(
        torch.xlogy(distribution_BV, distribution_BV / middle_BV).sum(-1) / 2 for distribution_BV in (p_BV, q_BV)
    )
    bits_B = torch.as_tensor(divergence_B).clamp_min(0) / torch.log(p_BV.new_tensor(2.0))  # rounding may go below 0
    cosine_B = torch.cosine_similarity(p_BV, q_BV, dim=-1)
    return (p_BV - q_BV).abs().sum(-1) / 2, bits_B.sqrt(), (1 - cosine_B).clamp_min(0)


@torch.no_grad()
def state_deviation(
    model: Reader, tokens_BT: Tensor, step: int, chunk: int, advance: Advance = unheard
) -> list[Deviation]:
    """Measure every layer's recurrent state at multiples of `step` tokens; [] if no layer has one.

    Rows are pooled about their common mean, as fitted noise pools lanes.
    """
    length = tokens_BT.shape[1]
    positions = range(step, length + 1, step)
    measured = []

    def see(end: int, nothing: Tensor, states: States) -> None:
        if end in positions:
            own_moments = {layer: _moments(state["ssm"]) for layer, state in states.items() if "ssm" in state}
            for layer, moments_H3 in model.of_all(own_moments).items():
                measured.append(Deviation(end, layer, _deviations(moments_H3)))

    read_chunks(model, tokens_BT, sorted({*chunk_ends(chunk, length), *positions}), _nothing, see, advance)
    return measured


def _moments(h_BX: Tensor) -> Tensor:
    """Compute mean and variance over rows per head (h: BHPN) or channel (h: BEN), and h's number of axes."""
    axes = (0, *range(2, h_BX.dim()))
    variance_H, mean_H = torch.var_mean(h_BX.double(), axes, correction=0)
    return torch.stack([mean_H, variance_H, torch.full_like(mean_H, h_BX.dim())], dim=1)


def _deviations(moments_H3: Tensor) -> tuple[float, ...]:
    """Compute each head's deviation, or one for all channels: mean variance within them plus variance between means."""
    mean_H, variance_H, axes_H = moments_H3.T
    if axes_H[0] == 4:
        return tuple(variance_H.sqrt().tolist())
    return ((variance_H.mean() + mean_H.var(correction=0)).sqrt().item(),)


def _next_token(model: Reader, tokens_BL: Tensor, chunk: int, advance: Advance) -> Tensor:
    """Compute the distribution over the token after the rows, (B, V) in float64."""
    batch, length = tokens_BL.shape
    last_logits: list[Tensor] = []

    def wanted(start: int, end: int) -> Finish:
        if end < length:
            return NOTHING
        return Finish(LanguageModel.next_logits, (batch, model.vocab_size), model.dtype)

    def see(end: int, logits_BV: Tensor, states: States) -> None:
        last_logits[:] = [logits_BV]

    read_chunks(model, tokens_BL, chunk_ends(chunk, length), wanted, see, advance)
    return torch.softmax(last_logits[0].double(), dim=-1)


def read_rows(model: Reader, tokens_BL: Tensor, chunk: int, advance: Advance) -> None:
    """Read the rows without output, for observers of ops."""
    read_chunks(model, tokens_BL, chunk_ends(chunk, tokens_BL.shape[1]), _nothing, lambda *seen: None, advance)


def _nothing(start: int, end: int) -> Finish:
    return NOTHING


def chunk_ends(chunk: int, length: int) -> list[int]:
    """List the positions where a row's chunks end."""
    return [*range(chunk, length, chunk), length]


def read_chunks(
    model: Reader,
    tokens_BL: Tensor,
    ends: Iterable[int],
    wanted: Callable[[int, int], Finish],
    see: Callable[[int, Tensor, States], None],
    advance: Advance,
) -> None:
    """Read the rows in chunks that end at `ends`; call `see` with each chunk's end, its output and the states.

    A callback and not a generator, so that a chunk's output is freed before the next chunk is read.
    """
    states = None
    start = 0
    for end in ends:
        tokens_BC = tokens_BL[:, start:end].to(model.device)
        seq = SeqInfo.stream(len(tokens_BC), end - start, start, model.device)
        output, states = model.forward(tokens_BC, states, seq, wanted(start, end))
        see(end, output, states)
        del output
        advance(end - start)
        start = end
