"""Every other model: a class of our own, whose files are shipped with the weights (`hybridtron/hf`).

It has one sub-layer for each of ours, in any order, of any kind that is registered. All options of a letter are
written, those that are left to a default too, so that a folder means the same when a default changes.
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
    """Any model of mixers that the class has."""

    name, model_type = SHIPPED, "hybridtron"

    def files(self) -> dict[str, bytes]:
        return shipped_code()

    def settings(self, model: ModelConfig, arch: Architecture, length: int) -> Settings:
        by_letter = arch.by_letter
        return {
            "auto_map": AUTO_MAP,
            "pattern": "".join(arch.letters),
            "layers": {k: {"kind": spec.kind, **spec.exported_options(arch.sizes)} for k, spec in by_letter.items()},
            "num_hidden_layers": len(arch.specs),
            "residual_in_fp32": model.residual_fp32,
            **multipliers_of(model),
            "max_position_embeddings": length,
        }

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        return theirs["pattern"], theirs["layers"]

    def model(self, theirs: Settings) -> ModelConfig:
        wide = theirs.get("residual_in_fp32", False)
        model = with_multipliers(super().model(theirs), theirs)
        return replace(model, residual_fp32=wide, embedding_std=theirs["initializer_range"])
