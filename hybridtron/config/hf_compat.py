"""Compare a model's sub-layers with the classes of transformers, to find a class for an export.

A sub-layer is one residual step in the model: a mixer (attention or a recurrence) or an MLP, with its norm. A sub-layer
fits a class only if all its options have exactly the values that the class implements. Unless stated otherwise, the
functions return a text about the first difference, or None if they find no difference. In these texts, "it" and "its"
refer to the model. `export_class.py` compares the embedding, head and multipliers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from hybridtron.architecture.attention import AttentionSpec
from hybridtron.architecture.base import MixerSpec
from hybridtron.architecture.gated_deltanet import GatedDeltaNetSpec
from hybridtron.architecture.mamba import MambaSpec
from hybridtron.architecture.mamba2 import Mamba2Spec, ProjectionMultipliers
from hybridtron.architecture.moe import MoESpec
from hybridtron.architecture.shared_attention import SharedAttentionSpec
from hybridtron.architecture.sparse import RecurrenceSpec
from hybridtron.architecture.squared_relu import SquaredReLUSpec
from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.architecture.table import Architecture

OLMO_HEAD_EPS = 1e-5  # OLMo-Hybrid ignores config.json for the epsilon of Gated DeltaNet's norm of each head
ZAMBA2_MAMBA_EPS = 1e-5  # Zamba2 ignores config.json for the epsilon of Mamba-2's gated norm
OF_FEW_CLASSES = {
    "dt_floor": 0.0,
    "norm": True,
    "multipliers": ProjectionMultipliers(),
    "gate_multiplier": 1.0,
    "output_multiplier": 1.0,
    "beside": False,
    "inner_norm": "none",
}
"""Sub-layer option that few classes support -> the value that all other classes need."""


def halves(arch: Architecture) -> tuple[Sequence[MixerSpec], Sequence[MixerSpec]]:
    """Return the sub-layers at even indices, and the sub-layers at odd indices.

    If mixers and MLPs alternate, these are the mixers and the MLPs.
    """
    return arch.specs[::2], arch.specs[1::2]


def _only(
    specs: Sequence[MixerSpec], kind: type[MixerSpec], norm_after: bool = False, also: Collection[str] = ()
) -> str | None:
    """Check that all sub-layers in `specs` have this kind and equal options.

    With `norm_after`, the norm must be after the sub-layer, else before it. Options named in OF_FEW_CLASSES must have
    the values from that table, except for the options in `also`.
    """
    if not all(spec.kind == kind.kind for spec in specs):
        return f"not every sub-layer is {kind.kind}"
    if len(set(specs)) != 1:
        return f"its {kind.kind} sub-layers differ"
    if isinstance(specs[0], RecurrenceSpec) and specs[0].sparse is not None:
        return f"its {kind.kind} sub-layers have parallel sparse attention"
    for name in [name for name in OF_FEW_CLASSES if hasattr(specs[0], name) and name not in also]:
        if (value := getattr(specs[0], name)) != OF_FEW_CLASSES[name]:
            return f"its {kind.kind} sub-layers have {name}={value}"
    if specs[0].norm_after is not norm_after:
        return f"its {kind.kind} sub-layers have their norm {'before' if norm_after else 'after'} them"
    return None


def _pairs(arch: Architecture, experts: bool = False) -> str | None:
    """Check that the model alternates mixers with SwiGLU MLPs, or with experts if `experts` is True."""
    mlps = halves(arch)[1]
    if experts and any(isinstance(spec, MoESpec) for spec in mlps):
        return _are_pairs(arch) or _experts(mlps)
    return _are_pairs(arch) or _only(mlps, SwiGLUSpec)


def _are_pairs(arch: Architecture) -> str | None:
    """Check that the number of sub-layers is even."""
    if len(arch.specs) % 2:
        return "its last sub-layer has no MLP after it"
    return None


def _attention(
    spec: MixerSpec, qk_norm: str = "none", gate: bool = False, part: bool = False, scaled: bool = False
) -> str | None:
    """Check that a sub-layer is attention without unsupported options.

    qk_norm, gate: values that the attention's options must have
    part: allow rotary positions that rotate only a part of each head
    scaled: allow a score scale other than the default
    """
    if not isinstance(spec, AttentionSpec):
        return f"{spec.kind} is not attention"
    if spec.conv:
        return "its attention has short convolutions"
    if spec.self_extend is not None:
        return "its attention has self_extend"
    if spec.rotary_dim is not None and not gate and not part:
        return "its rotary positions rotate only a part of each head"
    if spec.qk_norm != qk_norm:
        return f"its attention has qk_norm={spec.qk_norm}, not {qk_norm}"
    if spec.scale is not None and not scaled:
        return "its attention has another scale than the default"
    if spec.gate is not gate:
        return f"its attention has {'a' if spec.gate else 'no'} gate"
    return None


def _llama(arch: Architecture, norm_eps: float, windowed: bool, scaled: bool = False) -> str | None:
    """Check for Llama-like models: pairs of attention with rotary positions and a SwiGLU MLP.

    The attention must have a window if `windowed` is True, and no window otherwise. `scaled` means the same as in
    `_attention`.
    """
    mixers = halves(arch)[0]
    misfit = _pairs(arch) or _only(mixers, AttentionSpec) or _attention(mixers[0], scaled=scaled)
    if misfit is not None:
        return misfit
    spec = mixers[0]
    assert isinstance(spec, AttentionSpec)
    if spec.positions is None:
        return "its attention has no rotary positions"
    if (spec.window is not None) is not windowed:
        if spec.window:
            return "its attention has a window"
        return "its attention has no window"
    return None


def _experts(specs: Sequence[MixerSpec], shared_gate: bool = False, normalised: bool = True) -> str | None:
    """Check that all sub-layers in `specs` have the same experts, with a softmax router and a shared expert.

    The shared expert must have a gate if `shared_gate` is True, and none otherwise. With `normalised`, a token's
    weights must be divided by their sum; without it, both forms fit. config.json does not say how a model is trained,
    so the rules that keep loads even are not compared. Only a correction is refused: it changes the choice of experts.
    """
    if misfit := _only(specs, MoESpec):
        return misfit
    spec = specs[0]
    assert isinstance(spec, MoESpec)
    if not spec.shared:
        return "its moe sub-layers have no shared expert"
    fitting = {"activation": "swiglu", "latent": None, "scores": "softmax", "scale": 1.0, "groups": 1}
    fitting["shared_gate"] = shared_gate
    if normalised:
        fitting["normalise"] = True
    for option, value in fitting.items():
        if (actual := getattr(spec, option)) != value:
            return f"its moe sub-layers have {option}={actual}, not {value}"
    if spec.corrected:
        return "its moe sub-layers correct the scores (balance=bias)"
    return None


def _granite_hybrid(arch: Architecture, norm_eps: float) -> str | None:
    misfit, attention = _mamba2_hybrid(arch, norm_eps, scaled=True, experts=True)
    if misfit or attention is None:
        return misfit
    if attention.channels(arch.sizes)[0] != arch.sizes.width:
        return "its attention's heads together are not as wide as model.width"
    return None


def _bamba(arch: Architecture, norm_eps: float) -> str | None:
    """Check for Bamba: Mamba-2, and attention with rotary positions that rotate half the dimensions in each head."""
    misfit, attention = _mamba2_hybrid(arch, norm_eps, part=True)
    if misfit or attention is None:
        return misfit
    if attention.positions is None:
        return "its attention has no rotary positions"
    if 2 * attention.rotary(arch.sizes) != attention.head(arch.sizes):
        return "its rotary positions do not rotate half of each head"
    return None


def _mamba2_hybrid(
    arch: Architecture, norm_eps: float, part: bool = False, scaled: bool = False, experts: bool = False
) -> tuple[str | None, AttentionSpec | None]:
    """Check the common rules for Granite's hybrid and Bamba: pairs of a mixer (Mamba-2 or attention) and an MLP.

    Returns (first difference or None, the attention spec or None). `part` and `scaled` mean the same as in
    `_attention`, `experts` the same as in `_pairs`.
    """
    mixers = halves(arch)[0]
    recurrent: list[Mamba2Spec] = [spec for spec in mixers if isinstance(spec, Mamba2Spec)]
    other_mixers = [spec for spec in mixers if not isinstance(spec, Mamba2Spec)]
    if misfit := _pairs(arch, experts):
        return misfit, None
    if not recurrent:
        return "it has no mamba2 sub-layer", None
    if not other_mixers:
        return "it has no attention", None
    if misfit := _only(recurrent, Mamba2Spec) or _expanded(arch) or _same_eps(recurrent[0], norm_eps):
        return misfit, None
    if misfit := _only(other_mixers, AttentionSpec) or _attention(other_mixers[0], part=part, scaled=scaled):
        return misfit, None
    attention = other_mixers[0]
    assert isinstance(attention, AttentionSpec)
    return ("its attention has a window" if attention.window is not None else None), attention


def _expanded(arch: Architecture) -> str | None:
    """Check that Mamba-2's heads together are `expand` times as wide as the model, as transformers assumes."""
    mamba = next(spec for spec in arch.specs if isinstance(spec, Mamba2Spec))
    same = mamba.inner(arch.sizes) == mamba.expand * arch.sizes.width
    if same:
        return None
    return "its mamba2 heads together are not as wide as expand * model.width"


