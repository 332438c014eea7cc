"""Attention mixer (equations in `architecture/attention.py`): full or sliding window, grouped queries, RoPE.

`Heads` holds everything around the attention op, so that other mixers can share it (`span.py`, `shared_attention.py`).
`Attention` adds causal attention.

Legend: B rows (sequences), L tokens, D width, C channels in all heads, H query heads, G key/value heads, K channels per
head, W taps in the convolution, M carried tokens, E boundaries between documents.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hybridtron.architecture.attention import AttentionSpec, HeadsSpec
from hybridtron.architecture.base import ModelSizes
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, MixerOutput, State
from hybridtron.ops.attention import AttentionInputs, AttentionMemory, attention, remember
from hybridtron.ops.attention.self_extend import Places, self_extended
from hybridtron.ops.conv import ConvInputs, causal_conv, next_tail
from hybridtron.ops.norm import RMSNormInputs, rms_norm
from hybridtron.ops.precision import at_least_fp32
from hybridtron.ops.rope import RopeInputs, apply_rope
from hybridtron.parallel.context import halo_kv, halo_tokens
from hybridtron.parallel.linear import (
    SplitProjection,
    TensorGroup,
    all_reduce_sum,
    column_parallel,
    project_all,
    row_parallel,
)


class Heads(Mixer):
    """Base class for attention mixers: projections, short convolutions, norms, positions and output gate.

    Subclasses implement `attend`, which combines queries, keys and values. The state has the parts that `attend`
    returns. With short convolutions it also has their last inputs, `q_conv` and `kv_conv` (B, W - 1, channels).
    """

    # the attention op; in exported models, the kernel that the library transformers selects takes its place
    attention = staticmethod(attention)

    def __init__(self, spec: HeadsSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        self.heads = spec
        self.tensor = tensor
        self.head_dim, self.rotary_dim = spec.head(sizes), spec.rotary(sizes)
        queries, keys = spec.channels(sizes)
        whole_kv = spec.parameters(sizes)["kv.weight"].cut_over("tensor", tensor.size) is None
        if whole_kv and tensor.size > 1:
            self.kv_heads = tensor.groups_used(spec.heads, spec.groups())
        else:
            self.kv_heads = None
        self.keys_over = tensor.whole() if whole_kv else tensor  # the ranks that divide the key/value heads
        width = spec.input_width(sizes)
        self.q = column_parallel(width, queries, tensor)
        self.kv = column_parallel(width, 2 * keys, self.keys_over)
        self.out = row_parallel(queries, sizes.width, tensor)
        if spec.gate:
            self.gate = column_parallel(width, queries, tensor)
        else:
            self.gate = None
        self.own_keys = keys if whole_kv else tensor.share(keys)
        if spec.qk_norm != "none":
            if spec.qk_norm == "head":
                sizes_qk = (self.head_dim,) * 2
            else:
                sizes_qk = (tensor.share(queries), self.own_keys)
            self.q_norm_weight, self.k_norm_weight = (nn.Parameter(torch.empty(size)) for size in sizes_qk)
        if spec.conv:
            self.q_conv = nn.Parameter(torch.empty(tensor.share(queries), spec.conv))
            self.kv_conv = nn.Parameter(torch.empty(2 * self.own_keys, spec.conv))
        if spec.conv_bias:
            self.q_conv_bias = nn.Parameter(torch.empty(len(self.q_conv)))
            self.kv_conv_bias = nn.Parameter(torch.empty(len(self.kv_conv)))
        else:
            self.q_conv_bias = None
            self.kv_conv_bias = None

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput:
        before = state or {}
        new = State()
        if self.heads.conv:
            parts = ()
        else:
            parts = (self.own_keys, self.own_keys)
        q_BLC, *kv_BLC = (part.transpose(0, 1) for part in self.project(x_LBD, parts))
        gate_BLC = None if self.gate is None else kv_BLC.pop()
        if self.heads.conv:
            taps = self.heads.conv - 1
            tails = [
                halo_tokens(x_BLC, taps, before.get(name), seq)
                for x_BLC, name in ((q_BLC, "q_conv"), (kv_BLC[0], "kv_conv"))
            ]
            silu = self.heads.conv_silu
            documents = seq.documents_BL
            q_inputs = ConvInputs(q_BLC, self.q_conv, self.q_conv_bias, tails[0], documents, silu)
            kv_inputs = ConvInputs(kv_BLC[0], self.kv_conv, self.kv_conv_bias, tails[1], documents, silu)
            q_BLC = causal_conv(q_inputs)
            kv_BLC = causal_conv(kv_inputs).chunk(2, dim=-1)
            if seq.carried:
                new["q_conv"] = next_tail(q_inputs)
                new["kv_conv"] = next_tail(kv_inputs)
        k_BLC, v_BLC = kv_BLC
        if self.heads.qk_norm == "all":
            q_BLC = over_all_ranks(RMSNormInputs(q_BLC, self.q_norm_weight, self.heads.norm_eps), self.tensor)
            k_BLC = over_all_ranks(RMSNormInputs(k_BLC, self.k_norm_weight, self.heads.norm_eps), self.keys_over)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q_BLC, k_BLC, v_BLC))
        if self.heads.qk_norm == "head":
            q = rms_norm(RMSNormInputs(q, self.q_norm_weight, self.heads.norm_eps))
            k = rms_norm(RMSNormInputs(k, self.k_norm_weight, self.heads.norm_eps))
        if self.kv_heads is not None:
            k = k[:, :, self.kv_heads]
            v = v[:, :, self.kv_heads]
        if (rope := self.heads.positions) is not None:
            cos, sin = seq.rope(self.rotary_dim, rope)
            q, k = (apply_rope(RopeInputs(x, cos, sin)) for x in (q, k))
        if (factor := self.heads.query_factor(self.head_dim)) != 1:
            q = q * factor
        y_BLHK, kv_state = self.attend(q, k, v, before, seq)
        y_LBC = y_BLHK.flatten(2).transpose(0, 1)
        if gate_BLC is not None:
            y_LBC = y_LBC * torch.sigmoid(gate_BLC.transpose(0, 1))
        return MixerOutput(self.out(y_LBC), {**new, **kv_state}, {})

    def project(self, x_LBD: Tensor, parts: Sequence[int]) -> Sequence[Tensor]:
        """Return queries, then keys and values, then the gate's logits if there is a gate.

        If `parts` holds the channel counts for keys and for values, keys and values are two tensors. If `parts` is
        empty, they are one concatenated tensor.
        """
        return project_all(x_LBD, self.tensor, *self.input_layers(parts))

    def input_layers(self, parts: Sequence[int]) -> list[nn.Module | SplitProjection]:
        """Return the layers that project the input, in the order of `project`'s outputs."""
        return [self.q, SplitProjection(self.kv, parts), *([] if self.gate is None else [self.gate])]

    @abstractmethod
    def attend(
        self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, before: State, seq: SeqInfo
    ) -> tuple[Tensor, State]:
        """Return the heads' outputs and the state to carry.

        Queries and keys are already rotated. All tensors hold only this rank's heads. `before` is the carried state.
        """

    def attend_within(
        self,
        window: int | None,
        q_BLHK: Tensor,
        k_BLGK: Tensor,
        v_BLGK: Tensor,
        before: State,
        seq: SeqInfo,
        form: Callable[[AttentionInputs], Tensor] | None = None,
    ) -> tuple[Tensor, State]:
        """Apply causal attention; return the heads' outputs and the state to carry.

        The state has keys, values, and the number of tokens that they cover. If `window` is None, attention is full. If
        `form` is not None, it is called in place of the attention op.
        """
        if "keys" in before:
            memory = AttentionMemory(before["keys"], before["values"], before["length"])
        else:
            memory = None
        memory = halo_kv(k_BLGK, v_BLGK, window, memory, seq)
        inputs = AttentionInputs(q_BLHK, k_BLGK, v_BLGK, window, seq.documents_BL, memory, seq.boundaries_E)
        y_BLHK = (form or self.attention)(inputs)
        if not seq.carried:
            return y_BLHK, {}
        keep = None if window is None else window - 1
        remembered = remember(memory, k_BLGK, v_BLGK, seq.documents_BL, keep)
        return y_BLHK, {"keys": remembered.keys_BMGK, "values": remembered.values_BMGK, "length": remembered.length_B}


