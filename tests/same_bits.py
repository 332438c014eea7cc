"""Does this checkout compute the same bits as another commit?   python tests/same_bits.py COMMIT

Runs the laptop recipe, the four modes of states, and TP2 x PP2 for some steps with the code of both, each in an empty
folder, and compares every loss, gradient norm and validation loss as written. For changes that move code. What a
commit computes is kept in build/same_bits/COMMIT.json, since it takes a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = [
    "model.width=64",
    "phases.0.seq_len=64",
    "phases.0.micro_batch=2",
    "model.layers.W.window=32",
    "run.max_steps=6",
]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
CASES: dict[str, tuple[list[str], list[str]]] = {
    "laptop": ([], ["run.max_steps=6", "run.eval_every=3"]),
    "random": ([], [*SMALL, "phases.0.states.mode=random"]),
    "fitted": ([], [*SMALL, "phases.0.states.mode=fitted"]),
    "passing": ([], [*SMALL, "phases.0.states.mode=passing"]),
    "tbtt": ([], [*SMALL, "phases.0.states.mode=tbtt", "data.order=lanes"]),
    "tensor2_pipeline2": (TORCHRUN, [*SMALL, "parallel.tensor=2", "parallel.pipeline=2"]),
}
KEYS = ("step", "loss", "grad_norm", "validation")


def losses(code: Path, folder: Path) -> dict[str, list[object]]:
    """What each case logs with the code of one checkout."""
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    found: dict[str, list[object]] = {}
    for name, (launcher, arguments) in CASES.items():
        always = ["run.resume=never", f"run.dir={name}", "run.sample_tokens=0", "checkpoint.every=1000"]
        command = [sys.executable, *launcher, str(code / "train.py"), *always, *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise SystemExit(f"{name} failed in {code}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        found[name] = [{key: line.get(key) for key in KEYS} for line in lines]
    return found


def losses_of(commit: str) -> dict[str, list[object]]:
    full = subprocess.check_output(["git", "rev-parse", commit], cwd=ROOT, text=True).strip()
    kept = ROOT / "build" / "same_bits" / f"{full}.json"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            code, run = Path(folder, "code"), Path(folder, "run")
            run.mkdir()
            subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(code)], check=True)
            subprocess.run(["git", "checkout", "--quiet", full], cwd=code, check=True)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(losses(code, run)))
    return json.loads(kept.read_text())


def main(commit: str) -> int:
    before = losses_of(commit)
    with tempfile.TemporaryDirectory() as folder:
        now = losses(ROOT, Path(folder))
    different = [name for name in CASES if before[name] != now[name]]
    for name in CASES:
        print(f"{name:<18} {len(now[name])} steps  {'DIFFERENT' if name in different else 'the same bits'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
