"""What FP8 costs in loss: the laptop recipe in each of FP8's precisions, emulated, against bf16.

All runs of a model start from the same weights and read the same rows in the same order, at the recipe's learning rates
of these steps. Reported are the mean training loss of the last steps, and the loss on held-out text at the training
length. fp8_block needs a width of whole tiles of 128, so it is compared at a width of 256, with a bf16 run of its own,
and in smaller batches. No step is refused for a spike of its gradient, or runs could differ by a step. What it costs in
time says nothing: the emulation rounds, and multiplies in fp32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybridtron.config.check import require
from hybridtron.config.layout import ProcessLaunch
from hybridtron.config.load import load
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config
from hybridtron.data.batch import Batch
from hybridtron.data.loader import build_loader
from hybridtron.device import compute_device, megatron_context
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import start, stop
from hybridtron.proving.measuring import BenchReport, BenchSettings, BenchTable, Goal, random_batches
from hybridtron.train.evaluate import evaluate
from hybridtron.train.lr import learning_rate

WITHIN = 0.01  # of the bf16 loss
BF16 = "bf16"
MODELS = {
    "laptop": ((), ("fp8_delayed", "fp8_current")),
    "laptop, model.width=256, 2 rows a step": (
        ("model.width=256", "phases.0.global_batch=2", "phases.0.micro_batch=2"),
        ("fp8_block",),
    ),
}
QUICK = ("model.width=128", "model.layers.-.hidden=128", "model.vocab_size=320", "model.pattern=M-")
QUICK += ("model.layers.W.window=16", "phases.0.seq_len=32", "phases.0.global_batch=4", "phases.0.micro_batch=4")


@dataclass(frozen=True)
class Sizes:
    """How many steps are taken, over how many of the last the loss is a mean, and what is smaller than the recipe's."""

    steps: int
    last: int
    overrides: tuple[str, ...]
    own_text: bool


FULL = Sizes(200, 10, (), True)
TINY = Sizes(3, 2, QUICK, False)


@dataclass(frozen=True)
class Losses:
    """Of one run: the mean of the last training losses, and the held-out one."""

    training: float
    held_out: float


def bench(settings: BenchSettings) -> BenchReport:
    """Train every model in every precision, and compare."""
    sizes = TINY if settings.quick else FULL
    sizes = replace(sizes, overrides=(*sizes.overrides, *settings.recipe))
    cells, goals = [], []
    for model, (overrides, precisions) in MODELS.items():
        base = trained(model, BF16, overrides, sizes)
        cells.append((model, BF16, *figures(base, base)))
        for name in precisions:
            found = trained(model, name, overrides, sizes)
            cells.append((model, name, *figures(found, base)))
            for what in ("training", "held_out"):
                away = abs(getattr(found, what) / getattr(base, what) - 1)
                text = f"{what.replace('_', '-')} loss of {name} away from that of bf16, {model}"
                goals.append(Goal.at_most(text, WITHIN, away))
    header = ("model", "precision", f"training loss, last {sizes.last} steps", "/ bf16", "held-out loss", "/ bf16")
    notes = [
        f"{sizes.steps} steps of recipe=laptop, {' '.join(sizes.overrides) or 'at its own batch and length'}",
        "precision.emulate=true, no sub-layer in bf16, precision.history=1024; one seed",
    ]
    device = compute_device().type
    return BenchReport(
        "FP8 against bf16", device, [BenchTable("loss", header, cells)], [] if settings.quick else goals, notes
    )


def figures(found: Losses, base: Losses) -> Iterator[str]:
    for own, other in ((found.training, base.training), (found.held_out, base.held_out)):
        yield f"{own:.4f}"
        yield f"{own / other:.4f}x"


def trained(model: str, precision: str, overrides: tuple[str, ...], sizes: Sizes) -> Losses:
    """The losses of one run, which are printed when it has ended."""
    emulation = [] if precision == BF16 else ["precision.emulate=true"]
    settings = [
        f"precision={precision}",
        *emulation,
        *overrides,
        *sizes.overrides,
        "run.eval_lengths=[1]",
        "optim.spike=null",
    ]
    config = load(["recipe=laptop", *settings])
    require(config)
    with megatron_context():
        engine = Engine(config, start(config.parallel, launch=ProcessLaunch(0, 1)))
        losses = _trained(engine, config, sizes)
        stop()
    print(f"{model}, {precision}: training {losses.training:.4f}, held out {losses.held_out:.4f}", flush=True)
    return losses


def _trained(engine: Engine, config: Config, sizes: Sizes) -> Losses:
    phases, training = resolve(config), []
    loader = build_loader(phases[0]) if sizes.own_text else None
    read: Iterator[list[Batch]] = (
        itertools.repeat(random_batches(config)) if loader is None else loader.iterate(0, sizes.steps)
    )
    engine.start_phase(0, range(phases[0].lanes))
    for step, batches in enumerate(itertools.islice(read, sizes.steps)):
        loss = engine.forward_backward(batches, step)
        _, accepted = engine.step(learning_rate(phases, 0, (step + 1) * config.phases[0].tokens_per_step))
        assert accepted, f"step {step} was refused: {engine.guard.why}"
        training.append(loss.mean.item())
    if loader is None:
        held_out = engine.loss(random_batches(config)).mean.item()
    else:
        (held_out,) = evaluate(engine, loader.sources, phases[0]).by_length.values()
    return Losses(sum(training[-sizes.last :]) / sizes.last, held_out)
