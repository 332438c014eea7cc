"""Training steps for measurements: a recipe's engine in this process alone, with the same micro-batches each time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hybridtron.config.check import require
from hybridtron.config.load import load
from hybridtron.config.pipeline_layout import ProcessLaunch
from hybridtron.config.resolve import RunPlan
from hybridtron.config.schema import Config, Documents
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.device import megatron_context
from hybridtron.engine.engine import Engine
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel.groups import Groups, start, stop
from hybridtron.planning.count import count

DOCUMENTS = 3  # number of documents in each sequence of random tokens, if the recipe isolates documents
LEARNING_RATE = 1e-4


def load_checked(settings: Sequence[str]) -> Config:
    """Load the configuration from key=value arguments, and check it. Raises ConfigError for invalid arguments."""
    config = load(settings)
    require(RunPlan.of(config))
    return config


@contextmanager
def one_process(config: Config) -> Iterator[Groups]:
    """Yield the process groups of a layout with this process as its only rank, and destroy them afterwards."""
    try:
        yield start(config.parallel, launch=ProcessLaunch(0, 1))
    finally:
        stop()


class Steps:
    """A training step as the trainer takes it, without data loading and metrics.

    Each call takes one step on the micro-batches in `batches`, and appends the mean loss to `losses`.
    """

    def __init__(self, config: Config, groups: Groups, batches: Sequence[Batch]) -> None:
        self.batches = batches
        self.losses = list[Tensor]()
        self.phase = RunPlan.of(config).phases[0]
        with megatron_context():
            self.engine = Engine(self.phase, groups)
        self.engine.start_phase(self.phase, range(self.phase.lanes))

    def __call__(self) -> None:
        with megatron_context():
            self.losses.append(self.engine.forward_backward(self.batches, len(self.losses)).mean)
            self.engine.step(LEARNING_RATE)


def plain_adamw(model: LanguageModel, config: Config, lr: float, fused: bool = False) -> torch.optim.AdamW:
    """Return torch's own AdamW with the recipe's settings.

    The weights are grouped by their learning-rate factor and weight decay in the parameter table. Weights that the
    table excludes from weight decay are decayed only with `optim.decay_all`. The decay in a step does not depend on the
    factor.
    """
    optim = config.optim
    grouped: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, weight in model.named_parameters():
        parameter = model.table[name]
        if parameter.decay or optim.decay_all:
            decay = optim.weight_decay
        else:
            decay = 0.0
        grouped.setdefault((lr * parameter.lr_factor, decay / parameter.lr_factor), []).append(weight)
    groups = [{"params": weights, "lr": rate, "weight_decay": decay} for (rate, decay), weights in grouped.items()]
    return torch.optim.AdamW(groups, lr=lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps, fused=fused)


def speed(config: Config, seconds: float) -> tuple[float, float]:
    """Return the tokens per second and the TFLOP/s, if a step of the first phase takes `seconds`.

    `planning/count.py` counts the FLOPs per token from the architecture.
    """
    settings = config.phases[0]
    tokens = settings.tokens_per_step / seconds
    return tokens, tokens * count(RunPlan.of(config).arch, settings.seq_len).flops_per_token / 1e12


def random_batches(config: Config) -> list[Batch]:
    """Return the micro-batches for one step of the first phase: random tokens that all count in the loss."""
    phase = config.phases[0]
    documents = RunPlan.of(config).phases[0].documents
    generator = torch.Generator().manual_seed(0)
    rows = phase.micro_batch
    length = phase.seq_len
    batches = []
    for _ in range(phase.global_batch // rows):
        tokens = torch.randint(config.model.vocab_size, (rows, length + 1), generator=generator)
        mask = torch.ones(rows, length, dtype=torch.bool)
        batches.append(Batch(tokens[:, :-1], tokens[:, 1:], mask, _seq_info(documents, rows, length)))
    return batches


def _seq_info(documents: Documents, rows: int, length: int) -> SeqInfo:
    if documents is Documents.join:
        return SeqInfo.stream(rows, length)
    indices = torch.arange(length)
    size = -(-length // DOCUMENTS)
    return SeqInfo((indices % size).expand(rows, length), (indices // size).to(torch.int32).expand(rows, length))
