"""Rules for `precision`: FP8 must be available, and FP8 matmuls need suitable dimensions.

`FP8_MULTIPLES` gives a number for each FP8 precision. This number must divide all dimensions of the matrices in FP8
matmuls: the rows and columns of each weight's shard on a rank, and the token count of a forward pass. Several weights
that are fused into one projection count as one matrix. The rules here do not import torch, so they can't check whether
the device supports FP8. `parallel/transformer_engine.py` checks the device when a run starts.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from hybridtron.architecture.base import MixerSpec, ModelSizes
from hybridtron.architecture.table import Architecture
from hybridtron.config.choices import FP8_MULTIPLES, KeptFormat
from hybridtron.config.pipeline_layout import fp8_layers, multiples_near
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import Config, PrecisionConfig
from hybridtron.optimizers import OPTIMIZERS
from hybridtron.optimizers.base import UpdateRule
from hybridtron.problems import Problem, choice

EMULATION = "set precision.emulate=true to emulate FP8 rounding on this machine"
BF16_DECAY = 0.98  # largest beta that moments in bf16 allow; engine/update_rules.py gives the reason
_REACH = 1024  # `_fitting` searches for values that differ from an option's value by less than this


def precision_problems(phase: ResolvedPhase) -> Iterator[Problem]:
    """List all reasons why a phase can't run in its precision."""
    config = phase.config
    precision = phase.precision
    yield from _moments(phase)
    if precision.name not in FP8_MULTIPLES or min(precision.bf16_first, precision.bf16_last) < 0:
        return
    if not precision.emulate and importlib.util.find_spec("transformer_engine") is None:
        missing = "transformer_engine (not installed: pip install transformer-engine[pytorch])"
        yield needs(precision, f"{missing} and a Hopper or newer GPU")
    if config.run.compile:
        yield Problem(
            "run.compile", "unsupported", f"is true, but precision.name={precision.name} can't be compiled: use false"
        )
    yield from _tokens(phase)
    if phase.parsed is not None and config.parallel.tensor >= 1:
        yield from _layers(config, phase.parsed)
        yield from _sides(config, phase.parsed)


def precision_warnings(precision: PrecisionConfig) -> Iterator[str]:
    """Yield a sentence for each precision setting that has no effect."""
    defaults = PrecisionConfig()
    for name in ("cache_weights", "emulate", "bf16_first", "bf16_last"):
        if precision.name not in FP8_MULTIPLES and (value := getattr(precision, name)) != getattr(defaults, name):
            yield f"precision.{name}={str(value).lower()} has no effect without an fp8 precision"
    if precision.name == "fp32" and precision.gradients != defaults.gradients:
        yield f"precision.gradients={precision.gradients} has no effect: gradients of fp32 weights are fp32"
    if precision.name != "fp8_delayed" and precision.history != defaults.history:
        yield f"precision.history={precision.history} has no effect without precision.name=fp8_delayed"


def needs(precision: PrecisionConfig, what: str) -> Problem:
    """Return the problem to report if a package or GPU that FP8 needs is missing. `what` names the package or GPU."""
    return Problem(
        "precision.name", "unavailable", f"is {precision.name}, which needs {what}; {EMULATION}, or use bf16"
    )


def _moments(phase: ResolvedPhase) -> Iterator[Problem]:
    """Report bf16 moments with a decay so close to 1 that bf16 would round away a step's change."""
    config = phase.config
    if config.precision.moments != KeptFormat.bf16:
        return
    for key in OPTIMIZERS.get(config.optim.name, UpdateRule).decays:
        value = attrgetter(key)(config.optim)
        if isinstance(value, list):
            decay = max(value, default=0.0)
        else:
            decay = value
        if decay > BF16_DECAY:
            named = phase.key(f"optim.{key}")
            cure = f"use {named} of at most {BF16_DECAY}, or moments in fp32"
            yield Problem(
                "precision.moments",
                "conflict",
                f"is bf16, but with {decay} in {named} the changes of a step would be rounded away: {cure}",
            )


def _layers(config: Config, arch: Architecture) -> Iterator[Problem]:
    """Report an FP8 precision if no sub-layer would use FP8."""
    precision = config.precision
    count = len(arch.specs)
    if not fp8_layers(arch, precision):
        exceptions = f"precision.bf16_first={precision.bf16_first} and bf16_last={precision.bf16_last}"
        cure = f"use a sum of less than {count}, or precision=bf16"
        yield Problem(
            "precision.name",
            "no-effect",
            f"is {precision.name}, but with {exceptions} none of {count} layers uses FP8: {cure}",
        )


