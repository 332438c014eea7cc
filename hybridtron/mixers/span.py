"""Span-expanded attention mixer (equations and options in `architecture/span.py`).

In training, each chunk of tokens attends to itself and to selected blocks from the past. Outside training the mixer
computes full attention with keys and values as its state, unless the option `eval` is `span`.

Legend: B rows (sequences), L tokens, H query heads, G key/value heads, K channels per head, M carried tokens, S carried
and new tokens together, P blocks, T or N earlier queries (`block` - 1 of them).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.span import SpanSpec
from hybridtron.data.batch import SeqInfo, SequenceShard
from hybridtron.mixers.attention import Heads
from hybridtron.mixers.base import State
from hybridtron.ops.attention import AttentionMemory, joined, remember
from hybridtron.ops.dispatch import untraced
from hybridtron.ops.precision import at_least_fp32
from hybridtron.ops.span import (
    CarriedBlocks,
    ChoiceRule,
    SpanCut,
    SpanInputs,
    SpanPast,
    SpanSegment,
    Whole,
    behind,
    choose_at_random,
    choose_by_relevance,
    known_of,
    own_blocks,
    query_sums,
    span_attention,
    summaries,
)
from hybridtron.parallel.context import all_reduce_shards, halo_kv, halo_tokens
from hybridtron.parallel.linear import TensorGroup

LANDMARK_SEED = 20_241_217


class SpanAttention(Heads):
    """Span-expanded attention.

    State:

        keys, values    (B, M, G, K), for the last tokens; the keys are rotated
        length          (B,), how many tokens the current document has so far
        summaries       (B, U, H, K) in fp32, summaries of the last U complete blocks
        sums            (B, V, H, K) in fp32, each block's sum of queries, for the last V complete blocks
        queries         (B, block - 1, H, K), queries of the unfinished block

    `summaries`, `sums` and `queries` exist only if relevance selects blocks. In training, the state covers the current
    chunk and the `remember` tokens before the chunk; outside training, it covers the full document.
    """

    def __init__(self, spec: SpanSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__(spec, sizes, tensor)
        self.spec = spec
        self.layer = sizes.layer
        head_count = tensor.share(spec.heads)
        self.own_heads = slice(tensor.rank * head_count, (tensor.rank + 1) * head_count)
        used = tensor.groups_used(spec.heads, spec.groups())
        if isinstance(used, slice):
            self.own_groups = list(range(used.start, used.stop))
        else:
            self.own_groups = used

    @untraced  # shapes and the number of ops depend on document boundaries and on the drawn chunk size
    def attend(
        self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, before: State, seq: SeqInfo
    ) -> tuple[Tensor, State]:
        if seq.key is None and self.spec.eval == "full":
            return self.attend_within(None, q_BLHK, k_BLGK, v_BLGK, before, seq)
        chunk = self._chunk(seq)
        remembered = self.spec.remembered(training=seq.key is not None)
        if "keys" in before:
            memory = AttentionMemory(before["keys"], before["values"], before["length"])
        else:
            memory = None
        if memory is None:
            seen_counts = [0] * len(q_BLHK)
        else:
            seen_counts = memory.length_B.tolist()
        counts = [(count, self._kept(count, chunk, remembered)) for count in seen_counts]
        rows = SpanCut(chunk, self.spec.block, self._segments(seq, counts))
        if self.spec.retrieves:
            reach = None
        else:
            reach = max(self.spec.chunks()) + 1
        memory = halo_kv(k_BLGK, v_BLGK, reach, memory, seq)
        k_BSGK, v_BSGK = joined(memory, k_BLGK, v_BLGK)
        if self.spec.memory == "shifted":
            y_BLHK = self._shifted(q_BLHK, k_BSGK, v_BSGK, self._own(rows, [], seq)[0])
            new = State()
        else:
            chosen, new = self._chosen(rows, (q_BLHK, k_BSGK, v_BSGK), before, seq)
            y_BLHK = span_attention(SpanInputs(q_BLHK, k_BSGK, v_BSGK, *self._own(rows, chosen, seq)))
        if not seq.carried:
            return y_BLHK, {}
        if remembered is None:
            keep = None
        else:
            keep = remembered + max(self.spec.chunks())
        memory_after = remember(memory, k_BLGK, v_BLGK, seq.documents_BL, keep)
        length = q_BLHK.shape[1] * (1 if seq.shard is None else seq.shard.size)
        ends = {row: s.end_place for s in rows.segments if s.stop == length for row in _numbers(s.rows)}
        length_B = torch.tensor([ends[row] for row in range(len(q_BLHK))])
        length_B = length_B.to(q_BLHK.device, non_blocking=True)  # the host does not wait for this copy
        return y_BLHK, {**new, "keys": memory_after.keys_BMGK, "values": memory_after.values_BMGK, "length": length_B}

    def _chunk(self, seq: SeqInfo) -> int:
        """Return the chunk size.

        In training, it is drawn for each micro-batch, or with `draw: layer` for each micro-batch and layer. Outside
        training, it is the largest size.
        """
        sizes = self.spec.chunks()
        if seq.key is None:
            return max(sizes)
        return sizes[seq.number(f"chunk/{self.layer}" if self.spec.draw == "layer" else "chunk") % len(sizes)]

    def _segments(self, seq: SeqInfo, before: Sequence[tuple[int, int]]) -> list[SpanSegment]:
        """Return segments of consecutive tokens, one for each document in a row.

        `before` has two numbers for each row, about the row's first document: how many of the document's tokens came
        before the row, and how many of these tokens the row may read. If all rows have equal document boundaries and
        equal numbers, each segment covers all rows.
        """
        rows = [
            [(start, stop, *(before[row] if start == 0 else (0, 0))) for start, stop in spans]
            for row, spans in enumerate(seq.spans() if seq.shard is None else seq.shard.spans)
        ]
        if all(row == rows[0] for row in rows):
            return [SpanSegment(slice(0, len(rows)), *span) for span in rows[0]]
        return [SpanSegment(slice(number, number + 1), *span) for number, row in enumerate(rows) for span in row]

    def _kept(self, seen: int, chunk: int, remembered: int | None) -> int:
        """Return how many earlier tokens a row may read.

        `seen` is how many tokens the row's first document has before the row. If `remembered` is None, the row may read
        all of them. Otherwise it may read the earlier tokens in the chunk that it continues, and the `remembered`
        tokens before this chunk. With `memory: shifted` it may read the last `chunk` tokens.
        """
        if remembered is None:
            return seen
        if self.spec.memory == "shifted":
            return min(seen, chunk)
        return seen - max(0, seen // chunk * chunk - remembered)

    def _own(
        self, rows: SpanCut, chosen: Sequence[Tensor | None], seq: SeqInfo
    ) -> tuple[SpanCut, Sequence[Tensor | None]]:
        """Return the segments' parts in this rank's sequence shard, and the blocks chosen for the chunks in the parts.

        `rows` has the segments of the full rows, and `chosen` has the chosen blocks for each segment. A sequence shard
        is the part of every row that a context-parallel rank holds.
        """
        shard = seq.shard
        if shard is None:
            return rows, chosen
        segments = []
        choices = []
        for number, segment in enumerate(rows.segments):
            start = max(segment.start, shard.first)
            stop = min(segment.stop, shard.first + shard.length)
            if start >= stop:
                continue
            seen_count, kept_count = (before + start - segment.start for before in (segment.seen, segment.kept))
            if not self.spec.retrieves:
                kept_count = min(kept_count, self._kept(seen_count, rows.chunk, 0))
            own_segment = SpanSegment(segment.rows, start - shard.first, stop - shard.first, seen_count, kept_count)
            segments.append(own_segment)
            if chosen:
                chunks = rows.chunks(own_segment)
                first = rows.chunks(segment).start
                blocks = chosen[number]
                choices.append(None if blocks is None else blocks[:, :, chunks.start - first : chunks.stop - first])
        return rows._replace(segments=segments), choices

    def _chosen(
        self, cut: SpanCut, heads: tuple[Tensor, Tensor, Tensor], before: State, seq: SeqInfo
    ) -> tuple[list[Tensor | None], State]:
        """Return the blocks that each chunk of the full rows reads, and the state parts for later selections."""
        q_BLHK, k_BSGK, _ = heads
        if self.spec.memory == "none":
            return [None] * len(cut.segments), {}
        if self.spec.memory == "random":
            key = seq.number(f"blocks/{self.layer}")
            return choose_at_random(cut, self.spec.blocks, key, self.own_groups, q_BLHK.device), {}
        if self.spec.memory == "landmark":
            landmarks_HK = self._landmarks(q_BLHK)
        else:
            landmarks_HK = None
        rule = ChoiceRule(self.spec.blocks, self.spec.relevance == "previous_chunk", landmarks_HK)
        if "summaries" in before:
            past = SpanPast(before["queries"], before["summaries"], before["sums"])
        else:
            past = None
        carried = CarriedBlocks(*self.spec.carried_blocks(self.spec.remembered(training=seq.key is not None)))
        past_of = partial(known_of, cut, rule, heads, past)
        length = q_BLHK.shape[1]
        if seq.shard is not None:
            q_BTHK = halo_tokens(q_BLHK.detach(), cut.block - 1, before.get("queries"), seq)
            assert q_BTHK is not None
            past_of = partial(known_of_shards, cut, rule, (q_BTHK, *heads), past, seq.shard)
            length *= seq.shard.size
        chosen, after = choose_by_relevance(cut, rule, Whole(length, k_BSGK.shape[2], past_of), carried)
        return chosen, {"queries": after.queries_BNHK, "summaries": after.summaries_BPHK, "sums": after.sums_BPHK}

    def _landmarks(self, q_BLHK: Tensor) -> Tensor:
        """Return a random vector for each head on this rank; it depends only on the layer and the head."""
        generator = torch.Generator().manual_seed(LANDMARK_SEED + self.layer)
        whole_HK = torch.randn(self.spec.heads, q_BLHK.shape[-1], generator=generator)
        return whole_HK[self.own_heads].to(q_BLHK.device, non_blocking=True)

    def _shifted(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, rows: SpanCut) -> Tensor:
        """Attend within chunks; for the second half of all heads, chunks begin half a chunk earlier.

        Heads are counted over all tensor-parallel ranks.
        """
        queries_per_key = q_BLHK.shape[2] // k_BSGK.shape[2]
        k_BSHK, v_BSHK = (x.repeat_interleave(queries_per_key, dim=2) for x in (k_BSGK, v_BSGK))
        unmoved = min(max(self.spec.heads // 2 - self.own_heads.start, 0), q_BLHK.shape[2])
        halves = ((slice(0, unmoved), 0), (slice(unmoved, None), rows.chunk // 2))
        nothing = [None] * len(rows.segments)
        parts = []
        for heads, shift in halves:
            q, k, v = (x[:, :, heads] for x in (q_BLHK, k_BSHK, v_BSHK))
            if q.shape[2]:
                parts.append(span_attention(SpanInputs(q, k, v, rows._replace(shift=shift), nothing)))
        return torch.cat(parts, dim=2)


@torch.no_grad()
def known_of_shards(
    cut: SpanCut,
    rule: ChoiceRule,
    heads: tuple[Tensor, Tensor, Tensor, Tensor],
    past: SpanPast | None,
    shard: SequenceShard,
    segment: SpanSegment,
) -> SpanPast:
    """Return a segment's `SpanPast`, with summaries and query sums for the segment's blocks in all sequence shards.

    Each rank computes the blocks that end in its shard, and an all-reduce gives every rank the results for all blocks.
    `heads` are four tensors: the last `block` - 1 queries before the shard, the shard's queries, and the keys and the
    values up to the shard's end. `past` is the carried state.
    """
    before_BTHK, q_BLHK, k_BSGK, v_BSGK = heads
    queries = torch.cat((before_BTHK, q_BLHK), dim=1)[segment.rows]
    blocks = own_blocks(cut, segment, slice(shard.first, shard.first + shard.length))
    shape = len(queries), blocks.whole + blocks.counted, *queries.shape[2:]
    table = torch.zeros(shape, dtype=at_least_fp32(queries).dtype, device=queries.device)
    if blocks.begin < blocks.end:
        behind_q = before_BTHK.shape[1] - shard.first
        behind_k = k_BSGK.shape[1] - shard.length - shard.first
        asking = queries[:, blocks.tokens.start + behind_q : blocks.tokens.stop + behind_q]
        key_slice = slice(blocks.tokens.start + behind_k, blocks.tokens.stop + behind_k)
        k, v = (x[segment.rows, key_slice] for x in (k_BSGK, v_BSGK))
        block_summaries = summaries(asking, k, v, cut.block, rule.landmarks_HK)
        table[:, blocks.begin : blocks.begin + block_summaries.shape[1]] = block_summaries
        table[:, blocks.whole + blocks.begin : blocks.whole + blocks.end] = query_sums(asking, cut.block)
    summed = all_reduce_shards(table, shard)
    return behind(past, segment, SpanPast(queries, summed[:, : blocks.whole], summed[:, blocks.whole :]))


def _numbers(rows: slice) -> range:
    return range(rows.start, rows.stop)
