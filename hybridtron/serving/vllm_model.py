"""This package's class as a model of vLLM: our mixers, and vLLM's caches, attention, embedding and head.

vLLM computes the tokens of many requests in one step, as one flat tensor. A mixer belongs to one of three kinds:

    without a state     computes all tokens at once
    attention           computes all tokens at once; vLLM's own attention combines queries with the keys and values that
                        it keeps in pages
    with a state        a recurrence or a token shift: computes each prompt separately, and one token of all other
                        requests together. vLLM keeps the states of the requests, in shapes and types that the mixer
                        declares; they stay in the cache between steps

Attention that vLLM can't compute (short convolutions, selected blocks, Self-Extend) has a state too: keys, values and
other parts that grow with the request. Each request's state is then as large as for the longest request.

Recurrences run our ops, since vLLM has none of them on a CPU except those of Mamba-2 and Gated DeltaNet. One process
computes the whole model.

Legend: B requests, L tokens of a request in this step, T tokens of all requests in this step, D width, H query heads, G
key/value heads, K channels of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.utils import AutoWeightsLoader
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.linear_attn import LinearAttentionBackend, LinearAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from hybridtron.hf.layers_hybridtron import HybridtronLayer, HybridtronMixer, SeqOnDevices, sublayers
from hybridtron.hf.mixers_hybridtron import Heads, RMSNorm, SeqInfo, State, at_least_fp32, multiply
from hybridtron.serving.request_states import FixedState, largest_state, state_of


class StatesMetadataBuilder(LinearAttentionMetadataBuilder):
    """Places of the requests' tokens and states. A step's host code reads them, so CUDA graphs can't repeat a step."""

    _cudagraph_support = AttentionCGSupport.NEVER


class StatesBackend(LinearAttentionBackend):
    """Entry in vLLM's table of attention kernels, with the class that prepares a step's metadata."""

    @staticmethod
    def get_name() -> str:
        return "HYBRIDTRON_STATES"

    @staticmethod
    def get_builder_cls() -> type[StatesMetadataBuilder]:
        return StatesMetadataBuilder


class RequestStates(MambaBase, nn.Module):
    """The states of one sub-layer, for all requests that vLLM is computing."""

    def __init__(self, declared: FixedState, prefix: str) -> None:
        super().__init__()
        self.declared = declared
        self.prefix = prefix
        self.kv_cache = tuple(torch.tensor([]) for _ in declared.parts)
        get_current_vllm_config().compilation_config.static_forward_context[prefix] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return tuple(shape for shape, _ in self.declared.parts.values())

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return tuple(dtype for _, dtype in self.declared.parts.values())

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_attn_backend(self) -> type[StatesBackend]:
        return StatesBackend


class ServedMixer(HybridtronMixer):
    """A mixer whose keys, values and states are in vLLM's caches."""

    def __init__(self, config: Any, layer_idx: int, first: HybridtronMixer | None = None) -> None:
        super().__init__(config, layer_idx, first)
        for name in self.in_fp32:
            path, _, leaf = name.rpartition(".")
            module = self.get_submodule(path)
            setattr(module, leaf, nn.Parameter(getattr(module, leaf).float(), requires_grad=False))
        vllm = get_current_vllm_config()
        prefix = f"model.layers.{layer_idx}.mixer"
        declared = state_of(config, layer_idx, vllm.model_config.dtype, vllm.model_config.max_model_len)
        (mixer,) = self._mixer
        if isinstance(mixer, Heads) and not declared.parts:
            spec = mixer.heads
            self.pages = Attention(
                spec.heads,
                mixer.head_dim,
                mixer.head_dim**-0.5,
                num_kv_heads=spec.groups(),
                cache_config=vllm.cache_config,
                per_layer_sliding_window=getattr(mixer, "window", None),
                prefix=f"{prefix}.pages",
            )
            mixer.attend = self._attend
        self.states = RequestStates(declared, f"{prefix}.states") if declared.parts else None

    def forward(self, x_BLD: Tensor, state: State | None, seq: SeqInfo) -> tuple[Tensor, State]:
        """Compute the tokens of all requests (1, T, D)."""
        if self.states is None:
            return super().forward(x_BLD, None, seq)
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures a step's memory before it has caches
            return super().forward(x_BLD, None, seq)
        y_BLD = torch.zeros_like(x_BLD)
        declared = self.states.declared
        caches = self.states.kv_cache
        for tokens, slots_B in requests_of(metadata[self.states.prefix], declared.together):
            count = len(slots_B)
            positions_BL = seq.positions_BL[0, tokens].view(count, -1)
            before = declared.read(caches, slots_B, positions_BL[:, 0] == 0)
            rows_BLD, after = super().forward(x_BLD[0, tokens].unflatten(0, (count, -1)), before, SeqInfo(positions_BL))
            declared.write(caches, slots_B, after)
            y_BLD[0, tokens] = rows_BLD.flatten(0, 1)
        return y_BLD, {}

    def _attend(
        self, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, before: State, seq: SeqInfo
    ) -> tuple[Tensor, State]:
        y_TC = self.pages(*(part[0].flatten(1).contiguous() for part in (q_BLHK, k_BLGK, v_BLGK)))
        return y_TC.view_as(q_BLHK), {}


def requests_of(metadata: Any, together: bool) -> Iterator[tuple[slice, Tensor]]:
    """Yield groups of requests that one call computes: their tokens in the flat tensor, and the slots of their states.

    vLLM puts requests with a single token first. With `together` they are one group. Every other request is a group of
    its own.
    """
    singles = metadata.num_decodes if together else 0
    slots = metadata.state_indices_tensor
    if singles:
        yield slice(0, singles), slots[:singles]
    starts = metadata.query_start_loc.tolist()
    for request in range(singles, metadata.num_decodes + metadata.num_prefills):
        yield slice(starts[request], starts[request + 1]), slots[request : request + 1]


class ServedLayer(HybridtronLayer):
    """A residual sub-layer with a mixer for vLLM."""

    mixer_class: ClassVar[type[HybridtronMixer]] = ServedMixer


class ServedModel(nn.Module):
    """Embedding, sub-layers and final norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(sublayers(config, ServedLayer))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        x_BLD = x_TD[None]
        if self.config.residual_in_fp32:
            x_BLD = at_least_fp32(x_BLD)
        x_BLD = multiply(x_BLD, self.config.embedding_multiplier)
        places = SeqOnDevices(SeqInfo(positions_T[None]))
        embedded_BLD = x_BLD
        fed_BLD = None
        normed_BLD = None
        for layer in self.layers:
            x_BLD, fed_BLD, normed_BLD = layer(x_BLD, places, embedded_BLD, fed_BLD, normed_BLD)
        return self.norm(x_BLD)[0]


class ServedForCausalLM(nn.Module, HasInnerState, IsHybrid):
    """The model with the head that predicts the next token."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.model = ServedModel(config)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the largest state; vLLM makes the pages of all caches as large as this state."""
        return tuple(shape for shape, _ in largest_of(vllm_config.model_config).parts.values())

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return tuple(dtype for _, dtype in largest_of(vllm_config.model_config).parts.values())

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.model(inputs_embeds, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, multiply(hidden_states, 1 / self.config.logits_scaling))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy weights by their names in the export, one tensor after the other."""
        return AutoWeightsLoader(self).load_weights(weights)


def largest_of(model: Any) -> FixedState:
    """Return the largest state among the sub-layers. `model` is vLLM's configuration of the model."""
    return largest_state(model.hf_config, model.dtype, model.max_model_len)