def _nemotron_h(arch: Architecture, norm_eps: float) -> str | None:
    """Check for Nemotron-H: Mamba-2, squared-ReLU MLPs or experts, and attention without positions, in any order."""
    mamba = [spec for spec in arch.specs if isinstance(spec, Mamba2Spec)]
    mlps = [spec for spec in arch.specs if isinstance(spec, SquaredReLUSpec)]
    experts = [spec for spec in arch.specs if isinstance(spec, MoESpec)]
    attention = [spec for spec in arch.specs if isinstance(spec, AttentionSpec)]
    if other_kinds := [spec.kind for spec in arch.specs if spec not in (*mamba, *mlps, *experts, *attention)]:
        return f"{other_kinds[0]} is none of mamba2, squared_relu, moe and attention"
    kinds = {"mamba2": mamba, "squared_relu or moe": [*mlps, *experts], "attention": attention}
    if missing := [kind for kind, specs in kinds.items() if not specs]:
        return f"it has no {missing[0]} sub-layer"
    misfit = _only(mamba, Mamba2Spec) or _same_eps(mamba[0], norm_eps)
    misfit = misfit or (_only(mlps, SquaredReLUSpec) if mlps else None)
    misfit = misfit or (_only(experts, MoESpec) or _nemotron_experts(experts[0]) if experts else None)
    if misfit := misfit or _only(attention, AttentionSpec) or _attention(attention[0], part=True):
        return misfit
    if attention[0].positions is not None:
        return "its attention has rotary positions"
    if attention[0].window is not None:
        return "its attention has a window"
    return None