def _tokens(phase: ResolvedPhase) -> Iterator[Problem]:
    """Report row lengths at which the token count in a forward pass does not suit FP8.

    Evaluation reads fewer rows at larger lengths, so the lengths in `run.eval_lengths` are checked too.
    """
    name = phase.precision.name
    multiple = FP8_MULTIPLES[phase.precision.name]
    settings = phase.settings
    if min(settings.seq_len, settings.micro_batch) < 1:
        return  # `limit_problems` reports values below 1
    for times in (1, *(times for times in phase.config.run.eval_lengths if times > 0)):
        rows = max(1, settings.micro_batch // times)
        if (tokens := rows * settings.seq_len * times) % multiple:
            at = f" at {times} times the length" if times > 1 else ""
            fitting = choice(multiples_near(multiple, settings.seq_len))
            message = (
                f"is {settings.seq_len}, which gives {tokens} tokens in {rows} rows{at}, but {name} needs "
                f"a multiple of {multiple}: use {fitting}"
            )
            yield Problem(phase.own_key("seq_len"), "not-divisible", message)
            return


def _sides(config: Config, arch: Architecture) -> Iterator[Problem]:
    """Report weights whose shard on a rank has unsuitable dimensions for FP8."""
    name = config.precision.name
    multiple = FP8_MULTIPLES[config.precision.name]
    width = config.model.width
    tensor = config.parallel.tensor
    if width % multiple:
        fitting = choice(multiples_near(multiple, width))
        yield Problem(
            "model.width", "not-divisible", f"is {width}, but {name} needs a multiple of {multiple}: use {fitting}"
        )
        return
    letters = {arch.letters[index] for index in fp8_layers(arch, config.precision)}
    for letter, spec in arch.by_letter.items():
        if letter not in letters or any(spec.layout_problems(arch.sizes, tensor)):
            continue
        if weight := misfit(spec, arch.sizes, tensor, multiple):
            yield _unfit(f"model.layers.{letter}", spec, arch.sizes, config, weight)


def _unfit(where: str, spec: MixerSpec, sizes: ModelSizes, config: Config, weight: str) -> Problem:
    """Return the problem for a weight with dimensions that do not suit FP8.

    where: the sub-layer's dotted key, such as `model.layers.W`
    weight: the weight's name and dimensions, for the message

    If a sub-layer option sets the dimension, the message suggests values for this option.
    """
    name = config.precision.name
    multiple = FP8_MULTIPLES[config.precision.name]
    tensor = config.parallel.tensor
    needed = f"{name} needs multiples of {multiple} on each rank"
    if tensor > 1:
        ranks = f" on each of {tensor} tensor-parallel ranks"
    else:
        ranks = ""
    if spec.width_option is None:
        return Problem(where, "not-divisible", f"has the weight {weight}{ranks}, but {needed}: use precision=bf16")
    fitting = _fitting(spec, spec.width_option, sizes, tensor, multiple)
    cure = choice(fitting) if fitting else "precision=bf16"
    message = f"is {getattr(spec, spec.width_option)}, which gives the weight {weight}{ranks}, but {needed}: use {cure}"
    return Problem(f"{where}.{spec.width_option}", "not-divisible", message)


def misfit(spec: MixerSpec, sizes: ModelSizes, tensor: int, multiple: int) -> str | None:
    """Return a sub-layer's first weight with dimensions that do not suit FP8, as `name rows x columns`, or None.

    The dimensions are taken from a weight's shard on one of `tensor` tensor-parallel ranks.
    """
    for name, parameter in spec.parameters(sizes).items():
        if parameter.fp8:
            shape = parameter.shard_shape({"tensor": tensor})
        else:
            shape = ()
        if any(side % multiple for side in shape):
            return f"{name} {' x '.join(map(str, shape))}"
    return None


def _fitting(spec: MixerSpec, option: str, sizes: ModelSizes, tensor: int, multiple: int) -> list[int]:
    """Return the nearest smaller and larger values of an option that suit FP8, if there are such values."""

    def fits(value: int) -> bool:
        options: dict[str, Any] = {option: value}
        changed = dataclasses.replace(spec, **options)
        if any(changed.problems(sizes, sys.maxsize)) or any(changed.layout_problems(sizes, tensor)):
            return False
        return misfit(changed, sizes, tensor, multiple) is None

    value = getattr(spec, option)
    below = next((candidate for candidate in range(value - 1, max(0, value - _REACH), -1) if fits(candidate)), None)
    above = next((candidate for candidate in range(value + 1, value + _REACH) if fits(candidate)), None)
    return [candidate for candidate in (below, above) if candidate is not None]
