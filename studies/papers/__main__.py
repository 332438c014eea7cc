"""Claims of four papers, tested on a laptop: trains the missing runs, and writes a page for each paper.

    python -m studies.papers                          all papers, for at most two hours a call
    python -m studies.papers samba --only table3-order
    python -m studies.papers --pages                  trains nothing: pages of the existing results
    python -m studies.papers --quick --runs DIR --results DIR --output DIR       tiny sizes: checks that it runs
    python -m studies.papers --only table3-order --submit     prints a script that tests the claim on a SLURM cluster
    python -m studies.papers --fill table3-order              the third column, from runs on a GPU

Each study keeps its results in its folder `results`, a file for each run; a run with a result is not trained again, on
any machine. Pages go to studies/papers/pages.

Exit codes: 0 all runs have a result; 1 a run failed; 2 a wrong argument; 75 stopped, or runs remain for another call.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hybridtron.cli.arguments import positive
from hybridtron.cli.sweep import INTERRUPTED
from hybridtron.problems import Unusable, did_you_mean
from hybridtron.requirements import demand
from studies.papers import hax, length, overview, samba, span, submission
from studies.papers.carry_on import carry_on, minutes_by_sweep
from studies.papers.claim import Claim, Paper
from studies.papers.on_gpu import RUNS, fill
from studies.papers.page import page
from studies.papers.studies import Where, all_kept
from studies.results import ROOT

PAPERS = {paper.name: paper for paper in (samba.PAPER, span.PAPER, length.PAPER, hax.PAPER)}
PIECE = 115  # planned minutes of a call
HERE = Path(__file__).parent


def main(arguments: list[str]) -> int:
    """Train the next runs and write the pages, or print a script, or fill a column. Returns the exit code."""
    import torch

    chosen = parse(arguments)
    demand("plot")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    where = Where(chosen.runs, chosen.results, chosen.quick)
    claims = [claim for name in chosen.papers for claim in PAPERS[name].claims]
    try:
        wanted = [claim for claim in claims if chosen.only is None or claim.name == chosen.only]
        if not wanted:
            raise Unusable(
                f"--only {chosen.only} is none of {', '.join(claim.name for claim in claims)}", code="unknown-name"
            )
        if chosen.fill:
            return filled(chosen, claims, where)
        if chosen.submit:
            print(submission.script(wanted, chosen.full, chosen.only is None), end="")
            return 0
        code = 0
        if not chosen.pages:
            code = carry_on(wanted, where, chosen.minutes, jobs=chosen.jobs, console=Console(stderr=True))
        write([PAPERS[name] for name in chosen.papers], where, chosen.output)
    except Unusable as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="studies.papers", description="Claims of four papers on a laptop.")
    add = parser.add_argument
    add("papers", nargs="*", metavar="PAPER", help=f"{', '.join(PAPERS)} (default: all)")
    add("--only", metavar="CLAIM", help="the runs of one claim")
    add("--minutes", type=positive, default=PIECE, metavar="N", help="planned of this call (default: %(default)s)")
    add("--jobs", type=positive, default=2, metavar="N", help="runs at a time (default: %(default)s)")
    add("--pages", action="store_true", help="train nothing: pages of the results that there are")
    add("--submit", action="store_true", help="print what shows the claims on a SLURM cluster, as a script")
    add("--fill", nargs="+", metavar=("CLAIM", "NAME=RUN"), help="the third column of a claim, from runs on a GPU")
    add(
        "--full",
        action="store_true",
        help="with --submit and --fill: of the paper's size, not what a day is enough for",
    )
    add("--quick", action="store_true", help="tiny sizes; needs --runs, --results and --output")
    add("--runs", type=Path, metavar="DIR", help="where runs stand (default: runs)")
    add("--results", type=Path, metavar="DIR", help="results, a folder for each study (default: each study's own)")
    add("--output", type=Path, metavar="DIR", help="of pages and pictures (default: studies/papers/pages)")
    chosen = parser.parse_args(arguments)
    if unknown := [name for name in chosen.papers if name not in PAPERS]:
        parser.error(f"{unknown[0]} is none of {', '.join(PAPERS)}")
    if chosen.quick and None in (chosen.runs, chosen.results, chosen.output):
        parser.error("--quick needs --runs, --results and --output, so that it leaves the real results alone")
    chosen.papers = chosen.papers or list(PAPERS)
    chosen.runs = chosen.runs or ROOT / "runs"
    chosen.output = chosen.output or HERE / "pages"
    return chosen


def write(papers: Sequence[Paper], where: Where, output: Path) -> None:
    """Write a page for each given paper, and the overview of all papers."""
    kept = all_kept(where)
    results = where.kept("papers")
    output.mkdir(parents=True, exist_ok=True)
    for paper in papers:
        (output / f"{paper.name}.md").write_text(page(paper, kept, results, output), encoding="utf-8")
    every = list(PAPERS.values())
    spent = minutes_by_sweep([claim for paper in every for claim in paper.claims], where)
    html = overview.page(every, kept, spent, results=results, pictures=output)
    (output / "overview.html").write_text(html, encoding="utf-8")
    (output / "overview.md").write_text(overview.markdown(every, kept, spent), encoding="utf-8")
    print(f"written to {output}")


def filled(chosen: argparse.Namespace, claims: Sequence[Claim], where: Where) -> int:
    name, *runs = chosen.fill
    claim = next((claim for claim in claims if claim.name == name), None)
    if claim is None:
        names = [known.name for known in claims]
        raise Unusable(
            f"--fill {name} is no claim{did_you_mean(name, names)}; there are {', '.join(names)}", code="unknown-name"
        )
    print(f"written to {fill(claim, runs, ROOT / RUNS[chosen.full], where.kept('papers'))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
