"""Coordinate check of muP: sizes of activations, and of their changes in a few AdamW steps, for several widths.

Under muP (`architecture/mup.py`) the outputs of all sub-layers and the logits change by the same amount at every width,
so that a learning rate has the same effect at every width. The check trains models of one family, which differ only in
their widths, on the same random tokens. After each step it compares the outputs with the outputs before the first step.
The number that counts is the slope d log(change) / d log(width). A slope of 0.5 means that a change doubles if the
width is multiplied by four.

The models are small: the pattern is cut to its first sub-layers such that every letter still occurs, and the vocabulary
is reduced. AdamW is torch's, with the learning rates and the weight decay of the parameter table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.mup import MupConfig, resized, uneven_heads
from hybridtron.architecture.table import Architecture, architecture
from hybridtron.config.schema import Config
from hybridtron.data.batch import SeqInfo
from hybridtron.evaluate.pictures import picture
from hybridtron.mixers.base import MixerOutput
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.problems import ConfigError
from hybridtron.proving.steps import plain_adamw

FLAT = 0.25
"""Largest absolute slope that counts as flat: half of the smallest slope that a missing rule causes, 0.5."""
VOCABULARY = 16
"""Largest vocabulary of the models.

At each token, only the change of its label's logit adds up over the width. The changes of the other logits are random
sums, which shrink with the width. With a larger vocabulary, nearly all changes would be of this kind.
"""
ROWS = 4
LENGTH = 64  # tokens in a row
STREAM = "stream"
LOGITS = "logits"


@dataclass(frozen=True)
class Coordinate:
    """Root mean square of an output, and of its change since the first step began, at one width and step.

    output: `stream`, `logits`, or a letter with its kind of mixer, such as `W attention`
    step: number of AdamW steps before the measurement
    """

    output: str
    width: int
    step: int
    size: float
    change: float


@dataclass(frozen=True)
class Slope:
    """Slope of an output's change: d log(change) / d log(width).

    last: slope after the last step
    largest: largest of the slopes after each step
    """

    output: str
    last: float
    largest: float

    @property
    def verdict(self) -> str:
        """`flat`, `grows` or `shrinks`.

        A change that grows with the width at any step counts as growing: later steps may hide the growth, because the
        loss is near its minimum at large widths. A change that shrinks only in the first steps counts as flat: the
        changes of logits are random sums until the head has learned.
        """
        if self.largest > FLAT:
            return "grows"
        if self.last < -FLAT:
            return "shrinks"
        return "flat"


def family_member(model: ModelConfig, width: int) -> ModelConfig:
    """Return the model of the same family with another width, a short pattern and a small vocabulary.

    Raises ConfigError if a number of heads would not be an integer.
    """
    arch = architecture(model)
    share = Fraction(width, model.width)
    problems = []
    layers: dict[str, dict[str, Any]] = {}
    for letter, spec in architecture(replace(model, mup=MupConfig())).by_letter.items():
        uneven = uneven_heads(spec, share, f"width {width}")
        problems += [problem.below(f"model.layers.{letter}") for problem in uneven]
        if not problems:
            other = resized(spec, share)
            grown = {name: getattr(other, name) for name in (*spec.growing_sizes, *spec.growing_heads)}
            layers[letter] = model.layers[letter] | grown
    if problems:
        raise ConfigError(problems)
    vocabulary = min(model.vocab_size, VOCABULARY)
    return replace(model, width=width, vocab_size=vocabulary, pattern=short_pattern(arch), layers=layers, adapters=None)


def short_pattern(arch: Architecture) -> str:
    """Return the shortest beginning of the pattern that has every letter. Inseparable sub-layers stay together."""
    last = max(arch.letters.index(letter) for letter in set(arch.letters))
    stop = next(indices.stop for indices in arch.inseparable if last in indices)
    return "".join(arch.letters[:stop])


def measure(config: Config, widths: Sequence[int], steps: int, lr: float, seeds: int) -> list[Coordinate]:
    """Train a model of each width with each seed. Return the measurements as geometric means over the seeds."""
    coordinates = []
    for width in widths:
        arch = architecture(family_member(config.model, width))
        runs = [list(_run(arch, config, steps, lr, seed)) for seed in range(seeds)]
        for same in zip(*runs, strict=True):
            size = _geometric_mean([coordinate.size for coordinate in same])
            change = _geometric_mean([coordinate.change for coordinate in same])
            coordinates.append(replace(same[0], size=size, change=change))
    return coordinates


def _geometric_mean(values: Sequence[float]) -> float:
    return math.prod(values) ** (1 / len(values))


def _run(arch: Architecture, config: Config, steps: int, lr: float, seed: int) -> Iterator[Coordinate]:
    """Yield the measurements of one model before each step and after the last."""
    model = LanguageModel(arch)
    initialise(model, seed)
    optimizer = plain_adamw(model, config, lr)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(arch.model.vocab_size, (ROWS, LENGTH + 1), generator=generator)
    first: dict[str, Tensor] = {}
    for step in range(steps + 1):
        outputs = _outputs(model, tokens[:, :-1])
        loss = functional.cross_entropy(outputs[LOGITS].flatten(0, 1).float(), tokens[:, 1:].T.flatten())
        for name, value in outputs.items():
            value = value.detach()
            change = value - first.setdefault(name, value)
            yield Coordinate(name, arch.sizes.width, step, _rms(value), _rms(change))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _rms(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


def _outputs(model: LanguageModel, tokens_BL: Tensor) -> dict[str, Tensor]:
    """Return the mixers' outputs (a stacked tensor for each letter), the last stream and the logits, by name."""
    mixed: dict[str, list[Tensor]] = {}
    streams: list[Tensor] = []
    hooks = [model.norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))]
    for index, layer in model.layers.items():
        letter = model.arch.letters[int(index)]
        outputs = mixed.setdefault(f"{letter} {model.arch.by_letter[letter].kind}", [])
        hooks.append(layer.get_submodule("mixer").register_forward_hook(_appends_to(outputs)))
    rows, length = tokens_BL.shape
    try:
        logits_LBV = model(tokens_BL, None, SeqInfo.stream(rows, length)).output
    finally:
        for hook in hooks:
            hook.remove()
    return {**{name: torch.stack(outputs) for name, outputs in mixed.items()}, STREAM: streams[0], LOGITS: logits_LBV}


