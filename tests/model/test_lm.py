"""The whole model: how it starts, that nothing leaks between documents, and that decoding equals reading."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hybridtron.architecture.inits import Constant, InverseSoftplus, LogRange, LogUniform, Normal, Uniform
from hybridtron.architecture.model import Start
from hybridtron.architecture.table import architecture
from hybridtron.config.load import load
from hybridtron.data.batch import Batch, SeqInfo
from hybridtron.inference.generate import generate
from hybridtron.model.init import starting_value
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.dispatch import force
from hybridtron.ops.loss import CrossEntropyInputs, Loss, cross_entropy
from tests.conftest import random_batch, seq_info, small_config, small_model


def batch_loss(model: LanguageModel, batch: Batch) -> Loss:
    logits_LBV = model(batch.tokens_BL, None, batch.seq).output
    return cross_entropy(CrossEntropyInputs(logits_LBV, batch.labels_BL.T, batch.mask_BL.T, 0.0))


def test_initial_loss_is_near_that_of_uniform_predictions() -> None:
    loss = batch_loss(small_model("M-W-F-"), random_batch())
    assert (loss.cross_entropy / loss.tokens).item() == pytest.approx(math.log(61), rel=0.05)


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    long = small_model("M-W-M-")
    short = small_model("M-")
    weights = dict(long.named_parameters())
    torch.testing.assert_close(weights["layers.0.mixer.A_log"], dict(short.named_parameters())["layers.0.mixer.A_log"])
    torch.testing.assert_close(weights["embedding.weight"], short.embedding.weight)
    assert not torch.equal(weights["layers.0.mixer.in_proj.weight"], weights["layers.4.mixer.in_proj.weight"])


def test_mamba_starts_with_the_decays_and_steps_of_the_paper() -> None:
    assert torch.equal(starting_value(LogRange(), (3, 4), 0, "a")[2], torch.tensor([1.0, 2.0, 3.0, 4.0]).log())
    steps = torch.nn.functional.softplus(starting_value(InverseSoftplus(0.001, 0.1), (4096,), 0, "b"))
    assert steps.min() >= 0.000999
    assert steps.max() <= 0.1001
    assert steps.log().mean().item() == pytest.approx(math.log(0.01), abs=0.1)  # log-uniform


def test_mamba2_starts_with_the_decays_of_its_code() -> None:
    decays = starting_value(LogUniform(1.0, 16.0), (4096,), 0, "a").exp()
    assert 1 <= decays.min() < 1.1
    assert 15.9 < decays.max() <= 16.001
    assert decays.mean().item() == pytest.approx(8.5, abs=0.3)  # uniform before the logarithm


def test_output_projections_start_smaller_by_the_root_of_the_depth() -> None:
    model = small_model("-" * 16)
    weights = dict(model.named_parameters())
    bound = weights["layers.0.mixer.down.weight"].abs().max().item()
    assert bound == pytest.approx((48 * 16) ** -0.5, rel=0.01)


@pytest.mark.parametrize("recipe", ["llama2_438m", "llama2_swa_438m", "ablations/llama2_swa_438m_sc"])
def test_untied_llamas_start_with_the_deviations_of_their_code(recipe: str) -> None:
    """Check width 1536 and 12 blocks; short convolutions and norms start as in other models."""
    weights = architecture(load([f"recipe={recipe}"]).model).table
    starts = {name.removeprefix("layers.0.").removeprefix("layers.1."): weight.init for name, weight in weights.items()}
    inside = Normal((2 / (5 * 1536)) ** 0.5)
    outside = Normal(1536**-0.5 / 12)
    for name in ("embedding.weight", "head.weight", "mixer.q.weight", "mixer.kv.weight", "mixer.gate_up.weight"):
        assert starts[name] == inside
    assert starts["mixer.out.weight"] == starts["mixer.down.weight"] == outside
    assert starts["norm.weight"] == Constant(1.0)
    assert starts.get("mixer.q_conv", Uniform(0.5)) == Uniform(0.5)


def test_lit_gpt_start_changes_projections_alone() -> None:
    model = small_config("M-S-W-")
    ours = architecture(model).table
    theirs = architecture(replace(model, init=Start.lit_gpt)).table
    same = {name.rpartition(".")[2] for name in ours if ours[name] == theirs[name]}
    assert same >= {"A_log", "D", "dt_bias", "conv_weight", "conv_bias", "norm_weight"}
    changed = {name for name in ours if ours[name] != theirs[name]}
    assert changed >= {"embedding.weight", "layers.0.mixer.x_proj.weight", "layers.0.mixer.out_proj.weight"}
    assert theirs["layers.5.mixer.down.weight"].init == Normal(32**-0.5 / 3)  # three of six sub-layers are MLPs


@pytest.mark.parametrize("form", ["reference", None])
def test_documents_leak_no_bit_into_the_next_through_the_whole_model(form: str | None) -> None:
    """Loss on document B alone: other tokens in A leave B's loss and every gradient of it bit-identical."""
    tokens = torch.randint(61, (1, 25))
    mask = torch.zeros(1, 24, dtype=torch.bool)
    mask[:, 10:] = True

    def gradients_with(document_a: torch.Tensor) -> list[torch.Tensor]:
        model = small_model("M-W-S-F-")
        changed = tokens.clone()
        changed[:, :10] = document_a
        batch = Batch(changed[:, :-1], changed[:, 1:], mask, seq_info(1, 24, [[10, 14]]))
        with force(form):
            loss = batch_loss(model, batch)
            loss.total.backward()
        gradients = [weight.grad for name, weight in model.named_parameters() if name != "embedding.weight"]
        return [loss.total.detach(), loss.per_token, *(gradient for gradient in gradients if gradient is not None)]

    a = torch.randint(61, (1, 10))
    other = torch.randint(61, (1, 10))
    for left, right in zip(gradients_with(a), gradients_with(other), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("pattern", ["M-W-F-", "S-W-S"])
def test_decoding_from_carried_states_equals_reading_the_whole_row(pattern: str) -> None:
    model = small_model(pattern, torch.float64)
    prompt = torch.randint(61, (2, 13))
    generated = generate(model, prompt, new_tokens=12, temperature=0, seed=0)
    whole = torch.cat([prompt, generated], dim=1)
    logits_BLV = model(whole, None, SeqInfo.stream(2, whole.shape[1])).output.transpose(0, 1)
    assert torch.equal(logits_BLV[:, 12:-1].argmax(-1), generated)


def test_sampling_repeats_with_its_seed() -> None:
    model = small_model()
    prompt = torch.randint(61, (1, 5))
    first, again = (generate(model, prompt, 20, 1.0, seed=3) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, generate(model, prompt, 20, 1.0, seed=4))
