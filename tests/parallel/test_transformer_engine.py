"""Transformer Engine's layers, by a stand-in for the package: they take the place of ours under the same names.

Its FP8 too, as far as a stand-in can show: which recipe and group a region is entered with, by which of the package's
names for it, around which products; and that its statistics are put back, kept in checkpoints and read from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hybridtron.architecture.table import architecture
from hybridtron.config.check import check
from hybridtron.config.choices import FP8_MULTIPLES, Precision
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.config.schema import Config, ParallelConfig, PrecisionConfig, Recompute
from hybridtron.device import Package
from hybridtron.engine.engine import Engine
from hybridtron.model.init import initialise
from hybridtron.model.lm import LanguageModel, ModelSlice
from hybridtron.parallel import transformer_engine
from hybridtron.parallel.fp8 import Fp8
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.linear import LinearBackend, TensorGroup
from hybridtron.problems import ConfigError
from hybridtron.train import start
from tests.conftest import random_batch, small_config, small_model, small_run

HISTORY = 4
REGIONS: list[dict[str, Any]] = []  # those that are open


class StandIn(nn.Module):
    """transformer_engine.pytorch.Linear as far as it is used: local sizes, no bias, a weight named `weight`.

    Inside a region with delayed scaling it keeps statistics as the package does, in `fp8_meta`.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool, params_dtype: torch.dtype, fuse_wgrad_accumulation: bool
    ) -> None:
        super().__init__()
        assert not bias
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        self.fp8_meta: dict[str, Any] = {}
        self.in_fp8 = 0
        self.firsts: list[bool | None] = []  # of its passes, what they know of their micro-batch

    def init_fp8_metadata(self) -> None:
        assert REGIONS
        for kind, columns in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            kept = SimpleNamespace(amax_history=torch.zeros(HISTORY, columns), scale=torch.ones(columns))
            self.fp8_meta.setdefault(kind, kept)

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        if REGIONS:
            self.in_fp8 += 1
            self.firsts.append(is_first_microbatch)
            self.init_fp8_metadata()
            if isinstance(REGIONS[-1]["recipe"], DelayedScaling):
                row = self.fp8_meta["scaling_fwd"].amax_history[0]
                row[0] = x.detach().abs().amax()
                row[1] = self.weight.detach().abs().amax()
        return x @ self.weight.T


class DelayedScaling:
    def __init__(self, amax_history_len: int, amax_compute_algo: str) -> None:
        self.length = amax_history_len
        self.algorithm = amax_compute_algo


class Float8CurrentScaling:
    pass


class Float8BlockScaling:
    pass


@contextmanager
def autocast(enabled: bool, recipe: Any = None, amax_reduction_group: Any = None) -> Iterator[None]:
    assert enabled
    REGIONS.append({"recipe": recipe, "group": amax_reduction_group})
    try:
        yield
    finally:
        REGIONS.pop()


@contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None, fp8_group: Any = None) -> Iterator[None]:
    with autocast(enabled, fp8_recipe, fp8_group):
        yield


RECIPES = SimpleNamespace(
    DelayedScaling=DelayedScaling,
    Float8CurrentScaling=Float8CurrentScaling,
    Float8BlockScaling=Float8BlockScaling,
)
NOTHING: Mapping[str, Any] = {}
Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package with these contents in the real one's place."""

    def install(recipes: SimpleNamespace = RECIPES, quantization: Mapping[str, Any] = NOTHING, **names: Any) -> None:
        modules = {
            "transformer_engine.pytorch": SimpleNamespace(Linear=StandIn, **names),
            "transformer_engine.common.recipe": recipes,
            **quantization,
        }
        monkeypatch.setattr(
            transformer_engine, "optional_package", lambda name: Package(name, modules.get(name), "stand-in")
        )
        transformer_engine._recipe.cache_clear()

    install(autocast=autocast)
    yield install
    transformer_engine._recipe.cache_clear()
    assert not REGIONS


def config_of(precision: Precision, recompute: Recompute = Recompute.none) -> Config:
    config = small_run(small_config("M-W-"))
    config.precision = PrecisionConfig(precision, history=HISTORY, bf16_first=1)
    config.parallel = ParallelConfig(recompute=recompute)
    return config


def layers_of(engine: Engine) -> dict[str, StandIn]:
    named = engine.stages[0].model.named_modules()
    return {name: module for name, module in named if isinstance(module, StandIn)}


