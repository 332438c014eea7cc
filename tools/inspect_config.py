"""What a configuration amounts to, before anything is built: layers, parameters, FLOPs, memory, steps.

    python tools/inspect_config.py recipe=samba_1.7b phases.0.micro_batch=4
    python tools/inspect_config.py recipe=samba_1.7b --json

It takes the arguments of train.py, and reads neither data nor torch. What is counted, and what is not, stands in
`hybridtron/config/count.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridtron.config.check import require, warnings
from hybridtron.config.count import Memory, ModelCount, count, memory
from hybridtron.config.load import load
from hybridtron.config.problems import ConfigError
from hybridtron.config.schema import Config, PhaseConfig
from hybridtron.config.units import readable
from hybridtron.train.phases import Stretch, stretches


def main() -> int:
    """Print the tables, or the problems. Returns the exit code: 2 for a configuration that can't run."""
    parser = argparse.ArgumentParser(description="Layers, parameters, FLOPs, memory and steps of a configuration.")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as train.py takes them: recipe=samba_421m")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_intermixed_args()
    try:
        config = load(arguments.settings)
        require(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    for warning in warnings(config):
        print(f"note: {warning}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(as_json(config), indent=2))
    else:
        print_tables(config)
    return 0


def as_json(config: Config) -> dict[str, Any]:
    """Everything as plain values; FLOPs are those of the first phase's sequence length."""
    counted = count(config.model, config.phases[0].seq_len)
    phase, held = _largest(config)
    return {
        "parameters": counted.parameters,
        "flops_per_token": counted.flops_per_token,
        "forward_flops_by_part": counted.flops_by_part,
        "seq_len": counted.seq_len,
        "stages": list(counted.stages),
        "layers": [{"index": index, **dataclasses.asdict(layer)} for index, layer in enumerate(counted.layers)],
        "memory": {**dataclasses.asdict(held), "total": held.total, "phase": phase.name},
        "phases": [_phase_json(config, stretch) for stretch in stretches(config)],
    }


def _phase_json(config: Config, stretch: Stretch) -> dict[str, Any]:
    phase = stretch.phase
    steps = stretch.last - stretch.first
    return {
        "name": phase.name,
        "steps": steps,
        "tokens": steps * phase.tokens_per_step,
        "seq_len": phase.seq_len,
        "global_batch": phase.global_batch,
        "micro_batch": phase.micro_batch,
        "lr": phase.lr,
        "flops_per_token": count(config.model, phase.seq_len).flops_per_token,
    }


def _largest(config: Config) -> tuple[PhaseConfig, Memory]:
    """The phase with the most tokens in one forward pass, and the memory that it needs."""
    phase = max(config.phases, key=lambda phase: phase.micro_batch * phase.seq_len)
    return phase, memory(config.model, config.precision.name, phase.seq_len, phase.micro_batch)


def print_tables(config: Config) -> None:
    """For people: coloured in a terminal, plain text anywhere else."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160, no_color=True)
    counted = count(config.model, config.phases[0].seq_len)
    stages = f" in stages of {', '.join(map(str, counted.stages))}" if len(counted.stages) > 1 else ""
    title = f"{config.run.name}: {len(counted.layers)} layers{stages}, {config.model.pattern}"
    console.print(title, highlight=False, markup=False)
    for table in (_letter_table(counted), _flops_table(counted), _phase_table(config), _memory_table(config)):
        table.box = box.SIMPLE_HEAD if console.is_terminal else None
        table.pad_edge = False
        console.print()
        console.print(table)


def _table(*headers: str, numbers_from: int) -> Table:
    table = Table()
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index >= numbers_from else "left")
    return table


def _letter_table(counted: ModelCount) -> Table:
    """One row a letter, since all layers of a letter are alike, and what stands around the layers."""
    table = _table("", "kind", "options", "layers", "parameters", "FLOPs/token", "share", numbers_from=3)

    def add(letter: str, kind: str, options: str, layers: int | str, parameters: int, flops: float) -> None:
        share = f"{flops / counted.forward_flops:.1%}"
        table.add_row(Text(letter), kind, options, str(layers), f"{parameters:,}", readable(flops), share)

    for letter in dict.fromkeys(layer.letter for layer in counted.layers):
        alike = [layer for layer in counted.layers if layer.letter == letter]
        parameters = sum(layer.parameters for layer in alike)
        add(
            letter, alike[0].kind, alike[0].options, len(alike), parameters, sum(layer.forward_flops for layer in alike)
        )
    add("", "embedding", "", "", counted.embedding, 0)
    add("", "norm", "", "", counted.norm, 0)
    add("", "head", "" if counted.head else "tied", "", counted.head, counted.head_flops)
    add("", "total", "", len(counted.layers), counted.parameters, counted.forward_flops)
    return table


def _flops_table(counted: ModelCount) -> Table:
    table = _table(f"forward FLOPs per token at {counted.seq_len}", "", "share", numbers_from=1)
    for part, flops in counted.flops_by_part.items():
        table.add_row(part, readable(flops), f"{flops / counted.forward_flops:.1%}")
    table.add_row("training (3 x forward)", readable(counted.flops_per_token), "")
    return table


def _phase_table(config: Config) -> Table:
    headers = ("phase", "tokens", "steps", "rows", "micro", "seq_len", "lr", "FLOPs/token", "FLOPs")
    table = _table(*headers, numbers_from=1)
    for stretch in stretches(config):
        phase = _phase_json(config, stretch)
        table.add_row(
            phase["name"],
            readable(phase["tokens"]),
            f"{phase['steps']:,}",
            str(phase["global_batch"]),
            str(phase["micro_batch"]),
            str(phase["seq_len"]),
            f"{phase['lr']:g}",
            readable(phase["flops_per_token"]),
            f"{phase['flops_per_token'] * phase['tokens']:.3g}",
        )
    return table


def _memory_table(config: Config) -> Table:
    phase, held = _largest(config)
    rows = f"{phase.micro_batch} x {phase.seq_len} tokens, {config.precision.name.value}"
    table = _table(f"memory of one process ({rows}, estimate)", "GB", numbers_from=1)
    for part in dataclasses.fields(held):
        table.add_row(part.name, _gigabytes(getattr(held, part.name)))
    limit = f" of {config.cluster.memory_gb:g}" if config.cluster.memory_gb else ""
    table.add_row("total", _gigabytes(held.total) + limit)
    return table


def _gigabytes(amount: int) -> str:
    return f"{amount / 1e9:.2f}"


if __name__ == "__main__":
    sys.exit(main())