def over_all_ranks(inputs: RMSNormInputs, tensor: TensorGroup) -> Tensor:
    """Apply RMSNorm over channels that tensor-parallel ranks divide."""
    if tensor.size == 1:
        return rms_norm(inputs)
    wide = at_least_fp32(inputs.x)
    mean = all_reduce_sum(wide.square().mean(-1, keepdim=True), tensor) / tensor.size
    return (wide * torch.rsqrt(mean + inputs.eps) * inputs.weight.to(wide.dtype)).to(inputs.x.dtype)


class Attention(Heads):
    """Causal attention, full or in a window.

    State: `keys` (rotated) and `values`, both (B, M, G, K), of the tokens that later tokens may see; and `length` (B,).
    Of the M tokens, only the last `length` are real; the tokens before them are padding.
    """

    def __init__(self, spec: AttentionSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__(spec, sizes, tensor)
        self.window = spec.window
        self.self_extend = spec.self_extend

    def attend(
        self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, before: State, seq: SeqInfo
    ) -> tuple[Tensor, State]:
        form = None
        self_extend = self.self_extend  # not used in training; outside training `seq.key` is None
        rope = self.heads.positions
        if seq.key is None and self_extend is not None and rope is not None:
            places = Places(seq.positions_BL, rope, self.rotary_dim)

            def form(inputs: AttentionInputs) -> Tensor:
                return self_extended(inputs, places, self_extend)

        return self.attend_within(self.window, q_BLHK, k_BLGK, v_BLGK, before, seq, form)
