"""The custom class HybridtronForCausalLM, for models that no class of transformers fits.

transformers does not have this class, so an exported folder contains the class's code (`hybridtron/hf`) with the
weights. The class supports every registered kind of sub-layer, in any order.

config.json contains the layer pattern, in which each letter stands for a sub-layer, and the options of each letter.
Options that have their default values are written too. So the folder still describes the same model if this package
later changes a default.
"""

from __future__ import annotations

from dataclasses import replace

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import Architecture
from hybridtron.config.export_class import SHIPPED
from hybridtron.interop.native import Native, Settings, multipliers_of, with_multipliers
from hybridtron.interop.shipped_code import shipped_code

AUTO_MAP = {
    "AutoConfig": "configuration_hybridtron.HybridtronConfig",
    "AutoModel": "modeling_hybridtron.HybridtronModel",
    "AutoModelForCausalLM": "modeling_hybridtron.HybridtronForCausalLM",
}


class Custom(Native):
    """The custom class. In config.json, `pattern` is the layer pattern, and `layers` maps letters to their options."""

    name = SHIPPED
    model_type = "hybridtron"

    def files(self) -> dict[str, bytes]:
        return shipped_code()

    def settings(self, arch: Architecture, length: int) -> Settings:
        by_letter = arch.by_letter
        return {
            "auto_map": AUTO_MAP,
            "pattern": "".join(arch.letters),
            "layers": {
                letter: {"kind": spec.kind, **spec.exported_options(arch.sizes)} for letter, spec in by_letter.items()
            },
            "num_hidden_layers": len(arch.specs),
            "residual_in_fp32": arch.model.residual_fp32,
            **multipliers_of(arch),
            "max_position_embeddings": length,
        }

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        return theirs["pattern"], theirs["layers"]

    def model(self, theirs: Settings) -> ModelConfig:
        residual_fp32 = theirs.get("residual_in_fp32", False)
        model = with_multipliers(super().model(theirs), theirs)
        return replace(model, residual_fp32=residual_fp32, embedding_std=theirs["initializer_range"])
