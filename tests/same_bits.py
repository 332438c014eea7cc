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
CASES = {
    "laptop": ["run.max_steps=4", "run.eval_every=2"],
    "random": [*SMALL, "phases.0.states.mode=random"],
    "fitted": [*SMALL, "phases.0.states.mode=fitted"],
    "passing": [*SMALL, "phases.0.states.mode=passing"],
    "tbtt": [*SMALL, "phases.0.states.mode=tbtt", "data.order=lanes"],
    "tensor2_pipeline2": [*SMALL, "parallel.tensor=2", "parallel.pipeline=2"],
}
PARALLEL = "tensor2_pipeline2"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
TOGETHER = """
import json, sys
try:
    from hybridtron.cli.train import main
except ModuleNotFoundError:  # version 0.1.0
    from train import main
sys.exit(max(main(arguments) for arguments in json.loads(sys.argv[1])))
"""
KEYS = ("step", "loss", "grad_norm", "validation")


def losses(code: Path, folder: Path) -> dict[str, list[object]]:
    """What each case logs with the code of one checkout. Its data are prepared once, by the code that comes first."""
    (ROOT / "build" / "same_bits" / "data").mkdir(parents=True, exist_ok=True)
    (folder / "data").symlink_to(ROOT / "build" / "same_bits" / "data")
    always = ["run.resume=never", "run.sample_tokens=0", "checkpoint.every=1000"]
    arguments = {name: [*always, f"run.dir={name}", *settings] for name, settings in CASES.items()}
    alone = [arguments[name] for name in CASES if name != PARALLEL]
    run(code, folder, ["-c", TOGETHER, json.dumps(alone)])
    run(code, folder, [*TORCHRUN, str(code / "train.py"), *arguments[PARALLEL]])
    return {name: logged(folder / name) for name in CASES}


def run(code: Path, folder: Path, arguments: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"failed in {code}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def logged(run_folder: Path) -> list[object]:
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line.get(key) for key in KEYS} for line in lines]


def losses_of(commit: str) -> dict[str, list[object]]:
    full = subprocess.check_output(["git", "rev-parse", commit], cwd=ROOT, text=True).strip()
    kept = ROOT / "build" / "same_bits" / f"{full}-4.json"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            code, runs = Path(folder, "code"), Path(folder, "runs")
            runs.mkdir()
            subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(code)], check=True)
            subprocess.run(["git", "checkout", "--quiet", full], cwd=code, check=True)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(losses(code, runs)))
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
