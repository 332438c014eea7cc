"""Simulate a training step without a GPU: launches, bytes, memory, waits, collectives, and an estimate of its time.

    hybridtron rehearse recipe=samba_421m
    hybridtron rehearse recipe=samba_3.8b parallel.tensor=2 parallel.pipeline=2 --gpus 16 --rank all
    hybridtron rehearse recipe=samba_1.3b --gpu h200 --json
    hybridtron rehearse recipe=moe_laptop parallel.expert=2 phases.0.micro_batch=4 --imbalance 1.5
    hybridtron rehearse recipe=samba_421m --picture step.png
    hybridtron rehearse recipe=samba_421m --capture          can a CUDA graph repeat a micro-batch (run.cuda_graph)?
    hybridtron rehearse --suite                              every recipe in six parallel layouts, and a page of results
    hybridtron rehearse --suite --only samba_421m            one recipe; --only may be repeated
    hybridtron rehearse --suite --limit 600 --part 1/2       one half of the cases; no case starts after ten minutes
    hybridtron rehearse --suite --families                   recipes with one layout of their own, on H100s
    hybridtron rehearse --suite --keep                       skip recorded cases, even if older code recorded them

A rehearsal runs the training code on fake tensors, which have shapes but no values, so it takes seconds and little
memory. It needs neither a GPU nor a GPU driver. It needs Triton, which torch's builds without CUDA do not contain; the
extra `rehearse` installs Triton.

A suite appends its results to benchmarks/rehearse.jsonl, so that an interrupted suite can continue, and then writes the
page benchmarks/rehearse.md. `make rehearse` runs the suite. A budget is a file with the highest allowed costs of a
configuration: `--budget write` writes the file, and `--budget check` compares a rehearsal with the file.

Exit codes: 0 success; 1 a budget is exceeded or missing, cases of a suite failed or remain, a CUDA graph can't repeat a
micro-batch, or there is no C++ compiler to build the library that imitates the CUDA driver; 2 bad configuration or
arguments, or no Triton.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from hybridtron.cli.arguments import positive
from hybridtron.config.check import require, warnings
from hybridtron.config.load import choices_of, load
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.evaluate.pictures import require_format
from hybridtron.limits import path_of
from hybridtron.planning.activations import loads_change_memory
from hybridtron.planning.memory import fullest_phase
from hybridtron.planning.rates import GPUS
from hybridtron.problems import CommandParser, Unusable
from hybridtron.rehearse import rehearsal, suite, suite_page
from hybridtron.rehearse.fake_cuda_shim import ShimProblem
from hybridtron.rehearse.package_stubs import STUBS, appear_installed
from hybridtron.requirements import demand
from hybridtron.resources import pages


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(prog="hybridtron rehearse", description="Simulate a GPU's training step without a GPU.")
    parser.add_argument(
        "settings", nargs="*", metavar="key=value", help="settings as for `hybridtron train`: recipe=samba_421m"
    )
    parser.add_argument("--gpus", type=positive, metavar="N", help="number of processes (default: one replica)")
    parser.add_argument(
        "--rank", default="0", metavar="N", help="rank to simulate, or `all`: one rank for each pipeline rank"
    )
    parser.add_argument("--gpu", default="h100", choices=sorted(GPUS), help="GPU model (default h100)")
    parser.add_argument(
        "--package", action="append", choices=sorted(STUBS), default=[],
        help="simulate this package in addition to flash-attn; may be repeated",
    )  # fmt: skip
    parser.add_argument("--without-packages", action="store_true", help="do not simulate flash-attn")
    parser.add_argument(
        "--budget",
        choices=("check", "write"),
        help="compare the first rank's costs with the budget of run.name, or write the budget",
    )
    parser.add_argument("--no-kernels", action="store_true", help="compile no kernels; time them by their bytes alone")
    parser.add_argument(
        "--imbalance", type=float, default=1.0, metavar="X",
        help="let the rank's experts get X times as many tokens as with even loads (parallel.expert)",
    )  # fmt: skip
    parser.add_argument(
        "--picture",
        type=path_of,
        metavar="FILE",
        help="draw memory and time of the step to a .png or .svg file",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list with an object for each rank")
    parser.add_argument(
        "--capture", action="store_true", help="compare the launches of two micro-batches, for run.cuda_graph=true"
    )
    parser.add_argument(
        "--suite", action="store_true", help="every recipe in six layouts; see `hybridtron rehearse --suite --help`"
    )
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str]) -> int:
    """Rehearse the chosen ranks and print the report. Returns the exit code. Raises Unusable for wrong arguments."""
    if "--suite" in arguments:
        return rehearse_suite(arguments)
    chosen = parse(arguments)
    demand("rehearse", *(["plot"] if chosen.picture else []))
    if chosen.picture:
        require_format(chosen.picture)
    packages = (*([] if chosen.without_packages else rehearsal.INSTALLED), *chosen.package)
    if chosen.capture:
        config = load([*chosen.settings, "run.cuda_graph=true"])
    else:
        config = load(chosen.settings)
    run_plan = RunPlan.of(config)
    world = chosen.gpus or config.parallel.fewest_ranks
    with appear_installed(packages):
        require(run_plan, world)
    if chosen.rank != "all" and not (chosen.rank.isdigit() and int(chosen.rank) < world):
        raise Unusable(
            f"--rank is {chosen.rank}, must be a number from 0 to {world - 1}, or `all`", code="out-of-range"
        )
    if chosen.capture and chosen.imbalance != 1.0:
        raise Unusable("--capture counts no memory, on which --imbalance acts: leave one of them out", code="conflict")
    phase, _ = fullest_phase(run_plan, world)
    require_imbalance(chosen.imbalance, phase)
    for warning in warnings(run_plan):
        print(f"note: {warning}", file=sys.stderr)
    if chosen.rank == "all":
        ranks = rehearsal.different_ranks(config.parallel, world)
    else:
        ranks = [int(chosen.rank)]
    try:
        process = rehearsal.RehearsalProcess(GPUS[chosen.gpu], packages)
        if chosen.capture:
            return capture(process, phase)
        rehearsals = [process.rehearse(phase, world, rank, not chosen.no_kernels, chosen.imbalance) for rank in ranks]
    except ShimProblem as problem:
        print(f"this machine cannot rehearse: {problem}", file=sys.stderr)
        return 1
    from hybridtron.rehearse import (
        report,
    )  # imports torch, which must come after RehearsalProcess has loaded its library

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


def require_imbalance(imbalance: float, phase: ResolvedPhase) -> None:
    """Raise Unusable if the experts of a rank can't get this multiple of the rows of even loads."""
    expert_ranks = phase.config.parallel.expert
    if imbalance == 1.0:
        return
    if expert_ranks == 1:
        raise Unusable(
            f"--imbalance is {imbalance:g}, but no ranks divide experts, so a rank's memory does not depend on their "
            "loads: set parallel.expert, or leave --imbalance out",
            code="no-effect",
        )
    if not loads_change_memory(phase):
        raise Unusable(
            f"--imbalance is {imbalance:g}, but with a capacity ranks exchange equally many rows whatever the loads: "
            "leave --imbalance out",
            code="no-effect",
        )
    if not 0 <= imbalance <= expert_ranks:
        raise Unusable(
            f"--imbalance is {imbalance:g}, must be from 0 to {expert_ranks}: {expert_ranks} ranks divide the experts, "
            f"and a rank that gets all tokens gets {expert_ranks} times its share",
            code="out-of-range",
        )


