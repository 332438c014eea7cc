"""A training step of a recipe through our engine, against a plain PyTorch Llama with as many parameters.

Both have the same vocabulary, tied head, loss, batches, data type and threads. The Llama (`plain_llama`) is trained by
a loop as one would write it: cross entropy, `backward`, `clip_grad_norm_`, torch's fused AdamW. The comparison is of
tokens per second between two models that a user might choose from, not of the same mathematics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from hybridtron.architecture.table import architecture
from hybridtron.config.schema import Config
from hybridtron.config.units import readable
from hybridtron.data.batch import Batch
from hybridtron.model.lm import LanguageModel
from hybridtron.proving.measuring import BenchReport
from hybridtron.proving.steps import LEARNING_RATE, Steps, load_checked, one_process, random_batches

from .plain_llama import LlamaSizes, PlainLlama
from .step import QUICK

LAYERS = 4
HEADS = 4


class LlamaStep:
    """A step of the plain Llama's training loop."""

    def __init__(self, config: Config, parameters: int, batches: Sequence[Batch]) -> None:
        model = config.model
        sizes = LlamaSizes.of(parameters, width=model.width, layers=LAYERS, heads=HEADS, vocabulary=model.vocab_size)
        self.model = PlainLlama(sizes)
        self.batches = batches
        self.clip = config.optim.clip
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    def __call__(self) -> None:
        for batch in self.batches:
            logits_BLV = self.model(batch.tokens_BL)
            loss = functional.cross_entropy(logits_BLV.flatten(0, 1), batch.labels_BL.flatten())
            (loss / len(self.batches)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.adam.step()
        self.adam.zero_grad()


def llama(report: BenchReport) -> None:
    """Measure the tokens per second of both models."""
    config = load_checked([*report.recipe, *report.pick(full=(), quick=QUICK)])
    parameters = sum(weight.numel() for weight in LanguageModel(architecture(config.model)).parameters())
    batches = random_batches(config)
    with one_process(config) as groups:
        plain = LlamaStep(config, parameters, batches)
        timings = report.timed({"ours": Steps(config, groups, batches), "Llama": plain})
    of_llama = sum(weight.numel() for weight in plain.model.parameters())
    more = {"parameters": [readable(parameters)], "of the Llama": [readable(of_llama)]}
    report.ratios("training steps", "recipe", {config.run.name: timings}, [("Llama", "ours")], more)
    phase = config.phases[0]
    report.notes += [
        f"pattern {config.model.pattern}, width {config.model.width}; Llama: {LAYERS} layers, {HEADS} heads",
        f"{phase.global_batch} rows of {phase.seq_len} tokens, fp32, {report.repetitions} rounds of each",
    ]
    tokens = sum(batch.tokens_BL.numel() for batch in batches)
    report.console += [f"{name}: {tokens / timing.fastest:,.0f} tokens/s" for name, timing in timings.items()]
    report.at_least("tokens/s, ours / Llama", 0.9, timings.ratio("Llama", "ours"))