def _nemotron_experts(spec: MoESpec) -> str | None:
    """Check for the experts of Nemotron-H: sigmoid scores with a correction, and an ungated shared expert."""
    required = {"activation": "squared_relu", "scores": "sigmoid", "balance": "bias", "shared_gate": False}
    for name, value in required.items():
        if (actual := getattr(spec, name)) != value:
            return f"its experts have {name}={actual}, not {value}"
    if not spec.shared:
        return "its experts have no shared expert"
    if spec.groups == spec.experts:
        return "its groups of experts have one expert each, of which transformers can't take the two best"
    return None


def _delta(arch: Architecture) -> tuple[list[GatedDeltaNetSpec], list[AttentionSpec]]:
    """Return the Gated DeltaNet mixers and the attention mixers; two empty lists if the model has other mixers too."""
    mixers = halves(arch)[0]
    recurrent = [spec for spec in mixers if isinstance(spec, GatedDeltaNetSpec)]
    attention = [spec for spec in mixers if isinstance(spec, AttentionSpec)]
    if len(recurrent) + len(attention) == len(mixers):
        return (recurrent, attention)
    return ([], [])


def _delta_hybrid(arch: Architecture, qk_norm: str, gate: bool, norm_after: bool, experts: bool = False) -> str | None:
    """Check the common rules for OLMo-Hybrid and Qwen3-Next: Gated DeltaNet and attention, each followed by an MLP.

    qk_norm, gate: values that the attention's options must have
    norm_after: True if attention, and each MLP after attention, must have its norm after the sub-layer, not before it
    experts: allow layers with experts instead of the MLP, without a check of their options
    """
    recurrent, attention = _delta(arch)
    if not recurrent or not attention:
        return "its mixers are not a mixture of gated_deltanet and attention"
    mixers, mlps = halves(arch)
    dense = [replace(mlp, norm_after=False) for mlp in mlps if not (experts and isinstance(mlp, MoESpec))]
    misfit = _are_pairs(arch) or (_only(dense, SwiGLUSpec) if dense else None)
    misfit = misfit or _only(recurrent, GatedDeltaNetSpec) or _only(attention, AttentionSpec, norm_after)
    if misfit := misfit or _attention(attention[0], qk_norm, gate):
        return misfit
    if attention[0].window is not None:
        return "its attention has a window"
    misplaced = [mlp for mixer, mlp in zip(mixers, mlps, strict=True) if mlp.norm_after is not mixer.norm_after]
    if misplaced:
        return "an MLP and the mixer before it do not have their norms on the same side"
    return None


