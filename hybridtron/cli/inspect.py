"""Inspect a configuration without building the model: layers, parameters, FLOPs, memory, steps.

    hybridtron inspect recipe=samba_1.7b phases.0.micro_batch=4
    hybridtron inspect recipe=samba_1.7b --json
    hybridtron inspect recipe=samba_1.7b parallel.pipeline=4 --gpus 64
    hybridtron inspect recipe=samba_421m --exact
    hybridtron inspect recipe=samba_3.8b --gpus 256 --fit 80GB
    hybridtron inspect recipe=samba_1.7b parallel.tensor=4 parallel.pipeline=2 --dry-run

The command takes the same arguments as `hybridtron train`. It reads no tokens. If the run's folder has a time log, the
last line names the interval between checkpoints that loses the least time on these GPUs. The files `count.py`,
`memory.py` and `fit.py` in hybridtron/planning describe the costs that are counted. Options:

    --gpus N   number of GPUs, with one process each; default: the fewest that the parallel layout needs
    --fit M    list the layouts that fit into M of device memory, sorted by modelled step time
    --exact    rehearse the step, that is, simulate the step without a GPU, and report its exact memory peak
    --dry-run  build every rank's model on the meta device, without memory for weights

Without a rehearsal, memory is an estimate. For peaks of at least a gigabyte, it differs from the rehearsed peak by at
most 10%. `--fit` rehearses the fastest layouts. Rehearsals need Triton and run in separate processes. Their results are
stored until the code or the configuration changes. Only `--dry-run` imports torch in this process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from hybridtron.architecture.table import Architecture
from hybridtron.cli.arguments import positive
from hybridtron.config.check import require, warnings
from hybridtron.config.checks.parallel import uncuttable
from hybridtron.config.load import load
from hybridtron.config.pipeline_layout import stages_of
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.config.schema import Config
from hybridtron.config.units import readable
from hybridtron.planning.activations import MARGIN, MARGIN_FROM
from hybridtron.planning.context_balance import imbalance, token_costs
from hybridtron.planning.count import ModelCount, count
from hybridtron.planning.fit import TENSOR_SIZES, FittingLayout, fit, settings_of
from hybridtron.planning.memory import DeviceMemory, Plan, RankPlan, fullest_phase, imbalance_line, imbalance_that_fits
from hybridtron.planning.rates import GPUS, HEAD_ROOM, UNSEEN
from hybridtron.planning.traffic import Traffic
from hybridtron.problems import CommandParser, Unusable
from hybridtron.rehearse.exact import rehearsed_peaks
from hybridtron.requirements import demand, missing
from hybridtron.train.phase_table import (
    cost,
    phase_table,
    print_changes,
    rates_of,
    source_table,
    sources_of,
    table_of,
    wide_console,
)
from hybridtron.train.time_log import read_time

if TYPE_CHECKING:  # the module imports torch, which only --dry-run needs
    from hybridtron.engine.dry_run import RankShapes

MEMORY_PARTS = tuple(part.name for part in dataclasses.fields(DeviceMemory))
TRAFFIC_PARTS = tuple(part.name for part in dataclasses.fields(Traffic))
ACCURACY = f"within {MARGIN:.0%} from {MARGIN_FROM / 1e9:.0f} GB on"
MAX_LISTED = 10  # --fit prints at most this number of layouts; --json prints all layouts
FINALISTS = 3  # number of layouts that --fit rehearses, the fastest first


def main(arguments: list[str]) -> int:
    """Print the tables or JSON, and build the model with `--dry-run`.

    Returns the exit code: 1 if the dry run finds a shard that is missing or has a wrong shape, else 0. Raises
    ConfigError if the configuration can't run.
    """
    parser = CommandParser(
        prog="hybridtron inspect", description="Layers, parameters, FLOPs, memory, steps and layout."
    )
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="settings as for `hybridtron train`: recipe=samba_421m"
    )
    parser.add_argument("--gpus", type=positive, metavar="N", help="number of processes")
    parser.add_argument(
        "--fit", type=_parse_gigabytes, metavar="80GB", help="list layouts that fit into this device memory"
    )
    parser.add_argument(
        "--gpu", default="h100", choices=sorted(GPUS), help="GPU model for the step time of --fit (default h100)"
    )
    parser.add_argument("--exact", action="store_true", help="rehearse the step for the exact memory (needs Triton)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--dry-run", action="store_true", help="build every rank's model on the meta device")
    chosen = parser.parse_intermixed_args(arguments)
    config = load(chosen.settings)
    run_plan = RunPlan.of(config)
    require(run_plan, chosen.gpus if chosen.fit is None else None)
    for warning in warnings(run_plan):
        print(f"note: {warning}", file=sys.stderr)
    gpus = chosen.gpus or config.parallel.fewest_ranks
    fitting = peaks = None
    if chosen.exact:
        demand("rehearse")
    if chosen.fit is not None:
        fitting = fit(run_plan, gpus, chosen.fit, GPUS[chosen.gpu])
        fitting = with_rehearsals(fitting, config, chosen)
    elif chosen.exact:
        peaks = rehearsed_peaks(chosen.settings, gpus, chosen.gpu)
    mismatches: list[str] = []
    if chosen.json:
        results = as_json(run_plan, gpus, fitting=fitting, peaks=peaks)
        if chosen.dry_run:  # inside the object, so that stdout has nothing but JSON
            ranks, mismatches = dry_run(run_plan)
            results["dry_run"] = {"ranks": [_built_json(rank) for rank in ranks], "mismatches": mismatches}
        print(json.dumps(results, indent=2))
    else:
        print_tables(run_plan, gpus, fitting=fitting, peaks=peaks)
        if chosen.dry_run:
            ranks, mismatches = dry_run(run_plan)
            print_built(ranks, mismatches)
    return 1 if mismatches else 0


def with_rehearsals(
    fitting: Sequence[FittingLayout], config: Config, chosen: argparse.Namespace
) -> list[FittingLayout]:
    """Rehearse the fastest layouts, and return all layouts except layouts whose rehearsed memory does not fit.

    If no step can be rehearsed on this machine, all layouts are returned unchanged.
    """
    if (lack := missing("rehearse")) is not None:
        print(f"note: memory is an estimate, {ACCURACY}, since no step can be rehearsed: {lack}", file=sys.stderr)
        return list(fitting)
    finalists = []
    for layout in fitting[:FINALISTS]:
        settings = replace_settings(chosen.settings, settings_of(layout, config))
        print(f"note: rehearsing {' '.join(settings)}", file=sys.stderr)
        try:
            peak = max(rehearsed_peaks(settings, chosen.gpus or config.parallel.fewest_ranks, chosen.gpu))
        except Unusable as problem:
            print(f"note: memory of this layout is an estimate: {problem}", file=sys.stderr)
            finalists.append(layout)
            continue
        if peak <= (1 - HEAD_ROOM) * chosen.fit:
            finalists.append(dataclasses.replace(layout, rehearsed=peak))
    return [*finalists, *fitting[FINALISTS:]]


def replace_settings(settings: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return `settings` with `others`: a setting in `others` replaces a setting with the same key, or is appended."""
    by_key = {setting.partition("=")[0]: setting for setting in (*settings, *others)}
    return list(by_key.values())


