"""The inspection tool as a user runs it: in a process of its own, in which torch can't be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
WITHOUT_TORCH = (
    "import os, runpy, sys; sys.modules.update(torch=None, megatron=None); "
    "sys.argv = sys.argv[1:]; sys.path.insert(0, os.path.dirname(sys.argv[0])); "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The tool with these arguments; fails where it computes for longer than a person would wait."""
    before = os.times()
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(REPOSITORY / "tools/inspect_config.py"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=60,
    )
    after = os.times()
    # processor time: some take 6 s, and twice that where other tests share the cores
    assert after.children_user + after.children_system - before.children_user - before.children_system < 20
    return result


def test_json_has_parameters_flops_and_memory():
    result = run(["recipe=samba_1.7b", "--json", "phases.0.micro_batch=4"])
    assert result.returncode == 0, result.stderr
    reported = json.loads(result.stdout)
    assert reported["parameters"] == 1_742_194_688
    assert reported["stages"] == [48]
    assert [layer["letter"] for layer in reported["layers"]] == list("M-W-" * 12)
    around = 2048 * 50304 + 2048  # the tied embedding and the last norm
    assert sum(layer["parameters"] for layer in reported["layers"]) + around == reported["parameters"]
    assert reported["flops_per_token"] == 3 * sum(reported["forward_flops_by_part"].values())
    assert reported["memory"]["gradients"] == 4 * reported["parameters"]
    assert reported["phases"][0]["steps"] == 27_419  # 230e9 / (2048 * 4096), rounded up


def test_carried_states_are_counted():
    result = run(["recipe=samba_1.7b", "--json", "states.mode=passing", "--gpus", "64"])
    assert result.returncode == 0, result.stderr
    memory = json.loads(result.stdout)["memory"]
    lanes = 2048 // 64
    assert memory["states"] == 2 * lanes * 12 * 2 * 2048 * 16 * 4  # old and new, of 12 Mamba layers, 4096 x 16 in fp32
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "states")
    assert memory["total"] == sum(memory[part] for part in parts)


def test_tables_are_plain_text():
    result = run(["recipe=ablations/samba_421m_full_1_5"])
    assert result.returncode == 0, result.stderr
    assert "M-W-(M-)*3W-(M-)*6" in result.stdout
    assert "443,702,784" in result.stdout
    assert "\x1b" not in result.stdout
    assert result.stdout.isascii()


def test_problems_go_to_stderr_with_code_2():
    result = run(["model.layers.M.stat=3", "phases.0.micro_batch=3", "model.pattern=MX"])
    assert result.returncode == 2
    assert not result.stdout
    for key in ("model.layers.M.stat", "phases.0.micro_batch", "model.pattern"):
        assert key in result.stderr
    assert "Traceback" not in result.stderr


def test_settings_without_effect_get_a_note():
    result = run(["model.pattern=M-", "--json"])
    assert result.returncode == 0
    assert "note: model.layers.W" in result.stderr


def test_layout_is_reported_rank_by_rank():
    layout = ("parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "parallel.virtual_pipeline=2")
    result = run(["recipe=samba_1.7b", *layout, "--gpus", "16", "--json"])
    assert result.returncode == 0, result.stderr
    reported = json.loads(result.stdout)
    assert len(reported["stages"]) == 4
    assert sum(reported["stages"]) == 48
    plan = reported["plan"]
    assert (plan["world_size"], plan["data"], plan["micro_batches"]) == (16, 4, 256)
    chunks = [chunk for rank in plan["ranks"] for chunk in rank["chunks"]]
    assert [chunk["index"] for chunk in chunks] == [0, 2, 1, 3]
    assert sorted(layer for chunk in chunks for layer in chunk["layers"]) == list(range(48))
    assert reported["memory"]["total"] == max(rank["memory"]["total"] for rank in plan["ranks"])


@pytest.mark.slow
def test_option_fit_proposes_layouts():
    result = run(["recipe=samba_1.3b", "--gpus", "64", "--fit", "80GB", "--json"])
    assert result.returncode == 0, result.stderr
    best = json.loads(result.stdout)["fit"][0]
    assert best["memory"]["total"] < 72e9
    assert "phases.0.micro_batch" in best["settings"][-1]
    tables = run(["recipe=samba_3.8b", "--gpus", "256", "--fit", "80"])
    assert tables.returncode == 0, tables.stderr
    assert tables.stdout.isascii()
    assert "model.layers.W.heads is 11" in tables.stdout


@pytest.mark.slow
def test_number_of_processes_that_the_layout_does_not_fit_is_refused():
    result = run(["recipe=samba_1.7b", "parallel.pipeline=4", "--gpus", "6"])
    assert result.returncode == 2
    assert "parallel.pipeline" in result.stderr
    for wrong in (("--gpus", "0"), ("--fit", "much")):
        assert run(wrong).returncode == 2


def test_gpu_hours_are_printed_with_their_assumptions():
    printed = run(["recipe=samba_421m"]).stdout
    assert "GPU-hours on h100, at 40% of 989 TFLOP/s (a guess)" in printed
    assert "4.19e-6 to 4e-4 to 4e-5" in printed


def test_wrong_number_of_processes_gets_the_command_that_starts_them():
    result = run(["recipe=samba_421m", "parallel.tensor=2", "--gpus", "1"])
    assert result.returncode == 2
    assert "torchrun --nproc-per-node 2 -m hybridtron train" in result.stderr


@pytest.mark.slow
def test_a_measured_run_gives_the_interval_between_checkpoints(tmp_path: Path):
    """The time log has saves of 10 s and a start of 60 s; on 8 GPUs failures come every 6,335 h."""
    record = {
        "began": 0.0, "ended": 1000.0, "processes": 2, "resumed": 0, "step": 9, "trained": 9, "rolled_back": 0,
        "saves": 2, "save_seconds": 20.0, "seconds": {"start": 60.0, "steps": 920.0, "checkpoints": 20.0},
    }  # fmt: skip
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "time.jsonl").write_text(json.dumps(record) + "\n")
    arguments = ["recipe=samba_1.7b", "--gpus", "8", f"run.dir={tmp_path}"]
    reported = json.loads(run([*arguments, "--json"]).stdout)
    sentence = reported["checkpoint_interval"]
    assert "stops training for 10.0 s, a start takes 60 s" in sentence
    assert "one in 6,335 h on 8 devices, a checkpoint every 5:55" in sentence
    assert f"Checkpoints: {sentence}." in run(arguments).stdout
    assert json.loads(run(["recipe=samba_1.7b", "--json"]).stdout)["checkpoint_interval"] is None