@pytest.mark.usefixtures("alone", "install")
def test_projections_of_transformer_engine_replace_ours() -> None:
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    tensor = TensorGroup(group=group, backend=LinearBackend(transformer_engine=True))
    model = LanguageModel(architecture(small_config()), ModelSlice(tensor=tensor))
    initialise(model, seed=1)
    projections = [name for name, module in model.named_modules() if isinstance(module, StandIn)]
    assert len(projections) == 4 + 2 + 3 + 2 + 3  # Mamba, MLP, attention, MLP, attention
    batch = random_batch()
    ours = small_model()(batch.tokens_BL, None, batch.seq).output
    torch.testing.assert_close(model(batch.tokens_BL, None, batch.seq).output, ours)


def test_transformer_engine_is_refused_if_not_installed() -> None:
    (problem,) = check(RunPlan.of(load(["parallel.transformer_engine=true"])))
    assert (problem.key, problem.code) == ("parallel.transformer_engine", "not-installed")


@pytest.mark.parametrize("names", [{"autocast": autocast}, {"fp8_autocast": fp8_autocast}], ids=["new", "old"])
@pytest.mark.parametrize("precision", list(FP8_MULTIPLES))
def test_region_is_entered_by_the_available_name(install: Install, precision: Precision, names: dict[str, Any]) -> None:
    install(**names)
    group: Any = object()
    with transformer_engine.region(Fp8(precision, range(1), HISTORY, emulate=False, group=group)):
        (entered,) = REGIONS
    assert entered["group"] is group
    recipe = entered["recipe"]
    assert type(recipe).__name__ == transformer_engine.RECIPES[precision]
    if isinstance(recipe, DelayedScaling):
        assert (recipe.length, recipe.algorithm) == (HISTORY, "max")


