"""Four processes train on a mixture that a store on the loopback hands out, and two continue with it elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtron.data.prepare.writer import write_folder
from tests.storage.s3_server import serve
from tests.train.conftest import VOCAB, counting_documents

ROOT = Path(__file__).parents[2]
MIXTURE = "data.mixture={up: {weight: 3, path: s3://bucket/up}, down: {weight: 1, path: s3://bucket/down}}"


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def train(run_dir: Path, processes: int, url: str, *settings: str) -> str:
    shared = [
        f"run.dir={run_dir}", "data=folder", "data.path=s3://bucket/up", MIXTURE, f"data.cache={run_dir}-cache",
        "model.width=32", f"model.vocab_size={VOCAB}", "model.layers.M.state=4", "model.layers.W.window=8",
        "model.layers.-.hidden=64", "phases.0.seq_len=16", "phases.0.global_batch=8", "phases.0.micro_batch=2",
        "phases.0.tokens=2560", "run.eval_tokens=256", "run.eval_every=10", "checkpoint.every=5", "optim.warmup=5%",
        "optim.eps=1e-4", "data.workers=1", "data.shuffle=500",
    ]  # fmt: skip
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *shared, *settings]
    secrets = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    environment = os.environ | secrets | {"S3_ENDPOINT_URL": url, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(1500)
def test_a_mixture_from_s3_resumes_on_fewer_processes(tmp_path: Path) -> None:
    tokenizer = '{"counting": 1}'
    for name, seed in (("up", 0), ("down", 1)):
        documents = counting_documents(300, seed)
        if name == "down":
            documents = [document[::-1].copy() for document in documents]
        splits = {"train": {"text": documents[:280]}, "validation": {"text": documents[280:]}}
        write_folder(tmp_path / "store" / name, splits, tokenizer, VOCAB, VOCAB - 1, {}, shard_size=2000)
    with serve(tmp_path / "store") as store:
        store.fail("refuse", "shard", times=3)
        output = train(tmp_path / "four", 4, store.url)
        train(tmp_path / "moved", 4, store.url, "run.max_steps=10")
        train(tmp_path / "moved", 2, store.url)
    assert "up" in output
    assert "75.0%" in output
    whole = losses(tmp_path / "four")
    moved = losses(tmp_path / "moved")
    assert len(whole) == len(moved) == 20
    assert whole[-1] < 0.8 * whole[0]
    assert moved == pytest.approx(whole, rel=1e-5)
