"""Entropies in nats that show how widely layers look (Samba, appendix C and Figure 5).

    attention   mean over rows, heads and the last queries i of   -sum_j a_ij log a_ij,   a_ij = softmax of s_ij over j
    selection   mean over rows and channels (Mamba-2: heads) of   -sum_t d_t log d_t,     d_t = delta_t / S

with the scores s_ij = q_i . k_j / sqrt(K) of the keys that a query sees, and a scan's step sizes delta_t, whose sum
over a row is S. Neither needs the weights themselves: as log a_ij = s_ij - lse_i and log d_t = log delta_t - log S,

    -sum_j a_ij log a_ij = lse_i - sum_j a_ij s_ij,       -sum_t d_t log d_t = log S - (sum_t delta_t log delta_t) / S

Scores are computed for some queries at a time, and step sizes are accumulated. An entropy is 0 if only one key or token
counts. At most it is the log of the number of keys or tokens (a uniform choice); this bound is reported too.

The ops' inputs are observed while the model reads as usual, so this works under any layout. Ranks that divide rows
observe their sequence shards, and their sums are added. Samba's figure uses texts from GSM8K; here rows are held-out
text.

Legend: B rows, L tokens of a chunk, H query heads, G key/value heads, A query heads of a group, K head size, S keys, Q
queries, E channels or heads of a scan.
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

from hybridtron.data.batch import RowShare, SeqInfo
from hybridtron.evaluate.length import Advance, read_rows, unheard
from hybridtron.mixers.base import Mixer, State
from hybridtron.model.generate import Reader
from hybridtron.ops.attention import AttentionInputs
from hybridtron.ops.attention.reference import visible_keys, with_memory
from hybridtron.ops.dispatch import Op, observed
from hybridtron.ops.precision import at_least_fp32
from hybridtron.ops.scan import ScanInputs
from hybridtron.ops.scan.reference import step_sizes
from hybridtron.ops.span import SpanInputs
from hybridtron.ops.span.reference import chosen_table, chunk_spans
from hybridtron.ops.ssd import SSDInputs
from hybridtron.parallel.context import WHOLE_ROWS, ContextGroup, tensors_of_all_shares

SCORES = 2**24  # largest number of scores in memory at a time
QUERIES = 256  # number of last queries in a row whose attention is measured

KINDS = ("attention", "selection")


class Entropy(NamedTuple):
    """A layer's mean entropy over heads or channels, the smallest and largest one, and the mean upper bound."""

    layer: int
    kind: str
    entropy: float
    least: float
    greatest: float
    bound: float


class Looked(NamedTuple):
    """Entropies by query, and the number of keys that each query sees."""

    entropy_BHQ: Tensor
    keys_BHQ: Tensor


def attention_entropy(inputs: AttentionInputs, first: int) -> Looked:
    """Compute attention's entropies for the chunk's queries from position `first` on."""
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
    return Looked(*(torch.cat(parts, dim=-1) for parts in zip(*looked_by_turn, strict=True)))


