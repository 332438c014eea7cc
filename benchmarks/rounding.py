"""How far the losses of a run move where nothing but rounding differs.

The compiled forms compute what torch's do, in another order of sums. Training amplifies any such difference: each step
starts from weights that the last one has moved apart a little further. How much of this is training itself is shown by
a run of torch's forms alone whose first weights are each moved to a neighbouring number, up or down by chance: the
smallest difference that there can be. All runs read the same rows, at the recipe's learning rates.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config
from hybridtron.data.batch import Batch
from hybridtron.data.loader import build_loader
from hybridtron.device import compute_device, megatron_context
from hybridtron.engine.engine import Engine
from hybridtron.ops.dispatch import force
from hybridtron.ops.registry import torch_alone
from hybridtron.proving.measuring import BenchReport, times
from hybridtron.proving.steps import checked, one_process, random_batches
from hybridtron.train.lr import learning_rate

from .step import QUICK

BASE = "torch alone"
MOVED = "torch alone, first weights moved by a rounding"
COMPILED = "compiled forms"
QUICK_STEPS = 3
ROWS = 5  # of the table


def rounding(report: BenchReport) -> None:
    """The same training three times."""
    report.device = compute_device().type
    config = checked([*report.recipe, *(QUICK if report.quick else ()), "optim.spike=null"])
    steps = QUICK_STEPS if report.quick else resolve(config)[0].end_step
    runs = {
        BASE: losses(config, steps, not report.quick, torch_alone()),
        MOVED: losses(config, steps, not report.quick, torch_alone(), moved=True),
        COMPILED: losses(config, steps, not report.quick, {}),
    }
    apart = {name: largest_so_far(runs[BASE], runs[name]) for name in (MOVED, COMPILED)}
    shown = sorted({max(1, steps * part // ROWS) for part in range(ROWS + 1)})
    header = ("after step", *apart, "compiled / moved")
    cells = [(f"{step}", *row(*(found[step - 1] for found in apart.values()))) for step in shown]
    report.table(f"largest difference of the loss from {BASE} so far, relative", header, cells)
    report.notes.append(f"recipe {config.run.name}, {steps} steps, fp32; training losses of every step")
    report.at_most("compiled forms, over the whole run", 1e-4, apart[COMPILED][-1])
    report.at_most("compiled forms / weights moved by a rounding", 3, apart[COMPILED][-1] / apart[MOVED][-1])


def row(moved: float, compiled: float) -> list[str]:
    return [f"{moved:.1e}", f"{compiled:.1e}", times(compiled / moved) if moved else ""]


def losses(config: Config, steps: int, own_text: bool, forms: Mapping[str, str], moved: bool = False) -> list[float]:
    """The training loss of every step."""
    phases, found = resolve(config), list[float]()
    with megatron_context(), one_process(config) as groups, force(**forms):
        engine = Engine(config, groups)
        if moved:
            move(engine)
        read: Iterator[Sequence[Batch]] = itertools.repeat(random_batches(config))
        if own_text:
            read = build_loader(phases[0]).iterate(0, steps)
        engine.start_phase(0, range(phases[0].lanes))
        for step, batches in enumerate(itertools.islice(read, steps)):
            found.append(engine.forward_backward(batches, step).mean.item())
            _, accepted = engine.step(learning_rate(phases, 0, (step + 1) * config.phases[0].tokens_per_step))
            assert accepted, f"step {step} was refused: {engine.guard.why}"
    print(f"{BASE if forms else COMPILED}{', moved' * moved}: {found[-1]:.6f} at the end", flush=True)
    return found


@torch.no_grad()
def move(engine: Engine) -> None:
    """Every weight to the next number above or below it."""
    generator = torch.Generator().manual_seed(0)
    for stage in engine.stages:
        for weight in stage.model.parameters():
            up = torch.rand(weight.shape, generator=generator) < 0.5
            weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf)))


def largest_so_far(base: Sequence[float], other: Sequence[float]) -> list[float]:
    relative = (abs(one - two) / one for one, two in zip(base, other, strict=True))
    return list(itertools.accumulate(relative, max))