def _appends_to(outputs: list[Tensor]) -> Callable[[nn.Module, Any, MixerOutput], None]:
    """Return a forward hook of a mixer that appends the mixer's output to a list."""

    def hook(_: nn.Module, __: Any, output: MixerOutput) -> None:
        outputs.append(output.y_LBD)

    return hook


def slopes(coordinates: Sequence[Coordinate]) -> list[Slope]:
    """Return each output's slopes, by least squares."""
    steps = sorted({coordinate.step for coordinate in coordinates} - {0})
    outputs = dict.fromkeys(coordinate.output for coordinate in coordinates)
    fitted = []
    for output in outputs:
        of_output = [point for point in coordinates if point.output == output]
        by_step = [_slope([point for point in of_output if point.step == step]) for step in steps]
        fitted.append(Slope(output, by_step[-1], max(by_step)))
    return fitted


def _slope(points: Sequence[Coordinate]) -> float:
    """Return the slope of the changes at several widths."""
    x = torch.tensor([math.log(point.width) for point in points], dtype=torch.float64)
    y = torch.tensor([math.log(point.change) for point in points], dtype=torch.float64)
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def draw(coordinates: Sequence[Coordinate], output: Path) -> None:
    """Draw the changes in the last step over the width, with a line for each output."""
    last = max(coordinate.step for coordinate in coordinates)
    with picture(output) as axes:
        for slope in slopes(coordinates):
            points = [point for point in coordinates if point.output == slope.output and point.step == last]
            axes.plot(
                [point.width for point in points],
                [point.change for point in points],
                marker="o",
                label=f"{slope.output}: slope {slope.last:.2f}",
            )
        axes.set(
            xscale="log", yscale="log", xlabel="width", ylabel=f"rms of the change after {last} steps", title="muP"
        )
