"""Speed and memory on the device: recipes for a few steps, span attention over the length, FP8 beside bf16."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hybridtron.architecture.attention import AttentionSpec
from hybridtron.architecture.base import MixerSpec, ModelSizes
from hybridtron.architecture.span import SpanSpec
from hybridtron.config.check import require
from hybridtron.config.layout import ProcessLaunch
from hybridtron.config.load import load
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config
from hybridtron.data.batch import SeqInfo
from hybridtron.device import forget_peak_memory, megatron_context, peak_memory_gib, synchronize
from hybridtron.engine.engine import Engine
from hybridtron.mixers.base import build_mixer
from hybridtron.model.init import starting_value
from hybridtron.parallel import groups as process_groups
from hybridtron.parallel.linear import SINGLE_RANK
from hybridtron.planning.count import count
from hybridtron.planning.memory import plan
from hybridtron.problems import ConfigError
from hybridtron.proving.measuring import BenchTable, random_batches, times

LEARNING_RATE = 1e-4
TINY = ("model.width=128", "model.vocab_size=384", "model.layers.-.hidden=128", "model.layers.W.window=64")
TINY += ("model.layers.W.heads=2", "model.layers.W.kv_heads=2", "phases.0.seq_len=128", "phases.0.global_batch=2")
TINY += ("phases.0.micro_batch=1",)


@dataclass(frozen=True)
class Trained:
    """What a few steps of a recipe showed."""

    config: Config
    seconds: float
    loss: float
    memory_gib: float | None


def config_of(recipe: str, rows: int, precision: str, tiny: bool) -> Config:
    """A recipe on one device, a step of two micro-batches of this number of rows."""
    settings = [f"recipe={recipe}", f"precision={precision}", f"phases.0.micro_batch={rows}", "cluster=h100"]
    settings.append(f"phases.0.global_batch={2 * rows}")
    if tiny:
        settings += [*TINY, f"precision.emulate={str(precision.startswith('fp8')).lower()}"]
    config = load(settings)
    require(config)
    return config


def trained(config: Config, steps: int) -> Trained:
    """Random tokens through the engine; the fastest step but the first."""
    forget_peak_memory()
    batches, seconds, loss = random_batches(config), [], 0.0
    with megatron_context():
        engine = Engine(config, process_groups.start(config.parallel, launch=ProcessLaunch(0, 1)))
        for _ in range(steps):
            synchronize()
            start = time.perf_counter()
            loss = engine.forward_backward(batches).mean.item()
            engine.step(LEARNING_RATE)
            synchronize()
            seconds.append(time.perf_counter() - start)
        process_groups.stop()
    del engine
    gc.collect()
    return Trained(config, min(seconds[1:]), loss, peak_memory_gib())


SPEED = ("recipe", "precision", "rows x tokens", "tokens/s", "TFLOP/s", "MFU", "peak memory", "estimate", "loss")


def speed_cells(name: str, found: Trained) -> tuple[str, ...]:
    config, phase = found.config, found.config.phases[0]
    tokens = phase.tokens_per_step / found.seconds
    tflops = tokens * count(config.model, phase.seq_len).flops_per_token / 1e12
    peak = config.cluster.peak_tflops
    estimate = plan(resolve(config)[0], 1).fullest.memory.total / 2**30
    memory = "-" if found.memory_gib is None else f"{found.memory_gib:.1f} GiB"
    mfu = "-" if peak is None else f"{tflops / peak:.1%}"
    rows = f"{phase.micro_batch} x {phase.seq_len}"
    return (
        *(name, config.precision.name, rows, f"{tokens:,.0f}", f"{tflops:.4g}", mfu, memory),
        *(f"{estimate:.1f} GiB", f"{found.loss:.3f}"),
    )


def recipes(
    wanted: Sequence[tuple[str, int]], precisions: Sequence[str], steps: int, tiny: bool
) -> tuple[BenchTable, list[str]]:
    """A line for each recipe and precision, and the reasons why some can't run here."""
    cells, reasons = [], []
    for name, rows in wanted:
        for precision in precisions:
            try:
                cells.append(speed_cells(name, trained(config_of(name, rows, precision, tiny), steps)))
            except (ConfigError, torch.OutOfMemoryError) as error:
                process_groups.stop()
                reasons.append(f"{name} in {precision} is not measured: {str(error).splitlines()[-1].strip()}")
    return BenchTable(f"{steps} steps on random tokens, forward, backward and AdamW", SPEED, cells), reasons


def attention_over_length(device: torch.device, lengths: Sequence[int], tiny: bool) -> BenchTable:
    """Full attention, a window and span attention, forward and backward, the projections included."""
    heads, groups, window = (4, 2, 64) if tiny else (32, 4, 2048)
    kinds: dict[str, MixerSpec] = {
        "full": AttentionSpec(heads, groups),
        f"window {window}": AttentionSpec(heads, groups, window=window),
        f"span, chunk {window}, 8 x 32": SpanSpec(heads, groups, chunk=window),
    }
    sizes = ModelSizes(64 if tiny else 2048, 48)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    cells = []
    for length in lengths:
        found = {}
        for name, spec in kinds.items():
            mixer = build_mixer(spec, sizes, SINGLE_RANK)
            for key, weight in mixer.named_parameters():
                weight.data.copy_(starting_value(spec.parameters(sizes)[key].init, tuple(weight.shape), 1, key))
            mixer = mixer.to(device, dtype)
            x_LBD = torch.randn(length, 1, sizes.width, device=device, dtype=dtype, requires_grad=True)
            seq = replace(SeqInfo.stream(1, length, device=device), key=0)
            forget_peak_memory()
            found[name] = min(_seconds(mixer, x_LBD, seq) for _ in range(4)), peak_memory_gib()
        full = found["full"][0]
        for name, (seconds, memory) in found.items():
            held = "-" if memory is None else f"{memory:.2f} GiB"
            cells.append((str(length), name, f"{seconds * 1e3:.2f} ms", times(full / seconds), held))
    return BenchTable("attention over the length", ("tokens", "kind", "time", "faster than full", "peak memory"), cells)


def _seconds(mixer: torch.nn.Module, x_LBD: torch.Tensor, seq: SeqInfo) -> float:
    synchronize()
    start = time.perf_counter()
    mixer(x_LBD, None, seq).y_LBD.float().square().mean().backward()
    synchronize()
    return time.perf_counter() - start
