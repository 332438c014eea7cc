"""The length-generalization paper's models beside Mamba-2: sizes, and the steps of its Table 2."""

from __future__ import annotations

import pytest

from hybridtron.architecture.table import architecture
from hybridtron.config.load import load
from hybridtron.planning.count import count

EXACT = {  # GLA: 72.0M, 119.8M, 360.4M; Mamba as transformers' class counts its own; RWKV-6 by hand, below
    "gla_70m": 72_024_832,
    "gla_120m": 119_833_728,
    "gla_360m": 360_439_808,
    "mamba_130m": 129_135_360,
    "mamba_350m": 371_516_416,
    "rwkv6_70m": 73_361_920,
}


@pytest.mark.parametrize(("recipe", "parameters"), EXACT.items())
def test_models_of_the_length_paper_have_their_exact_parameters(recipe: str, parameters: int) -> None:
    model = load([f"recipe={recipe}"]).model
    assert count(architecture(model), 512).parameters == parameters
    assert sum(parameter.size for parameter in architecture(model).table.values()) == parameters


@pytest.mark.parametrize(
    ("recipe", "seq_len", "lr"),
    list(zip(EXACT, (512, 512, 512, 2048, 2048, 256), (1e-3, 6e-4, 3e-4, 6e-4, 3e-4, 1e-3), strict=True)),
)
def test_models_of_the_length_paper_take_its_steps(recipe: str, seq_len: int, lr: float) -> None:
    config = load([f"recipe={recipe}"])
    (phase,) = config.phases
    assert (phase.seq_len, phase.lr, phase.seq_len * phase.global_batch) == (seq_len, lr, 2**19)
    assert phase.lr * config.optim.final_lr == pytest.approx(1e-5, rel=1e-4)
    assert (config.optim.weight_decay, config.optim.warmup) == (0.01, "10%")


def test_parameters_of_rwkv6_equal_a_hand_count() -> None:
    # norm; r, k, v, gate, out; what mixes tokens, of inner size 5 * 32; decays, by 64; bonus, norm of heads
    time_mix = 512 + 5 * 512**2 + (6 * 512 + 2 * 160 * 512) + (2 * 64 * 512 + 512) + 512 + 2 * 512
    # norm; what mixes tokens; key and value of 3.5 * 512 channels; receptance
    channel_mix = 512 + 2 * 512 + 2 * 1792 * 512 + 512**2
    assert EXACT["rwkv6_70m"] == 6 * (time_mix + channel_mix) + 512 + 2 * 50288 * 512
