"""The loss that FP8 costs: the laptop recipe in each of FP8's precisions, emulated, against bf16.

All runs of a model start from the same weights and read the same rows in the same order, at the recipe's learning rates
for these steps. The page reports the mean training loss of the last steps, and the loss on held-out text at the
training length. fp8_block needs a width of complete tiles of 128, so it is compared at a width of 256, with a bf16 run
of its own, and in smaller batches. No step is refused for a spike of its gradient, or runs could differ by a step.
Times mean nothing here: the emulation rounds, and multiplies in fp32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config
from hybridtron.data.batch import Batch
from hybridtron.data.loader import build_loader
from hybridtron.device import compute_device, megatron_context
from hybridtron.engine.engine import Engine
from hybridtron.proving.measuring import BenchReport
from hybridtron.proving.steps import load_checked, one_process, random_batches
from hybridtron.train.held_out_loss import evaluate
from hybridtron.train.lr import learning_rate

WITHIN = 0.01  # largest allowed distance from the bf16 loss, as a share of it
BF16 = "bf16"
LOSSES = ("training loss", "held-out loss")
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
    """Steps to train, last steps to average the loss over, and overrides that make the recipe smaller."""

    steps: int
    last: int
    overrides: tuple[str, ...]
    own_text: bool


FULL = Sizes(200, 10, (), True)
TINY = Sizes(3, 2, QUICK, False)


def fp8(report: BenchReport) -> None:
    """Train every model in every precision, and compare losses."""
    sizes = report.pick(full=FULL, quick=TINY)
    sizes = replace(sizes, overrides=(*sizes.overrides, *report.recipe))
    report.device = compute_device().type
    cells = []
    for model, (overrides, precisions) in MODELS.items():
        losses = {name: trained(model, name, overrides, sizes) for name in (BF16, *precisions)}
        for name, of_run in losses.items():
            for kind, loss in of_run.items():
                share = loss / losses[BF16][kind]
                cells.append((model, name, kind, f"{loss:.4f}", f"{share:.4f}x"))
                if name != BF16:
                    report.at_most(f"{kind} of {name} away from that of bf16, {model}", WITHIN, abs(share - 1))
    report.table("loss", ("model", "precision", "of", "loss", "/ bf16"), cells)
    report.notes += [
        f"{sizes.steps} steps of recipe=laptop, {' '.join(sizes.overrides) or 'at its own batch and length'}; the "
        f"training loss is that of the last {sizes.last} steps",
        "precision.emulate=true, no sub-layer in bf16, precision.history=1024; one seed",
    ]


def trained(model: str, precision: str, overrides: tuple[str, ...], sizes: Sizes) -> dict[str, float]:
    """Train one run and return its losses, which are also printed when it ends."""
    settings = [*overrides, *sizes.overrides, "run.eval_lengths=[1]", "optim.spike=null"]
    if precision != BF16:
        settings.insert(0, "precision.emulate=true")
    config = load_checked(["recipe=laptop", f"precision={precision}", *settings])
    with megatron_context(), one_process(config) as groups:
        losses = dict(zip(LOSSES, _trained(Engine(resolve(config)[0], groups), config, sizes), strict=True))
    said = ", ".join(f"{what} {loss:.4f}" for what, loss in losses.items())
    print(f"{model}, {precision}: {said}", flush=True)
    return losses


def _trained(engine: Engine, config: Config, sizes: Sizes) -> tuple[float, float]:
    phases = resolve(config)
    training = []
    loader = None
    read: Iterator[list[Batch]]
    if sizes.own_text:
        loader = build_loader(phases[0])
        read = loader.iterate(0, sizes.steps)
    else:
        read = itertools.repeat(random_batches(config))
    engine.start_phase(engine.phase, range(phases[0].lanes))
    for step, batches in enumerate(itertools.islice(read, sizes.steps)):
        loss = engine.forward_backward(batches, step)
        _, accepted = engine.step(learning_rate(phases, 0, (step + 1) * config.phases[0].tokens_per_step))
        assert accepted, f"step {step} was refused: {engine.guard.why}"
        training.append(loss.mean.item())
    if loader is None:
        held_out = engine.loss(random_batches(config)).mean.item()
    else:
        (held_out,) = evaluate(engine, loader.sources, phases[0])[0].values()
    return sum(training[-sizes.last :]) / sizes.last, held_out
