"""Training steps for measurements: a recipe's engine on this process alone, with the same micro-batches each time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hybridtron.config.check import require
from hybridtron.config.layout import ProcessLaunch
from hybridtron.config.load import load
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config, Documents
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.device import megatron_context
from hybridtron.engine.engine import Engine
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel.groups import Groups, start, stop
from hybridtron.planning.count import count

DOCUMENTS = 3  # per row of random tokens, if the recipe isolates documents
LEARNING_RATE = 1e-4


def checked(settings: Sequence[str]) -> Config:
    """Load and check the configuration of these arguments. Raises ConfigError."""
    config = load(settings)
    require(config)
    return config


@contextmanager
def one_process(config: Config) -> Iterator[Groups]:
    """Yield process groups with this process alone, until the block ends."""
    try:
        yield start(config.parallel, launch=ProcessLaunch(0, 1))
    finally:
        stop()


class Steps:
    """The trainer's step without data loading and metrics; each call runs one step on the same batches."""

    def __init__(self, config: Config, groups: Groups, batches: Sequence[Batch]) -> None:
        self.batches, self.losses = batches, list[Tensor]()
        with megatron_context():
            self.engine = Engine(config, groups)
        self.engine.start_phase(0, range(resolve(config)[0].lanes))

    def __call__(self) -> None:
        with megatron_context():
            self.losses.append(self.engine.forward_backward(self.batches, len(self.losses)).mean)
            self.engine.step(LEARNING_RATE)


def plain_adamw(model: LanguageModel, config: Config, lr: float, fused: bool = False) -> torch.optim.AdamW:
    """Return torch's own AdamW with the recipe's settings."""
    weights = dict(model.named_parameters())
    optim = config.optim
    groups = [
        {"params": [w for name, w in weights.items() if model.table[name].decay is decayed], "weight_decay": amount}
        for decayed, amount in ((True, optim.weight_decay), (False, optim.weight_decay * optim.decay_all))
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(optim.betas[0], optim.betas[1]), eps=optim.eps, fused=fused)


def speed(config: Config, seconds: float) -> tuple[float, float]:
    """Return tokens per second and TFLOP/s, by our FLOP count, of a first-phase step that takes this long."""
    phase = config.phases[0]
    tokens = phase.tokens_per_step / seconds
    return tokens, tokens * count(config.model, phase.seq_len).flops_per_token / 1e12


def random_batches(config: Config) -> list[Batch]:
    """Return the micro-batches for one step of the first phase: random tokens without masks."""
    phase = config.phases[0]
    generator = torch.Generator().manual_seed(0)
    rows = phase.micro_batch
    length = phase.seq_len
    batches = []
    for _ in range(phase.global_batch // rows):
        tokens = torch.randint(config.model.vocab_size, (rows, length + 1), generator=generator)
        mask = torch.ones(rows, length, dtype=torch.bool)
        batches.append(Batch(tokens[:, :-1], tokens[:, 1:], mask, _seq_info(config, rows, length)))
    return batches


def _seq_info(config: Config, rows: int, length: int) -> SeqInfo:
    if resolve(config)[0].documents is Documents.join:
        return SeqInfo.stream(rows, length)
    places = torch.arange(length)
    size = -(-length // DOCUMENTS)
    return SeqInfo((places % size).expand(rows, length), (places // size).to(torch.int32).expand(rows, length))
