"""Cases of attention in a run: from the configuration, and as `run.force_ops.attention` is checked against them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.ops.attention.table import TABLE, AttentionCase
from hybridtron.train import report
from hybridtron.train.attention_cases import attention_cases, forced_problems

LAPTOP = ("recipe=laptop", "phases.0.seq_len=512", "phases.0.micro_batch=2", "precision=bf16")


def plan_of(*settings: str) -> RunPlan:
    return RunPlan.of(load([*LAPTOP, *settings]))


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ([], {}),
        (["precision=fp32"], {"dtype": torch.float32}),
        (["model.layers.W.window=512"], {"window": False}),
        (["data.documents=join"], {"documents": False}),
        (["states.mode=tbtt"], {"memory": True}),
        (["states.mode=tbtt", "states.carry=[ssm]"], {}),
        (["parallel.context=2"], {"memory": True, "length": 256}),
        (["run.deterministic=true"], {"deterministic": True}),
    ],
)
def test_the_configuration_gives_a_case_for_each_letter(settings: list[str], changed: dict[str, object]) -> None:
    plan = plan_of("model.layers.W.window=64", *settings)
    (phase,) = plan.phases
    channels = next(spec.head(phase.arch.sizes) for spec in phase.arch.specs if hasattr(spec, "window"))
    values = {"dtype": torch.bfloat16, "channels": channels, "length": 512, "window": True, "documents": True}
    assert attention_cases(phase) == {"attention W": AttentionCase(**{**values, **changed})}


def test_the_report_shows_the_kernel_of_each_letter_on_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_of("model.layers.W.window=64")
    (phase,) = plan.phases
    engine: Any = SimpleNamespace(
        config=phase.config,
        phase=phase,
        arch=phase.arch,
        device=SimpleNamespace(type="cuda"),
        groups=SimpleNamespace(world_size=1),
        optimizer=SimpleNamespace(table={}),
    )
    with caplog.at_level("INFO", logger=report.LOG.name):
        report.announce_run(plan.config, engine, 0, 1)
    lines = caplog.text.splitlines()
    (row,) = (line.split() for line in lines if line.strip().startswith("attention "))
    assert row[:2] == ["attention", "W"]
    assert row[2] in {each.name for each in TABLE if each.window and each.documents}


def test_a_kernel_without_windows_is_refused_for_a_model_with_windows() -> None:
    (problem,) = forced_problems(plan_of("model.layers.W.window=64", "data.documents=join"), "sdpa")
    assert "eval_lengths" not in problem.message
    assert (problem.key, problem.code) == ("run.force_ops.attention", "unsupported")
    assert "takes no window" in problem.message
    whole = ("model.layers.W.window=512", "data.documents=join", "run.sample_tokens=0")
    assert forced_problems(plan_of(*whole, "run.eval_lengths=[1]"), "sdpa") == []
    (problem,) = forced_problems(plan_of(*whole, "run.eval_lengths=[1,2]"), "sdpa")
    assert "takes no window" in problem.message
    assert "run.eval_lengths=[1], because only rows of 2 times" in problem.message
    assert forced_problems(plan_of("model.layers.W.window=64"), "flex") == []


def test_a_kernel_without_remembered_keys_is_refused_for_a_sample() -> None:
    settings = ("model.layers.W.window=512", "data.documents=join", "run.eval_lengths=[1]")
    assert forced_problems(plan_of(*settings, "run.sample_tokens=0"), "sdpa") == []
    (problem,) = forced_problems(plan_of(*settings, "run.sample_tokens=8"), "sdpa")
    assert "remembered keys" in problem.message
    assert "run.sample_tokens=0" in problem.message
