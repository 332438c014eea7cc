"""Exported models in the hands of others: trl fine-tunes them, whole and by LoRA, and lm-eval measures them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hybridtron.architecture.model import ModelConfig
from hybridtron.cli.convert import main
from hybridtron.parallel.groups import Groups
from tests.interop.models import ATTENTION, MAMBA2, MLP, VOCAB, WIDTH, checkpoint_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LAYERS = {
    "M": {"kind": "mamba", "state": 4},
    "S": MAMBA2,
    "W": {**ATTENTION, "window": 9},
    "X": {"kind": "span", "heads": 4, "chunk": 8, "block": 4, "blocks": 1},
    "-": MLP,
}


@pytest.fixture
def exported(alone: Groups, tmp_path: Path) -> Path:
    """A model with every mixer, as transformers loads it."""
    model = ModelConfig(width=WIDTH, vocab_size=VOCAB, pattern="M-WSX-", layers=LAYERS)
    checkpoint_of(model, alone, tmp_path / "run")
    assert main(["export", "--checkpoint", str(tmp_path / "run"), "--output", str(tmp_path / "out")]) == 0
    return tmp_path / "out"


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "whole"])
def test_trl_fine_tunes_an_exported_model(lora: bool, exported: Path, tmp_path: Path) -> None:
    datasets, trl, peft = (pytest.importorskip(name) for name in ("datasets", "trl", "peft"))
    text = " ".join(f"w{number}" for number in range(10, 30))
    settings = trl.SFTConfig(
        output_dir=str(tmp_path / "tuned"),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        learning_rate=2e-2,
        max_length=32,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        model_init_kwargs={"trust_remote_code": True, "dtype": "float32"},
    )
    adapter = None
    if lora:
        adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    trainer = trl.SFTTrainer(
        model=str(exported),
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"text": [text] * 16}),
        peft_config=adapter,
    )
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    for name, weight in trainer.model.named_parameters():
        if lora and "lora_" not in name:
            assert torch.equal(weight, before[name]), name
    assert any(not torch.equal(weight, before[name]) for name, weight in trainer.model.named_parameters())


def test_lm_eval_evaluates_an_exported_model(exported: Path, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    tasks = pytest.importorskip("lm_eval.tasks")
    rows = [{"question": f"w{n} w{n + 1}", "choices": [f"w{n + 2}", "w3"], "answer": n % 2} for n in range(10, 16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "tiny",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/tiny.yaml").write_text(json.dumps(task))
    manager = tasks.TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(exported), "trust_remote_code": True, "dtype": "float32", "device": "cpu"},
        tasks=["tiny"],
        task_manager=manager,
        batch_size=2,
        bootstrap_iters=0,
    )
    assert 0 <= results["results"]["tiny"]["acc,none"] <= 1
    assert results["n-samples"]["tiny"]["effective"] == len(rows)
