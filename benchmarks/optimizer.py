"""An optimizer step of Muon against AdamW's step and a bare loop of Muon's matrix products, over the same matrices.

The bare loop takes each matrix of the model, in Muon's number format and transposed if it is tall, and computes the
products of the iteration alone: no momentum, no norm, no update. Muon must do this work, and for each weight about what
AdamW does. What is above their sum is the cost of the rule: norms, momentum, updates and copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config
from hybridtron.config.units import readable
from hybridtron.device import compute_device, megatron_context
from hybridtron.engine.engine import Engine
from hybridtron.optimizers.muon import IterationFormat, MuonOptions, Polynomial, polynomials
from hybridtron.parallel.groups import Groups
from hybridtron.proving.measuring import BenchReport, Seconds, Timings, now, times
from hybridtron.proving.steps import LEARNING_RATE, load_checked, one_process

QUICK = ("model.width=64", "model.vocab_size=320")
MUON = "muon"
ADAMW = "adamw"
LOOP = "bare loop"


class Update:
    """An optimizer step from gradients that are drawn before the clock starts."""

    def __init__(self, config: Config, groups: Groups) -> None:
        with megatron_context():
            self.optimizer = Engine(resolve(config)[0], groups).optimizer
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self) -> Seconds:
        for shard in self.optimizer.shards.values():
            shard.weight.main_grad.normal_(generator=self.generator)
        start = now()
        with megatron_context():
            norm = self.optimizer.grad_norm()
            assert self.optimizer.apply_update(LEARNING_RATE, norm)
        return Seconds(now() - start)


def bare_loop(matrices: Sequence[Tensor], steps: Sequence[Polynomial]) -> Callable[[], None]:
    """Return a function with the products of the iteration on each matrix."""

    def loop() -> None:
        for x in matrices:
            for a, b, c in steps:
                square = x @ x.mT
                x = x.addmm(square.addmm(square, square, beta=b, alpha=c), x, beta=a)

    return loop


def wide_matrices(config: Config, options: MuonOptions) -> list[Tensor]:
    """Return matrices with the shapes of the model's, normalized, with fewer rows than columns."""
    generator = torch.Generator().manual_seed(0)
    matrices = []
    for name, weight in resolve(config)[0].table.items():
        if not weight.is_matrix:
            continue
        for *experts, rows, columns in weight.stored(name).values():
            for _ in range(math.prod(experts)):
                matrix = torch.randn(min(rows, columns), max(rows, columns), generator=generator)
                matrix /= matrix.norm()
                if options.iteration is IterationFormat.bf16:
                    matrix = matrix.bfloat16()
                matrices.append(matrix)
    return matrices


def optimizer(report: BenchReport) -> None:
    """Measure steps of AdamW and Muon and the bare loop, in both number formats of the iteration."""
    base = load_checked([*report.recipe, *report.pick(full=(), quick=QUICK)])
    report.device = compute_device().type
    measured: dict[str, Timings] = {}
    with one_process(base) as groups:
        adamw = Update(base, groups)
        forms = {}
        for iteration in (IterationFormat.master, IterationFormat.bf16):
            options = replace(base.optim.muon, iteration=iteration)
            muon = replace(base, optim=replace(base.optim, name=MUON, muon=options))
            steps = polynomials(options.coefficients, options.steps)
            loop = bare_loop(wide_matrices(muon, options), steps)
            forms[f"iteration={iteration}"] = {MUON: Update(muon, groups), ADAMW: adamw, LOOP: loop}
        measured = report.sweep(forms)
    shares = [share(timings) for timings in measured.values()]
    above = {"(muon - adamw) / bare loop": [times(value) for value in shares]}
    report.ratios("time of an optimizer step", "format", measured, [(MUON, ADAMW), (LOOP, ADAMW)], above)
    matrices = wide_matrices(base, base.optim.muon)
    entries = readable(sum(matrix.numel() for matrix in matrices))
    report.notes += [
        f"recipe {base.run.name}, width {base.model.width}: {len(matrices)} matrices with {entries} entries",
        f"{report.repetitions} rounds of each; clipping and the gradient's norm are part of both steps",
    ]
    for (name, _), value in zip(measured.items(), shares, strict=True):
        report.at_most(f"(muon - adamw) / bare loop, {name}", 1.2, value)


def share(timings: Timings) -> float:
    """Return the time of Muon's step above AdamW's step, in multiples of the bare loop's time."""
    return (timings[MUON].fastest - timings[ADAMW].fastest) / timings[LOOP].fastest
