"""A language model of residual sub-layers in any order: state spaces, attention, gated MLPs.

With x the residual stream, there are three kinds of sub-layers:

    ordinary           computes x + mixer(norm(x)), or x + norm(mixer(x))
    parallel branch    adds mixer(u), where u is the previous sub-layer's normed input
    feeder             reads x concatenated with the token embedding, and leaves x unchanged; the next sub-layer reads
                       norm(x + the feeder's output)

Weights are named by sub-layer: `model.layers.3.mixer.in_proj.weight`. With `residual_in_fp32`, x is in fp32 between
sub-layers, even if the weights have a lower precision.

A row (sequence in the batch) may hold several documents. A document begins where `position_ids` start again from 0.
Attention, convolutions and states see nothing before the document's first token. Padding (zeros in `attention_mask`)
may come before or after a row's tokens, and counts as a separate document. If a row is to be continued from a cache,
its last token must not be padding.

Legend: B rows, L tokens, S tokens including cached tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from .configuration_hybridtron import HybridtronConfig
from .layers_hybridtron import HybridtronLayer, SeqOnDevices, start_weights, sublayers
from .mixers_hybridtron import RMSNorm, SeqInfo, State, at_least_fp32, multiply

Names = list[str] | set[str] | None
# transformers 5.24 renamed the argument and output field `past_key_values` to `cache`. A model that knew only one of
# the two names would silently generate without a cache under versions that use the other name.
CACHE_NAMES = ["cache", "past_key_values"]
if "cache" in {field.name for field in fields(BaseModelOutputWithPast)}:
    CACHE_NAME = CACHE_NAMES[0]
else:
    CACHE_NAME = CACHE_NAMES[1]


class HybridtronCache(Cache):
    """Every layer's state, and how many tokens the model has seen.

    transformers' own cache layers hold only keys and values, or the state of one convolution and one recurrence. This
    cache holds any tensors that a mixer carries. Attention's state includes how many of each row's keys are not
    padding, so that padded rows give exact results even with a window.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self.states: list[State] = [{} for _ in range(num_layers)]
        self.seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor t in the states by change(t). The first axis of t is the row's index."""
        self.states = [{name: change(part) for name, part in state.items()} for state in self.states]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.map(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.map(lambda part: part[indices])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.map(lambda part: part.repeat_interleave(repeats, dim=0))

    def forget(self, rows_B: Tensor) -> None:
        """Reset the states to zero, their initial value, in the rows that the mask `rows_B` selects."""
        self.map(lambda part: part.masked_fill(rows_B.to(part.device).view(-1, *[1] * (part.ndim - 1)), 0))

    def reset(self) -> None:
        self.states = [{} for _ in self.states]
        self.seen = 0

    def crop(self, *_: int) -> None:
        raise NotImplementedError("a recurrent state can't be taken back by some tokens")

    def __len__(self) -> int:
        return len(self.states)


class HybridtronPreTrainedModel(PreTrainedModel):
    config_class = HybridtronConfig
    config: HybridtronConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[Names] = ["HybridtronLayer"]
    _skip_keys_device_placement: ClassVar[Names] = CACHE_NAMES
    _supports_sdpa = True
    _supports_flash_attn = True
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        start_weights(module)


def places_of(
    batch: int, length: int, seen: int, device: torch.device, attention_mask: Tensor | None, position_ids: Tensor | None
) -> tuple[SeqInfo, Tensor | None]:
    """Return the new tokens' positions and documents, and a mask (B,): True if all cached tokens of a row are padding.

    The mask is None if no token is padding. `length` counts the new tokens per row, and `seen` the cached tokens.
    """
    if position_ids is not None:
        position_ids = position_ids.expand(batch, length)
    real_BS = _real_tokens(attention_mask, seen, length)
    if real_BS is None:
        if position_ids is None:
            return SeqInfo.stream(batch, length, seen, device), None
        return SeqInfo(position_ids, _documents(position_ids == 0)), None
    if position_ids is None:
        position_ids = (real_BS.cumsum(1) - 1).clamp(min=0)[:, -length:]
    now_BL = real_BS[:, -length:]
    before_BS = real_BS[:, :-length]
    starts_BL = (position_ids == 0) & now_BL
    starts_BL[:, 1:] |= now_BL[:, 1:] != now_BL[:, :-1]
    return SeqInfo(position_ids, _documents(starts_BL)), ~before_BS.any(1)


def _real_tokens(attention_mask: Tensor | None, seen: int, length: int) -> Tensor | None:
    """Return a mask (B, S) of the tokens that are not padding, or None if no token is padding.

    Raises ValueError if the attention mask has the wrong shape, or padding between a row's tokens.
    """
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[1] != seen + length:
        raise ValueError(
            f"attention_mask is of shape {tuple(attention_mask.shape)}, must be (rows, {seen + length}): "
            "one entry for each token, with those that the cache has seen"
        )
    real_BS = attention_mask.bool()
    if real_BS.all():
        return None
    runs_B = real_BS[:, 0].long() + (real_BS[:, 1:] & ~real_BS[:, :-1]).sum(1)
    if (runs_B > 1).any():
        raise ValueError("attention_mask has padding between a row's tokens; to continue from a cache, pad on the left")
    return real_BS


def _documents(starts_BL: Tensor) -> Tensor | None:
    """Return each token's document index, or None if no document begins inside a row."""
    if starts_BL.shape[1] == 1 or not starts_BL[:, 1:].any():
        return None
    return starts_BL.cumsum(1)


class HybridtronModel(HybridtronPreTrainedModel):
    """Embedding, sub-layers and final norm."""

    def __init__(self, config: HybridtronConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = sublayers(config, HybridtronLayer)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        in_fp32 = (f"layers.{index}.mixer.{name}" for index, layer in enumerate(layers) for name in layer.mixer.in_fp32)
        self._keep_in_fp32_modules_strict = set(in_fp32)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: HybridtronCache | None = None,
        past_key_values: HybridtronCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            x_BLD = self.embed_tokens(input_ids)
        else:
            x_BLD = inputs_embeds
        if self.config.residual_in_fp32:
            x_BLD = at_least_fp32(x_BLD)
        x_BLD = multiply(x_BLD, self.config.embedding_multiplier)
        cache = self._cache(cache if past_key_values is None else past_key_values, use_cache)
        batch, length = x_BLD.shape[:2]
        seen = 0 if cache is None else cache.seen
        seq, fresh_B = places_of(batch, length, seen, x_BLD.device, attention_mask, position_ids)
        if cache is not None and seen and fresh_B is not None:
            cache.forget(fresh_B)
        hidden = [x_BLD]
        places = SeqOnDevices(seq)
        embedded_BLD = x_BLD
        fed_BLD = None
        normed_BLD = None
        for layer in self.layers:
            x_BLD, fed_BLD, normed_BLD = layer(x_BLD, places, embedded_BLD, fed_BLD, normed_BLD, cache=cache)
            hidden.append(x_BLD)
        if cache is not None:
            cache.seen += length
        hidden[-1] = x_BLD = self.norm(x_BLD)
        kept: dict[str, Any] = {CACHE_NAME: cache}
        return BaseModelOutputWithPast(
            last_hidden_state=x_BLD, hidden_states=tuple(hidden) if output_hidden_states else None, **kept
        )

    def _cache(self, given: HybridtronCache | None, use_cache: bool | None) -> HybridtronCache | None:
        """Return the caller's cache, a new cache, or None for no cache.

        If the caller passes neither a cache nor `use_cache`, a new cache is made outside training, unless the
        configuration has `use_cache=False`. Training with gradient checkpointing never has a cache. Raises TypeError
        for a cache of another class.
        """
        if self.gradient_checkpointing and self.training:
            return None
        if given is not None:
            if not isinstance(given, HybridtronCache):
                raise TypeError(f"{CACHE_NAME} is a {type(given).__name__}; this model's cache is HybridtronCache")
            return given
        if use_cache is not None:
            wanted = use_cache
        else:
            wanted = self.config.use_cache and not self.training
        if wanted:
            return HybridtronCache(self.config.num_hidden_layers)
        return None


class HybridtronForCausalLM(HybridtronPreTrainedModel, GenerationMixin):
    """The model with the head that predicts the next token."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: HybridtronConfig) -> None:
        super().__init__(config)
        self.model = HybridtronModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: HybridtronCache | None = None,
        past_key_values: HybridtronCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        if isinstance(logits_to_keep, int):
            kept = slice(-logits_to_keep, None)
        else:
            kept = logits_to_keep
        logits_BLV = self.lm_head(multiply(out.last_hidden_state[:, kept], 1 / self.config.logits_scaling))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits_BLV, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        cached: dict[str, Any] = {CACHE_NAME: getattr(out, CACHE_NAME)}
        return CausalLMOutputWithPast(loss=loss, logits=logits_BLV, hidden_states=out.hidden_states, **cached)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *rest: Any) -> None:
        """Make generate() start with a HybridtronCache. Raises ValueError if another cache class is requested."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r}: have no other than dynamic"
            )
        if generation_config.use_cache is not False and model_kwargs.get(CACHE_NAME) is None:
            model_kwargs[CACHE_NAME] = HybridtronCache(self.config.num_hidden_layers)
