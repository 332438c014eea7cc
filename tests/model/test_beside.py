"""Sub-layers beside each other: one norm, both outputs added together, by hand and however they are run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.config.schema import Recompute
from hybridtron.data.batch import SeqInfo
from hybridtron.inference.generate import generate
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel
from hybridtron.planning.count import count
from hybridtron.problems import ConfigError
from tests.conftest import part_of, seq_info

LAYERS = {
    "M": {
        "kind": "mamba2",
        "state": 4,
        "head_dim": 8,
        "norm": False,
        "multipliers": {"z": 0.5, "B": 0.7, "dt": 2.0},
        "output_multiplier": 0.3,
    },
    "A": {"kind": "attention", "heads": 2, "beside": True, "scale": 0.2, "output_multiplier": 0.9},
    "W": {"kind": "attention", "heads": 2, "beside": True, "window": 5},
    "-": {"kind": "swiglu", "hidden": 24, "gate_multiplier": 0.8, "output_multiplier": 0.6},
    "P": {"kind": "swiglu", "hidden": 24, "norm_after": True},
    "S": {"kind": "shared_attention", "heads": 2, "hidden": 24, "rank": 3},
}
PATTERN = "MA-MWA-"
LENGTH = 11


def config(pattern: str) -> ModelConfig:
    return ModelConfig(16, 32, pattern, {letter: LAYERS[letter] for letter in LAYERS if letter in pattern})


def built(pattern: str = PATTERN, recompute: Recompute = Recompute.none, offload: int = 0) -> LanguageModel:
    model = LanguageModel(architecture(config(pattern)), recompute=recompute, offload=offload)
    initialise(model, 0)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.data = (weight.data + 0.1 * torch.randn(weight.shape, generator=generator)).double()
    return model


def tokens() -> Tensor:
    return torch.randint(32, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def results(model: LanguageModel) -> list[Tensor]:
    output = model(tokens(), None, seq_info(2, LENGTH, [[4, 7], [11]])).output
    (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)).sum().backward()
    return [output.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def test_parallel_branches_read_one_norm_and_are_added() -> None:
    model = built()
    seq = SeqInfo.stream(2, LENGTH)
    seen: dict[int, Tensor] = {}
    for name, layer in model.layers.items():
        layer.mixer.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({int(name): inputs[0]}))
    out = model(tokens(), None, seq)
    x_LBD = model.embedding(tokens())
    by_index = {int(name): layer for name, layer in model.layers.items()}
    for group, factors in (((0, 1), (0.3, 0.9)), ((2,), (0.6,)), ((3, 4, 5), (0.3, 1.0, 0.9)), ((6,), (0.6,))):
        read_LBD = torch.nn.functional.rms_norm(x_LBD, (16,), by_index[group[0]].norm.weight, 1e-5)
        for index in group:
            torch.testing.assert_close(seen[index], read_LBD)
        outputs_LBD = [by_index[index].mixer(read_LBD, None, seq).y_LBD for index in group]
        x_LBD = x_LBD + sum(factor * y_LBD for factor, y_LBD in zip(factors, outputs_LBD, strict=True))
    expected = torch.nn.functional.linear(model.norm(x_LBD), model.output_weight())
    torch.testing.assert_close(out.output, expected, rtol=1e-12, atol=1e-12)


def test_table_has_one_norm_for_parallel_branches() -> None:
    names = [name for name, _ in built().named_parameters()]
    assert sorted(names) == sorted(architecture(config(PATTERN)).table)
    assert [index for index in range(7) if f"layers.{index}.norm.weight" in names] == [0, 2, 3, 6]
    assert count(architecture(config(PATTERN)), 64).parameters == sum(weight.numel() for weight in built().parameters())


@pytest.mark.parametrize("recompute", [Recompute.selective, Recompute.layer])
def test_recomputed_sub_layers_change_no_bit(recompute: Recompute) -> None:
    assert all(map(torch.equal, results(built()), results(built(recompute=recompute))))


def test_offloaded_sub_layers_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridtron.model.offload.SMALLEST", 1)
    assert all(map(torch.equal, results(built()), results(built(offload=5))))


def test_chunks_with_carried_states_equal_the_whole_row() -> None:
    model = built()
    seq = seq_info(2, LENGTH)
    whole = model(tokens(), None, seq)
    first = model(tokens()[:, :4], None, part_of(seq, 0, 4))
    second = model(tokens()[:, 4:], first.states, part_of(seq, 4, LENGTH))
    torch.testing.assert_close(torch.cat((first.output, second.output)), whole.output, rtol=1e-10, atol=1e-10)


def test_token_by_token_equals_the_whole_row() -> None:
    model = built().eval()
    generated = generate(model, tokens(), 5, temperature=0, seed=0)
    read = tokens()
    for _ in range(5):
        with torch.no_grad():
            logits_LBV = model(read, None, SeqInfo.stream(len(read), read.shape[1])).output
        read = torch.cat((read, logits_LBV[-1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(read[:, LENGTH:], generated)


def test_parallel_branches_stay_in_one_pipeline_stage() -> None:
    assert [len(unit) for unit in architecture(config(PATTERN)).inseparable] == [2, 1, 3, 1]


@pytest.mark.parametrize(
    "pattern",
    [
        "AM",  # nothing before the branch
        "M|A-",  # a stage boundary before it
        "PA",  # no norm to share
        "SAM",  # A can't read the output of S
    ],
)
def test_misplaced_branches_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError) as refused:
        architecture(config(pattern))
    assert [(p.key, p.code) for p in refused.value.problems] == [("model.pattern", "misplaced")]


def test_norm_after_and_output_multiplier_are_refused_beside() -> None:
    model = config("M-")
    model.layers["-"] = {**LAYERS["-"], "beside": True, "norm_after": True}
    with pytest.raises(ConfigError) as refused:
        architecture(model)
    assert [(p.key, p.code) for p in refused.value.problems] == [("model.layers.-.beside", "conflict")]
    model = config("SM")
    model.layers["S"] = {**LAYERS["S"], "output_multiplier": 2.0}
    with pytest.raises(ConfigError) as refused:
        architecture(model)
    assert [(p.key, p.code) for p in refused.value.problems] == [("model.layers.S.output_multiplier", "unsupported")]
