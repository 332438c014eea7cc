"""Conversion to the format of Hugging Face and back: its rate beside a plain copy of the same bytes, and its memory.

Each conversion runs in a process of its own, without verification. Its peak is the memory added to the interpreter
after all imports; its time begins after the imports. The copy is flushed, as our files are.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import time
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

from hybridtron.architecture.model import ModelConfig
from hybridtron.architecture.table import architecture
from hybridtron.cli import convert_commands
from hybridtron.cli.convert import parse
from hybridtron.interop.native_pairs import Llama
from hybridtron.interop.writer import write_json
from hybridtron.proving.measuring import MIB, BenchReport, Seconds, times

from .peak_memory import fresh_processes, resident

SHARD = 256 * MIB


def converted(arguments: list[str]) -> tuple[Seconds, int]:
    """Run a conversion; return its seconds, and the bytes that it adds to this process at its peak."""
    before = resident(reset=True)
    start = time.perf_counter()
    with redirect_stdout(io.StringIO()):
        assert convert_commands.run(parse(arguments)) == 0
    return Seconds(time.perf_counter() - start), resident(reset=False) - before


def copy(source: Path, target: Path) -> Seconds:
    """Copy a folder and flush it; return the seconds."""
    shutil.rmtree(target, ignore_errors=True)
    start = time.perf_counter()
    shutil.copytree(source, target)
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return Seconds(time.perf_counter() - start)


def convert(report: BenchReport) -> None:
    width = report.pick(full=1024, quick=64)
    heads = {"kind": "attention", "heads": 8, "kv_heads": 4}
    layers = {"A": heads, "-": {"kind": "swiglu", "hidden": 4 * width}}
    model = ModelConfig(width=width, vocab_size=32 * width, pattern="(A-)*12", layers=layers, tie_embeddings=False)
    peaks = {"import": 0, "export": 0}

    def conversion(*words: str | Path) -> Seconds:
        """Run a conversion into a new folder and return its seconds."""
        shutil.rmtree(words[-1], ignore_errors=True)
        with fresh_processes() as pool:
            seconds, added = pool.submit(converted, [*map(str, words), "--verify", "none"]).result()
        peaks[str(words[0])] = max(peaks[str(words[0])], added)
        return seconds

    with tempfile.TemporaryDirectory() as place:
        theirs, ours, back = (Path(place) / name for name in ("theirs", "ours", "back"))
        size = written(model, theirs)
        forms = {
            "import": partial(conversion, "import", "--input", theirs, "--output", ours),
            "export": partial(conversion, "export", "--checkpoint", ours, "--shard-size", str(SHARD), "--output", back),
            "copy": partial(copy, theirs, Path(place) / "copy"),
        }
        timings = report.timed(forms)
    limit = 1.2 * min(SHARD, size) + 300e6
    cells = []
    for name in ("export", "import"):
        rate = size / 2**30 / timings[name].fastest
        peak = peaks[name]
        share = timings.ratio("copy", name)
        cells.append((name, times(share), f"{timings[name].spread:.0%}", f"{peak / MIB:,.0f} MiB"))
        reached = max(rate / 0.3, share / 0.7)
        report.at_least(f"{name}: GiB/s over 0.3, or the copy's rate over 0.7", 1, reached)
        report.at_most(f"{name}: peak over 1.2 x the largest shard + 300 MB", 1, peak / limit)
    header = ("direction", "rate over a flushed copy's", "spread", "peak over the interpreter")
    report.table("time and memory", header, cells)
    report.notes.append(
        f"a Llama of {size / MIB:,.0f} MiB in fp32, shards of {SHARD / MIB:.0f} MiB; the wall's clock, local disk"
    )


def written(model: ModelConfig, folder: Path) -> int:
    """Write a Llama of transformers' format with random weights; return their bytes."""
    target = Llama()
    folder_size = 0
    folder.mkdir()
    arch = architecture(model)
    rules = target.rules(arch)
    for number in range(0, len(rules), 16):
        tensors = {rule.theirs: torch.randn(rule.shape) for rule in rules[number : number + 16]}
        folder_size += sum(tensor.nbytes for tensor in tensors.values())
        save_file(tensors, folder / f"part-{number:05}.safetensors", {"format": "pt"})
    where = {rule.theirs: f"part-{index // 16 * 16:05}.safetensors" for index, rule in enumerate(rules)}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})
    write_json(folder / "config.json", target.config(arch, 128))
    (folder / "tokenizer.json").write_text(Tokenizer(BPE()).to_str())
    return folder_size