def capture(process: rehearsal.RehearsalProcess, phase: ResolvedPhase) -> int:
    """Print whether a CUDA graph can repeat the passes of the phase's micro-batches. Returns the exit code."""
    from hybridtron.rehearse.capture import lines_of  # imports torch, as below

    proof = process.capture(phase)
    print("\n".join(lines_of(proof, phase.config.run.name)))
    if proof.holds:
        return 0
    return 1


def budget(name: str, settings: Sequence[str], report: dict[str, Any], writes: bool) -> int:
    """Write the cost budget of a configuration, or print the costs that exceed it. Returns the exit code."""
    from hybridtron.rehearse import budget as budgets

    costs = budgets.budget_of(report)
    path = budgets.path_of(name)
    if writes:
        print(budgets.write(name, settings, costs))
        return 0
    if not path.exists():
        print(f"{path} does not exist: write this budget with --budget write", file=sys.stderr)
        return 1
    budget_settings, limits = budgets.read(path)
    if sorted(budget_settings) != sorted(settings):
        print(
            f"{path} belongs to other settings: use {' '.join(budget_settings)}, or another run.name",
            file=sys.stderr,
        )
        return 2
    lines = budgets.exceeded(costs, limits)
    print("\n".join(lines) or f"{name} is within the budget {path}")
    return 1 if lines else 0


