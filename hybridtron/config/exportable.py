"""Which class of transformers a model is, exactly, and what else an export needs; without torch and transformers.

A model is one of these classes or it is none: nothing is rounded to the nearest. What is none of them is shipped with
the class in `hf/`, which has every registered mixer. How a class is written stands in `interop/`.
"""

from __future__ import annotations

from collections.abc import Collection

from hybridtron.architecture.model import MULTIPLIERS, ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.choices import Export
from hybridtron.config.native_fits import NATIVE
from hybridtron.requirements import installed, missing

SHIPPED = "HybridtronForCausalLM"
RECORD = "hybridtron_export.json"  # in each exported folder: which checkpoint it was
TRANSFORMERS = (5, 23)  # before it, its Mamba-2 takes the norm of several groups as one


class CannotExport(ValueError):
    """A model that can't be exported as asked; the message says why and what would work."""


def export_class(model: ModelConfig, wanted: Export) -> str:
    """The name of the class that a model is exported as. Raises CannotExport where there is none."""
    arch = architecture(model)
    reasons = {name: misfit(arch, model.norm_eps) or _beside(model, name) for name, misfit in NATIVE.items()}
    fitting = [name for name, reason in reasons.items() if reason is None]
    if fitting and wanted is not Export.custom:
        return fitting[0]
    listed = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
    if wanted is Export.native:
        raise CannotExport(f"{model.pattern} is no class of transformers; auto and custom ship a class for it{listed}")
    return SHIPPED


def transformers_fault() -> str | None:
    """Why what transformers must do to prove an export can't be done; None where it can."""
    if (fault := missing("export")) is not None:
        return fault
    if (found := installed("transformers")) is None:
        return None  # a checkout on the path: the user who put it there knows its version
    numbers = tuple(int(part) if part.isdigit() else 0 for part in found.split(".")[:2])
    if numbers >= TRANSFORMERS:
        return None
    needed = ".".join(map(str, TRANSFORMERS))
    return f"transformers {needed} or newer is needed, not {found}: pip install 'transformers>={needed}'"


def _beside(model: ModelConfig, name: str) -> str | None:
    """What of a model's ends keeps it from a class that has its sub-layers."""
    if model.tie_embeddings and name in UNTIED:
        return "its head is tied to its embedding"
    if not model.tie_embeddings and name in TIED:
        return "it shares no weights where the head has its own"
    other = [each for each in MULTIPLIERS if getattr(model, each) != 1 and each not in MULTIPLIED.get(name, ())]
    return f"it has {other[0]}={getattr(model, other[0])}" if other else None


UNTIED = ("NemotronHForCausalLM",)
"""Classes that can't share the embedding's weights with the head."""
TIED = ("Zamba2ForCausalLM",)
"""Those that transformers builds otherwise, without a word, where the embedding is not the head."""
MULTIPLIED: dict[str, Collection[str]] = {
    **dict.fromkeys(("GraniteForCausalLM", "GraniteMoeHybridForCausalLM"), MULTIPLIERS),
    "FalconH1ForCausalLM": ("embedding_multiplier", "logits_scaling"),
}
"""Those that multiply embedding, all sub-layers or logits."""
