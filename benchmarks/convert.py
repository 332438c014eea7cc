"""Conversion to the format of Hugging Face and back: its rate beside a plain copy of the same bytes, and its memory.

Each conversion runs in a process of its own, without the proof. Its peak is what it adds to the interpreter with all it
has imported; its time begins after the imports. A copy is flushed, as what we write is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from hybridtron.architecture.model import ModelConfig
from hybridtron.interop.native_pairs import Llama
from hybridtron.interop.writer import write_json
from hybridtron.proving.measuring import (
    BenchReport,
    BenchSettings,
    BenchTable,
    Contender,
    Goal,
    interleaved,
    times,
)

SHARD = 256 * 2**20
MEASURED = """
import resource, sys, time
from hybridtron.cli.convert import main
import hybridtron.interop.verify
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() // 1024
start = time.perf_counter()
assert main(sys.argv[1:]) == 0
took = time.perf_counter() - start
print(took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@dataclass
class Work:
    """Folders of one model in both formats, and what conversions added to memory at most, in bytes."""

    scratch: Path
    peaks: dict[str, int]

    def convert(self, name: str, *arguments: str) -> float:
        """Seconds of a conversion into a new folder."""
        output = self.scratch / name
        shutil.rmtree(output, ignore_errors=True)
        words = [name.partition("-")[0], *arguments, "--output", str(output), "--verify", "none"]
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}  # this process may have found the package by a door's own path
        command = [sys.executable, "-c", MEASURED, *words]
        done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True, check=True)
        seconds, added = done.stdout.splitlines()[-1].split()
        self.peaks[name] = max(self.peaks.get(name, 0), int(added) * 1024)
        return float(seconds)

    def copy(self) -> float:
        target = self.scratch / "copy"
        shutil.rmtree(target, ignore_errors=True)
        start = time.perf_counter()
        shutil.copytree(self.scratch / "theirs", target)
        for path in target.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return time.perf_counter() - start


def bench(settings: BenchSettings) -> BenchReport:
    width = 64 if settings.quick else 1024
    heads = {"kind": "attention", "heads": 8, "kv_heads": 4}
    layers = {"A": heads, "-": {"kind": "swiglu", "hidden": 4 * width}}
    model = ModelConfig(width=width, vocab_size=32 * width, pattern="(A-)*12", layers=layers, tie_embeddings=False)
    with tempfile.TemporaryDirectory() as place:
        work = Work(Path(place), {})
        size = written(model, work.scratch / "theirs")
        importing = ["--input", str(work.scratch / "theirs")]
        exporting = ["--checkpoint", str(work.scratch / "import"), "--shard-size", str(SHARD)]
        forms = {
            "import": Contender(lambda: work.convert("import", *importing), settings.repetitions),
            "export": Contender(lambda: work.convert("export", *exporting), settings.repetitions),
            "copy": Contender(work.copy, settings.repetitions),
        }
        forms["import"].run()
        timing = interleaved(forms)
    copied = timing["copy"].fastest
    limit = 1.2 * min(SHARD, size) + 300e6
    cells, goals = [], []
    for name in ("export", "import"):
        rate, peak = size / 2**30 / timing[name].fastest, work.peaks[name]
        share = copied / timing[name].fastest
        cells.append((name, times(share), f"{timing[name].spread:.0%}", f"{peak / 2**20:,.0f} MiB"))
        goals.append(
            Goal.at_least(f"{name}: GiB/s over 0.3, or the copy's rate over 0.7", 1, max(rate / 0.3, share / 0.7))
        )
        goals.append(Goal.at_most(f"{name}: peak over 1.2 x the largest shard + 300 MB", 1, peak / limit))
    notes = [
        f"a Llama of {size / 2**20:,.0f} MiB in fp32, shards of {SHARD / 2**20:.0f} MiB; the wall's clock, local disk"
    ]
    header = ("direction", "rate over a flushed copy's", "spread", "peak over the interpreter")
    return BenchReport(
        "Conversion", "cpu", [BenchTable("time and memory", header, cells)], [] if settings.quick else goals, notes
    )


def written(model: ModelConfig, folder: Path) -> int:
    """A folder of transformers with random weights; their bytes."""
    target, folder_size = Llama(), 0
    folder.mkdir()
    rules = target.rules(model)
    for number in range(0, len(rules), 16):
        tensors = {rule.theirs: torch.randn(rule.shape) for rule in rules[number : number + 16]}
        folder_size += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, folder / f"part-{number:05}.safetensors", {"format": "pt"})
    where = {rule.theirs: f"part-{index // 16 * 16:05}.safetensors" for index, rule in enumerate(rules)}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    write_json(folder / "config.json", target.config(model, 128))
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    return folder_size
