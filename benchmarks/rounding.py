"""The distance between the losses of runs that differ in nothing but rounding.

The compiled forms compute the same as torch's, in another order of sums. Training amplifies any such difference, as
each step starts from weights that the last one has moved apart a little further. A control run shows how much of this
is training itself: it uses torch's forms alone, and its first weights are each moved to a neighbouring number, up or
down at random, the smallest possible difference. All runs read the same rows, at the recipe's learning rates.

Runs in float64 show whether the compiled forms compute something else. There rounding and all its consequences are 2^29
times smaller, while a difference in the mathematics would stay as large as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from hybridtron.architecture.table import architecture
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config
from hybridtron.data.batch import Batch
from hybridtron.data.loader import build_loader
from hybridtron.device import compute_device, megatron_context
from hybridtron.engine.engine import Engine
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.dispatch import force
from hybridtron.ops.registry import torch_alone
from hybridtron.parallel.linear import SINGLE_RANK
from hybridtron.parallel.vocabulary import linear_cross_entropy
from hybridtron.proving.measuring import BenchReport, times
from hybridtron.proving.steps import load_checked, one_process, plain_adamw, random_batches
from hybridtron.train.lr import learning_rate

from .step import QUICK

BASE = "torch alone"
MOVED = "torch alone, first weights moved by a rounding"
COMPILED = "compiled forms"
QUICK_STEPS = 3
DOUBLE_STEPS = 40  # steps in float64, which take several times as long
ROWS = 5  # rows of the table after the first
FP32_ROUNDING = 2**-24  # the smallest relative difference that an fp32 loss can show


def rounding(report: BenchReport) -> None:
    """Train three times and compare the losses, then twice in float64."""
    report.device = compute_device().type
    config = load_checked([*report.recipe, *report.pick(full=(), quick=QUICK), "optim.spike=null"])
    steps = report.pick(full=resolve(config)[0].end_step, quick=QUICK_STEPS)
    runs = {
        BASE: losses(config, steps, not report.quick, torch_alone()),
        MOVED: losses(config, steps, not report.quick, torch_alone(), moved=True),
        COMPILED: losses(config, steps, not report.quick, {}),
    }
    apart = {name: largest_so_far(runs[BASE], runs[name]) for name in (MOVED, COMPILED)}
    shown = sorted({max(1, steps * part // ROWS) for part in range(ROWS + 1)})
    header = ("after step", *apart, "compiled / moved")
    cells = [(f"{step}", *row(*(differences[step - 1] for differences in apart.values()))) for step in shown]
    report.table(f"largest difference of the loss from {BASE} so far, relative", header, cells)
    report.notes.append(f"recipe {config.run.name}, {steps} steps, fp32; training losses of every step")
    double = report.pick(full=DOUBLE_STEPS, quick=2)
    of_forms = [double_losses(config, batches_of(config, double, not report.quick), f) for f in (torch_alone(), {})]
    exact = largest_so_far(*of_forms)
    cells = [(f"{step}", f"{exact[step - 1]:.1e}") for step in sorted({1, double // 2, double})]
    report.table(
        f"in float64: largest difference of the loss from {BASE} so far, relative", ("after step", COMPILED), cells
    )
    report.at_most(f"compiled forms, {double} steps in float64", 1e-10, exact[-1])
    report.at_most("compiled forms, over the whole run", 1e-4, apart[COMPILED][-1])
    moved = max(apart[MOVED][-1], FP32_ROUNDING)
    report.at_most("compiled forms / weights moved by a rounding", 3, apart[COMPILED][-1] / moved)


def row(moved: float, compiled: float) -> list[str]:
    return [f"{moved:.1e}", f"{compiled:.1e}", times(compiled / moved) if moved else ""]


def losses(config: Config, steps: int, own_text: bool, forms: Mapping[str, str], *, moved: bool = False) -> list[float]:
    """Train with the given forms and return the loss of every step.

    With `moved` the first weights are moved by a rounding.
    """
    phases = resolve(config)
    by_step = list[float]()
    with megatron_context(), one_process(config) as groups, force(**forms):
        engine = Engine(resolve(config)[0], groups)
        if moved:
            move(engine)
        engine.start_phase(engine.phase, range(phases[0].lanes))
        for step, batches in enumerate(batches_of(config, steps, own_text)):
            by_step.append(engine.forward_backward(batches, step).mean.item())
            _, accepted = engine.step(learning_rate(phases, 0, (step + 1) * config.phases[0].tokens_per_step))
            assert accepted, f"step {step} was refused: {engine.guard.why}"
    print(f"{BASE if forms else COMPILED}{', moved' * moved}: {by_step[-1]:.6f} at the end", flush=True)
    return by_step


def batches_of(config: Config, steps: int, own_text: bool) -> Iterator[Sequence[Batch]]:
    """Yield the micro-batches of every step: the recipe's rows, or random tokens."""
    read: Iterator[Sequence[Batch]] = itertools.repeat(random_batches(config))
    if own_text:
        read = build_loader(resolve(config)[0]).iterate(0, steps)
    return itertools.islice(read, steps)


def double_losses(config: Config, steps: Iterator[Sequence[Batch]], forms: Mapping[str, str]) -> list[float]:
    """Train in float64 by a plain loop, as the engine does not offer it; return the loss of every step."""
    phases = resolve(config)
    by_step = list[float]()
    model = LanguageModel(architecture(config.model))
    initialise(model, config.run.seed)
    model = model.to(torch.float64)
    adam = plain_adamw(model, config, 0.0)
    for step, batches in enumerate(steps):
        for group in adam.param_groups:
            group["lr"] = learning_rate(phases, 0, (step + 1) * config.phases[0].tokens_per_step)
        with force(**forms):
            by_step.append(sum(backward(model, batch, len(batches)) for batch in batches))
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
        adam.step()
        adam.zero_grad()
    return by_step


def backward(model: LanguageModel, batch: Batch, parts: int) -> float:
    """Compute a micro-batch's part of the mean loss, and accumulate its gradients."""
    x_LBD = model(batch.tokens_BL, None, batch.seq, logits=False).output
    mask_LB = batch.mask_BL.T
    loss = linear_cross_entropy(x_LBD, model.output_weight(), batch.labels_BL.T, mask_LB, 0.0, SINGLE_RANK)
    mean = loss.total / mask_LB.sum() / parts
    mean.backward()
    return mean.item()


@torch.no_grad()
def move(engine: Engine) -> None:
    """Move every weight to the next number above or below it, at random."""
    generator = torch.Generator().manual_seed(0)
    for stage in engine.stages:
        for weight in stage.model.parameters():
            up = torch.rand(weight.shape, generator=generator) < 0.5
            weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf)))


def largest_so_far(base: Sequence[float], other: Sequence[float]) -> list[float]:
    relative = (abs(first - second) / first for first, second in zip(base, other, strict=True))
    return list(itertools.accumulate(relative, max))
