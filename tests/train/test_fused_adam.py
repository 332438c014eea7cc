"""The AdamW of Transformer Engine and apex, which Megatron uses if one is installed, by a stand-in.

It has the same state as they have: a weight's moments are created in its first step and are alone, and steps are
counted for a group of weights. The arithmetic is torch's, so that runs give the same bits as with torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import optimizer as megatron
from megatron.core.optimizer import distrib_optimizer
from torch.optim.adamw import adamw

from tests.train.conftest import Train
from tests.train.faults import spoiled, trained

SHARED = ("optim.warmup=0%", "run.eval_every=100", "run.eval_lengths=[1]")
SIZES = "seq_len: 16, global_batch: 4, micro_batch: 2, lr: 1e-2"
OTHER_USE = "layers: {W: {window: 4}}"  # which takes another engine
TWO_PHASES = f"phases=[{{name: a, tokens: 256, {SIZES}}},{{name: b, tokens: 256, {SIZES}, {OTHER_USE}}}]"


class FusedAdam(torch.optim.Optimizer):
    """Stand-in for transformer_engine.pytorch.optimizers.FusedAdam and apex.optimizers.FusedAdam."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool,
        capturable: bool = False,  # asked for by newer megatron-core alone
    ) -> None:
        assert adam_w_mode
        assert not capturable
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            learning = [weight for weight in group["params"] if weight.grad is not None]
            for weight in learning:
                if not self.state[weight]:
                    self.state[weight] = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                assert self.state[weight].keys() == {"exp_avg", "exp_avg_sq"}
            adamw(
                learning,
                [weight.grad for weight in learning],
                [self.state[weight]["exp_avg"] for weight in learning],
                [self.state[weight]["exp_avg_sq"] for weight in learning],
                [],
                [torch.tensor(group["step"] - 1.0) for _ in learning],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def resumed(train: Train, settings: list[str]) -> None:
    assert train(settings, "run.max_steps=5") == 0
    assert train(settings, "run.max_steps=8") == 0


def rolled_back(train: Train, settings: list[str]) -> None:
    with spoiled(math.nan, (14, 16)):  # a micro-batch of step 7, and one of step 8
        assert train(settings, "run.max_steps=8", "optim.skips=2") == 0


def in_two_phases(train: Train, settings: list[str]) -> None:
    assert train(settings, TWO_PHASES) == 0


@pytest.mark.parametrize(
    "scenario", [rolled_back, *(pytest.param(s, marks=pytest.mark.slow) for s in (resumed, in_two_phases))]
)
def test_fused_adam_runs_equal_those_of_torch(
    scenario: Callable[[Train, list[str]], None], train_small: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario(train_small, [*SHARED, f"run.dir={tmp_path / 'torch'}"])
    for module in (megatron, distrib_optimizer):
        monkeypatch.setattr(module, "Adam", FusedAdam)
    monkeypatch.setattr(megatron, "USING_PYTORCH_OPTIMIZER", False)
    scenario(train_small, [*SHARED, f"run.dir={tmp_path / 'fused'}"])
    assert trained(tmp_path / "fused") == trained(tmp_path / "torch")
