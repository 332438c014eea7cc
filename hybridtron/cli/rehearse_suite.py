"""Rehearse every recipe under six layouts and write a page of the results: `hybridtron rehearse --suite`.

    hybridtron rehearse --suite                              all; continues after an interruption
    hybridtron rehearse --suite --only samba_421m            one recipe; may be repeated
    hybridtron rehearse --suite --limit 600 --part 1/2       ten minutes, for one half of the cases
    hybridtron rehearse --suite --keep                       results of older code count too

Results are appended to benchmarks/rehearse.jsonl, and the page is made from that file. `make rehearse` runs this too.
Exit codes: 0 all cases are rehearsed, 1 some failed, remain or can't be rehearsed here, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import sys

from hybridtron.config.load import choices_of
from hybridtron.limits import path_of
from hybridtron.planning.rates import GPUS
from hybridtron.problems import Unusable
from hybridtron.rehearse import suite, suite_page
from hybridtron.rehearse.guard import GuardProblem
from hybridtron.rehearse.rehearsal import RehearsalProcess
from hybridtron.requirements import demand
from hybridtron.shipped import pages


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="hybridtron rehearse", description="Every recipe under six layouts.")
    parser.add_argument("--suite", action="store_true", help="rehearse the recipes rather than one configuration")
    parser.add_argument("--only", action="append", default=[], metavar="RECIPE", help="this recipe; may be repeated")
    parser.add_argument("--gpu", default="h200", choices=sorted(GPUS), help="its kind (default h200)")
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS", help="begin nothing after that")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="one of N parts of the cases, for N processes")
    parser.add_argument("--keep", action="store_true", help="what older code showed counts too")
    parser.add_argument(
        "--output", type=path_of, metavar="FILE",
        help="the page; what was shown goes to a .jsonl beside it (default: benchmarks/rehearse.md)",
    )  # fmt: skip
    parser.add_argument("--no-kernels", action="store_true", help="compile no kernels: each takes as long as its bytes")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Rehearse the cases that are not recorded yet, and write the page. Returns the exit code."""
    chosen = parse(arguments)
    if unknown := sorted(set(chosen.only) - set(choices_of("recipe"))):
        raise Unusable(f"--only {unknown[0]}: no such recipe", code="unknown-name")
    index, _, count = chosen.part.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise Unusable(f"--part {chosen.part}: give I/N, such as 1/2", code="malformed")
    demand("rehearse")
    checkout = pages()
    output = chosen.output or (checkout and checkout / "rehearse.md")
    if output is None:
        raise Unusable(
            "--output FILE is needed where there is no checkout, whose benchmarks/ the page would go to", code="missing"
        )
    records = suite.SuiteRecords(output.with_suffix(".jsonl"))
    cases = suite.slice_of(suite.all_cases(chosen.only), int(index) - 1, int(count), "")
    todo = suite.missing(cases, records, chosen.keep)
    print(f"{len(todo)} ranks of {len(cases)} cases are to be rehearsed; records in {records.path}", file=sys.stderr)
    is_done = True
    if todo:
        try:
            process = RehearsalProcess(GPUS[chosen.gpu])
        except GuardProblem as problem:
            print(f"nothing can be rehearsed here: {problem}", file=sys.stderr)
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
