"""Replicated weights of a mixer get full gradients under sequence parallelism by their marks, whatever their names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from hybridtron.architecture import SPECS
from hybridtron.architecture.base import Cut, MixerSpec, ModelSizes, Parameter, linear, output_linear
from hybridtron.architecture.inits import Constant
from hybridtron.architecture.table import architecture
from hybridtron.config.schema import Config, Documents, ParallelConfig
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, MixerOutput, State
from hybridtron.mixers.norm import RMSNorm
from hybridtron.ops.norm import RMSNormInputs, rms_norm
from hybridtron.parallel.linear import (
    TensorGroup,
    all_reduce_gradients,
    column_parallel,
    gather_input,
    project_with_input,
    row_parallel,
    row_parallel_inside,
)
from hybridtron.parallel.pool import Seat
from hybridtron.proving.audit.audit import as_computed, parallel_step, serial_step
from hybridtron.proving.audit.cases import Layout, small, small_model
from hybridtron.proving.audit.differences import PRECISIONS, Step, differences
from tests.distributed import run_distributed

RANK = 8
EPS = 1e-2
IN_FLOAT64 = PRECISIONS[0]


@dataclass(frozen=True)
class TwoNormsSpec(MixerSpec):
    """A gated product with two norms: of a rank's own tokens, and of values that all ranks compute alike.

    `by_name` marks them as their names suggest, which is wrong for both.
    """

    kind: ClassVar[str] = "two_norms"
    module: ClassVar[str] = f"{__name__}:TwoNorms"

    by_name: bool = False

    def parameters(self, model: ModelSizes) -> dict[str, Parameter]:
        width = model.width
        scale = Parameter((width,), Constant(1.0), decay=False)
        return {
            "norm_scale": replace(scale, sequence_partial=not self.by_name),
            "in_proj.weight": linear(width, width),
            "down.weight": linear(RANK, width, cut=Cut(1), fp8=False),
            "qk_norm.weight": replace(scale, shape=(RANK,), sequence_partial=self.by_name),
            "up.weight": linear(width, RANK, fp8=False),
            "out_proj.weight": output_linear(width, width, model.num_sublayers),
        }

    def activation_values(self, model: ModelSizes) -> int:
        return 4 * model.width


class TwoNorms(Mixer):
    """out_proj(h * up(norm(down(h)))), h = in_proj(norm(x))."""

    def __init__(self, spec: TwoNormsSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        self.tensor = tensor
        self.norm_scale = nn.Parameter(torch.empty(sizes.width))
        self.in_proj = column_parallel(sizes.width, sizes.width, tensor)
        self.down = row_parallel_inside(sizes.width, RANK, tensor)
        self.qk_norm = RMSNorm(RANK, EPS)
        self.up = column_parallel(RANK, sizes.width, tensor)
        self.out_proj = row_parallel(sizes.width, sizes.width, tensor)

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput:
        normed_LBD = rms_norm(RMSNormInputs(x_LBD, self.norm_scale, EPS))
        h_LBE, small_LBR = project_with_input(self.down, self.in_proj(gather_input(normed_LBD, self.tensor)))
        small_LBR = all_reduce_gradients(self.qk_norm(small_LBR), self.tensor)
        return MixerOutput(self.out_proj(h_LBE * self.up(small_LBR)), {}, {})


def step_of_rank(seat: Seat, config: Config) -> Step:
    SPECS[TwoNormsSpec.kind] = TwoNormsSpec  # the job's process ends with it
    return parallel_step(seat, config, IN_FLOAT64, None)


def wrong_gradients(by_name: bool, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the weights whose gradients under TP2 with sequence parallelism differ from those of one process."""
    monkeypatch.setitem(SPECS, TwoNormsSpec.kind, TwoNormsSpec)
    layers: dict[str, dict[str, Any]] = {"P": {"kind": TwoNormsSpec.kind, "by_name": by_name}}
    model = replace(small_model("PP", tied=False, heads={}), layers=layers)
    parallel = Layout(tensor=2, sequence=True).on(ParallelConfig())
    config = as_computed(small(model, parallel, Documents.isolate, data=1), IN_FLOAT64)
    ranks = run_distributed(step_of_rank, 2, config)
    compared = differences(serial_step(config, IN_FLOAT64), ranks, architecture(config.model).table, IN_FLOAT64)
    return {item.what for item in compared if item.what.startswith("gradient of ") and not item.passes}


@pytest.mark.gloo
def test_norms_inside_a_mixer_have_the_gradients_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_gradients(by_name=False, monkeypatch=monkeypatch) == set()


@pytest.mark.gloo
def test_weights_with_a_wrong_mark_have_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [f"layers.{layer}.mixer.{name}" for layer in (0, 1) for name in ("norm_scale", "qk_norm.weight")]
    assert wrong_gradients(by_name=True, monkeypatch=monkeypatch) == {f"gradient of {name}" for name in weights}
