"""A training step of a recipe through our engine on megatron-core, against a plain PyTorch loop over the same model.

Both take the same batches and start from the same weights. The plain loop is what one would write by hand: cross
entropy, `backward`, `clip_grad_norm_`, torch's fused AdamW. Ours adds Megatron's schedule and distributed optimizer,
token-weighted losses, the check for gradients that are not finite, the learning rate per step and, in bf16, fp32 master
weights, which the plain loop goes without. What the ratio shows is the cost of these. On CUDA the absolute speed is
reported too: tokens/s, TFLOP/s, MFU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hybridtron.config.check import require
from hybridtron.config.layout import ProcessLaunch
from hybridtron.config.load import load
from hybridtron.config.schema import Config
from hybridtron.config.units import readable
from hybridtron.data.batch import Batch
from hybridtron.device import DTYPES, compute_device, megatron_context, peak_memory_gib
from hybridtron.engine.engine import Engine
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel.groups import start, stop
from hybridtron.planning.count import count
from hybridtron.proving.measuring import (
    BenchReport,
    BenchSettings,
    BenchTable,
    Contender,
    Goal,
    interleaved,
    random_batches,
    times,
)

QUICK = ("phases.0.seq_len=32", "phases.0.global_batch=2", "phases.0.micro_batch=1", "model.width=64")
QUICK += ("model.vocab_size=320", "model.layers.W.window=16")
LEARNING_RATE = 1e-4
LOSS_TOLERANCE = 1e-4


class OurStep:
    """What the trainer does between asking for data and writing metrics: Megatron's schedule and optimizer, on one
    process, in the context that they need on a CPU."""

    def __init__(self, config: Config, batches: list[Batch]) -> None:
        self.batches = batches
        with megatron_context():
            self.engine = Engine(config, start(config.parallel, launch=ProcessLaunch(0, 1)))
        self.losses: list[Tensor] = []

    def __call__(self) -> None:
        with megatron_context():
            self.losses.append(self.engine.forward_backward(self.batches).mean)
            self.engine.optimizer.step(LEARNING_RATE)


class PlainStep:
    """The same by hand."""

    def __init__(self, model: LanguageModel, config: Config, batches: list[Batch]) -> None:
        self.model, self.clip, self.batches = model, config.optim.clip, batches
        weights, optim = dict(model.named_parameters()), config.optim
        groups = [
            {"params": [w for n, w in weights.items() if model.table[n].decay is decay], "weight_decay": amount}
            for decay, amount in ((True, optim.weight_decay), (False, optim.weight_decay * optim.decay_all))
        ]
        betas = (optim.betas[0], optim.betas[1])
        self.adam = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=betas, eps=optim.eps, fused=True)
        self.losses: list[Tensor] = []

    def __call__(self) -> None:
        total = torch.zeros((), device=compute_device())
        for batch in self.batches:
            batch = batch.to(compute_device())
            logits_LBV = self.model(batch.tokens_BL, None, batch.seq).output
            loss = functional.cross_entropy(logits_LBV.flatten(0, 1).float(), batch.labels_BL.T.flatten())
            loss = loss / len(self.batches)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.adam.step()
        self.adam.zero_grad()
        self.losses.append(total)


def bench(settings: BenchSettings) -> BenchReport:
    """Ours against the plain loop, with the speed in words."""
    config = load([*settings.recipe, *(QUICK if settings.quick else ())])
    require(config)
    model = LanguageModel(config.model)
    initialise(model, config.run.seed)
    model = model.to(compute_device()).cast(DTYPES[config.precision.name])
    batches = random_batches(config)
    ours, plain = OurStep(config, batches), PlainStep(model, config, batches)
    measured = interleaved(
        {"ours": Contender(ours, settings.repetitions), "plain": Contender(plain, settings.repetitions)}
    )
    stop()
    difference = _loss_difference(ours, plain)
    assert config.precision.name != "fp32" or difference <= LOSS_TOLERANCE, f"the losses differ by {difference:.1e}"
    ratio = measured["ours"].fastest / measured["plain"].fastest
    spreads = " / ".join(f"+{timing.spread:.0%}" for timing in measured.values())
    phase, parameters = config.phases[0], sum(weight.numel() for weight in model.parameters())
    cells = [(config.run.name, readable(parameters), times(ratio), spreads, f"{difference:.0e}")]
    notes = [
        f"pattern {config.model.pattern}, width {config.model.width}, {config.precision.name}",
        f"{phase.global_batch} rows of {phase.seq_len} tokens in micro-batches of {phase.micro_batch}",
        f"{settings.repetitions} rounds of each",
    ]
    speed = _speed(config, measured["ours"].fastest)
    console = [f"{name}: {timing}" for name, timing in measured.items()]
    header = ("recipe", "parameters", "ours / plain loop", "median over fastest", "losses differ")
    tables = [BenchTable("time", header, cells)]
    if compute_device().type == "cpu":
        console += [f"{what}: {value}" for what, value in speed]
    else:
        tables.append(BenchTable("speed of our step", ("", "value"), speed))
    goals = [] if settings.quick else [Goal.at_most("our step / the plain loop's", 1.05, ratio)]
    return BenchReport("Training step", compute_device().type, tables, goals, notes, console)


def _loss_difference(ours: OurStep, plain: PlainStep) -> float:
    """The largest difference between the losses of the same step, as far as both loops have come."""
    pairs = zip(ours.losses, plain.losses, strict=False)
    return max((mine - theirs).abs().item() for mine, theirs in pairs)


def _speed(config: Config, seconds: float) -> list[tuple[str, ...]]:
    phase = config.phases[0]
    tokens = phase.tokens_per_step / seconds
    tflops = tokens * count(config.model, phase.seq_len).flops_per_token / 1e12
    peak, memory = config.cluster.peak_tflops, peak_memory_gib()
    lines: list[tuple[str, ...]] = [("tokens/s", f"{tokens:,.0f}"), ("TFLOP/s", f"{tflops:.3g}")]
    lines += [("MFU", f"{tflops / peak:.1%} of {peak:g} TFLOP/s")] if peak else []
    lines += [("peak memory, both loops", f"{memory:.1f} GiB")] if memory is not None else []
    return lines
