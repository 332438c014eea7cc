"""A training step of a recipe through our engine on megatron-core, against a plain PyTorch loop over the same model.

Both take the same batches and start from the same weights. The plain loop is as one would write it by hand: cross
entropy, `backward`, `clip_grad_norm_`, torch's fused AdamW. Ours adds Megatron's schedule and distributed optimizer,
token-weighted losses, the check for gradients that are not finite, the learning rate per step and, in bf16, fp32 master
weights, which the plain loop omits. The ratio shows the cost of these. On CUDA the absolute speed is reported too:
tokens/s, TFLOP/s, MFU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from hybridtron.architecture.table import architecture
from hybridtron.config.schema import Config
from hybridtron.config.units import readable
from hybridtron.data.batch import Batch
from hybridtron.device import DTYPES, compute_device, peak_memory_gib
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.dispatch import force
from hybridtron.ops.registry import torch_alone
from hybridtron.proving.measuring import BenchReport
from hybridtron.proving.steps import LEARNING_RATE, Steps, load_checked, one_process, plain_adamw, random_batches, speed

QUICK = ("phases.0.seq_len=32", "phases.0.global_batch=2", "phases.0.micro_batch=1", "model.width=64")
QUICK += ("model.vocab_size=320", "model.layers.W.window=16")
LOSS_TOLERANCE = 1e-4
TORCH = "ours by torch alone"


class PlainStep:
    """A step of the plain loop."""

    def __init__(self, model: LanguageModel, config: Config, batches: Sequence[Batch]) -> None:
        self.model = model
        self.clip = config.optim.clip
        self.batches = batches
        self.adam = plain_adamw(model, config, LEARNING_RATE, fused=True)
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


def step(report: BenchReport) -> None:
    """Measure our step against the plain loop, and report its speed."""
    config = load_checked([*report.recipe, *report.pick(full=(), quick=QUICK)])
    report.device = compute_device().type
    model = LanguageModel(architecture(config.model))
    initialise(model, config.run.seed)
    model = model.to(compute_device()).cast(DTYPES[config.precision.name])
    batches = random_batches(config)
    with one_process(config) as groups:
        ours = Steps(config, groups, batches)
        plain = PlainStep(model, config, batches)
        uncompiled = Steps(config, groups, batches)
        timings = report.timed({"ours": ours, "plain loop": plain, TORCH: partial(by_torch, uncompiled)})
    pairs = zip(ours.losses, plain.losses, strict=False)  # the steps that both loops have taken
    difference = max((mine - theirs).abs().item() for mine, theirs in pairs)
    assert config.precision.name != "fp32" or difference <= LOSS_TOLERANCE, f"the losses differ by {difference:.1e}"
    parameters = readable(sum(weight.numel() for weight in model.parameters()))
    more = {"parameters": [parameters], "losses differ": [f"{difference:.0e}"]}
    report.ratios("time", "recipe", {config.run.name: timings}, [("ours", "plain loop"), (TORCH, "ours")], more)
    phase = config.phases[0]
    report.notes += [
        f"pattern {config.model.pattern}, width {config.model.width}, {config.precision.name}",
        f"{phase.global_batch} rows of {phase.seq_len} tokens in micro-batches of {phase.micro_batch}",
        f"{report.repetitions} rounds of each",
    ]
    reached = speed_cells(config, timings["ours"].fastest)
    if report.device == "cpu":
        report.console += [f"{unit}: {value}" for unit, value in reached]
    else:
        report.table("speed of our step", ("", "value"), reached)
    report.at_most("our step / the plain loop's", 1.05, timings.ratio("ours", "plain loop"))
    if report.device == "cpu":
        report.at_least("times faster than by torch alone", 2.5, timings.ratio(TORCH, "ours"))


def by_torch(step: Callable[[], None]) -> None:
    """Run a step without compiled forms."""
    with force(**torch_alone()):
        step()


def speed_cells(config: Config, seconds: float) -> list[tuple[str, str]]:
    tokens, tflops = speed(config, seconds)
    peak = config.cluster.peak_tflops
    memory = peak_memory_gib()
    lines = [("tokens/s", f"{tokens:,.0f}"), ("TFLOP/s", f"{tflops:.3g}")]
    if peak:
        lines.append(("MFU", f"{tflops / peak:.1%} of {peak:g} TFLOP/s"))
    if memory is not None:
        lines.append(("peak memory, both loops", f"{memory:.1f} GiB"))
    return lines
