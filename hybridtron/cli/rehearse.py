"""Simulate a training step without a GPU: launches, bytes, memory, waits, collectives, and an estimate of its time.

    hybridtron rehearse recipe=samba_421m
    hybridtron rehearse recipe=samba_3.8b parallel.tensor=2 parallel.pipeline=2 --gpus 16 --rank all
    hybridtron rehearse recipe=samba_1.3b --gpu h200 --json
    hybridtron rehearse recipe=samba_421m --picture step.png
    hybridtron rehearse --suite

It runs the training code on fake tensors, which have no values, so it takes seconds and little memory. It needs no GPU
and no driver, but Triton (the extra `rehearse`), which torch's builds without CUDA lack.

Exit codes: 0 rehearsed, 1 a budget is exceeded or nothing can be rehearsed here (no compiler), 2 bad configuration, or
no Triton.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from hybridtron.cli.given import positive
from hybridtron.config.check import require, warnings
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.evaluate.pictures import require_format
from hybridtron.limits import path_of
from hybridtron.planning.memory import largest_phase
from hybridtron.planning.rates import GPUS
from hybridtron.problems import Unusable
from hybridtron.rehearse import rehearsal
from hybridtron.rehearse.guard import GuardProblem
from hybridtron.rehearse.stand_ins import WORKS, to_be_found
from hybridtron.requirements import demand


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="hybridtron rehearse", description="Simulate a GPU's training step without a GPU."
    )
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="as `hybridtron train` takes them: recipe=samba_421m"
    )
    parser.add_argument("--gpus", type=positive, metavar="N", help="processes of the whole run (default: one model's)")
    parser.add_argument(
        "--rank", default="0", metavar="N", help="the rank to play, or `all`: one of each pipeline rank"
    )
    parser.add_argument("--gpu", default="h100", choices=sorted(GPUS), help="its kind (default h100)")
    parser.add_argument(
        "--package", action="append", choices=sorted(WORKS), default=[],
        help="counts as installed too, beside flash-attn; may be repeated",
    )  # fmt: skip
    parser.add_argument("--without-packages", action="store_true", help="no flash-attn where it is not installed here")
    parser.add_argument(
        "--budget", choices=("check", "write"), help="of rank 0: hold it to the file of its run.name, or write that"
    )
    parser.add_argument("--no-kernels", action="store_true", help="compile no kernels: each takes as long as its bytes")
    parser.add_argument(
        "--picture",
        type=path_of,
        metavar="FILE",
        help="draw memory over the step, and where its time goes: a .png or .svg",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list with one object a rank")
    parser.add_argument(
        "--suite", action="store_true", help="every recipe under six layouts: `hybridtron rehearse --suite --help`"
    )
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str]) -> int:
    """Rehearse the chosen ranks and print the report. Returns the exit code. Raises Unusable."""
    if "--suite" in arguments:
        from hybridtron.cli import rehearse_suite

        return rehearse_suite.main(arguments)
    chosen = parse(arguments)
    demand("rehearse", *(["plot"] if chosen.picture else []))
    if chosen.picture:
        require_format(chosen.picture)
    packages = (*([] if chosen.without_packages else rehearsal.INSTALLED), *chosen.package)
    config = load(chosen.settings)
    world = chosen.gpus or config.parallel.model_ranks
    with to_be_found(packages):
        require(config, world)
    if chosen.rank != "all" and not (chosen.rank.isdigit() and int(chosen.rank) < world):
        raise Unusable(f"--rank {chosen.rank}: give a number from 0 to {world - 1}, or `all`", code="out-of-range")
    for warning in warnings(RunPlan.of(config)):
        print(f"note: {warning}", file=sys.stderr)
    phase = largest_phase(config)
    if chosen.rank == "all":
        ranks = rehearsal.different_ranks(config.parallel, world)
    else:
        ranks = [int(chosen.rank)]
    try:
        process = rehearsal.RehearsalProcess(GPUS[chosen.gpu], packages)
        rehearsals = [process.rehearse(phase, world, rank, not chosen.no_kernels) for rank in ranks]
    except GuardProblem as problem:
        print(f"nothing can be rehearsed here: {problem}", file=sys.stderr)
        return 1
    from hybridtron.rehearse import report  # imports torch, which the guard library must precede

    if chosen.picture:
        from hybridtron.rehearse.picture import draw

        draw(rehearsals, chosen.picture)
    if chosen.budget:
        return budget(config.run.name, chosen.settings, report.as_json(rehearsals[0]), chosen.budget == "write")
    if chosen.json:
        print(json.dumps([report.as_json(rank_costs) for rank_costs in rehearsals], indent=1))
    else:
        report.print_tables(rehearsals)
    return 0


def budget(name: str, settings: Sequence[str], found: dict[str, Any], writes: bool) -> int:
    """Write the cost budget of a configuration, or print the costs that exceed it. Returns the exit code."""
    from hybridtron.rehearse import budget as budgets

    costs = budgets.budget_of(found)
    path = budgets.path_of(name)
    if writes:
        print(budgets.write(name, settings, costs))
        return 0
    if not path.exists():
        print(f"{path} does not exist: write it with --budget write", file=sys.stderr)
        return 1
    budget_settings, limits = budgets.read(path)
    if sorted(budget_settings) != sorted(settings):
        print(f"{path} is of {' '.join(budget_settings)}: ask for these, or give another run.name", file=sys.stderr)
        return 2
    lines = budgets.exceeded(costs, limits)
    print("\n".join(lines) or f"{name} is within {path}")
    return 1 if lines else 0
