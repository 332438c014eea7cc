"""Entropies for attention weights and for Mamba's step sizes, in nats (Samba, appendix C and Figure 5).

    attention   -sum_j a_ij log a_ij   the mean over rows, heads and the last 256 queries i in each row
    selection   -sum_t d_t log d_t     the mean over rows and channels (in Mamba-2, over rows and heads)

- a_ij: key j's attention weight for query i, the softmax over j of the scores s_ij = q_i . k_j / sqrt(K)
- d_t = delta_t / D: token t's step size delta_t in a selective scan (Mamba, Mamba-2), divided by the row's sum
  D = sum_t delta_t

An entropy is 0 if a single key or token has all the weight. It is largest if all weights are equal: then it is log n
for n keys or tokens. This upper bound is reported too. Samba's figure uses texts from GSM8K; here the rows are held-out
text.

With lse_i = log sum_j exp(s_ij), both entropies follow from sums that can be accumulated over a row's chunks:

    -sum_j a_ij log a_ij = lse_i - sum_j a_ij s_ij
    -sum_t d_t log d_t   = log D - (sum_t delta_t log delta_t) / D

The inputs to attention and scans are observed while the model reads a row chunk by chunk. Under context parallelism
each rank observes its own tokens, and all ranks' sums are added.

Legend: B rows, L tokens per chunk, H query heads, G key/value heads, A query heads per key/value head, K head size,
S keys, Q queries, E channels or heads per scan, R rows per segment in span attention. In `chosen_RGTC`, T stands for
span chunks and C for chosen blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from hybridtron.data.batch import SeqInfo, SequenceShard
from hybridtron.evaluate.length import Advance, read_rows, unheard
from hybridtron.inference.reader import Reader
from hybridtron.mixers.base import Mixer, State
from hybridtron.ops.attention import AttentionInputs
from hybridtron.ops.attention.reference import visible_keys, with_memory
from hybridtron.ops.dispatch import Op, observed
from hybridtron.ops.precision import at_least_fp32
from hybridtron.ops.scan import ScanInputs
from hybridtron.ops.scan.reference import step_sizes
from hybridtron.ops.span import SpanInputs
from hybridtron.ops.span.reference import chosen_table, chunk_spans
from hybridtron.ops.ssd import SSDInputs
from hybridtron.parallel.context import tensors_of_all_shards
from hybridtron.parallel.mesh import ONE_RANK, RankGroup

SCORES = 2**24  # largest number of attention scores in memory at a time
QUERIES = 256  # number of queries at a row's end whose attention is measured

KINDS = ("attention", "selection")


class Entropy(NamedTuple):
    """A layer's mean, smallest and largest entropy over its heads or channels, and the mean upper bound."""

    layer: int
    kind: str
    entropy: float
    least: float
    greatest: float
    bound: float


class Looked(NamedTuple):
    """Each query's entropy, and the number of keys that the query sees."""

    entropy_BHQ: Tensor
    keys_BHQ: Tensor


def attention_entropy(inputs: AttentionInputs, first: int) -> Looked:
    """Compute the entropies for a chunk's queries from index `first` on."""
    keys = with_memory(inputs)
    batch, length, heads, _ = inputs.q_BLHK.shape
    num_keys = keys.keys_BSGK.shape[1]
    looked_by_turn = []
    for start, stop in _turns(first, length, batch * heads * num_keys):
        end_key = num_keys - length + stop
        if inputs.window is None:
            first_key = 0
        else:
            first_key = max(0, end_key - (stop - start) - inputs.window + 1)
        visible = visible_keys(keys, first_key, end_key, stop - start, inputs.window)
        if visible.dim() == 4:
            visible_BGAQS = visible[:, :, None]
        else:
            visible_BGAQS = visible
        looked_by_turn.append(
            _looked(inputs.q_BLHK[:, start:stop], keys.keys_BSGK[:, first_key:end_key], visible_BGAQS)
        )
    return Looked(
        torch.cat([looked.entropy_BHQ for looked in looked_by_turn], dim=-1),
        torch.cat([looked.keys_BHQ for looked in looked_by_turn], dim=-1),
    )


