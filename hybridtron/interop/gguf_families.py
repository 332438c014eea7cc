"""Model families of llama.cpp: their metadata keys, and the changes to tensors from folders of transformers.

llama.cpp stores a model in one GGUF file: metadata, such as the model's sizes, and tensors. A family's tensors differ
from those in a folder of transformers in these ways:

- Mamba, Mamba-2: -exp(A_log) instead of A_log; the convolution without its dimension of size 1
- Mamba-2: A and D as a column; the gated norm's weight with a row for each group
- Granite: gate and up as two tensors; rows of q and k in the order of rotary pairs (x0, x1), not halves (x0, x_half)
- Falcon-H1: multipliers are part of the weights, since the file has no keys for them

Names come from the package `gguf`, which maps names of transformers to those of llama.cpp. Changes and keys equal those
of llama.cpp's own converter (read at commit 0c1e57098). `consumers.GGUF` has the conditions under which llama.cpp loads
the file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from hybridtron.interop.native import Settings

if TYPE_CHECKING:
    from gguf import GGUFWriter

ANY_LENGTH = 2**20  # context length of models without positions, as in llama.cpp's converter
Change = Callable[[Tensor], Tensor]


class GgufPart(NamedTuple):
    """A tensor in the file: its name, and the function that computes it from a tensor of the folder."""

    name: str
    change: Change


class GgufFamily(ABC):
    """A model family of llama.cpp, for one folder: `config` is the content of its config.json."""

    arch: ClassVar[str]  # member of gguf.MODEL_ARCH

    def __init__(self, config: Settings) -> None:
        from gguf import MODEL_ARCH, get_tensor_name_map

        self.config = config
        self._names = get_tensor_name_map(MODEL_ARCH[self.arch], config["num_hidden_layers"])

    @abstractmethod
    def write_keys(self, writer: GGUFWriter) -> None:
        """Write the model's sizes and multipliers."""

    def parts(self, name: str) -> list[GgufPart]:
        """Return the tensors in the file that are computed from the folder's tensor `name`."""
        return [GgufPart(self.named(name), self.change(name))]

    def change(self, name: str) -> Change:
        """Return the change to a tensor that becomes a single tensor in the file."""
        if name.endswith("conv1d.weight"):
            return lambda weight: weight.squeeze(1)
        return lambda weight: weight

    def named(self, name: str) -> str:
        """Return llama.cpp's name for a tensor."""
        listed_name = name.replace(".dt_bias", ".dt_proj.bias")  # as the package `gguf` lists it
        mapped = self._names.get_name(listed_name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        return mapped


class GgufMamba(GgufFamily):
    """Mamba-1."""

    arch = "MAMBA"

    def write_keys(self, writer: GGUFWriter) -> None:
        config = self.config
        _write_recurrent(writer, config)
        writer.add_ssm_conv_kernel(config["conv_kernel"])
        writer.add_ssm_inner_size(config["intermediate_size"])
        writer.add_ssm_state_size(config["state_size"])
        writer.add_ssm_time_step_rank(config["time_step_rank"])
        writer.add_ssm_dt_b_c_rms(False)
        writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])

    def change(self, name: str) -> Change:
        if name.endswith(".A_log"):
            return _negative_exp
        return super().change(name)


class GgufWithMamba2(GgufFamily):
    """Base class for families with Mamba-2."""

    norm: ClassVar[str] = ".mamba.norm.weight"  # ends the name of a gated norm's weight

    def groups(self) -> int:
        """Return the number of groups; the heads in a group share B and C."""
        return self.config["mamba_n_groups"]

    def change(self, name: str) -> Change:
        if name.endswith(".A_log"):
            return lambda a_log: _negative_exp(a_log).unsqueeze(1)
        if name.endswith(".D"):
            return lambda skip: skip.unsqueeze(1)
        if name.endswith(self.norm):
            return lambda weight: weight.reshape(self.groups(), -1)
        return super().change(name)

    def write_mamba2(self, writer: GGUFWriter, heads: int, head_dim: int) -> None:
        """Write the sizes of Mamba-2 in a hybrid."""
        writer.add_ssm_conv_kernel(self.config["mamba_d_conv"])
        writer.add_ssm_inner_size(heads * head_dim)
        writer.add_ssm_state_size(self.config["mamba_d_state"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_group_count(self.groups())

    def write_layers(self, writer: GGUFWriter) -> None:
        """Write the sizes of a hybrid's layers, attention and MLP, except the number of key-value heads."""
        config = self.config
        writer.add_vocab_size(config["vocab_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_rope_freq_base(config["rope_theta"])


class GgufMamba2(GgufWithMamba2):
    """Mamba-2."""

    arch = "MAMBA2"
    norm = ".mixer.norm.weight"

    def groups(self) -> int:
        return self.config["n_groups"]

    def write_keys(self, writer: GGUFWriter) -> None:
        config = self.config
        _write_recurrent(writer, config)
        writer.add_ssm_conv_kernel(config["conv_kernel"])
        writer.add_ssm_inner_size(config["num_heads"] * config["head_dim"])
        writer.add_ssm_state_size(config["state_size"])
        writer.add_ssm_time_step_rank(config["num_heads"])
        writer.add_ssm_group_count(config["n_groups"])
        writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])


class GgufGraniteHybrid(GgufWithMamba2):
    """Granite's hybrid without experts. Attention has rotary positions or none."""

    arch = "GRANITE_HYBRID"

    def write_keys(self, writer: GGUFWriter) -> None:
        config = self.config
        rotates = config.get("position_embedding_type") == "rope"
        self.write_layers(writer)
        self.write_mamba2(writer, config["mamba_n_heads"], config["mamba_d_head"])
        is_attention = [kind in ("attention", "full_attention") for kind in config["layer_types"]]
        writer.add_head_count_kv([config["num_key_value_heads"] if attends else 0 for attends in is_attention])
        writer.add_context_length(config["max_position_embeddings"] if rotates else ANY_LENGTH)
        writer.add_rope_scaling_finetuned(rotates)  # llama.cpp's switch for rotary positions in this family
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])

    def parts(self, name: str) -> list[GgufPart]:
        layer = name.partition(".shared_mlp.")[0]
        if name.endswith(".shared_mlp.input_linear.weight"):
            return [
                GgufPart(self.named(f"{layer}.mlp.gate_proj.weight"), lambda fused: fused.chunk(2)[0]),
                GgufPart(self.named(f"{layer}.mlp.up_proj.weight"), lambda fused: fused.chunk(2)[1]),
            ]
        if name.endswith(".shared_mlp.output_linear.weight"):
            return super().parts(f"{layer}.mlp.down_proj.weight")
        return super().parts(name)

    def change(self, name: str) -> Change:
        heads = {"q_proj": self.config["num_attention_heads"], "k_proj": self.config["num_key_value_heads"]}
        projection = name.removesuffix(".weight").rpartition(".")[2]
        if projection in heads:
            return lambda weight: _in_pairs(weight, heads[projection])
        return super().change(name)