def _olmo_hybrid(arch: Architecture, norm_eps: float) -> str | None:
    """Check for OLMo-Hybrid: Gated DeltaNet and attention, each followed by an MLP.

    Attention, and each MLP after attention, has its norm after the sub-layer.
    """
    if misfit := _delta_hybrid(arch, "all", gate=False, norm_after=True):
        return misfit
    recurrent, attention = _delta(arch)
    if recurrent[0].norm_eps != OLMO_HEAD_EPS:
        return f"its gated_deltanet has norm_eps={recurrent[0].norm_eps}, not {OLMO_HEAD_EPS}"
    return _same_eps(attention[0], norm_eps)


def _qwen(arch: Architecture, norm_eps: float, mlps: type[MixerSpec] | None = None) -> str | None:
    """Check for Qwen3-Next or, if `mlps` is set, for Qwen3.5.

    mlps: spec that every layer's MLP must have, for an MLP or for experts
    """
    if misfit := _delta_hybrid(arch, "head", gate=True, norm_after=False, experts=True):
        return misfit
    if mlps is not None and (misfit := _only(halves(arch)[1], mlps)):
        return misfit
    experts = [spec for spec in halves(arch)[1] if isinstance(spec, MoESpec)]
    if experts and (misfit := _experts(experts, shared_gate=True, normalised=mlps is not None)):
        return misfit
    recurrent, attention = _delta(arch)
    if recurrent[0].negative_eigenvalues:
        return "its gated_deltanet has negative_eigenvalues"
    if attention[0].positions is None:
        return "its attention has no rotary positions"
    return _same_eps(recurrent[0], norm_eps) or _same_eps(attention[0], norm_eps)


