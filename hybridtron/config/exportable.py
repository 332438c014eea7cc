"""Find the transformers class that a model fits exactly, and check other needs of an export.

A model either fits a class or it does not; nothing is rounded to the nearest. A model that fits none is exported with
the class in `hf/`, which supports every registered mixer. The code that writes each class is in `interop/`. Nothing
here needs torch or transformers.
"""

from __future__ import annotations

from collections.abc import Collection

from hybridtron.architecture.model import MULTIPLIERS, ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.choices import Export
from hybridtron.config.native_fits import NATIVE
from hybridtron.requirements import installed, missing

SHIPPED = "HybridtronForCausalLM"
RECORD = "hybridtron_export.json"  # in each exported folder: names the checkpoint that it was made from
TRANSFORMERS = (5, 23)  # the Mamba-2 of earlier versions normalizes several groups as one


class CannotExport(ValueError):
    """A model that can't be exported as requested; the message says why and suggests an alternative."""


def export_class(model: ModelConfig, wanted: Export) -> str:
    """Return the class name that a model is exported as.

    Raises CannotExport if `wanted` is native and no class of transformers fits.
    """
    arch = architecture(model)
    reasons = {name: misfit(arch, model.norm_eps) or _beside(model, name) for name, misfit in NATIVE.items()}
    fitting = [name for name, reason in reasons.items() if reason is None]
    if fitting and wanted is not Export.custom:
        return fitting[0]
    listed = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
    if wanted is Export.native:
        raise CannotExport(
            f"transformers has no class for {model.pattern}; auto and custom ship a class for it{listed}"
        )
    return SHIPPED


def transformers_fault() -> str | None:
    """Return why the installed transformers cannot prove an export; None if it can."""
    if (fault := missing("export")) is not None:
        return fault
    if (version := installed("transformers")) is None:
        return None  # a checkout on the path: the user who put it there knows its version
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if numbers >= TRANSFORMERS:
        return None
    needed = ".".join(map(str, TRANSFORMERS))
    return f"transformers {needed} or newer is needed, not {version}: pip install 'transformers>={needed}'"


def _beside(model: ModelConfig, name: str) -> str | None:
    """Return why a class with fitting sub-layers does not fit the embedding, head or multipliers; else None."""
    if model.tie_embeddings and name in UNTIED:
        return "its head is tied to its embedding"
    if not model.tie_embeddings and name in TIED:
        return "it shares no weights where the head has its own"
    unsupported = [
        multiplier
        for multiplier in MULTIPLIERS
        if getattr(model, multiplier) != 1 and multiplier not in MULTIPLIED.get(name, ())
    ]
    if unsupported:
        return f"it has {unsupported[0]}={getattr(model, unsupported[0])}"
    return None


UNTIED = ("NemotronHForCausalLM",)
"""Classes that can't share the embedding's weights with the head."""
TIED = ("Zamba2ForCausalLM",)
"""Classes that transformers silently builds without shared sub-layers if embedding and head are not tied."""
MULTIPLIED: dict[str, Collection[str]] = {
    **dict.fromkeys(("GraniteForCausalLM", "GraniteMoeHybridForCausalLM"), MULTIPLIERS),
    "FalconH1ForCausalLM": ("embedding_multiplier", "logits_scaling"),
}
"""Model multipliers (of the embedding, all sub-layers or the logits) that a class supports."""