@pytest.mark.usefixtures("install")
def test_regions_reduce_largest_values_within_the_group_of_the_stage(
    alone: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package takes None for all processes, including those of other pipeline stages."""
    from megatron.core import parallel_state

    entered = []
    forward = StandIn.forward

    def watched(self: StandIn, x: torch.Tensor) -> torch.Tensor:
        entered.extend(region["group"] for region in REGIONS)
        return forward(self, x)

    monkeypatch.setattr(StandIn, "forward", watched)
    Engine(resolve(config_of(Precision.fp8_delayed))[0], alone).forward_backward([random_batch()])
    assert set(entered) == {parallel_state.get_amax_reduction_group(with_context_parallel=True)}


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize(("recompute", "runs"), [(Recompute.none, 2), (Recompute.layer, 4)])
def test_large_projections_alone_multiply_in_fp8(alone: Groups, recompute: Recompute, runs: int) -> None:
    engine = Engine(resolve(config_of(Precision.fp8_current, recompute))[0], alone)
    engine.forward_backward([random_batch(), random_batch()])
    counted = {name: layer.in_fp8 for name, layer in layers_of(engine).items()}
    names = ["1.mixer.gate_up", "1.mixer.down", "2.mixer.q", "2.mixer.kv", "2.mixer.out"]
    names += ["3.mixer.gate_up", "3.mixer.down"]  # the first sub-layer is kept in bf16
    assert counted == {f"layers.{name}": runs for name in names}
    assert engine.blocks()["fp8"] == []


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize(
    ("cached", "of_step"),
    [(False, [None] * 4), (True, [True, False, False, False])],  # each micro-batch runs forward twice
    ids=["plain", "cached"],
)
def test_cached_weights_are_rounded_in_the_first_micro_batch_of_a_step(
    alone: Groups, cached: bool, of_step: list[bool | None]
) -> None:
    config = config_of(Precision.fp8_current, Recompute.layer)
    config.precision.cache_weights = cached
    engine = Engine(resolve(config)[0], alone)
    for _ in range(2):
        engine.forward_backward([random_batch(), random_batch()])
        engine.optimizer.zero_grad()
    engine.loss([random_batch()])
    assert all(layer.firsts == [*of_step, *of_step, None] for layer in layers_of(engine).values() if layer.firsts)
    assert any(layer.firsts for layer in layers_of(engine).values())


@pytest.mark.usefixtures("install")
def test_text_is_generated_in_bf16(alone: Groups) -> None:
    """A single token is not a multiple of 16."""
    engine = Engine(resolve(config_of(Precision.fp8_delayed))[0], alone)
    token = random_batch(rows=1, length=1)
    with torch.no_grad():
        engine.stages[0].model(token.tokens_BL, None, token.seq)
    assert not any(layer.in_fp8 for layer in layers_of(engine).values())


@pytest.mark.usefixtures("install")
def test_region_is_open_for_the_whole_step(alone: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories therefore advance once, for any number of micro-batches."""
    depths = []
    forward = StandIn.forward

    def watched(self: StandIn, x: torch.Tensor) -> torch.Tensor:
        depths.append(len(REGIONS))
        return forward(self, x)

    monkeypatch.setattr(StandIn, "forward", watched)
    engine = Engine(resolve(config_of(Precision.fp8_delayed))[0], alone)
    engine.forward_backward([random_batch(), random_batch()])
    assert set(depths) == {2}


@pytest.mark.usefixtures("install")
def test_refused_steps_and_evaluations_are_undone(alone: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(resolve(config_of(Precision.fp8_delayed))[0], alone)
    kept = [block.data for block in engine.blocks()["fp8"] if block.key.startswith("fp8_history.")]
    engine.forward_backward([random_batch()])
    assert any(history.any() for history in kept)
    with monkeypatch.context() as refusing:
        refusing.setattr(engine.guard, "accepts", lambda norm, loss: False)
        engine.step(1e-2)
    assert not any(history.any() for history in kept)
    engine.loss([random_batch()])
    assert not any(history.any() for history in kept)
    engine.forward_backward([random_batch()])
    assert engine.step(1e-2)[1]
    assert any(history.any() for history in kept)


@pytest.mark.usefixtures("install")
def test_checkpoints_hold_statistics_under_the_names_of_the_emulation(alone: Groups) -> None:
    """Blocks are views, so that loading fills the statistics in place, also before the first step."""
    emulated = config_of(Precision.fp8_delayed)
    emulated.precision.emulate = True
    engine = Engine(resolve(config_of(Precision.fp8_delayed))[0], alone)
    other = Engine(resolve(emulated)[0], alone)
    blocks = engine.blocks()["fp8"]
    theirs = other.blocks()["fp8"]
    assert {(block.key, block.global_shape) for block in blocks} == {(b.key, b.global_shape) for b in theirs}
    for number, block in enumerate(blocks):
        block.data.fill_(number + 1.0)
    again = engine.blocks()["fp8"]
    assert [block.data.unique().item() for block in again] == [number + 1.0 for number in range(len(blocks))]
    covered = {key: sum(b.data.numel() for b in blocks if b.key == key) for key in {b.key for b in blocks}}
    assert covered == {block.key: block.data.numel() for block in theirs}
    gate_up = layers_of(engine)["layers.1.mixer.gate_up"].fp8_meta
    gate_up["scaling_fwd"].amax_history[:, 1] = 7.0
    gate_up["scaling_bwd"].amax_history[:, 0] = 9.0
    whole = torch.zeros(3, HISTORY)
    for block in again:
        if block.key == "fp8_history.layers.1.mixer.gate_up.weight":
            whole[block.global_offset[0] : block.global_offset[0] + len(block.data)] = block.data
    assert whole[1].tolist() == [7.0] * HISTORY
    assert whole[2].tolist() == [9.0] * HISTORY


def test_unavailable_fp8_is_reported_before_processes_connect(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(Precision.fp8_block)
    assert "CUDA" in refusal(config)
    install(SimpleNamespace(DelayedScaling=DelayedScaling), autocast=autocast)
    assert "Float8BlockScaling" in refusal(config)
    monkeypatch.setattr(transformer_engine, "optional_package", lambda name: Package(name, None, "absent"))
    assert "absent" in refusal(config)
    config.precision.emulate = True
    start.check_fp8(RunPlan.of(config))


def refusal(config: Config) -> str:
    """Check that FP8 is refused by its key and code, and return the message."""
    with pytest.raises(ConfigError) as refused:
        start.check_fp8(RunPlan.of(config))
    (problem,) = refused.value.problems
    assert (problem.key, problem.code) == ("precision.name", "unavailable")
    return problem.message


@pytest.mark.parametrize("module", transformer_engine.QUANTIZATION)
@pytest.mark.parametrize("fault", [None, "needs CUDA 12.9"])
def test_block_scaling_is_available_where_the_package_says_so(
    module: str, fault: str | None, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package knows its kernels' CUDA version; every version answers in this form, in one of two modules."""
    monkeypatch.setattr(transformer_engine, "fp8_device_fault", lambda: None)
    answer = (fault is None, fault or "")
    manager = SimpleNamespace(is_fp8_block_scaling_available=lambda: answer)
    install(quantization={module: SimpleNamespace(FP8GlobalStateManager=manager)}, autocast=autocast)
    assert transformer_engine.fp8_fault(Precision.fp8_block) == fault
    assert transformer_engine.fp8_fault(Precision.fp8_delayed) is None