def span_entropy(inputs: SpanInputs, first: int) -> Looked:
    """Compute span attention's entropies for the queries from index `first` on.

    Span attention divides a row into span chunks, and chooses for each span chunk some blocks of earlier keys. A query
    sees the chosen blocks, and the keys in its own span chunk up to its own position.
    """
    q_BLHK, k_BSGK, _, cut, chosen = inputs
    batch, length, heads, _ = q_BLHK.shape
    looked = Looked(*(q_BLHK.new_zeros(batch, heads, length, dtype=torch.float64) for _ in range(2)))
    for segment, chosen_RGTC in zip(cut.segments, chosen, strict=True):
        segment_keys = segment.keys(length, k_BSGK.shape[1])
        k_RSGK = k_BSGK[segment.rows, segment_keys]
        positions_S = torch.arange(k_RSGK.shape[1], device=k_RSGK.device)
        num_scores = len(k_RSGK) * heads * len(positions_S)
        if chosen_RGTC is None:
            table = None
        else:
            table = chosen_table(chosen_RGTC, int(positions_S[-1]) // cut.block + 1)
        for number, span in enumerate(chunk_spans(cut, segment, segment.kept - segment.start, len(positions_S))):
            for start, stop in _turns(max(first, span.queries.start), span.queries.stop, num_scores):
                positions_Q = torch.arange(start, stop, device=positions_S.device) - segment.start + segment.kept
                visible = ((positions_S >= span.keys.start) & (positions_S <= positions_Q[:, None]))[None, None]
                if table is not None:
                    visible = visible | table[:, :, number, positions_S // cut.block][:, :, None]
                part = _looked(q_BLHK[segment.rows, start:stop], k_RSGK, visible[:, :, None])
                for full, values in zip(looked, part, strict=True):
                    full[segment.rows, :, start:stop] = values
    return Looked(*(full[..., first:] for full in looked))


def _turns(first: int, length: int, scores: int) -> Iterator[tuple[int, int]]:
    """Yield query ranges (start, stop) to process together, so that at most `SCORES` scores are in memory.

    `scores` is the number of scores that one query position has, over all rows, heads and keys.
    """
    num_queries = max(1, SCORES // scores)
    for start in range(first, length, num_queries):
        yield start, min(start + num_queries, length)


def _looked(q_BQHK: Tensor, k_BSGK: Tensor, visible_BGAQS: Tensor) -> Looked:
    """Compute each query's entropy, lse_i - sum_j a_ij s_ij, and how many keys the query sees."""
    q_BQGAK = at_least_fp32(q_BQHK).unflatten(2, (k_BSGK.shape[2], -1))
    scores_BGAQS = torch.einsum("bqgak,bsgk->bgaqs", q_BQGAK, at_least_fp32(k_BSGK)) * q_BQHK.shape[-1] ** -0.5
    lse_BGAQ1 = scores_BGAQS.masked_fill(~visible_BGAQS, -torch.inf).logsumexp(-1, keepdim=True)
    weights_BGAQS = torch.where(visible_BGAQS, (scores_BGAQS - lse_BGAQ1).exp(), 0.0)
    # clamped, because rounding may make an entropy negative
    entropy_BGAQ = (lse_BGAQ1[..., 0] - (weights_BGAQS * scores_BGAQS).sum(-1)).clamp_min(0)
    keys_BGAQ = visible_BGAQS.sum(-1).expand_as(entropy_BGAQ)
    return Looked(*(x.flatten(1, 2).double() for x in (entropy_BGAQ, keys_BGAQ)))


@dataclass
class Attending:
    """A layer's accumulated attention entropies, over the queries from position `first` on.

    read: how many tokens in each row were read so far
    sums: shift -> (H, 3): for each head with this shift, the sum of entropies, the sum of upper bounds and the number
        of queries. In span attention a head's shift is the shift of its span chunks. In other attention the shift is 0.
    """

    first: int
    read: int = 0
    sums: dict[int, Tensor] = field(default_factory=dict)

    def add(
        self, inputs: AttentionInputs | SpanInputs, shard: SequenceShard | None = None, counts: bool = True
    ) -> None:
        """Add a chunk's queries, or only the queries in this rank's shard of the chunk.

        If `counts` is False, only the number of tokens read is updated.
        """
        length = inputs.q_BLHK.shape[1]
        if isinstance(inputs, SpanInputs):
            tokens_before = inputs.cut.segments[0].seen
            if counts and tokens_before + length > self.first:
                self._add(inputs.cut.shift, span_entropy(inputs, max(0, self.first - tokens_before)))
            return
        if shard is None:
            begin = self.read
        else:
            begin = self.read + shard.first
        if counts and begin + length > self.first:
            self._add(0, attention_entropy(inputs, max(0, self.first - begin)))
        self.read += length if shard is None else length * shard.size

    def _add(self, shift: int, looked: Looked) -> None:
        """Add sums over rows and queries to the sums of the heads with this shift."""
        entropy_BHQ, keys_BHQ = looked
        ones_BHQ = torch.ones_like(entropy_BHQ)
        sums_H3 = torch.stack([x.sum((0, 2)) for x in (entropy_BHQ, keys_BHQ.log(), ones_BHQ)], dim=1)
        self.sums[shift] = self.sums.get(shift, 0) + sums_H3

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to sum over the ranks, by name."""
        return {str(shift): sums_H3 for shift, sums_H3 in self.sums.items()}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Attending:
        """Return a copy with the sums over all ranks; `tensors` has them under the names that `tensors()` gives."""
        return replace(self, sums={int(shift): sums_H3 for shift, sums_H3 in tensors.items()})

    def means(self) -> Tensor:
        """Return (H, 3): each head's mean entropy, its mean upper bound, and 0, the index of `attention` in KINDS."""
        sums_H3 = torch.cat(list(self.sums.values()))
        return torch.cat([sums_H3[:, :2] / sums_H3[:, 2:], torch.zeros_like(sums_H3[:, :1])], dim=1)


@dataclass
class Selecting:
    """The accumulated step sizes delta of a layer's scan, for each row and channel (or head).

    tokens: how many tokens were read
    sum_BE: delta, summed over tokens
    logs_BE: delta log delta, summed over tokens
    """

    tokens: int = 0
    sum_BE: Tensor | float = 0.0
    logs_BE: Tensor | float = 0.0

    def add(self, inputs: ScanInputs | SSDInputs) -> None:
        """Add a chunk's step sizes, or only the step sizes in this rank's shard of the chunk."""
        if isinstance(inputs, ScanInputs):
            bias = inputs.dt_bias_E
        else:
            bias = inputs.dt_bias_H
        delta_BLE = step_sizes(inputs[1], bias).double()
        self.tokens += delta_BLE.shape[1]
        self.sum_BE = self.sum_BE + delta_BLE.sum(1)
        self.logs_BE = self.logs_BE + torch.xlogy(delta_BLE, delta_BLE).sum(1)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to sum over the ranks, by name."""
        sums = {"sum": torch.as_tensor(self.sum_BE), "logs": torch.as_tensor(self.logs_BE)}
        return {"tokens": torch.tensor(self.tokens), **sums}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Selecting:
        """Return a copy with the sums over all ranks; `tensors` has them under the names that `tensors()` gives."""
        return Selecting(int(tensors["tokens"]), tensors["sum"], tensors["logs"])

    def means(self) -> Tensor:
        """Return (E, 3): each channel's mean entropy, its upper bound, and 1, the index of `selection` in KINDS."""
        sum_BE = torch.as_tensor(self.sum_BE)
        entropy_E = (sum_BE.log() - self.logs_BE / sum_BE).clamp_min(0).mean(0)
        bound_E = torch.full_like(entropy_E, math.log(self.tokens))
        return torch.stack([entropy_E, bound_E, torch.ones_like(entropy_E)], dim=1)


Observed = TypeVar("Observed", Attending, Selecting)


@dataclass
class Looking:
    """Observer of attention and scans. It accumulates each layer's sums while the model reads.

    first: position of the first query whose attention is measured
    context: the ranks of context parallelism
    layer: the running layer's index
    has_selective_steps: whether this layer's step sizes depend on the tokens
    shard: this rank's tokens in the chunk; None if the ranks do not divide the tokens
    attending, selecting: layer's index -> accumulated sums
    """

    first: int
    context: RankGroup = ONE_RANK
    layer: int = 0
    has_selective_steps: bool = False
    shard: SequenceShard | None = None
    attending: dict[int, Attending] = field(default_factory=dict)
    selecting: dict[int, Selecting] = field(default_factory=dict)

    def enter(self, layer: int, mixer: Mixer, arguments: tuple[Tensor, State | None, SeqInfo]) -> None:
        """Store the index of the layer that runs next. This is a forward pre-hook of every layer's mixer."""
        self.layer = layer
        self.has_selective_steps = mixer.has_selective_steps
        self.shard = arguments[2].shard

    def observe(self, op: Op[Any, Any], inputs: Any) -> None:
        """Add the inputs of an op (attention or scan) to the sums of the layer that is running.

        If the ranks do not divide the tokens, all ranks observe the same inputs. Then only the last rank counts them.
        If the ranks divide the tokens, a scan runs twice: first without an initial state, then with the final state of
        the previous rank. Only the second scan counts.
        """
        counts = self.shard is not None or self.context.rank == self.context.size - 1
        if isinstance(inputs, AttentionInputs | SpanInputs):
            self.attending.setdefault(self.layer, Attending(self.first)).add(inputs, self.shard, counts)
        elif isinstance(inputs, ScanInputs | SSDInputs) and self.has_selective_steps:
            selecting = self.selecting.setdefault(self.layer, Selecting())
            if isinstance(inputs, ScanInputs):
                state = inputs.state_BEN
            else:
                state = inputs.state_BHPN
            if counts and (self.shard is None or state is not None):
                selecting.add(inputs)

    def all_gather_shards(self) -> dict[int, Tensor]:
        """Sum over the ranks that divide the tokens, and return each layer's `means()`.

        All these ranks call this together.
        """
        return _means(self.attending, self.context) | _means(self.selecting, self.context)


def _means(sums_by_layer: Mapping[int, Observed], context: RankGroup) -> dict[int, Tensor]:
    """Sum each layer's tensors over the ranks in `context`, and return each layer's `means()`."""
    tensors_by_name = {
        f"{layer} {name}": tensor
        for layer, layer_sums in sums_by_layer.items()
        for name, tensor in layer_sums.tensors().items()
    }
    total: dict[int, dict[str, Tensor]] = {layer: {} for layer in sums_by_layer}
    for shard in tensors_of_all_shards(tensors_by_name, context):
        for key, tensor in shard.items():
            layer, name = key.split()
            layer_total = total[int(layer)]
            if name in layer_total:
                layer_total[name] = layer_total[name] + tensor
            else:
                layer_total[name] = tensor
    return {layer: layer_sums.with_tensors(total[layer]).means() for layer, layer_sums in sums_by_layer.items()}


def entropies(
    model: Reader, tokens_BL: Tensor, chunk: int, advance: Advance = unheard, queries: int = QUERIES
) -> list[Entropy]:
    """Measure every layer with attention or a selective scan. All ranks of the model call this together.

    chunk: how many tokens are read at a time
    queries: how many queries to measure at the end of each row
    """
    looking = Looking(max(0, tokens_BL.shape[1] - queries), model.context)
    with ExitStack() as stack, torch.no_grad():
        for index, mixer in _mixers(model.parts):
            stack.callback(mixer.register_forward_pre_hook(partial(looking.enter, index)).remove)
        stack.enter_context(observed(looking.observe))
        read_rows(model, tokens_BL, chunk, advance)
    return [
        _of_layer(layer, means_H3)
        for layer, means_H3 in sorted(model.gather_layers(looking.all_gather_shards()).items())
    ]


def _mixers(parts: Sequence[Any]) -> Iterator[tuple[int, nn.Module]]:
    """Yield each layer's index and its mixer (attention, scan, MLP, ...)."""
    for part in parts:
        for index, layer in part.layers.items():
            yield int(index), layer.mixer


def _of_layer(layer: int, means_H3: Tensor) -> Entropy:
    """Summarize the entropies over a layer's heads or channels."""
    entropy_H, bound_H, kind_H = means_H3.T
    least, greatest = entropy_H.aminmax()
    kind = KINDS[int(kind_H[0])]
    return Entropy(layer, kind, *(x.item() for x in (entropy_H.mean(), least, greatest, bound_H.mean())))
