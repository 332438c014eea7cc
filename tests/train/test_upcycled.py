"""Models with experts that start from dense models: first logits, refusals, other layouts, imported weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.moe import MoESpec
from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.architecture.table import architecture
from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.folder import folder_of, newest
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.data.batch import SeqInfo
from hybridtron.model.lm import LanguageModel
from hybridtron.train.upcycled import UpcycledLayer, frozen_problems
from tests.train.conftest import VOCAB, Refused, Train, small_run_arguments
from tests.train.test_stop_and_resume import run

FROZEN = ["phases.0.lr=1e-30", "optim.final_lr=1", "run.max_steps=1"]
UNGATED = "model.layers.-={kind: squared_relu, hidden: 64}"


def experts(options: str) -> str:
    return f"model.layers.-={{kind: moe, experts: 4, top_k: 2, hidden: 64, {options}}}"


def logits(checkpoint: Checkpoint) -> Tensor:
    """Return the logits of a checkpoint's model for 48 tokens."""
    model = LanguageModel(architecture(checkpoint.config.model))
    checkpoint.load_weights(model)
    with torch.no_grad():
        return model(torch.arange(48).view(2, 24) % VOCAB, None, SeqInfo.stream(2, 24)).output


def relative(other: Tensor, truth: Tensor) -> float:
    return float((other - truth).abs().max() / truth.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dense", "options", "limit"),
    [
        ((), "scores: softmax", 2e-6),
        ((), "scores: sigmoid, scale: 2.5, balance: bias", 2e-6),
        ((), "shared: 32, shared_gate: true", 2e-6),
        ((UNGATED,), "activation: squared_relu, shared: 32", 2e-6),
        ((), "normalise: false", 2e-2),
        ((), "normalise: false, scores: sigmoid, balance: bias", 2e-2),
    ],
)
def test_first_logits_are_those_of_the_dense_model(
    dense: tuple[str, ...], options: str, limit: float, train_small: Train, tmp_path: Path
) -> None:
    assert train_small(*dense, "run.max_steps=2") == 0
    before = Checkpoint.open(folder_of(tmp_path / "run", 2))
    folder = tmp_path / "upcycled"
    assert train_small(f"run.weights={tmp_path / 'run'}", f"run.dir={folder}", *FROZEN, experts(options)) == 0
    after = Checkpoint.open(folder_of(folder, 1))
    assert relative(logits(after), logits(before)) < limit
    down = after.whole("layers.1.mixer.down")
    assert torch.equal(down[0], down[3])
    router = after.whole("layers.1.mixer.router")
    assert router.std(0).min() > 0


def test_copies_of_bf16_weights_are_divided_in_fp32() -> None:
    """An imported checkpoint has no fp32 masters."""
    spec = MoESpec(experts=4, top_k=2, hidden=8, scale=2.5)
    layer = UpcycledLayer(1, "-", spec, SwiGLUSpec(hidden=8))
    parameter = spec.parameters(ModelSizes(4, 2))["down"]
    dense = torch.randn(4, 8, dtype=torch.bfloat16)
    copies = layer.value("layers.1.mixer.down", parameter, 0, lambda name: {"layers.1.mixer.down.weight": dense}[name])
    assert torch.equal(copies, (dense.float() / 2.5).expand(4, 4, 8))


