"""The custom class HybridtronForCausalLM, for all other models; its code is shipped with the weights.

The class (`hybridtron/hf`) takes sub-layers of every registered kind, in any order. config.json has all options of each
letter, also those left at their defaults, so that the folder keeps its meaning when a default changes.
"""

from __future__ import annotations

from dataclasses import replace

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import Architecture
from hybridtron.config.exportable import SHIPPED
from hybridtron.interop.native import Native, Settings, multipliers_of, with_multipliers
from hybridtron.interop.shipped_code import shipped_code

AUTO_MAP = {
    "AutoConfig": "configuration_hybridtron.HybridtronConfig",
    "AutoModel": "modeling_hybridtron.HybridtronModel",
    "AutoModelForCausalLM": "modeling_hybridtron.HybridtronForCausalLM",
}


class Custom(Native):
    """The custom class: any pattern of registered mixers, written to config.json as `pattern` and `layers`."""

    name = SHIPPED
    model_type = "hybridtron"

    def files(self) -> dict[str, bytes]:
        return shipped_code()

    def settings(self, model: ModelConfig, arch: Architecture, length: int) -> Settings:
        by_letter = arch.by_letter
        return {
            "auto_map": AUTO_MAP,
            "pattern": "".join(arch.letters),
            "layers": {
                letter: {"kind": spec.kind, **spec.exported_options(arch.sizes)} for letter, spec in by_letter.items()
            },
            "num_hidden_layers": len(arch.specs),
            "residual_in_fp32": model.residual_fp32,
            **multipliers_of(model),
            "max_position_embeddings": length,
        }

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        return theirs["pattern"], theirs["layers"]

    def model(self, theirs: Settings) -> ModelConfig:
        residual_fp32 = theirs.get("residual_in_fp32", False)
        model = with_multipliers(super().model(theirs), theirs)
        return replace(model, residual_fp32=residual_fp32, embedding_std=theirs["initializer_range"])
