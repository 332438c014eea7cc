"""Measurements of length generalization, on a trained model (Buitrago Ruiz & Gu, section 3 and appendix F).

    position-wise perplexity   ppl(t) = exp(mean over rows of -log q(x_t | x_0 ... x_{t-1}))
    Effective Remembrance      EffRem_T(t) = mean over rows of d(q(. | x_0:T), q(. | x_t:T))
    state deviation            standard deviation of the recurrent state h_t, over rows and the elements in a head's
                               state; in layers without heads, over rows and all elements

- q: the model's distribution over the next token
- x_t:T: the tokens x_t ... x_{T-1}, read as a separate text whose first token has position 0
- d: a distance between two distributions p and q, which is one of:

    total variation            1/2 sum_v |p_v - q_v|
    Jensen-Shannon distance    sqrt(1/2 KL(p || m) + 1/2 KL(q || m)), m = (p + q) / 2, with logarithms to base 2
    cosine distance            1 - p.q / (|p| |q|)

A row starts from zero states; document boundaries inside a row are ignored. Rows are read in chunks, and the states
after a chunk are the next chunk's initial states. So memory does not grow with the text's length, except for the keys
and values in full and span attention.

Legend: B rows, C tokens per chunk, D width of the residual stream, V vocabulary, X all axes of a state after B. A row
has T tokens. Where losses are measured, L = T - 1 tokens are read, and each token's label is the token after it. For
Effective Remembrance all T tokens are read, as in the paper. In states: H heads, P channels per head, E channels in a
layer without heads, N state size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hybridtron.architecture.table import Architecture
from hybridtron.data.batch import SeqInfo
from hybridtron.inference.reader import EMPTY_READOUT, Reader, Readout
from hybridtron.model.lm import LanguageModel
from hybridtron.model.stack import States
from hybridtron.parallel.vocabulary import likeliest, linear_cross_entropy

CHUNK_VALUES = 2**27  # largest number of logits in a chunk, over all rows
MAX_CHUNK = 2048  # largest number of tokens in a chunk

Advance = Callable[[int], object]
"""Progress callback: called after each chunk with the chunk's number of tokens per row."""

OfLabels = Callable[[Tensor, LanguageModel, Tensor], Tensor]
"""Function from labels (C, B), the last pipeline stage, and the input to the output layer (C, B, D).

It returns a result (C, B, ...) with an entry for each label. It is called on every rank of the last stage.
"""


class Bin(NamedTuple):
    """The perplexity over predictions that have `first` to `last` tokens before them."""

    first: int
    last: int
    perplexity: float


class Remembrance(NamedTuple):
    """Distances between two distributions over the next token: after all tokens, and after all except the first `t`."""

    t: int
    total_variation: float
    jensen_shannon: float
    cosine: float


class Deviation(NamedTuple):
    """Standard deviations of a layer's recurrent state after `position` tokens.

    `deviations` has an entry for each head. Layers without heads, such as Mamba-1, have a single entry.
    """

    position: int
    layer: int
    deviations: tuple[float, ...]

    @property
    def overall(self) -> float:
        """A single standard deviation for all heads: the square root of the heads' mean variance."""
        return math.sqrt(sum(deviation * deviation for deviation in self.deviations) / len(self.deviations))


def unheard(_: int) -> None:
    pass


def position_losses(model: Reader, tokens_BT: Tensor, chunk: int, advance: Advance = unheard) -> Tensor:
    """Compute -log q, averaged over rows, in nats: (L,) in float64 on the CPU.

    Entry i is the loss for the token that follows the first i + 1 tokens.
    """
    return token_losses(model, tokens_BT, chunk, advance).mean(1)


def token_losses(model: Reader, tokens_BT: Tensor, chunk: int, advance: Advance = unheard) -> Tensor:
    """Compute -log q for every prediction, in nats: (L, B) in float64 on the CPU."""
    return of_labels(model, tokens_BT, chunk, label_losses, (), advance)


@torch.no_grad()
def of_labels(
    model: Reader,
    tokens_BT: Tensor,
    chunk: int,
    make: OfLabels,
    label_shape: tuple[int, ...],
    advance: Advance = unheard,
) -> Tensor:
    """Compute a result with shape `label_shape` for every label. The labels are all tokens after the first.

    Returns (L, B, *label_shape) in float64 on the CPU. `make` computes the results for a chunk's labels.
    """
    labels_LB = tokens_BT[:, 1:].T
    dtype = torch.promote_types(model.dtype, torch.float32)
    chunk_results = []

    def wanted(start: int, end: int) -> Readout:
        return of_these(labels_LB[start:end].to(model.device))

    def of_these(labels_CB: Tensor) -> Readout:
        shape = (*labels_CB.shape, *label_shape)
        return Readout(partial(make, labels_CB), shape, dtype, lambda here: of_these(labels_CB[here]))

    def see(end: int, made_CB: Tensor, states: States) -> None:
        chunk_results.append(made_CB.double().cpu())

    read_chunks(model, tokens_BT[:, :-1], chunk_ends(chunk, len(labels_LB)), wanted, see, advance)
    return torch.cat(chunk_results)


