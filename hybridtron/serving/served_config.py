"""Configuration of an export with this package's class, as vLLM reads it."""

from __future__ import annotations

from typing import Any

from hybridtron.hf import HybridtronConfig


class ServedConfig(HybridtronConfig):
    """Configuration with the attributes that vLLM expects of a hybrid.

    `layers_block_type` names each sub-layer's kind. `sliding_window` is None, because vLLM would give the window to all
    attention sub-layers, including those without a window.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        layers = [self.layers.get(letter, {}) for letter in self.pattern]
        self.layers_block_type = ["attention" if "kv_heads" in layer else layer.get("kind") for layer in layers]
        self.sliding_window = None
