"""The needs of `phases.N.export` are checked before training: a class, transformers, and a free name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from hybridtron.architecture import SPECS
from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.config import export_class as export_module
from hybridtron.config.check import check
from hybridtron.config.checks.export import export_folder_problems
from hybridtron.config.export_class import RECORD, TRANSFORMERS
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.interop.export import TARGETS
from hybridtron.requirements import requirements
from tests.settings import Setting, flat


@dataclass(frozen=True)
class OtherSpec(SwiGLUSpec):
    """A mixer that somebody registered."""

    kind: ClassVar[str] = "other"


def keys(*settings: Setting) -> list[str]:
    return [problem.key for problem in check(RunPlan.of(load(flat(settings))))]


def test_a_model_without_the_requested_class_is_refused() -> None:
    assert keys("phases.0.export=native") == ["phases.0.export"]
    assert keys("phases.0.export=auto") == keys("phases.0.export=custom") == []
    assert keys("model=mamba2_laptop", "phases.0.export=native") == []


def test_export_checks_the_model_of_each_phase() -> None:
    sizes = "tokens: 1M, seq_len: 256, global_batch: 8, lr: 1e-3, export: native"
    turned = "layers: {A: {rotary_dim: 64}}"
    phases = f"phases=[{{name: a, {sizes}}},{{name: b, {sizes}, {turned}}}]"
    assert keys("model=llama2_438m", phases) == ["phases.1.export"]


def test_only_the_shipped_class_has_self_extend() -> None:
    extended = ["model=llama2_438m", "model.layers.A.self_extend={group: 4, neighbours: 256}"]
    assert keys("model=llama2_438m", "phases.0.export=native") == keys(extended, "phases.0.export=auto") == []
    assert keys(extended, "phases.0.export=native") == ["phases.0.export"]


def test_a_registered_mixer_is_exported_by_the_shipped_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPECS, "other", OtherSpec)
    changed = ["model.pattern=O", "model.layers.O={kind: other, hidden: 64}"]
    assert keys(changed, "phases.0.export=auto") == keys(changed, "phases.0.export=custom") == []
    assert keys(changed, "phases.0.export=native") == ["phases.0.export"]


def test_a_missing_or_old_transformers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "installed", lambda _: "4.57.6")
    assert keys() == []
    assert keys("phases.0.export=auto") == ["phases.0.export"]
    monkeypatch.setattr(export_module, "installed", lambda _: "6.0.0.dev0")
    assert keys("phases.0.export=auto") == []
    monkeypatch.setattr(export_module, "missing", lambda *extras: f"{extras} is not installed")
    assert keys("phases.0.export=auto") == ["phases.0.export"]


@pytest.mark.parametrize("name", ["..", ".hidden", "a/b"])
def test_phase_names_outside_the_folder_are_refused(name: str) -> None:
    assert "phases.0.name" in keys("phases.0.export=auto", f"phases.0.name={name}")


def test_an_existing_export_of_another_step_or_run_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["phases.0.export=auto", f"run.dir={run}"]
    config = load(arguments)
    output = run / "export" / "pretrain"

    def found(*more: str) -> list[str]:
        config = load([*arguments, *more])
        return [problem.key for problem in export_folder_problems(config, resolve(config))]

    assert found() == []
    output.mkdir(parents=True)
    assert found() == ["phases.0.export"]
    step = RunPlan.of(config).last_step
    (output / RECORD).write_text(json.dumps({"step": step}))
    assert found() == ["phases.0.export"]  # there is no such checkpoint
    (run / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    (run / f"checkpoints/step-{step:08d}/manifest.json").write_text("{}")
    assert found() == []
    assert found("run.resume=never") == ["phases.0.export"]
    (output / RECORD).write_text(json.dumps({"step": step - 1}))
    assert found() == ["phases.0.export"]


def test_the_list_of_native_classes_equals_the_targets() -> None:
    assert [target.name for target in TARGETS] == [*export_module.NATIVE, export_module.SHIPPED]
    pin = requirements().extras["export"]["transformers"]
    assert pin.startswith(f">={TRANSFORMERS[0]}.{TRANSFORMERS[1]},")