def label_losses(labels_CB: Tensor, stage: LanguageModel, x_CBD: Tensor) -> Tensor:
    """Compute -log q for the labels, (C, B). `x_CBD` is the input to the output layer, and `stage` has this layer."""
    counted_CB = torch.ones_like(labels_CB, dtype=torch.bool)
    return linear_cross_entropy(x_CBD, stage.output_weight(), labels_CB, counted_CB, 0.0, stage.slice.tensor).per_token


@torch.no_grad()
def likeliest_tokens(model: Reader, tokens_BL: Tensor, chunk: int) -> Tensor:
    """Return the likeliest next token after the tokens up to each position: (B, L) on the CPU."""
    chunk_tokens = []

    def wanted(start: int, end: int) -> Readout:
        return of_these(range(end - start))

    def of_these(positions: range) -> Readout:
        shape = len(positions), len(tokens_BL)
        return Readout(_likeliest, shape, torch.int64, lambda here: of_these(positions[here]))

    def see(start: int, tokens_CB: Tensor, states: States) -> None:
        chunk_tokens.append(tokens_CB.T.cpu())

    read_chunks(model, tokens_BL, chunk_ends(chunk, tokens_BL.shape[1]), wanted, see, unheard)
    return torch.cat(chunk_tokens, dim=1)


def _likeliest(stage: LanguageModel, x_CBD: Tensor) -> Tensor:
    return likeliest(x_CBD, stage.output_weight(), stage.slice.tensor)


def perplexity_bins(losses_L: Tensor, seq_len: int, per_doubling: int = 1) -> list[Bin]:
    """Compute perplexity by position, in bins.

    The bins end at 1, 2, 4, ... times the training length, and at the row's end. With `per_doubling` = n above 1 they
    end at 2 ** (i / n) times the training length for i = 0, 1, ...; bins without a position are left out.
    """
    last = len(losses_L)
    bin_ends = (int(seq_len * 2 ** (step / per_doubling)) for step in itertools.count())
    ends = sorted({0, *itertools.takewhile(lambda end: end < last, bin_ends), last})
    return [
        Bin(start + 1, end, losses_L[start:end].double().mean().exp().item()) for start, end in itertools.pairwise(ends)
    ]


