"""Configuration for a language model made from residual sub-layers: a pattern of letters, and each letter's options.

In a pattern such as `M-W-`, each letter is one sub-layer: norm, mixer, addition to the residual stream. A mixer is
attention, a state-space recurrence or an MLP.
"""

from __future__ import annotations

from typing import Any

import transformers

NEEDED = (5, 16)
# Checked here, because with an older version a later import would fail without naming the cause.
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < NEEDED:
    raise ImportError(
        f"this model needs transformers {NEEDED[0]}.{NEEDED[1]} or newer, not {transformers.__version__}: "
        f"pip install 'transformers>={NEEDED[0]}.{NEEDED[1]}'"
    )

# attributes that follow from the pattern and its letters
FOLLOWING = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")


class HybridtronConfig(transformers.PreTrainedConfig):
    """Configuration for a hybridtron model.

    `pattern` has one letter for each sub-layer. `layers` gives, for each letter, its mixer's kind (`kind`) and the
    options for that kind. `num_attention_heads`, `num_key_value_heads`, `head_dim` and `sliding_window` describe the
    first attention sub-layer. They are for other tools; the model itself reads `layers`.
    """

    model_type = "hybridtron"
    # names of the cache in the model's output: `past_key_values` before transformers 5.24, then `cache`
    keys_to_ignore_at_inference = ("cache", "past_key_values")

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 64,
        pattern: str = "",
        layers: dict[str, dict[str, Any]] | None = None,
        rms_norm_eps: float = 1e-5,
        residual_in_fp32: bool = False,
        embedding_multiplier: float = 1.0,
        residual_multiplier: float = 1.0,
        logits_scaling: float = 1.0,
        initializer_range: float = 0.02,
        max_position_embeddings: int = 2048,
        tie_word_embeddings: bool = True,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.pattern = pattern
        self.layers = layers or {}
        self.rms_norm_eps = rms_norm_eps
        self.residual_in_fp32 = residual_in_fp32
        self.embedding_multiplier = embedding_multiplier
        self.residual_multiplier = residual_multiplier
        self.logits_scaling = logits_scaling
        self.initializer_range = initializer_range
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        self.num_hidden_layers = len(pattern)
        self._set_heads()
        rest = {name: value for name, value in kwargs.items() if name not in FOLLOWING}
        rest["tie_word_embeddings"] = tie_word_embeddings
        super().__init__(**rest)

    def _set_heads(self) -> None:
        heads = [options for letter in self.pattern if "kv_heads" in (options := self.layers.get(letter, {}))]
        if heads:
            self.num_attention_heads = heads[0]["heads"]
            self.num_key_value_heads = heads[0]["kv_heads"]
            self.head_dim = heads[0]["head_dim"]
            self.sliding_window = heads[0].get("window")
