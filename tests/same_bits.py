"""Compares this checkout's results and files with another commit's, bit for bit.

    python tests/same_bits.py COMMIT     the commit's code runs here too, and this checkout reads its files
    python tests/same_bits.py            compares with tests/same_bits.json
    python tests/same_bits.py --record   writes tests/same_bits.json

Two groups of cases, each in an empty folder. `write` trains some steps (the laptop recipe, every mode of states, every
mixer, TP2 x PP2, CP2), prepares text and conversations, and exports. `read` starts from the written files: a run
resumes, a phase with adapters starts from its weights, a prepared folder is trained on, an export is imported. Against
a commit both read the files of that commit, so that a change of format shows too.

For changes that move code. Results of a commit are kept in build/same_bits, since they take minutes. Recorded bits hold
for one kind of machine: the record names Python, torch and CPU, and another machine is refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "same_bits"
RECORD = Path(__file__).with_suffix(".json")
Results = dict[str, object]

ALWAYS = ["run.sample_tokens=0", "checkpoint.every=1000"]
SMALL = [
    "model.width=64",
    "phases.0.seq_len=64",
    "phases.0.micro_batch=2",
    "model.layers.W.window=32",
    "run.max_steps=6",
]
MIXERS = {
    "M": "{kind: mamba, state: 4, sparse: {keys: 8, hashes: 3}}",
    "S": "{kind: mamba2, state: 8, head_dim: 16}",
    "T": "{kind: mamba3, state: 8, head_dim: 16}",
    "G": "{kind: gla, heads: 2}",
    "R": "{kind: retnet, heads: 2}",
    "D": "{kind: gated_deltanet, heads: 2}",
    "K": "{kind: kda, heads: 2}",
    "V": "{kind: rwkv6, head_dim: 16}",
    "c": "{kind: rwkv6_channel_mix}",
    "W": "{kind: attention, heads: 4, kv_heads: 2, window: 32}",
    "F": "{kind: attention, heads: 4, qk_norm: head, gate: true}",
    "E": "{kind: span, heads: 4, chunk: 16, block: 4, blocks: 2, relevance: previous_chunk}",
    "Z": "{kind: shared_attention, heads: 4, hidden: 64, rank: 4}",
    "-": "{kind: swiglu, hidden: 96}",
    "^": "{kind: squared_relu, hidden: 96}",
}
TRAINED = {
    "laptop": ["run.max_steps=4", "run.eval_every=2"],
    "random": [*SMALL, "phases.0.states.mode=random"],
    "fitted": [*SMALL, "phases.0.states.mode=fitted"],
    "passing": [*SMALL, "phases.0.states.mode=passing"],
    "tbtt": [*SMALL, "phases.0.states.mode=tbtt", "data.order=lanes"],
    "mixers": [
        *SMALL,
        f"model.pattern={''.join(MIXERS)}",
        *(f"model.layers.{letter}={options}" for letter, options in MIXERS.items()),
        "run.max_steps=2",
    ],
}
"""Cases of one process, which share it."""
DISTRIBUTED = {
    "tensor2_pipeline2": (4, [*SMALL, "parallel.tensor=2", "parallel.pipeline=2"]),
    "context2": (2, [*SMALL, "parallel.context=2"]),
}
TOKENS = ["data=folder", "data.path=written/tokens", "data.epochs=null"]
ADAPTERS = "phases.0.adapters={preset: hylora, weights: ['*'], rank: 4, alpha: 8}"
CONTINUED = {
    "resumed": ["run.dir=written/laptop", "run.resume=auto", "run.max_steps=6"],
    "adapters": ["run.dir=adapters", "run.weights=written/laptop", "run.max_steps=4", ADAPTERS],
    "tokens": ["run.dir=tokens", *SMALL, *TOKENS],
}
TOGETHER = """
import json, sys
try:
    from hybridtron.cli.train import main
except ModuleNotFoundError:  # version 0.1.0
    from train import main
sys.exit(max(main(arguments) for arguments in json.loads(sys.argv[1])))
"""
LOGGED = ("step", "loss", "grad_norm", "validation")
UNTIMED = (".json", ".jsonl", ".md", ".txt")
"""Files of names, versions and texts: they are read by the cases that load a folder, not compared as bytes."""


OWN_CODE = """
from pathlib import Path
from hybridtron.interop.shipped_code import shipped_code
for name, content in shipped_code().items():
    Path("written/exported", name).write_bytes(content)
"""
"""Program that replaces the code in an export by the reader's own, since an import refuses that of no release."""


def write(code: Path, folder: Path) -> Results:
    """Run the cases that start from nothing with the code of one checkout."""
    (KEPT / "data").mkdir(parents=True, exist_ok=True)
    (folder / "data").symlink_to(KEPT / "data")
    train_together(code, folder, {name: [f"run.dir={name}", *settings] for name, settings in TRAINED.items()})
    for name, (processes, settings) in DISTRIBUTED.items():
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        run(code, folder, [*launch, str(code / "train.py"), *ALWAYS, f"run.dir={name}", *settings])
    results: Results = {name: logged(folder / name) for name in (*TRAINED, *DISTRIBUTED)}
    write_inputs(folder / "inputs")
    prepare = ["data", "prepare", "--tokenizer", "inputs/tokenizer", "--validation", "5%"]
    hybridtron(code, folder, [*prepare, "--input", "inputs/text.jsonl", "--output", "tokens"])
    hybridtron(
        code, folder, [*prepare, "--input", "inputs/chats.jsonl", "--learn", "messages", "--output", "conversations"]
    )
    hybridtron(code, folder, ["export", "laptop", "--output", "exported"])
    for name in ("tokens", "conversations", "exported"):
        results[name] = digests(folder / name)
    return results