@pytest.mark.slow
def test_the_start_says_what_experts_are(
    train_small: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_small("run.max_steps=1") == 0
    arguments = [f"run.weights={tmp_path / 'run'}", f"run.dir={tmp_path / 'upcycled'}", *FROZEN]
    capsys.readouterr()
    assert train_small(arguments, experts("normalise: false, shared: 8")) == 0
    shown = capsys.readouterr().out
    assert "-: each of 4 experts starts as a copy of the dense MLP, in layers 1, 3, 5, 7" in shown
    assert "first logits are only near" in shown
    assert "the shared expert adds nothing at first" in shown


@pytest.mark.slow
def test_experts_that_differ_from_the_mlp_are_refused(train_small: Train, refused: Refused, tmp_path: Path) -> None:
    assert train_small("run.max_steps=1") == 0
    start = [f"run.weights={tmp_path / 'run'}", f"run.dir={tmp_path / 'upcycled'}"]
    narrow = experts("latent: 16, activation: squared_relu").replace("hidden: 64", "hidden: 32")
    problems = refused(start, narrow)
    assert {key: problem.code for key, problem in problems.items()} == {
        f"model.layers.-.{option}": "mismatch" for option in ("hidden", "activation", "latent")
    }
    assert "use 64" in problems["model.layers.-.hidden"].message
    experts_of_attention = ["model.layers.W={kind: moe, experts: 4, top_k: 2, hidden: 64}"]
    assert refused(start, experts_of_attention)["model.layers.W.kind"].code == "mismatch"


PHASE = "tokens: 1M, seq_len: 256, global_batch: 8, micro_batch: 4, lr: 1e-3"
LORA = "phases.0.adapters={preset: lora}"
ROUTER = "layers.*.mixer.router"
DOWN = "layers.*.mixer.down"
ROUTER_AND_HALVES = [ROUTER, "layers.1.mixer.gate_up", *(f"layers.{layer}.mixer.down" for layer in range(3, 40, 2))]


EXPERTS = "experts of -, which no later phase trains, so that they stay equal copies"
RANDOM = "a router of -, which no later phase trains, so that it stays as random"


@pytest.mark.parametrize(
    ("settings", "key", "frozen"),
    [
        ([], None, None),
        ([LORA], "phases.0.adapters", EXPERTS),
        ([LORA, f"phases.0.train=[{ROUTER}]"], "phases.0.adapters", EXPERTS),
        ([LORA, f"phases.0.train=[{DOWN}]"], "phases.0.adapters", RANDOM),
        ([f"phases.0.train=[{ROUTER}]"], "phases.0.train", EXPERTS),
        ([LORA, f"phases.0.train=[layers.1.mixer.router, {DOWN}]"], "phases.0.adapters", RANDOM),
        ([LORA, f"phases.0.train=[{ROUTER}, {DOWN}]"], None, None),
        (["model.adapters={preset: lora}"], "model.adapters", EXPERTS),
        ([LORA, "phases.0.train=[" + ", ".join(ROUTER_AND_HALVES) + "]"], None, None),
        ([f"phases=[{{name: a, {PHASE}, adapters: {{preset: lora}}}}, {{name: b, {PHASE}}}]"], None, None),
        (
            [f"phases=[{{name: a, {PHASE}, adapters: {{preset: lora}}}}, {{name: b, {PHASE}, train: [{DOWN}]}}]"],
            "phases.0.adapters",
            RANDOM,
        ),
    ],
)
def test_frozen_experts_and_routers_are_a_problem(settings: list[str], key: str | None, frozen: str | None) -> None:
    plan = RunPlan.of(load(["recipe=moe_laptop", *settings]))
    layers = [
        UpcycledLayer(index, plan.arch.letters[index], spec, SwiGLUSpec(hidden=spec.hidden))
        for index, spec in enumerate(plan.arch.specs)
        if isinstance(spec, MoESpec)
    ]
    problems = list(frozen_problems(layers, plan))
    expected = [] if key is None else [(key, "no-effect")]
    assert [(problem.key, problem.code) for problem in problems] == expected
    assert all(f"freezes {frozen}" in problem.message for problem in problems)


@pytest.mark.slow
def test_adapters_alone_do_not_start_with_copies(train_small: Train, refused: Refused, tmp_path: Path) -> None:
    assert train_small("run.max_steps=1") == 0
    start = [f"run.weights={tmp_path / 'run'}", f"run.dir={tmp_path / 'upcycled'}", experts("scores: softmax")]
    problems = refused(start, LORA)
    assert {key: problem.code for key, problem in problems.items()} == {"phases.0.adapters": "no-effect"}
    assert "phases.0.train" in problems["phases.0.adapters"].message


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("before", "after"), [("tp2", "ep2"), ("pp2", "tp2-ep2-et1")])
def test_weights_of_one_layout_upcycle_under_another(
    before: str, after: str, counting_folder: Path, tmp_path: Path
) -> None:
    dense = small_run_arguments(counting_folder, tmp_path / "dense")
    run(before, [*dense, "run.max_steps=2"])
    start = [f"run.weights={tmp_path / 'dense'}", *FROZEN, experts("shared: 32")]
    run(after, [*small_run_arguments(counting_folder, tmp_path / "upcycled"), *start])
    old = newest(tmp_path / "dense")
    new = newest(tmp_path / "upcycled")
    assert old is not None
    assert new is not None
    assert relative(logits(new), logits(old)) < 2e-6
