"""Best learning rates at several widths, with muP and without: short trainings on bytes of Python's manual.

    python -m studies.mup_rates        minutes on one core; prints the table of docs/mup.md

Each model has the pattern M-W- (Mamba, an MLP, attention with a window, an MLP). At every width, with and without muP,
the same rows are read at each rate. The rate rises linearly in the first steps and then falls linearly to zero. The
loss of a run is the mean over its last steps, each on rows that were not read before.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.mup import MupConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.load import load
from hybridtron.data.batch import SeqInfo
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.proving.coordinates import family_member
from hybridtron.proving.steps import plain_adamw

BASE = 32
WIDTHS = (32, 64, 128)
RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2, 4.8e-2)
STEPS = 60
WARMUP = 6
LAST = 10  # steps over which a run's loss is averaged
ROWS = 8
LENGTH = 64
VOCABULARY = 128  # ASCII
LAYERS: dict[str, dict[str, Any]] = {
    "M": {"kind": "mamba"},
    "W": {"kind": "attention", "heads": 4, "window": 32},
    "-": {"kind": "swiglu", "hidden": 88},
}


def model_of(width: int, transfer: bool) -> ModelConfig:
    """Return the model with this width; the sizes of its layers are in proportion."""
    base = ModelConfig(BASE, VOCABULARY, "M-W-", LAYERS, False, mup=MupConfig(BASE if transfer else None))
    return replace(family_member(base, width), vocab_size=VOCABULARY)


def rows_of(step: int) -> Tensor:
    """Return the rows of a step, from random places of the manual."""
    text = torch.frombuffer(bytearray("".join(topics.values()).encode("ascii", "ignore")), dtype=torch.uint8)
    places = torch.randint(len(text) - LENGTH - 1, (ROWS,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[place : place + LENGTH + 1] for place in places.tolist()]).long()


def loss_after(width: int, transfer: bool, lr: float, steps: int) -> float:
    """Train a model, and return the mean of its last losses."""
    model = LanguageModel(architecture(model_of(width, transfer)))
    initialise(model, seed=1)
    optimizer = plain_adamw(model, load(["optim.weight_decay=0"]), lr)
    rates = [group["lr"] for group in optimizer.param_groups]
    losses = []
    for step in range(steps):
        share = min((step + 1) / WARMUP, (steps - step) / (steps - WARMUP))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share
        tokens = rows_of(step)
        logits = model(tokens[:, :-1], None, SeqInfo.stream(ROWS, LENGTH)).output
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].T.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-LAST:]) / LAST


def table_of(losses: Mapping[tuple[bool, int, float], float], widths: Sequence[int], rates: Sequence[float]) -> str:
    """Return the losses as a Markdown table; the lowest loss of a line is bold."""
    lines = ["| | width | " + " | ".join(f"{rate:g}" for rate in rates) + " |", "|---" * (2 + len(rates)) + "|"]
    for transfer in (True, False):
        for width in widths:
            values = [losses[transfer, width, rate] for rate in rates]
            cells = [f"**{value:.3f}**" if value == min(values) else f"{value:.3f}" for value in values]
            name = "muP" if transfer else "standard"
            lines.append(f"| {name} | {width} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Train all models and print the table."""
    torch.set_num_threads(1)
    losses = {}
    for width in WIDTHS:
        for transfer in (True, False):
            for rate in RATES:
                losses[transfer, width, rate] = loss_after(width, transfer, rate, STEPS)
                print(f"{width} {transfer} {rate:g} {losses[transfer, width, rate]:.4f}", file=sys.stderr, flush=True)
    print(table_of(losses, WIDTHS, RATES))


if __name__ == "__main__":
    main()