def read(code: Path, folder: Path, written: Path) -> Results:
    """Run the cases that start from files of `write`."""
    shutil.copytree(written, folder / "written", symlinks=True, ignore=shutil.ignore_patterns("data"))
    (folder / "data").symlink_to(KEPT / "data")
    train_together(code, folder, CONTINUED)
    places = {"resumed": folder / "written" / "laptop"}
    results: Results = {f"read: {name}": logged(places.get(name, folder / name)) for name in CONTINUED}
    run(code, folder, ["-c", OWN_CODE])
    hybridtron(code, folder, ["import", "written/exported", "--output", "imported"])
    hybridtron(code, folder, ["export", "imported", "--output", "exported"])
    results["read: imported"] = digests(folder / "exported")
    return results


def write_inputs(folder: Path) -> None:
    """Texts and conversations that depend on nothing, and the tokenizer of the laptop's corpus with a chat template."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(parents=True)
    prepared = next(KEPT.glob("data/embedded-*/tokenizer.json"))
    shutil.copy(prepared, tokenizer)
    turns = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}"
    (tokenizer / "chat_template.jinja").write_text(turns)
    texts = [f"def f{i}(x):\n    return x + {i * i}  # {'é' * (i % 7)}\n" * (1 + i % 5) for i in range(400)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with (folder / "chats.jsonl").open("w") as file:
        for i in range(60):
            messages = [{"role": "user", "content": f"{i} + 1?"}, {"role": "assistant", "content": str(i + 1)}]
            file.write(json.dumps({"messages": messages}) + "\n")


def train_together(code: Path, folder: Path, cases: dict[str, list[str]]) -> None:
    arguments = [[*ALWAYS, *settings] for settings in cases.values()]
    run(code, folder, ["-c", TOGETHER, json.dumps(arguments)])


def hybridtron(code: Path, folder: Path, arguments: list[str]) -> None:
    run(code, folder, ["-m", "hybridtron", *arguments])


def run(code: Path, folder: Path, arguments: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)[:200]}\nfailed in {code}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def logged(run_folder: Path) -> list[object]:
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line.get(key) for key in LOGGED} for line in lines]


def digests(folder: Path) -> dict[str, str]:
    """The bytes of each file that holds numbers, as SHA-256."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (*UNTIMED, ".py"))
    assert files, f"{folder} holds no numbers"
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def results_of(commit: str) -> tuple[Results, Path]:
    """Return a commit's results, and the folder with its files."""
    full = subprocess.check_output(["git", "rev-parse", commit], cwd=ROOT, text=True).strip()
    kept = KEPT / f"{full}-5"
    if not (kept / "results.json").exists():
        shutil.rmtree(kept, ignore_errors=True)
        (kept / "written").mkdir(parents=True)
        with tempfile.TemporaryDirectory() as folder:
            code = Path(folder, "code")
            subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(code)], check=True)
            subprocess.run(["git", "checkout", "--quiet", full], cwd=code, check=True)
            results = write(code, kept / "written")
            with tempfile.TemporaryDirectory() as reader:
                results |= read(code, Path(reader), kept / "written")
        (kept / "results.json").write_text(json.dumps(results))
    return json.loads((kept / "results.json").read_text()), kept / "written"


def results_here(written: Path | None = None) -> Results:
    """Return this checkout's results. It reads its own files, or those of another commit."""
    with tempfile.TemporaryDirectory() as writer, tempfile.TemporaryDirectory() as reader:
        results = write(ROOT, Path(writer))
        results |= read(ROOT, Path(reader), written or Path(writer))
    return json.loads(json.dumps(results))


def machine() -> dict[str, str]:
    """The facts that bits depend on beside the code."""
    with Path("/proc/cpuinfo").open() as file:
        flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    packages = {name: version(name) for name in ("torch", "megatron-core", "tokenizers")}
    cpu = hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:16]
    return {"python": platform.python_version(), **packages, "cpu": cpu}


def compare(before: Results, now: Results) -> int:
    """Print a line a case; the number of cases that differ."""
    different = [name for name in before if before[name] != now.get(name)]
    for name in before:
        verdict = {True: "DIFFERENT", False: "the same bits"}[name in different]
        print(f"{name:<20} {verdict}")
    return len(different)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--record", action="store_true", help="write tests/same_bits.json")
    arguments = parser.parse_args()
    if arguments.record:
        RECORD.write_text(json.dumps({"machine": machine(), "results": results_here()}, indent=1) + "\n")
        return 0
    if arguments.commit:
        before, written = results_of(arguments.commit)
        return int(compare(before, results_here(written)) > 0)
    record = json.loads(RECORD.read_text())
    if record["machine"] != machine():
        print(f"recorded on {record['machine']}, and this is {machine()}: name a commit instead", file=sys.stderr)
        return 2
    return int(compare(record["results"], results_here()) > 0)


if __name__ == "__main__":
    sys.exit(main())