def parse_suite(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line of a suite."""
    parser = CommandParser(prog="hybridtron rehearse", description="Rehearse every recipe in six parallel layouts.")
    parser.add_argument("--suite", action="store_true", help="rehearse the recipes rather than one configuration")
    parser.add_argument("--only", action="append", default=[], metavar="RECIPE", help="this recipe; may be repeated")
    parser.add_argument(
        "--families",
        action="store_true",
        help="rehearse only recipes with a layout of their own, by default on an H100",
    )
    parser.add_argument("--gpu", choices=sorted(GPUS), help="GPU model (default h200)")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), metavar="SECONDS", help="start no case after this time"
    )
    parser.add_argument("--part", default="1/1", metavar="I/N", help="rehearse the I-th of N parts of the cases")
    parser.add_argument("--keep", action="store_true", help="keep results that older code has recorded")
    parser.add_argument(
        "--output", type=path_of, metavar="FILE",
        help="page of results, with a .jsonl file next to it (default: benchmarks/rehearse.md)",
    )  # fmt: skip
    parser.add_argument("--no-kernels", action="store_true", help="compile no kernels; time them by their bytes alone")
    return parser.parse_args(arguments)


def rehearse_suite(arguments: list[str]) -> int:
    """Rehearse the cases that are not recorded yet, and write the page. Returns the exit code."""
    chosen = parse_suite(arguments)
    if unknown := sorted(set(chosen.only) - set(choices_of("recipe"))):
        raise Unusable(f"--only {unknown[0]}: there is no recipe {unknown[0]}", code="unknown-name")
    index, _, count = chosen.part.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise Unusable(f"--part is {chosen.part}, must be I/N, such as 1/2", code="malformed")
    demand("rehearse")
    checkout = pages()
    output = chosen.output or (checkout and checkout / "rehearse.md")
    if output is None:
        raise Unusable(
            "--output FILE is needed: without a checkout there is no folder benchmarks/ for the page", code="missing"
        )
    records = suite.SuiteRecords(output.with_suffix(".jsonl"))
    cases = [case for case in suite.all_cases(chosen.only) if (case.recipe in suite.FAMILIES) == chosen.families]
    if not cases:
        flag = "without --families" if chosen.families else "with --families"
        raise Unusable(f"--only names no recipe that is rehearsed so: rehearse it {flag}", code="no-effect")
    if chosen.families and chosen.gpu not in (None, suite.FAMILIES_GPU):
        what = f"--gpu is {chosen.gpu}, but the layouts of --families are for {suite.FAMILIES_GPU}: leave it out"
        raise Unusable(what, code="conflict")
    cases = suite.slice_of(cases, int(index) - 1, int(count), "")
    gpu = chosen.gpu or (suite.FAMILIES_GPU if chosen.families else "h200")
    todo = suite.missing(cases, records, chosen.keep)
    print(
        f"{len(todo)} ranks of {len(cases)} cases remain to be rehearsed; results are recorded in {records.path}",
        file=sys.stderr,
    )
    is_done = True
    if todo:
        try:
            process = rehearsal.RehearsalProcess(GPUS[gpu])
        except ShimProblem as problem:
            print(f"this machine cannot rehearse: {problem}", file=sys.stderr)
            return 1
        say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
        is_done = suite.rehearse_all(process, todo, records, chosen.limit, say, not chosen.no_kernels)
    if int(count) == 1:
        records.tidy()
    shown = list(records.read().values())
    output.write_text(suite_page.page(shown, suite.code_digest()))
    print(output)
    if is_done and not any("failed" in record for record in shown):
        return 0
    return 1