def span_entropy(inputs: SpanInputs, first: int) -> Looked:
    """Compute span attention's entropies for the row's queries from position `first` on.

    A query sees the keys before it in its own span chunk, and the blocks chosen for that chunk.
    """
    q_BLHK, k_BSGK, _, cut, chosen = inputs
    batch, length, heads, _ = q_BLHK.shape
    looked = Looked(*(q_BLHK.new_zeros(batch, heads, length, dtype=torch.float64) for _ in range(2)))
    for segment, chosen_RGTC in zip(cut.segments, chosen, strict=True):
        segment_keys = segment.keys(length, k_BSGK.shape[1])
        k_RSGK = k_BSGK[segment.rows, segment_keys]
        places_S = torch.arange(k_RSGK.shape[1], device=k_RSGK.device)
        num_scores = len(k_RSGK) * heads * len(places_S)
        if chosen_RGTC is None:
            table = None
        else:
            table = chosen_table(chosen_RGTC, int(places_S[-1]) // cut.block + 1)
        for number, span in enumerate(chunk_spans(cut, segment, segment.kept - segment.start, len(places_S))):
            for start, stop in _turns(max(first, span.queries.start), span.queries.stop, num_scores):
                places_Q = torch.arange(start, stop, device=places_S.device) - segment.start + segment.kept
                visible = ((places_S >= span.keys.start) & (places_S <= places_Q[:, None]))[None, None]
                if table is not None:
                    visible = visible | table[:, :, number, places_S // cut.block][:, :, None]
                part = _looked(q_BLHK[segment.rows, start:stop], k_RSGK, visible[:, :, None])
                for full, values in zip(looked, part, strict=True):
                    full[segment.rows, :, start:stop] = values
    return Looked(*(full[..., first:] for full in looked))


def _turns(first: int, length: int, scores: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of queries to process together; each query has `scores` scores over all rows and heads."""
    num_queries = max(1, SCORES // scores)
    for start in range(first, length, num_queries):
        yield start, min(start + num_queries, length)


def _looked(q_BQHK: Tensor, k_BSGK: Tensor, visible_BGAQS: Tensor) -> Looked:
    """Compute the entropies for a few queries."""
    q_BQGAK = at_least_fp32(q_BQHK).unflatten(2, (k_BSGK.shape[2], -1))
    scores_BGAQS = torch.einsum("bqgak,bsgk->bgaqs", q_BQGAK, at_least_fp32(k_BSGK)) * q_BQHK.shape[-1] ** -0.5
    lse_BGAQ1 = scores_BGAQS.masked_fill(~visible_BGAQS, -torch.inf).logsumexp(-1, keepdim=True)
    weights_BGAQS = torch.where(visible_BGAQS, (scores_BGAQS - lse_BGAQ1).exp(), 0.0)
    # clamped, because rounding may make it negative
    entropy_BGAQ = (lse_BGAQ1[..., 0] - (weights_BGAQS * scores_BGAQS).sum(-1)).clamp_min(0)
    keys_BGAQ = visible_BGAQS.sum(-1).expand_as(entropy_BGAQ)
    return Looked(*(x.flatten(1, 2).double() for x in (entropy_BGAQ, keys_BGAQ)))


@dataclass
class Attending:
    """A layer's accumulated attention entropies, for queries from position `first` in the rows on."""

    first: int
    read: int = 0
    sums: dict[int, Tensor] = field(default_factory=dict)  # by shift, (heads, 3): entropy, bound, queries

    def add(self, inputs: AttentionInputs | SpanInputs, share: RowShare | None = None, counts: bool = True) -> None:
        """Add a chunk, or its sequence shard. Without `counts`, only update the number of tokens read."""
        length = inputs.q_BLHK.shape[1]
        if isinstance(inputs, SpanInputs):
            tokens_before = inputs.cut.segments[0].seen
            if counts and tokens_before + length > self.first:
                self._add(inputs.cut.shift, span_entropy(inputs, max(0, self.first - tokens_before)))
            return
        if share is None:
            begin = self.read
        else:
            begin = self.read + share.first
        if counts and begin + length > self.first:
            self._add(0, attention_entropy(inputs, max(0, self.first - begin)))
        self.read += length if share is None else length * share.size

    def _add(self, shift: int, looked: Looked) -> None:
        """Add each head's sums over rows and queries."""
        entropy_BHQ, keys_BHQ = looked
        ones_BHQ = torch.ones_like(entropy_BHQ)
        sums_H3 = torch.stack([x.sum((0, 2)) for x in (entropy_BHQ, keys_BHQ.log(), ones_BHQ)], dim=1)
        self.sums[shift] = self.sums.get(shift, 0) + sums_H3

    def tensors(self) -> dict[str, Tensor]:
        """List by name the tensors that are summed over ranks."""
        return {str(shift): sums_H3 for shift, sums_H3 in self.sums.items()}

    def with_tensors(self, found: Mapping[str, Tensor]) -> Attending:
        """Return a copy that has sums over all ranks instead."""
        return replace(self, sums={int(shift): sums_H3 for shift, sums_H3 in found.items()})

    def means(self) -> Tensor:
        """Return each head's entropy, bound and kind, (H, 3)."""
        sums_H3 = torch.cat(list(self.sums.values()))
        return torch.cat([sums_H3[:, :2] / sums_H3[:, 2:], torch.zeros_like(sums_H3[:, :1])], dim=1)


@dataclass
class Selecting:
    """The accumulated step sizes of a layer's scan."""

    tokens: int = 0
    sum_BE: Tensor | float = 0.0
    logs_BE: Tensor | float = 0.0

    def add(self, inputs: ScanInputs | SSDInputs) -> None:
        """Add a chunk's step sizes."""
        if isinstance(inputs, ScanInputs):
            bias = inputs.dt_bias_E
        else:
            bias = inputs.dt_bias_H
        delta_BLE = step_sizes(inputs[1], bias).double()
        self.tokens += delta_BLE.shape[1]
        self.sum_BE = self.sum_BE + delta_BLE.sum(1)
        self.logs_BE = self.logs_BE + torch.xlogy(delta_BLE, delta_BLE).sum(1)

    def tensors(self) -> dict[str, Tensor]:
        """List by name the tensors that are summed over ranks."""
        sums = {"sum": torch.as_tensor(self.sum_BE), "logs": torch.as_tensor(self.logs_BE)}
        return {"tokens": torch.tensor(self.tokens), **sums}

    def with_tensors(self, found: Mapping[str, Tensor]) -> Selecting:
        """Return a copy that has sums over all ranks instead."""
        return Selecting(int(found["tokens"]), found["sum"], found["logs"])

    def means(self) -> Tensor:
        """Return each channel's entropy, bound and kind, (E, 3)."""
        sum_BE = torch.as_tensor(self.sum_BE)
        entropy_E = (sum_BE.log() - self.logs_BE / sum_BE).clamp_min(0).mean(0)
        bound_E = torch.full_like(entropy_E, math.log(self.tokens))
        return torch.stack([entropy_E, bound_E, torch.ones_like(entropy_E)], dim=1)


Observed = TypeVar("Observed", Attending, Selecting)


@dataclass
class Looking:
    """An observer of a model's ops that accumulates entropies by layer while the model reads."""

    first: int
    context: ContextGroup = WHOLE_ROWS
    layer: int = 0
    selects: bool = False
    share: RowShare | None = None
    attending: dict[int, Attending] = field(default_factory=dict)
    selecting: dict[int, Selecting] = field(default_factory=dict)

    def enter(self, layer: int, mixer: Mixer, arguments: tuple[Tensor, State | None, SeqInfo]) -> None:
        """Note which layer's mixer runs next. This is a forward pre-hook on every mixer."""
        self.layer = layer
        self.selects = mixer.selects
        self.share = arguments[2].share

    def observe(self, op: Op[Any, Any], inputs: Any) -> None:
        """Add an op's inputs to its layer's sums.

        Inputs that all ranks read alike count only on the last rank. Under context parallelism a scan runs twice over
        its shard: first from zeros, which does not count, and then from its initial state.
        """
        counts = self.share is not None or self.context.rank == self.context.size - 1
        if isinstance(inputs, AttentionInputs | SpanInputs):
            self.attending.setdefault(self.layer, Attending(self.first)).add(inputs, self.share, counts)
        elif isinstance(inputs, ScanInputs | SSDInputs) and self.selects:
            seen = self.selecting.setdefault(self.layer, Selecting())
            if isinstance(inputs, ScanInputs):
                state = inputs.state_BEN
            else:
                state = inputs.state_BHPN
            if counts and (self.share is None or state is not None):
                seen.add(inputs)

    def of_all_shares(self) -> dict[int, Tensor]:
        """Return entropy, bound and kind by layer, over full rows."""
        return _means(self.attending, self.context) | _means(self.selecting, self.context)


def _means(seen: Mapping[int, Observed], context: ContextGroup) -> dict[int, Tensor]:
    """Sum over the ranks that share the rows, and return means by layer."""
    tensors_by_name = {
        f"{layer} {name}": tensor for layer, layer_sums in seen.items() for name, tensor in layer_sums.tensors().items()
    }
    total: dict[int, dict[str, Tensor]] = {layer: {} for layer in seen}
    for share in tensors_of_all_shares(tensors_by_name, context):
        for key, tensor in share.items():
            layer, name = key.split()
            layer_total = total[int(layer)]
            if name in layer_total:
                layer_total[name] = layer_total[name] + tensor
            else:
                layer_total[name] = tensor
    return {layer: layer_sums.with_tensors(total[layer]).means() for layer, layer_sums in seen.items()}


def entropies(
    model: Reader, tokens_BL: Tensor, chunk: int, advance: Advance = unheard, queries: int = QUERIES
) -> list[Entropy]:
    """Measure every layer with attention or a selecting scan. The model's ranks call this together."""
    looking = Looking(max(0, tokens_BL.shape[1] - queries), model.context)
    with ExitStack() as stack, torch.no_grad():
        for index, mixer in _mixers(model.parts):
            stack.callback(mixer.register_forward_pre_hook(partial(looking.enter, index)).remove)
        stack.enter_context(observed(looking.observe))
        read_rows(model, tokens_BL, chunk, advance)
    return [_of_layer(layer, means_H3) for layer, means_H3 in sorted(model.of_all(looking.of_all_shares()).items())]


def _mixers(parts: Sequence[Any]) -> Iterator[tuple[int, nn.Module]]:
    """Yield each layer's index and mixer."""
    for part in parts:
        for index, layer in part.layers.items():
            yield int(index), layer.mixer


def _of_layer(layer: int, means_H3: Tensor) -> Entropy:
    """Summarize the entropies over a layer's heads or channels."""
    entropy_H, bound_H, kind_H = means_H3.T
    least, greatest = entropy_H.aminmax()
    kind = KINDS[int(kind_H[0])]
    return Entropy(layer, kind, *(x.item() for x in (entropy_H.mean(), least, greatest, bound_H.mean())))
