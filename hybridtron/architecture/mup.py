"""Maximal update parametrisation (muP): scales initial values and learning rates, so that one `lr` fits all widths.

Yang and Hu et al. 2022, "Tensor Programs V". A learning rate that is tuned on a narrow model, the *base model*, then
fits wider models of the same family. The base model has the width `model.mup.base_width`. Sizes that grow in proportion
to the width (`MixerSpec.growing_sizes`, `MixerSpec.growing_heads`) are smaller in the base model. All other options are
the same in both models.

The rules follow from a comparison of two parameter tables: the model's and the base model's. In the table below, r is a
weight's number of inputs in the model, divided by its number of inputs in the base model:

    weight                                        initial standard deviation    AdamW's learning rate
    projection, inputs and outputs grow           base model's / sqrt(r)        lr / r
    projection, only the inputs grow              base model's / r              lr / r
    any other weight                              base model's                  lr

Other weights have no inputs that grow: embedding, norms, biases, convolutions, a recurrence's A_log. Only the inputs
grow in an untied head, in routers, and in Mamba's projections to B and C. If a weight is fused from several parts, each
part has its own standard deviation. The number of experts does not grow; their inner channels do.

Two more rules change the computation. If the head is tied to the embedding, logits are divided by width / base_width,
because the embedding keeps its standard deviation and learning rate. If the heads of attention grow from b to d
channels, q k^T is multiplied by sqrt(b) / d instead of 1 / sqrt(d).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any

from hybridtron.architecture.base import MixerSpec, ModelSizes, Parameter
from hybridtron.architecture.inits import EachExpert, Init, Normal, RowFactors, Uniform
from hybridtron.limits import at_least
from hybridtron.problems import Problem


@dataclass
class MupConfig:
    """Maximal update parametrisation: derives initial values and learning rates from a narrower model."""

    # width of the base model, for which the learning rate was tuned; null: no muP
    base_width: Annotated[int | None, at_least(1)] = None


def resized(spec: MixerSpec, share: Fraction) -> MixerSpec:
    """Return the same mixer in a model whose width is `share` times as large. `uneven_heads` must yield no problem."""
    sizes = {name: max(1, round(getattr(spec, name) * share)) for name in spec.growing_sizes}
    heads = {name: int(getattr(spec, name) * share) for name in spec.growing_heads}
    changed: dict[str, Any] = sizes | heads
    return replace(spec, **changed)


def uneven_heads(spec: MixerSpec, share: Fraction, width_key: str) -> Iterator[Problem]:
    """Yield a problem for each option with a fractional number of heads at `share` times the model's width.

    `width_key` names that width for the message. Each problem's key is an option's name.
    """
    for name in spec.growing_heads:
        heads = getattr(spec, name) * share
        if heads.denominator > 1:
            yield Problem(
                name,
                "not-divisible",
                f"is {getattr(spec, name)}, which would be {float(heads):g} at {width_key}: use a width at which it is "
                "whole, or smaller heads",
            )


def transfer_problems(spec: MixerSpec, sizes: ModelSizes, base_width: int, longest: int) -> Iterator[Problem]:
    """Yield a problem for each reason why muP can't transfer a mixer from the base width. Keys are option names."""
    if not spec.supports_mup:
        yield Problem("kind", "unsupported", f"is {spec.kind}, for which model.mup has no rules: leave model.mup out")
        return
    share = Fraction(base_width, sizes.width)
    width_key = f"model.mup.base_width={base_width}"
    uneven = list(uneven_heads(spec, share, width_key))
    yield from uneven
    if uneven:
        return
    base_sizes = replace(sizes, width=base_width)
    base = resized(spec, share)
    unfit = list(base.problems(base_sizes, longest))
    for problem in unfit:
        yield replace(problem, message=f"does not fit {width_key}: there it {problem.message}")
    if not unfit:
        yield from spec.mup_problems(sizes, base, base_sizes)


def transferred(table: Mapping[str, Parameter], base: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return a model's table with muP's initial values and learning rates; `base` is the base model's table."""
    return {name: _transferred(weight, base[name]) for name, weight in table.items()}


def _transferred(weight: Parameter, base: Parameter) -> Parameter:
    inputs = weight.shape[-1] / base.shape[-1]
    if not weight.is_linear or inputs == 1:
        return replace(weight, init=base.init)
    outputs = len(weight.shape) - 2  # the axis of outputs; an axis that counts experts comes before it
    sizes = zip(weight.fused_sizes(outputs), base.fused_sizes(outputs), strict=True)
    parts = [(size, inputs**-0.5 if size != base_size else 1 / inputs) for size, base_size in sizes]
    return replace(weight, init=_scaled(base.init, parts), lr_factor=1 / inputs)


def _scaled(init: Init, parts: list[tuple[int, float]]) -> Init:
    """Return an initialisation with scaled values; `parts` has a pair (number of rows, factor) for each part."""
    if isinstance(init, EachExpert):
        of_expert = _scaled(init.init, parts)
        assert isinstance(of_expert, Normal | Uniform)  # the parts of an expert, gate and up, have equal sizes
        return EachExpert(of_expert)
    if not isinstance(init, Normal | Uniform):
        return init  # zeros: the only other initialisation of projections in mixers that support muP
    factor = parts[0][1]
    if any(other != factor for _, other in parts):
        return RowFactors(init, tuple(parts))
    if isinstance(init, Normal):
        return replace(init, std=init.std * factor)
    return replace(init, bound=init.bound * factor)
