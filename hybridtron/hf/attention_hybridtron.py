"""Attention with rotary positions: full, in a window, and span-expanded.

Keys and values are carried as they were read, with how many of them are real: rows may remember unequally much.

Legend: B rows, L tokens, D width, C channels, H query heads, G key/value heads, K head size, M remembered tokens,
S = M + L.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .mixers_hybridtron import Mixer, Options, Places, ShortConv, State
from .ops_hybridtron import (
    AttentionInputs,
    AttentionMemory,
    CarriedBlocks,
    ChoiceRule,
    RopeInputs,
    SpanCut,
    SpanInputs,
    SpanPast,
    SpanSegment,
    apply_rope,
    attention,
    blocked_attention,
    choose_at_random,
    choose_by_relevance,
    remember,
    span_attention,
)

LANDMARK_SEED = 20_241_217


class Heads(Mixer):
    """Projections, short convolutions and positions around what a subclass does with queries, keys and values.

    State: `q_conv`, `k_conv`, `v_conv` (B, W - 1, C) where there are convolutions, and what the subclass carries.
    """

    def __init__(self, config: PreTrainedConfig, options: Options, layer_idx: int) -> None:
        super().__init__(config, options, layer_idx)
        self.head_dim, self.is_causal = options["head_dim"], True
        self.num_key_value_groups = options["heads"] // options["kv_heads"]
        queries, keys = options["heads"] * self.head_dim, options["kv_heads"] * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        if width := options["conv"]:
            self.q_conv1d = ShortConv(queries, width, options["conv_bias"])
            self.k_conv1d = ShortConv(keys, width, options["conv_bias"])
            self.v_conv1d = ShortConv(keys, width, options["conv_bias"])

    def forward(self, x_BLD: Tensor, state: State | None, places: Places) -> tuple[Tensor, State]:
        before, new = state or {}, State()
        parts = {"q": self.q_proj(x_BLD), "k": self.k_proj(x_BLD), "v": self.v_proj(x_BLD)}
        if self.options["conv"]:
            for name, conv in (("q", self.q_conv1d), ("k", self.k_conv1d), ("v", self.v_conv1d)):
                tail_BTC = before.get(f"{name}_conv")
                parts[name], new[f"{name}_conv"] = conv(parts[name], tail_BTC, places, self.options["conv_silu"])
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts.values())
        if (base := self.options["rope_base"]) is not None:
            cos, sin = places.rope(self.options["rotary_dim"] or self.head_dim, base)
            q, k = (apply_rope(RopeInputs(x, cos, sin)) for x in (q, k))
        y_BLHK, kept = self.attend(q, k, v, before, places)
        return self.o_proj(y_BLHK.flatten(2)), {**new, **kept}

    def attend(
        self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, before: State, places: Places
    ) -> tuple[Tensor, State]:
        """The heads' outputs, and what is carried."""
        raise NotImplementedError

    def within(
        self, window: int | None, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, before: State, places: Places
    ) -> tuple[Tensor, State]:
        """Attention in a window or without one, by what `attn_implementation` says, and what is kept for it."""
        memory = AttentionMemory(before["keys"], before["values"], before["length"]) if "keys" in before else None
        implementation = self.config._attn_implementation or "sdpa"
        if implementation.startswith("flash") and memory is None:
            y_BLHK = self._flash(implementation, window, q_BLHK, k_BLGK, v_BLGK, places)
        else:
            attend = attention if implementation == "eager" else blocked_attention
            y_BLHK = attend(AttentionInputs(q_BLHK, k_BLGK, v_BLGK, window, places.documents_BL, memory))
        kept = remember(memory, k_BLGK, v_BLGK, places.documents_BL, None if window is None else window - 1)
        return y_BLHK, {"keys": kept.keys_BMGK, "values": kept.values_BMGK, "length": kept.length_B}

    def _flash(
        self, implementation: str, window: int | None, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, places: Places
    ) -> Tensor:
        """The kernels that transformers knows. They could skip no padding among remembered keys, so there are none."""
        borders = {}
        if (starts := places.borders()) is not None:
            length = q_BLHK.shape[1]
            borders = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": length, "max_length_k": length}
        q, k, v = (x.transpose(1, 2) for x in (q_BLHK, k_BLGK, v_BLGK))
        attend = ALL_ATTENTION_FUNCTIONS[implementation]
        y_BLHK, _ = attend(self, q, k, v, None, scaling=self.head_dim**-0.5, sliding_window=window, **borders)
        return y_BLHK


class Attention(Heads):
    """State: rotated `keys` and `values` of the tokens that later ones may see (B, M, G, K), of which the last
    `length` (B,) are real."""

    def attend(
        self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, before: State, places: Places
    ) -> tuple[Tensor, State]:
        return self.within(self.options["window"], q_BLHK, k_BLGK, v_BLGK, before, places)


