"""The page of a paper: for each claim the paper's table, ours, the picture, the verdict, and how to test it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hybridtron.proving.measuring import grid
from studies.judge import Said, Verdict
from studies.judge import notes as judged_by
from studies.papers.claim import Claim, Kept, Paper, Written, judged, minutes
from studies.papers.on_gpu import column, hours
from studies.results import commit

MARKS = {said: f"**{said.value}**" for said in Said} | {Said.WAITS: f"*{Said.WAITS.value}*"}
EXPLAINED = (Said.NOT, Said.ONE_SEED, Said.FEW_SEEDS, Said.NO_FAILURE, Said.OTHER)


def page(paper: Paper, kept: Kept, results: Path, pictures: Path | None) -> str:
    """Return the page in Markdown.

    The pictures of claims with complete results are drawn into the folder `pictures`, unless that is None.
    """
    verdicts = [(claim, judged(claim, kept)) for claim in paper.claims]
    lines = [f"# {paper.title}", "", f"`python -m studies.papers {paper.name}`", ""]
    lines += [f"- {note}" for note in notes(kept, verdicts)]
    lines += ["", *summary(verdicts)]
    for claim, verdict in verdicts:
        lines += ["", *section(paper, claim, verdict, kept=kept, results=results, pictures=pictures)]
    return "\n".join(lines) + "\n"


def notes(kept: Kept, verdicts: Sequence[tuple[Claim, Verdict]]) -> Iterator[str]:
    used = {id(result): (run, result) for claim, _ in verdicts for run, result in kept.of(claim.needs)}
    counted = [result.commit for _, result in used.values()]
    yield "models of a laptop's size beside the paper's numbers; ± is the standard deviation over seeds"
    yield from judged_by()
    yield rules(claim for claim, _ in verdicts)
    yield f"{len(used)} runs, {minutes(used.values()):.0f} minutes of steps on one thread each"
    if counted:
        listed = ", ".join(f"{name} ({counted.count(name)})" for name in dict.fromkeys(counted))
        yield f"results by commits: {listed}; page written at {commit()}"


def rules(claims: Iterable[Claim]) -> str:
    """Return the note that counts rules by what was known when they were written."""
    written = [claim.written for claim in claims if claim.needs or claim.timed]
    counted = (f"{kind.value}: {written.count(kind)}" for kind in Written if kind in written)
    return f"rules: {len(written)}; {'; '.join(counted)}"


def summary(verdicts: Sequence[tuple[Claim, Verdict]]) -> list[str]:
    rows = [
        (f"[{claim.name}](#{claim.name})", claim.where, claim.says, MARKS[verdict.said]) for claim, verdict in verdicts
    ]
    return grid(("claim", "in the paper", "what it says", "ours"), rows)


def section(
    paper: Paper, claim: Claim, verdict: Verdict, *, kept: Kept, results: Path, pictures: Path | None
) -> Iterator[str]:
    yield from (f"## {claim.name}", "", f"{claim.where}: {claim.says}", "")
    yield f"- agreement: {claim.agreement}"
    if claim.needs or claim.timed:
        yield f"- this rule: {claim.written.value}"
    yield f"- {MARKS[verdict.said]}: {verdict.numbers}"
    if claim.seen_at:
        yield f"- where it could be seen: {claim.seen_at}"
    if verdict.said is Said.NOT or (claim.reason is not None and verdict.said in EXPLAINED):
        yield f"- a further experiment: {further(claim, kept)}"
    of_claim = kept.of(claim.needs)
    if of_claim or claim.timed in kept.timed:
        spent = minutes(of_claim)
        if claim.timed:
            spent = kept.timed[claim.timed]["minutes"]
        yield f"- `python -m studies.papers {paper.name} --only {claim.name}`: {spent:.0f} minutes"
    elif claim.needs or claim.timed:
        yield f"- `python -m studies.papers {paper.name} --only {claim.name}`: not run yet"
    if not claim.paper.rows:
        yield "- the paper has no table of this: it draws a figure, or says it in words"
    tables = (("The paper:", claim.paper), ("Ours:", claim.ours(kept)), ("On a GPU:", column(results, claim)))
    for title, table in tables:
        if table is not None and table.rows:
            yield from ("", title, "", *grid(table.header, table.rows))
    if claim.draw is not None and pictures is not None and not kept.missing(claim.needs):
        name = f"{paper.name}_{claim.name}.png"
        claim.draw(kept, pictures / name)
        yield from ("", f"![{claim.name}]({name})")
    yield from on_gpu(paper, claim)


def further(claim: Claim, kept: Kept) -> str:
    if claim.reason is None:
        return "none was made yet"
    if missing := kept.missing(claim.further):
        return f"waits for {', '.join(missing)}"
    return claim.reason(kept)


MODEL = "[modelled](../../../docs/rehearse.md)"


def on_gpu(paper: Paper, claim: Claim) -> Iterator[str]:
    """Yield the lines about the test at the paper's size, with the expected hours."""
    command = f"python -m studies.papers {paper.name} --only {claim.name} --submit > {claim.name}.sh"
    if claim.timed:
        of = f" by {', '.join(claim.timed_models)}, with weights as they start" if claim.timed_models else ""
        yield from ("", f"On one H100, in less than an hour{of} (nothing was measured):", "", "```sh", command, "```")
    if claim.on_gpu is None:
        return
    expected = list(hours(claim.on_gpu).values())
    several = f", {len(expected)} runs, the longest {_time(max(expected))}" if len(expected) > 1 else ""
    yield from ("", f"On one H100, {_time(sum(expected))} expected{several} ({MODEL}):", "")
    yield from (
        "```sh",
        command,
        "```",
        "",
        "The script is for a SLURM cluster: from the download to this claim's table.",
    )


def _time(hours: float) -> str:
    if hours > 1:
        return f"{hours:.1f} hours"
    return f"{60 * hours:.0f} minutes"