class GgufFalconH1(GgufWithMamba2):
    """Falcon-H1: Mamba-2 and attention in parallel, with multipliers."""

    arch = "FALCON_H1"

    def write_keys(self, writer: GGUFWriter) -> None:
        config = self.config
        self.write_layers(writer)
        self.write_mamba2(writer, config["mamba_n_heads"], config["mamba_d_head"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_context_length(config["max_position_embeddings"])

    def parts(self, name: str) -> list[GgufPart]:
        parts = super().parts(name)
        config = self.config
        if name == "model.embed_tokens.weight" and config["tie_word_embeddings"]:
            factor = config["lm_head_multiplier"]
            if factor != config["embedding_multiplier"]:  # else llama.cpp uses the embedding as the head
                parts.append(GgufPart(self.named("lm_head.weight"), lambda weight: _times(weight, factor)))
        return parts

    def change(self, name: str) -> Change:
        if name.endswith(".mamba.in_proj.weight"):
            return self._input_projection
        factor = self._factors().get(name.removesuffix(".weight").rpartition(".")[2], 1.0)
        if factor == 1.0:
            return super().change(name)
        return lambda weight: _times(weight, factor)

    def _factors(self) -> dict[str, float]:
        """Return the factor of each projection, by the end of its name."""
        config = self.config
        gate, down = config["mlp_multipliers"]
        attention_input = config["attention_in_multiplier"]
        return {
            "embed_tokens": config["embedding_multiplier"],
            "lm_head": config["lm_head_multiplier"],
            "q_proj": attention_input,
            "k_proj": attention_input * config["key_multiplier"],
            "v_proj": attention_input,
            "o_proj": config["attention_out_multiplier"],
            "out_proj": config["ssm_out_multiplier"],
            "gate_proj": gate,
            "down_proj": down,
        }

    def _input_projection(self, weight: Tensor) -> Tensor:
        """Multiply the rows that give z, x, B, C and dt by their factors."""
        config = self.config
        inner = config["mamba_n_heads"] * config["mamba_d_head"]
        shared = config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (inner, inner, shared, shared, config["mamba_n_heads"])
        parts = zip(weight.split(sizes), config["ssm_multipliers"], strict=True)
        return torch.cat([_times(rows, config["ssm_in_multiplier"] * factor) for rows, factor in parts])


FAMILIES: dict[str, type[GgufFamily]] = {
    "MambaForCausalLM": GgufMamba,
    "Mamba2ForCausalLM": GgufMamba2,
    "GraniteMoeHybridForCausalLM": GgufGraniteHybrid,
    "FalconH1ForCausalLM": GgufFalconH1,
}
"""Class of transformers -> family of llama.cpp."""


def _write_recurrent(writer: GGUFWriter, config: Settings) -> None:
    """Write the sizes of a model with Mamba alone; llama.cpp needs sizes of attention and MLP even then."""
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_context_length(ANY_LENGTH)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)


def _negative_exp(a_log: Tensor) -> Tensor:
    return -torch.exp(a_log.float())


def _times(weight: Tensor, factor: float) -> Tensor:
    """Multiply in fp32; the result has the weight's dtype."""
    return (weight.float() * factor).to(weight.dtype)


def _in_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head: from halves (all x_i, then all y_i) to pairs (x_0, y_0, x_1, y_1, ...)."""
    by_half = weight.reshape(heads, 2, -1, weight.shape[1])
    return by_half.transpose(1, 2).reshape(weight.shape)