def _zamba2(arch: Architecture, norm_eps: float) -> str | None:
    """Check for Zamba2: Mamba-2, and shared attention blocks that are used in turn."""
    blocks = [spec for spec in arch.specs if isinstance(spec, SharedAttentionSpec)]
    mamba = [spec for spec in arch.specs if isinstance(spec, Mamba2Spec)]
    if not blocks or not mamba or len(blocks) + len(mamba) != len(arch.specs):
        return "its sub-layers are not a mixture of mamba2 and shared_attention"
    if (
        misfit := _only(mamba, Mamba2Spec, also=["dt_floor"])
        or _only(blocks, SharedAttentionSpec)
        or _attention(blocks[0])
    ):
        return misfit
    if blocks[0].window is not None:
        return "its attention has a window"
    if blocks[0].channels(arch.sizes) != (2 * arch.sizes.width,) * 2:
        return "its query heads together, or its key heads together, are not twice as wide as the model"
    letters = [letter for letter, spec in zip(arch.letters, arch.specs, strict=True) if spec.feeds_next]
    in_turn = list(dict.fromkeys(letters))
    if any(letter != in_turn[index % len(in_turn)] for index, letter in enumerate(letters)):
        return f"its shared blocks are used in the order {''.join(letters)}, not in turn"
    if mamba[0].norm_eps != ZAMBA2_MAMBA_EPS:
        return f"its mamba2 has norm_eps={mamba[0].norm_eps}, not {ZAMBA2_MAMBA_EPS}"
    return _same_eps(blocks[0], norm_eps)


def _falcon_h1(arch: Architecture, norm_eps: float) -> str | None:
    """Check for Falcon-H1: triples of Mamba-2, attention parallel to it, and a SwiGLU MLP."""
    mamba, attention, mlps = (arch.specs[first::3] for first in range(3))
    kinds = {tuple(spec.kind for spec in triple) for triple in zip(mamba, attention, mlps, strict=False)}
    if len(arch.specs) % 3 or kinds != {("mamba2", "attention", "swiglu")}:
        return "its layers are not triples of mamba2, parallel attention and swiglu"
    misfit = _only(mamba, Mamba2Spec, also=["norm", "multipliers", "output_multiplier"])
    misfit = misfit or _only(attention, AttentionSpec, also=["beside", "output_multiplier"])
    misfit = misfit or _only(mlps, SwiGLUSpec, also=["gate_multiplier", "output_multiplier"])
    if misfit := misfit or _attention(attention[0], scaled=True):
        return misfit
    first = mamba[0]
    beside = attention[0]
    assert isinstance(first, Mamba2Spec)
    assert isinstance(beside, AttentionSpec)
    if not beside.beside:
        return "its attention is not parallel to mamba2 (option beside)"
    if beside.positions is None:
        return "its attention has no rotary positions"
    if beside.window is not None:
        return "its attention has a window"
    if first.norm:
        return _same_eps(first, norm_eps)
    return None


def _falcon_mamba(arch: Architecture, norm_eps: float) -> str | None:
    """Check for Falcon-Mamba: Mamba-1 alone, with norms of dt, B and C that have no weights."""
    return _only(arch.specs, MambaSpec, also=["inner_norm"]) or _inner_norm(arch.specs[0], "plain")


def _jamba(arch: Architecture, norm_eps: float) -> str | None:
    """Check for Jamba: Mamba-1 with learned inner norms, or attention, each followed by an MLP or by experts."""
    mixers, mlps = halves(arch)
    mamba = [spec for spec in mixers if isinstance(spec, MambaSpec)]
    attention = [spec for spec in mixers if isinstance(spec, AttentionSpec)]
    dense = [spec for spec in mlps if isinstance(spec, SwiGLUSpec)]
    experts = [spec for spec in mlps if isinstance(spec, MoESpec)]
    if not mamba or not attention or len(mamba) + len(attention) != len(mixers):
        return "its mixers are not a mixture of mamba and attention"
    if len(dense) + len(experts) != len(mlps) or len(mlps) != len(mixers):
        return "its mixers are not each followed by swiglu or moe"
    misfit = _only(mamba, MambaSpec, also=["inner_norm"]) or _inner_norm(mamba[0], "learned")
    misfit = misfit or _same_eps(mamba[0], norm_eps) or _only(attention, AttentionSpec) or _attention(attention[0])
    misfit = misfit or (_only(dense, SwiGLUSpec) if dense else None)
    misfit = misfit or (_only(experts, MoESpec) or _jamba_experts(experts[0]) if experts else None)
    if misfit := misfit or _jamba_attention(arch, attention[0]):
        return misfit
    if dense and experts and dense[0].hidden != experts[0].hidden:
        return "its MLPs and its experts have different sizes"
    for kind, specs in (("attention", mixers), ("moe", mlps)):
        if period_of([spec.kind == kind for spec in specs]) is None:
            return f"its {kind} sub-layers do not follow each other at equal distances"
    return None


