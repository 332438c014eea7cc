"""Budget of a layer of experts: kernels that it launches, and bytes of the kernels that copy, weight and add rows.

A layer is a sub-layer with its norm and its part in the balance of loads. Launches are those of a micro-batch on an
H200. Bytes are relative to the rows of all choices. A kernel that goes over these rows once, from or to the tokens,
reads or writes them (1), and a quarter as many tokens (0.25).
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from tests.rehearse.programs import PATIENT, printed_by

TOKENS = 2048
WIDTH = 512
TOP_K = 4
SETTINGS = [
    *("recipe=samba_421m", "precision=bf16", f"model.width={WIDTH}", "model.vocab_size=2048"),
    *("model.layers.W={kind: attention, heads: 4, kv_heads: 4}", f"phases.0.seq_len={TOKENS}"),
    "phases.0.micro_batch=1",
]
TWO_PASSES = {"forward": 2 * 1.25, "backward": 1.25 + 2.25}  # backward, weights' gradients read the rows once more
FOUR_PASSES = {"forward": 2 * 1.25 + 2 * 2, "backward": 1.25 + 2.25 + 2 * 2}  # two more, over received rows
SLACK = 0.1  # indices and weights


@dataclass(frozen=True)
class LayerBudget:
    """Options of experts, number of processes, and the most launches of both passes together."""

    options: str
    gpus: int
    launches: int


BUDGETS = [
    LayerBudget("coefficient: 0.01", 1, 41),
    LayerBudget("shared: 512, shared_gate: true, scores: sigmoid, balance: bias, z_loss: 0.001", 1, 67),
    LayerBudget(
        "activation: squared_relu, shared: 512, scores: sigmoid, groups: 4, group_limit: 2, balance: bias", 1, 40
    ),
    LayerBudget("coefficient: 0.01", 2, 58),
    LayerBudget("shared: 512, scores: sigmoid, balance: bias", 2, 57),
]


@pytest.mark.slow
@PATIENT
def test_layers_of_experts_stay_in_their_budgets() -> None:
    jobs = []
    for budget in BUDGETS:
        experts = f"model.layers.E={{kind: moe, experts: 16, top_k: {TOP_K}, hidden: 256, {budget.options}}}"
        layout = [f"phases.0.global_batch={budget.gpus}", f"parallel.expert={budget.gpus}"]
        jobs.append([[*SETTINGS, experts, *layout], budget.gpus])
    layers = printed_by("expert_layers", json.dumps(jobs), processor_s=600)
    rows = TOKENS * TOP_K * WIDTH * 2
    for budget, layer in zip(BUDGETS, layers, strict=True):
        assert sum(part["launches"] for part in layer.values()) <= budget.launches, budget
        passes = TWO_PASSES if budget.gpus == 1 else FOUR_PASSES
        for part, limit in passes.items():
            copied = sum(layer[part]["copied"].values()) / rows
            assert limit <= copied < limit + SLACK, (budget, part)
