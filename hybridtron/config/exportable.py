"""Which class of transformers a model is, exactly, and what else an export needs; without torch and transformers.

A model is one of these classes or it is none: nothing is rounded to the nearest. What is none of them is shipped with
the class in `hf/`, which has every registered mixer. How a class is written stands in `interop/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hybridtron.architecture.attention import AttentionSpec
from hybridtron.architecture.base import MixerSpec
from hybridtron.architecture.mamba import MambaSpec
from hybridtron.architecture.mamba2 import Mamba2Spec
from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.architecture.table import Architecture, architecture
from hybridtron.config.choices import Export
from hybridtron.requirements import installed, missing

SHIPPED = "HybridtronForCausalLM"
RECORD = "hybridtron_export.json"  # in each exported folder: which checkpoint it was
TRANSFORMERS = (5, 17)  # the first version that what is written was tried with


class CannotExport(ValueError):
    """A model that can't be exported as asked; the message says why and what would work."""


def export_class(model: ModelConfig, wanted: Export) -> str:
    """The name of the class that a model is exported as. Raises CannotExport where there is none."""
    arch = architecture(model)
    reasons = {name: misfit(arch) for name, misfit in NATIVE.items()}
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


def halves(arch: Architecture) -> tuple[Sequence[MixerSpec], Sequence[MixerSpec]]:
    """The mixers, and the MLPs after them, of a model whose layers are pairs of both."""
    return arch.specs[::2], arch.specs[1::2]


def _only(specs: Sequence[MixerSpec], kind: type[MixerSpec]) -> str | None:
    if not all(isinstance(spec, kind) for spec in specs):
        return f"not every sub-layer is {kind.kind}"
    return None if len(set(specs)) == 1 else f"its {kind.kind} sub-layers differ"


def _pairs(arch: Architecture) -> str | None:
    mixers, mlps = halves(arch)
    if len(mixers) != len(mlps):
        return "its last sub-layer has no MLP after it"
    return _only(mlps, SwiGLUSpec)


def _attention(spec: MixerSpec) -> str | None:
    if not isinstance(spec, AttentionSpec):
        return f"{spec.kind} is not attention"
    if spec.conv:
        return "its attention has short convolutions"
    if spec.rotary_dim is not None:
        return "its rotary positions turn a part of each head"
    return None


def _llama(arch: Architecture, windowed: bool) -> str | None:
    mixers = halves(arch)[0]
    found = _pairs(arch) or _only(mixers, AttentionSpec) or _attention(mixers[0])
    if found is not None:
        return found
    spec = mixers[0]
    assert isinstance(spec, AttentionSpec)
    if spec.rope_base is None:
        return "its attention has no rotary positions"
    if (spec.window is not None) is not windowed:
        return "its attention has a window" if spec.window else "its attention has no window"
    return None


def _granite(arch: Architecture) -> str | None:
    mixers = halves(arch)[0]
    recurrent = [spec for spec in mixers if isinstance(spec, Mamba2Spec)]
    others = [spec for spec in mixers if not isinstance(spec, Mamba2Spec)]
    if found := _pairs(arch):
        return found
    if not recurrent:
        return "it has no mamba2 sub-layer"
    found = _only(recurrent, Mamba2Spec)
    if found or not others:
        return found
    if found := _only(others, AttentionSpec) or _attention(others[0]):
        return found
    attention = others[0]
    assert isinstance(attention, AttentionSpec)
    if attention.window is not None:
        return "its attention has a window"
    if attention.channels(arch.sizes)[0] != arch.sizes.width:
        return "its heads together are not as wide as the model"
    return None


Misfit = Callable[[Architecture], str | None]
NATIVE: dict[str, Misfit] = {
    "MambaForCausalLM": lambda arch: _only(arch.specs, MambaSpec),
    "Mamba2ForCausalLM": lambda arch: _only(arch.specs, Mamba2Spec),
    "LlamaForCausalLM": partial(_llama, windowed=False),
    "MistralForCausalLM": partial(_llama, windowed=True),
    "GraniteMoeHybridForCausalLM": _granite,
}
"""Why a model is not of a class that transformers has by itself; None where it is, exactly."""