def dry_run(run_plan: RunPlan) -> tuple[list[RankShapes], list[str]]:
    """Build every rank's weights on the meta device and check that the shards form the full model.

    Returns the ranks, and a message for each shard that is missing or has a wrong shape.
    """
    from hybridtron.engine.dry_run import build_every_rank, faults  # imports torch

    ranks = list(build_every_rank(run_plan))
    return ranks, faults(run_plan, ranks)


def print_built(ranks: Sequence[RankShapes], mismatches: Sequence[str]) -> None:
    """Print a line for each rank that `dry_run` has built, and the mismatches to stderr."""
    for rank in ranks:
        place = f"pipeline {rank.pipeline_rank} tensor {rank.tensor_rank}"
        print(f"rank {rank.rank} ({place}): {len(rank.shapes)} weights, {rank.parameters:,} parameters")
    print(
        "\n".join(mismatches) or "the shards of all ranks form the full model",
        file=sys.stderr if mismatches else sys.stdout,
    )


def _built_json(rank: RankShapes) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "pipeline_rank": rank.pipeline_rank,
        "tensor_rank": rank.tensor_rank,
        "weights": len(rank.shapes),
        "parameters": rank.parameters,
    }


def as_json(
    run_plan: RunPlan, gpus: int, *, fitting: list[FittingLayout] | None = None, peaks: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return all results as JSON values. FLOPs per token are for the first phase's sequence length.

    `fitting` has the layouts from --fit. `peaks` has each rank's memory peak in bytes, as rehearsed with --exact.
    """
    config = run_plan.config
    model_count = count(run_plan.arch, config.phases[0].seq_len)
    phases = run_plan.phases
    results = {
        "parameters": model_count.parameters,
        "active_parameters": model_count.active,
        "flops_per_token": model_count.flops_per_token,
        "forward_flops_by_part": model_count.flops_by_part,
        "seq_len": model_count.seq_len,
        "stages": [len(stage) for stage in stages_of(run_plan.arch, config)],
        "layers": [{"index": index, **dataclasses.asdict(layer)} for index, layer in enumerate(model_count.layers)],
        "phases": [_phase_json(phases, phase) for phase in phases],
        "checkpoint_interval": checkpoint_interval(config, gpus),
    }
    if fitting is not None:
        return results | {"fit": [_fitting_json(config, layout) for layout in fitting]}
    phase, layout_plan = fullest_phase(run_plan, gpus)
    return results | {
        "memory": {**_memory_json(layout_plan.fullest), "phase": phase.settings.name},
        "plan": {**_plan_json(layout_plan), "imbalance": _imbalance(phase)},
        "rehearsed": peaks,
    }


def _memory_json(rank: RankPlan) -> dict[str, Any]:
    return {**dataclasses.asdict(rank.memory), "total": rank.memory.total, "rank": rank.rank}


def _plan_json(rank_plan: Plan) -> dict[str, Any]:
    plain = dataclasses.asdict(rank_plan)
    for rank, fields in zip(rank_plan.ranks, plain["ranks"], strict=True):
        for chunk in fields["chunks"]:
            chunk["layers"] = list(chunk["layers"])
        fields["memory"] = _memory_json(rank)
        fields["sent_bytes"] = {**fields.pop("traffic"), "total": rank.traffic.total}
    return plain


def _fitting_json(config: Config, layout: FittingLayout) -> dict[str, Any]:
    return {
        "settings": settings_of(layout, config),
        "data": layout.plan.data,
        "memory": _memory_json(layout.plan.fullest),
        "rehearsed": layout.rehearsed,
        "model_seconds": layout.seconds,
        "sent_bytes": layout.sent_bytes,
        "bubble": layout.plan.bubble,
    }


def _phase_json(phases: Sequence[ResolvedPhase], phase: ResolvedPhase) -> dict[str, Any]:
    settings = phase.settings
    return {
        "name": settings.name,
        "steps": phase.end_step - phase.start_step,
        "first_step": phase.start_step + 1,
        "tokens": phase.tokens,
        "seq_len": settings.seq_len,
        "global_batch": settings.global_batch,
        "micro_batch": settings.micro_batch,
        "lr": settings.lr,
        "rates": rates_of(phases, phase),
        "sources": [line._asdict() for line in sources_of(phase)],
        "flops_per_token": count(phase.arch, settings.seq_len).flops_per_token,
    }


def print_tables(
    run_plan: RunPlan, gpus: int, *, fitting: list[FittingLayout] | None = None, peaks: Sequence[int] | None = None
) -> None:
    """Print the tables: formatted on a terminal, plain text elsewhere."""
    config = run_plan.config
    console = wide_console()
    counted = count(run_plan.arch, config.phases[0].seq_len)
    stages = [len(stage) for stage in stages_of(run_plan.arch, config)]
    if len(stages) > 1:
        in_stages = f" in pipeline stages of {', '.join(map(str, stages))}"
    else:
        in_stages = ""
    title = f"{config.run.name}: {len(counted.layers)} layers{in_stages}, {config.model.pattern}"
    console.print(title, highlight=False, markup=False)
    tables = [_letter_table(counted), _flops_table(counted), phase_table(run_plan), source_table(run_plan)]
    if fitting is None:
        phase, layout_plan = fullest_phase(run_plan, gpus)
        tables.append(_memory_table(phase, layout_plan, peaks))
        if gpus > 1:
            tables.append(_traffic_table(phase, layout_plan))
    else:
        tables.append(_fit_table(config, gpus, fitting))
    for table in tables:
        table.box = box.SIMPLE_HEAD if console.is_terminal else None
        table.pad_edge = False
        title = table.title
        table.title = None
        console.print(f"\n{title}" if title else "", highlight=False)
        console.print(table)
    if fitting is None:
        for line in _load_lines(run_plan, gpus):
            console.print(line, highlight=False, markup=False)
    print_changes(run_plan, console)
    for line in cost(run_plan):
        console.print(line, highlight=False)
    console.print(f"Memory that is not counted: {UNSEEN}.", highlight=False)
    if interval := checkpoint_interval(config, gpus):
        console.print(f"Checkpoints: {interval}.", highlight=False, markup=False, soft_wrap=True)
    if fitting is not None:
        for line in _left_out(run_plan.arch, fitting):
            console.print(line, highlight=False, markup=False)


def _load_lines(run_plan: RunPlan, gpus: int) -> list[str]:
    """Return a line if the loads of experts can be so uneven that a rank does not fit on the cluster's GPUs."""
    phase, _ = fullest_phase(run_plan, gpus)
    gigabytes = phase.config.cluster.memory_gb
    if gigabytes is None:
        return []
    memory = 1e9 * gigabytes
    most = imbalance_that_fits(phase, gpus, memory)
    if most is None:
        return []
    return [imbalance_line(most, phase, gpus, memory)]


def checkpoint_interval(config: Config, gpus: int) -> str | None:
    """Return a sentence with the best interval between checkpoints, from the time log of the run in `run.dir`.

    None if that folder has no run that has saved a checkpoint.
    """
    spent = read_time(Path(config.run.dir))
    if spent is None:
        return None
    return spent.interval(gpus)


def _letter_table(counted: ModelCount) -> Table:
    """Build a table with rows for the letters of `model.pattern`, the embedding, the norm, the head and the total."""
    table = table_of("", "kind", "options", "layers", "parameters", "FLOPs/token", "share", numbers_from=3)

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
    if counted.active < counted.parameters:
        add("", "active", "of a token", "", counted.active, counted.forward_flops)
    return table


def _flops_table(counted: ModelCount) -> Table:
    table = table_of(f"forward FLOPs per token at {counted.seq_len}", "", "share", numbers_from=1)
    for part, flops in counted.flops_by_part.items():
        table.add_row(part, readable(flops), f"{flops / counted.forward_flops:.1%}")
    table.add_row("training (3 x forward)", readable(counted.flops_per_token), "")
    return table


def _memory_table(planned: ResolvedPhase, rank_plan: Plan, peaks: Sequence[int] | None) -> Table:
    """Build a table with a row for each pipeline rank: memory in GB by use. With --exact, add the rehearsed total."""
    config = planned.config
    phase = planned.settings
    table = table_of("rank", "layers", "parameters", *MEMORY_PARTS, "total", "in flight", numbers_from=2)
    if peaks is not None:
        table.add_column("rehearsed", justify="right")
    table.title = (
        f"GB per device (estimate, {ACCURACY}): {config.precision.name.value}, "
        f"{phase.micro_batch} x {phase.seq_len} tokens, "
        f"{rank_plan.world_size} devices: tensor {config.parallel.tensor} x pipeline {config.parallel.pipeline} x "
        f"data {rank_plan.data}, {rank_plan.micro_batches} micro-batches per step"
    )
    if config.cluster.memory_gb:
        limit = f" of {config.cluster.memory_gb:g}"
    else:
        limit = ""
    for rank in rank_plan.ranks:
        layers = ", ".join(f"{chunk.layers.start}-{chunk.layers.stop - 1}" for chunk in rank.chunks)
        cells = [str(rank.rank), layers, f"{rank.parameters:,}"]
        cells += [_gigabytes(getattr(rank.memory, part)) for part in MEMORY_PARTS]
        cells += [_gigabytes(rank.memory.total) + limit, str(rank.in_flight)]
        if peaks is not None:
            cells.append(_gigabytes(peaks[rank.rank]))
        table.add_row(*cells)
    return table


def _traffic_table(phase: ResolvedPhase, rank_plan: Plan) -> Table:
    """Build a table with a row for each pipeline rank: the GB that a device of the rank sends per step, and its work.

    A rank's work is its forward cost divided by the largest forward cost of all ranks.
    """
    table = table_of("rank", *TRAFFIC_PARTS, "total", "work", numbers_from=1)
    table.title = f"GB that a device sends per step (estimate); pipeline bubble: {rank_plan.bubble:.1%} of the time"
    if phase.config.parallel.context > 1:
        table.title += f"; context parallelism: up to {_imbalance(phase):.2f} times the mean work on a rank"
    costs = [sum(chunk.forward_cost for chunk in rank.chunks) for rank in rank_plan.ranks]
    for rank, computed in zip(rank_plan.ranks, costs, strict=True):
        parts = dataclasses.astuple(rank.traffic)
        table.add_row(str(rank.rank), *map(_gigabytes, (*parts, rank.traffic.total)), f"{computed / max(costs):.0%}")
    return table


def _imbalance(phase: ResolvedPhase) -> float:
    """Return the largest work of a context-parallel rank, divided by the mean work of all context-parallel ranks.

    The work is computed for the worst case: a row that is a single document.
    """
    length = phase.settings.seq_len
    costs = token_costs(phase.arch, length)
    return imbalance(costs.of_shards([[(0, length)]], length, phase.config.parallel.context))


def _fit_table(config: Config, gpus: int, fitting: list[FittingLayout]) -> Table:
    table = table_of("s a step (model)", "GB", "rehearsed", "GB sent a step", "bubble", "settings", numbers_from=0)
    table.columns[-1].justify = "left"
    table.columns[-1].overflow = "fold"
    table.title = f"the fastest of {len(fitting)} layouts that fit on {gpus} devices, by a time model without scans"
    for layout in fitting[:MAX_LISTED]:
        table.add_row(
            f"{layout.seconds:.3g}",
            f"{layout.plan.fullest.memory.total / 1e9:.0f}",
            _gigabytes(layout.rehearsed) if layout.rehearsed else "",
            _gigabytes(layout.sent_bytes),
            f"{layout.plan.bubble:.1%}",
            " ".join(settings_of(layout, config)),
        )
    return table


def _left_out(arch: Architecture, fitting: list[FittingLayout]) -> list[str]:
    """Return lines about layouts that were not tried. If no layout fits, add a line with advice."""
    reasons = {tensor: "; ".join(uncuttable(arch, tensor, full_experts=True)) for tensor in TENSOR_SIZES}
    lines = [f"not tried: parallel.tensor={tensor}, since {reason}" for tensor, reason in reasons.items() if reason]
    if fitting:
        return lines
    return [*lines, "no layout fits: use more devices, or a global batch that divides evenly among the devices"]


def _gigabytes(amount: int) -> str:
    return f"{amount / 1e9:.2f}"


def _parse_gigabytes(text: str) -> float:
    """Parse gigabytes such as `80GB` or `80` to bytes, for argparse."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(?:GB)?", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory such as 80GB")
    return float(match[1]) * 1e9
