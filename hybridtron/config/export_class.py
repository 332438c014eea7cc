"""Find the class of transformers that can represent a model exactly, for an export in Hugging Face's format.

`hf_compat.py` compares the model's sub-layers with each class; this file compares the embedding, the head and the
multipliers. A model that fits no class is exported with this package's class in `hf/`, which supports every registered
mixer. The code that writes exports is in `interop/`. Nothing here needs torch or transformers.
"""

from __future__ import annotations

from collections.abc import Collection

from hybridtron.architecture.model import MULTIPLIERS
from hybridtron.architecture.table import Architecture
from hybridtron.config.choices import Export
from hybridtron.config.hf_compat import NATIVE
from hybridtron.problems import Unusable
from hybridtron.requirements import installed, missing

SHIPPED = "HybridtronForCausalLM"  # this package's class, whose source files become part of the export
RECORD = "hybridtron_export.json"  # file that each export contains; it names the exported checkpoint
# minimum version for the proof of exports; earlier versions normalize all groups of Mamba-2's grouped norm as one group
TRANSFORMERS = (5, 23)


class CannotExport(Unusable):
    """Raised if a model can't be exported as requested. The message names the reasons and an alternative."""


def export_class(arch: Architecture, wanted: Export) -> str:
    """Return the class name for an export of this model.

    `wanted` is the value of `phases.N.export` or `--target`. Raises CannotExport if `wanted` is native and no class of
    transformers fits.
    """
    model = arch.model
    reasons = {name: misfit_of(arch, name) for name in NATIVE}
    fitting = [name for name, reason in reasons.items() if reason is None]
    if fitting and wanted is not Export.custom:
        return fitting[0]
    listed = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
    if wanted is Export.native:
        raise CannotExport(
            f"no class of transformers fits {model.pattern}: use auto or custom for this package's class{listed}",
            code="unsupported",
        )
    return SHIPPED


def misfit_of(arch: Architecture, name: str) -> str | None:
    """Return the first reason why a class of transformers does not compute exactly this model, or None."""
    return NATIVE[name](arch, arch.model.norm_eps) or _beside(arch, name)


def required_class(arch: Architecture, name: str) -> str:
    """Return `name`, a class of transformers. Raises CannotExport if this class does not fit the model."""
    if (reason := misfit_of(arch, name)) is not None:
        raise CannotExport(
            f"{name} does not fit {arch.model.pattern}: {reason}; use auto for a class that fits", code="unsupported"
        )
    return name


def transformers_fault() -> str | None:
    """Return the reason why exports can't be loaded with the installed transformers, or None if they can.

    Every export is checked by loading it with transformers.
    """
    if (fault := missing("export")) is not None:
        return fault
    if (version := installed("transformers")) is None:
        return None  # transformers is imported from a checkout, whose version is unknown
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if numbers >= TRANSFORMERS:
        return None
    needed = ".".join(map(str, TRANSFORMERS))
    return f"transformers {version} is too old: run pip install 'transformers>={needed}'"


def _beside(arch: Architecture, name: str) -> str | None:
    """Return the first reason why a class does not fit the model's embedding, head or multipliers, or None."""
    tied = arch.model.tie_embeddings
    if tied and name in UNTIED:
        return "its head is tied to its embedding"
    if not tied and name in TIED:
        return "its head is not tied to its embedding"
    unsupported = [
        f"{multiplier}={value}"
        for multiplier, value in arch.multipliers.items()
        if value != 1 and multiplier not in MULTIPLIED.get(name, ())
    ]
    if unsupported:
        return f"it has {unsupported[0]}"
    return None


UNTIED = ("NemotronHForCausalLM",)
"""Classes whose head can't be tied to the embedding."""
TIED = ("Zamba2ForCausalLM",)
"""Classes whose head must be tied to the embedding.

If it is not tied, transformers silently gives each use of a shared layer its own weights.
"""
MULTIPLIED: dict[str, Collection[str]] = {
    **dict.fromkeys(("GraniteForCausalLM", "GraniteMoeHybridForCausalLM"), MULTIPLIERS),
    "FalconH1ForCausalLM": ("embedding_multiplier", "logits_scaling"),
}
"""Class -> names of the multipliers in ModelConfig that the class supports; other classes support none."""