def remembrance_points(length: int) -> list[int]:
    """Choose values for t, the number of first tokens that are not read, in Effective Remembrance.

    The values are length / 32, length / 16, multiples of length / 8, and length - length / 2**n for n = 0, 1, 2, ...
    """
    halves = (length - (length >> power) for power in range(length.bit_length()))
    return sorted({length // 32, length // 16, *(eighth * length // 8 for eighth in range(8)), *halves})


def fitting_chunk(arch: Architecture, rows: int, ranks: int = 1) -> int:
    """Choose how many tokens a chunk has, such that a rank's logits take at most half a GiB in fp32.

    A chunk's tokens are divided over `ranks` ranks. The number of tokens per rank is a power of two, rounded down to a
    multiple of the architecture's `chunk_multiple`, but is at least `chunk_multiple`.
    """
    max_tokens = max(1, CHUNK_VALUES // (rows * arch.model.vocab_size))
    multiple = arch.chunk_multiple
    power_of_two = min(MAX_CHUNK, 1 << (max_tokens.bit_length() - 1))
    return max(1, power_of_two // multiple) * multiple * ranks


def attention_at_eval(arch: Architecture) -> dict[str, str]:
    """Describe the attention outside training, for each letter in the layer pattern that has attention.

    A description names full attention, or a window or span with its size.
    """
    kinds = {letter: spec.attention_at_eval for letter, spec in zip(arch.letters, arch.specs, strict=True)}
    return {letter: kind for letter, kind in kinds.items() if kind is not None}


@torch.no_grad()
def effective_remembrance(
    model: Reader, tokens_BT: Tensor, ts: Sequence[int], chunk: int, advance: Advance = unheard
) -> list[Remembrance]:
    """Compute the distances between q(. | x_t:T) and q(. | x_0:T), averaged over rows, for each t in `ts`.

    All T tokens are read once. Then, for each t above 0, the last T - t tokens are read.
    """
    length = tokens_BT.shape[1]
    if wrong_ts := [t for t in ts if not 0 <= t < length]:
        raise ValueError(f"t must be in 0..{length - 1}, but ts has {wrong_ts}")
    all_read_BV = _next_token(model, tokens_BT, chunk, advance)
    measured = []
    for t in ts:
        if t:
            recent_BV = _next_token(model, tokens_BT[:, t:], chunk, advance)
        else:
            recent_BV = all_read_BV
        measured.append(Remembrance(t, *(d_B.mean().item() for d_B in distances(all_read_BV, recent_BV))))
    return measured


def distances(p_BV: Tensor, q_BV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute total variation, Jensen-Shannon (base 2) and cosine distance between distributions, each (B,)."""
    # the minimum avoids 0 / 0 for tokens with p = q = 0, which do not contribute
    middle_BV = ((p_BV + q_BV) / 2).clamp_min(torch.finfo(p_BV.dtype).tiny)
    divergence_B = sum(
        torch.xlogy(distribution_BV, distribution_BV / middle_BV).sum(-1) / 2 for distribution_BV in (p_BV, q_BV)
    )
    # clamped, because rounding may make a divergence negative
    bits_B = torch.as_tensor(divergence_B).clamp_min(0) / torch.log(p_BV.new_tensor(2.0))
    cosine_B = torch.cosine_similarity(p_BV, q_BV, dim=-1)
    return (p_BV - q_BV).abs().sum(-1) / 2, bits_B.sqrt(), (1 - cosine_B).clamp_min(0)


@torch.no_grad()
def state_deviation(
    model: Reader, tokens_BT: Tensor, step: int, chunk: int, advance: Advance = unheard
) -> list[Deviation]:
    """Measure the standard deviation of every layer's recurrent state, after every `step` tokens.

    A deviation is measured from the mean over the same rows and elements. The list is empty if no layer has a recurrent
    state.
    """
    length = tokens_BT.shape[1]
    positions = range(step, length + 1, step)
    measured = []

    def see(end: int, nothing: Tensor, states: States) -> None:
        if end in positions:
            own_moments = {layer: _moments(state["ssm"]) for layer, state in states.items() if "ssm" in state}
            for layer, moments_H3 in model.gather_layers(own_moments).items():
                measured.append(Deviation(end, layer, _deviations(moments_H3)))

    read_chunks(model, tokens_BT, sorted({*chunk_ends(chunk, length), *positions}), _nothing, see, advance)
    return measured


def _moments(h_BX: Tensor) -> Tensor:
    """Compute the mean and variance of each head's state (h is h_BHPN) or channel's state (h_BEN): (H or E, 3).

    The third column is the number of axes in h, from which `_deviations` sees whether h has heads or channels.
    """
    axes = (0, *range(2, h_BX.dim()))
    variance_H, mean_H = torch.var_mean(h_BX.double(), axes, correction=0)
    return torch.stack([mean_H, variance_H, torch.full_like(mean_H, h_BX.dim())], dim=1)


def _deviations(moments_H3: Tensor) -> tuple[float, ...]:
    """Compute each head's standard deviation, or for channels a single deviation over all channels.

    The variance over all channels is the mean of the channels' variances plus the variance of the channels' means.
    """
    mean_H, variance_H, axes_H = moments_H3.T
    if axes_H[0] == 4:
        return tuple(variance_H.sqrt().tolist())
    return ((variance_H.mean() + mean_H.var(correction=0)).sqrt().item(),)


def _next_token(model: Reader, tokens_BL: Tensor, chunk: int, advance: Advance) -> Tensor:
    """Compute the distribution over the token after each row, (B, V) in float64."""
    batch, length = tokens_BL.shape
    last_logits: list[Tensor] = []

    def wanted(start: int, end: int) -> Readout:
        if end < length:
            return EMPTY_READOUT
        return Readout(LanguageModel.next_logits, (batch, model.vocab_size), model.dtype)

    def see(end: int, logits_BV: Tensor, states: States) -> None:
        last_logits[:] = [logits_BV]

    read_chunks(model, tokens_BL, chunk_ends(chunk, length), wanted, see, advance)
    return torch.softmax(last_logits[0].double(), dim=-1)


def read_rows(model: Reader, tokens_BL: Tensor, chunk: int, advance: Advance) -> None:
    """Read the rows and discard the outputs, for callers that observe the inputs to ops."""
    read_chunks(model, tokens_BL, chunk_ends(chunk, tokens_BL.shape[1]), _nothing, lambda *seen: None, advance)


def _nothing(start: int, end: int) -> Readout:
    return EMPTY_READOUT


def chunk_ends(chunk: int, length: int) -> list[int]:
    """List the positions where a row's chunks end."""
    return [*range(chunk, length, chunk), length]


def read_chunks(
    model: Reader,
    tokens_BL: Tensor,
    ends: Iterable[int],
    wanted: Callable[[int, int], Readout],
    see: Callable[[int, Tensor, States], None],
    advance: Advance,
) -> None:
    """Read the rows in chunks that end at the positions `ends`.

    wanted: called with a chunk's start and end; returns the Readout, which computes the output
    see: called with a chunk's end, the output and the states

    This function takes the callback `see`, instead of being a generator, so that a chunk's output is freed before the
    next chunk is read.
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
