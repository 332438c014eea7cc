"""Rules for `precision`: FP8 must be available, and every FP8 product needs sides that FP8 can use.

An FP8 product is computed in tiles. The rows and columns of each weight, as one rank holds it, must be multiples of
`FP8_MULTIPLES`, and so must the tokens in one forward pass. A fused projection counts as one matrix. Only torch knows
if the device can multiply in FP8: a run asks `parallel/transformer_engine.py` before processes connect.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from hybridtron.architecture.base import MixerSpec, ModelSizes
from hybridtron.architecture.table import Architecture
from hybridtron.config.choices import FP8_MULTIPLES, KeptFormat
from hybridtron.config.layout import fp8_layers, multiples_near
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.config.schema import Config, PrecisionConfig
from hybridtron.problems import Problem, choice

EMULATION = "set precision.emulate=true to try its numerics here"
BF16_DECAY = 0.98  # the largest decay rate of moments in bf16, see engine/update_rules.py
_REACH = 1024  # how far from an option's value a fitting one is searched


def precision_problems(phase: ResolvedPhase) -> Iterator[Problem]:
    """List everything that prevents a phase from running in its precision."""
    config = phase.config
    precision = phase.precision
    yield from _moments(config)
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
    if phase.arch is not None and config.parallel.tensor >= 1:
        yield from _layers(config, phase.arch)
        yield from _sides(config, phase.arch)


def precision_warnings(precision: PrecisionConfig) -> Iterator[str]:
    """List precision settings that have no effect, a sentence each."""
    defaults = PrecisionConfig()
    for name in ("cache_weights", "emulate", "bf16_first", "bf16_last"):
        if precision.name not in FP8_MULTIPLES and (value := getattr(precision, name)) != getattr(defaults, name):
            yield f"precision.{name}={str(value).lower()} has no effect: it belongs to the precisions with fp8"
    if precision.name == "fp32" and precision.gradients != defaults.gradients:
        yield f"precision.gradients={precision.gradients} has no effect: gradients of fp32 weights are fp32"
    if precision.name != "fp8_delayed" and precision.history != defaults.history:
        yield f"precision.history={precision.history} has no effect: it belongs to precision.name=fp8_delayed"


def needs(precision: PrecisionConfig, what: str) -> Problem:
    """Return the problem to report when FP8 lacks something, such as a package or a GPU."""
    return Problem(
        "precision.name", "unavailable", f"is {precision.name}, which needs {what}; {EMULATION}, or use bf16"
    )


def _moments(config: Config) -> Iterator[Problem]:
    """Check that bf16 moments have a decay rate small enough for bf16's rounding.

    With a larger rate, a step's change would be rounded away.
    """
    largest = max(config.optim.betas, default=0.0)
    if config.precision.moments == KeptFormat.bf16 and largest > BF16_DECAY:
        cure = f"use optim.betas of at most {BF16_DECAY}, or fp32"
        yield Problem(
            "precision.moments",
            "conflict",
            f"is bf16, which rounds away what a decay rate of {largest} changes: {cure}",
        )


def _layers(config: Config, arch: Architecture) -> Iterator[Problem]:
    """Check that at least one sub-layer multiplies in FP8."""
    precision = config.precision
    count = len(arch.specs)
    if not fp8_layers(config):
        exceptions = f"precision.bf16_first={precision.bf16_first} and bf16_last={precision.bf16_last}"
        cure = f"use less than {count} together, or precision=bf16"
        yield Problem(
            "precision.name",
            "no-effect",
            f"is {precision.name}, but {exceptions} leave none of {count} layers to it: {cure}",
        )


def _tokens(phase: ResolvedPhase) -> Iterator[Problem]:
    """Check that FP8 can use each forward pass's number of tokens, also at other evaluation lengths."""
    name = phase.precision.name
    multiple = FP8_MULTIPLES[phase.precision.name]
    settings = phase.settings
    if min(settings.seq_len, settings.micro_batch) < 1:
        return  # reported by the phase's own rules
    for times in (1, *(times for times in phase.config.run.eval_lengths if times > 0)):
        rows = max(1, settings.micro_batch // times)
        if (tokens := rows * settings.seq_len * times) % multiple:
            at = f" at {times} times the length" if times > 1 else ""
            fitting = choice(multiples_near(multiple, settings.seq_len))
            message = (
                f"is {settings.seq_len}, which makes {tokens} tokens of {rows} rows{at}; {name} needs "
                f"multiples of {multiple}: use {fitting}"
            )
            yield Problem(phase.own_key("seq_len"), "not-divisible", message)
            return


def _sides(config: Config, arch: Architecture) -> Iterator[Problem]:
    """Check that FP8 can use each rank's shard of every FP8 weight."""
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
    letters = {arch.letters[index] for index in fp8_layers(config)}
    for letter, spec in arch.by_letter.items():
        if letter not in letters or any(spec.layout_problems(arch.sizes, tensor)):
            continue
        if weight := misfit(spec, arch.sizes, tensor, multiple):
            yield _unfit(f"model.layers.{letter}", spec, arch.sizes, config, weight)


def _unfit(where: str, spec: MixerSpec, sizes: ModelSizes, config: Config, weight: str) -> Problem:
    """Report a weight with a side that FP8 cannot use.

    The message offers values for the option that sets this side, if there is one.
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
        return Problem(where, "not-divisible", f"makes {weight}{ranks}; {needed}: use precision=bf16")
    fitting = _fitting(spec, spec.width_option, sizes, tensor, multiple)
    cure = choice(fitting) if fitting else "precision=bf16"
    message = f"is {getattr(spec, spec.width_option)}, which makes {weight}{ranks}; {needed}: use {cure}"
    return Problem(f"{where}.{spec.width_option}", "not-divisible", message)


def misfit(spec: MixerSpec, sizes: ModelSizes, tensor: int, multiple: int) -> str | None:
    """Return the first weight of a mixer that FP8 cannot use on `tensor` ranks, as `name rows x columns`; else None."""
    for name, parameter in spec.parameters(sizes).items():
        if parameter.fp8:
            shape = parameter.share_shape({"tensor": tensor})
        else:
            shape = ()
        if any(side % multiple for side in shape):
            return f"{name} {' x '.join(map(str, shape))}"
    return None


def _fitting(spec: MixerSpec, option: str, sizes: ModelSizes, tensor: int, multiple: int) -> list[int]:
    """Return the nearest values below and above an option's own that FP8 can use, if any."""

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