class SpanAttention(Heads):
    """Full attention, unless the option `eval` is `span`: then tokens see their chunk and the blocks chosen for it.

    State in the span form: `keys` and `values` of the `length` (B,) tokens of their document so far, or of the last
    ones where no block of the past is read; where relevance decides, also `summaries` of all its blocks, `sums` of the
    last ones' queries, `queries` of the one under way.
    """

    def attend(
        self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, before: State, places: Places
    ) -> tuple[Tensor, State]:
        if self.options["eval"] == "full":
            return self.within(None, q_BLHK, k_BLGK, v_BLGK, before, places)
        chunk = self.chunk
        keep = None if self.options["memory"] in ("span", "landmark", "random") else chunk
        memory = AttentionMemory(before["keys"], before["values"], before["length"]) if "keys" in before else None
        seen = [0] * len(q_BLHK) if memory is None else memory.length_B.tolist()
        segments = self._segments(places, seen)
        k_BSGK, v_BSGK = k_BLGK, v_BLGK
        if memory is not None:
            k_BSGK, v_BSGK = torch.cat((memory.keys_BMGK, k_BLGK), 1), torch.cat((memory.values_BMGK, v_BLGK), 1)
        if self.options["memory"] == "shifted":
            y_BLHK, new = self._shifted(q_BLHK, k_BSGK, v_BSGK, segments), State()
        else:
            cut = SpanCut(chunk, self.options["block"], segments)
            chosen, new = self._chosen(cut, q_BLHK, k_BSGK, v_BSGK, before)
            y_BLHK = span_attention(SpanInputs(q_BLHK, k_BSGK, v_BSGK, cut, chosen))
        kept = remember(memory, k_BLGK, v_BLGK, places.documents_BL, keep)
        ends = {
            row: s.end_place
            for s in segments
            if s.stop == q_BLHK.shape[1]
            for row in range(*s.rows.indices(len(q_BLHK)))
        }
        length_B = torch.tensor([ends[row] for row in range(len(q_BLHK))], device=q_BLHK.device)
        return y_BLHK, {**new, "keys": kept.keys_BMGK, "values": kept.values_BMGK, "length": length_B}

    @property
    def chunk(self) -> int:
        """The largest, outside of pretraining."""
        sizes = self.options["chunk"]
        return sizes if isinstance(sizes, int) else max(sizes)

    def _segments(self, places: Places, seen: Sequence[int]) -> list[SpanSegment]:
        """The documents of all rows; rows that are cut alike are taken together."""
        rows = [
            [(start, stop, seen[row] if start == 0 else 0) for start, stop in spans]
            for row, spans in enumerate(places.spans())
        ]
        if all(row == rows[0] for row in rows):
            return [SpanSegment(slice(0, len(rows)), *span, self._kept(span[2])) for span in rows[0]]
        return [
            SpanSegment(slice(number, number + 1), *span, self._kept(span[2]))
            for number, row in enumerate(rows)
            for span in row
        ]

    def _kept(self, seen: int) -> int:
        """How many of the tokens before a row it may read: all, or those of the chunks that it begins in."""
        if self.options["memory"] == "none":
            return seen % self.chunk
        return min(seen, self.chunk) if self.options["memory"] == "shifted" else seen

    def _chosen(
        self, cut: SpanCut, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, before: State
    ) -> tuple[list[Tensor | None], State]:
        """The blocks that each chunk reads, and what is carried of the choice."""
        memory, most = self.options["memory"], self.options["blocks"]
        if memory == "none":
            return [None] * len(cut.segments), {}
        if memory == "random":
            digest = hashlib.blake2b(f"0/blocks/{self.layer_idx}".encode(), digest_size=8).digest()
            key = int.from_bytes(digest, "little")
            return choose_at_random(cut, most, key, range(self.options["kv_heads"]), q_BLHK.device), {}
        landmarks_HK = None
        if memory == "landmark":
            generator = torch.Generator().manual_seed(LANDMARK_SEED + self.layer_idx)
            landmarks_HK = torch.randn(self.options["heads"], self.head_dim, generator=generator).to(q_BLHK.device)
        rule = ChoiceRule(most, self.options["relevance"] == "previous_chunk", landmarks_HK)
        past = SpanPast(before["queries"], before["summaries"], before["sums"]) if "summaries" in before else None
        carried = CarriedBlocks(None, 2 * self.chunk // self.options["block"])
        chosen, after = choose_by_relevance(cut, rule, q_BLHK, k_BSGK, v_BSGK, past, carried)
        return chosen, {"queries": after.queries_BNHK, "summaries": after.summaries_BPHK, "sums": after.sums_BPHK}

    def _shifted(self, q_BLHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, segments: Sequence[SpanSegment]) -> Tensor:
        """Chunks on their own, half a chunk earlier in the second half of all heads."""
        k_BSHK, v_BSHK = (x.repeat_interleave(self.num_key_value_groups, dim=2) for x in (k_BSGK, v_BSGK))
        half = self.options["heads"] // 2
        nothing = [None] * len(segments)
        parts = []
        for heads, shift in ((slice(0, half), 0), (slice(half, None), self.chunk // 2)):
            q, k, v = (x[:, :, heads] for x in (q_BLHK, k_BSHK, v_BSHK))
            cut = SpanCut(self.chunk, self.options["block"], segments, shift)
            parts.append(span_attention(SpanInputs(q, k, v, cut, nothing)))
        return torch.cat(parts, dim=2)
