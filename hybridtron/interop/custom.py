"""Every other model: a class of our own, whose files are shipped with the weights (`hybridtron/hf`).

It has one sub-layer for each of ours, in any order, of any kind that is registered. All options of a letter are
written, those that are left to a default too, so that a folder means the same when a default changes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import Architecture
from hybridtron.config.exportable import SHIPPED
from hybridtron.interop.native import Native, Settings
from hybridtron.interop.shipped_code import is_shipped, shipped_code

AUTO_MAP = {
    "AutoConfig": "configuration_hybridtron.HybridtronConfig",
    "AutoModel": "modeling_hybridtron.HybridtronModel",
    "AutoModelForCausalLM": "modeling_hybridtron.HybridtronForCausalLM",
}


class ForeignCode(ValueError):
    """A folder brings code that is not ours, or not as we ship it; it is not run."""


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
            "max_position_embeddings": length,
        }

    def pattern(self, theirs: Settings) -> tuple[str, dict[str, Settings]]:
        return theirs["pattern"], theirs["layers"]

    def model(self, theirs: Settings) -> ModelConfig:
        wide = theirs.get("residual_in_fp32", False)
        return replace(super().model(theirs), residual_fp32=wide, embedding_std=theirs["initializer_range"])


def brings_our_code(folder: Path) -> bool:
    """Whether a folder is of our class, with files that a version of hybridtron shipped, byte for byte.

    Raises ForeignCode where it has other code: of a trusted folder transformers runs what auto_map names, a `generate`
    of the folder's own, and the code of the model that an adapter is for, wherever that is.
    """
    auto_map = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map")
    if auto_map is None:
        return False
    if auto_map != AUTO_MAP:
        raise ForeignCode(f"{folder / 'config.json'} names code that is not ours in auto_map: {auto_map}")
    if (folder / "adapter_config.json").exists():
        raise ForeignCode(f"{folder / 'adapter_config.json'} names another model, whose code is not run")
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.py"))}
    if not is_shipped(found):
        ours = shipped_code()
        other = [name for name in found.keys() | ours.keys() if found.get(name) != ours.get(name)]
        raise ForeignCode(f"{folder / min(other)} is not this version's or an earlier one's, and is not run")
    return True