def _jamba_attention(arch: Architecture, spec: AttentionSpec) -> str | None:
    if spec.positions is not None:
        return "its attention has rotary positions"
    if spec.window is not None:
        return "its attention has a window"
    if spec.channels(arch.sizes)[0] != arch.sizes.width:
        return "its attention's heads together are not as wide as model.width"
    return None


def _jamba_experts(spec: MoESpec) -> str | None:
    required = {"activation": "swiglu", "scores": "softmax", "normalise": False, "scale": 1.0, "shared": 0, "groups": 1}
    for name, value in {**required, "latent": None}.items():
        if (actual := getattr(spec, name)) != value:
            return f"its experts have {name}={actual}, not {value}"
    if spec.corrected:
        return "its experts have a correction of their scores (balance=bias)"
    return None


def _inner_norm(spec: MixerSpec, wanted: str) -> str | None:
    assert isinstance(spec, MambaSpec)
    same = spec.inner_norm == wanted
    if same:
        return None
    return f"its mamba has inner_norm={spec.inner_norm}, not {wanted}"


class Period(NamedTuple):
    """Layers at equal distances: layer i with i % period == offset."""

    period: int
    offset: int


def period_of(marks: Sequence[bool]) -> Period | None:
    """Return the period of the marked layers, or None if they have no period or do not begin in the first period.

    If no layer is marked, the period is longer than the model.
    """
    places = [index for index, mark in enumerate(marks) if mark]
    count = len(marks)
    if not places:
        return Period(count + 1, count)
    first = places[0]
    period = places[1] - first if len(places) > 1 else max(first + 1, count - first)
    if first >= period or places != list(range(first, count, period)):
        return None
    return Period(period, first)


def _same_eps(spec: GatedDeltaNetSpec | AttentionSpec | Mamba2Spec | MambaSpec, norm_eps: float) -> str | None:
    same = spec.norm_eps == norm_eps
    if same:
        return None
    return f"its {spec.kind} has norm_eps={spec.norm_eps}, not model.norm_eps={norm_eps}"


Misfit = Callable[[Architecture, float], str | None]
NATIVE: dict[str, Misfit] = {
    "MambaForCausalLM": lambda arch, _: _only(arch.specs, MambaSpec),
    "Mamba2ForCausalLM": lambda arch, _: _only(arch.specs, Mamba2Spec) or _expanded(arch),
    "LlamaForCausalLM": partial(_llama, windowed=False),
    "MistralForCausalLM": partial(_llama, windowed=True),
    "GraniteForCausalLM": partial(_llama, windowed=False, scaled=True),
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "BambaForCausalLM": _bamba,
    "OlmoHybridForCausalLM": _olmo_hybrid,
    "Qwen3_5ForCausalLM": partial(_qwen, mlps=SwiGLUSpec),
    "Qwen3NextForCausalLM": _qwen,
    "Qwen3_5MoeForCausalLM": partial(_qwen, mlps=MoESpec),
    "NemotronHForCausalLM": _nemotron_h,
    "Zamba2ForCausalLM": _zamba2,
    "FalconH1ForCausalLM": _falcon_h1,
    "FalconMambaForCausalLM": _falcon_mamba,
    "JambaForCausalLM": _jamba,
}
"""Class of transformers -> function that compares a model's sub-layers with the class.

The function's arguments are (architecture, norm_eps). It returns the first difference as a text, or None.
"""
