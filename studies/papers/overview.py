"""All papers on one page: in Markdown, and as self-contained HTML with the pictures inside."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridtron.proving.measuring import grid
from studies.judge import Said, Verdict, power_rows
from studies.judge import notes as judged_by
from studies.papers.claim import Claim, Kept, Paper, Table, judged
from studies.papers.on_gpu import column
from studies.papers.page import rules

COLORS = {
    Said.AGREES: "#2e7d32",
    Said.NOT: "#c62828",
    Said.UNDECIDED: "#b26a00",
    Said.ONE_SEED: "#b26a00",
    Said.FEW_SEEDS: "#b26a00",
    Said.NO_FAILURE: "#546e7a",
    Said.OTHER: "#546e7a",
    Said.UNSEEN: "#546e7a",
    Said.WAITS: "#9e9e9e",
}
INTRODUCTION = (
    "Claims of four papers, asked of tiny models that were trained on two CPU cores. One judge decides all of them; "
    "each rule says what was known of the results when it was written. A claim about models that fail says so if ours "
    "do not, and one that models of this size can say nothing about says at what size it could be seen."
)
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; vertical-align: top; padding: .4rem .6rem }
tr + tr { border-top: 1px solid #ddd } b { white-space: nowrap } img { max-width: 100% } small { color: #555 }
.claims > tbody > tr > td:first-child { width: 7rem } .claims > tbody > tr > td:last-child { width: 8rem }
summary { color: #1565c0; cursor: pointer; font-size: 13px }
details td, details th { padding: .1rem .5rem; font-size: 13px }
"""


def counts(papers: Sequence[Paper], kept: Kept) -> list[tuple[str, ...]]:
    """Return a row for each paper: its title, and the number of its claims with each outcome."""
    rows: list[tuple[str, ...]] = []
    for paper in papers:
        said = [judged(claim, kept).said for claim in paper.claims]
        rows.append((paper.title, *(str(said.count(outcome)) for outcome in Said)))
    return rows


def markdown(papers: Sequence[Paper], kept: Kept, spent: Table) -> str:
    """Return the overview in Markdown, which stands beside the papers' pages."""
    lines = ["# Four papers at the size of a laptop", ""]
    lines += ["What `make papers` found of their claims, each on tiny models, beside the paper's own numbers.", ""]
    lines += grid(("paper", *(outcome.value for outcome in Said)), counts(papers, kept))
    lines += ["", *(f"- {note}" for note in header(papers)), "", *grid(*power_rows())]
    lines += ["", "Minutes of one thread, of which two run side by side:", "", *grid(spent.header, spent.rows)]
    for paper in papers:
        lines += ["", f"## {paper.title}", "", f"[Tables, pictures and commands]({paper.name}.md)", ""]
        rows = [(claim.where, claim.says, judged(claim, kept).said.value) for claim in paper.claims]
        lines += grid(("in the paper", "what it says", "ours"), rows)
    return "\n".join(lines) + "\n"


def header(papers: Sequence[Paper]) -> list[str]:
    """Return notes about the judge and the rules."""
    return [*judged_by(), rules(claim for paper in papers for claim in paper.claims)]


def page(papers: Sequence[Paper], kept: Kept, spent: Table, *, results: Path, pictures: Path) -> str:
    """Return the overview as HTML that needs no other file."""
    titles = ("paper", *(outcome.value for outcome in Said))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Four papers at the size of a laptop</title>",
        f"<style>{STYLE}</style><h1>Four papers at the size of a laptop</h1><p>{INTRODUCTION}</p>",
        _table(Table(titles, tuple(counts(papers, kept)))),
        f"<ul>{''.join(f'<li>{html.escape(note)}' for note in header(papers))}</ul>",
        f"<p>Minutes of one thread, of which two run side by side:</p>{_table(spent)}",
    ]
    for paper in papers:
        parts.append(f"<h2>{html.escape(paper.title)}</h2><table class=claims>")
        parts.append("<tr><th>in the paper<th>what it says, and what we found<th>ours</tr>")
        parts += [
            _row(paper, claim, judged(claim, kept), kept=kept, results=results, pictures=pictures)
            for claim in paper.claims
        ]
        parts.append("</table>")
    return "\n".join(parts) + "</html>\n"


def _row(paper: Paper, claim: Claim, verdict: Verdict, *, kept: Kept, results: Path, pictures: Path) -> str:
    said = f"<b style='color:{COLORS[verdict.said]}'>{html.escape(verdict.said.value)}</b>"
    about = f"{html.escape(claim.says)}<br><small>{html.escape(verdict.numbers)}</small>"
    more = "".join([*_picture(paper, claim, pictures), *_details(paper, claim, kept, results)])
    return f"<tr><td>{html.escape(claim.where)}<td>{about}{more}<td>{said}</tr>"


def _details(paper: Paper, claim: Claim, kept: Kept, results: Path) -> Iterator[str]:
    """Yield the part that opens at a click: the rule, the tables side by side, and the command."""
    yield f"<details><summary>rule, tables and command</summary><p>Agreement: {html.escape(claim.agreement)}."
    if claim.needs or claim.timed:
        yield f" This rule: {html.escape(claim.written.value)}."
    yield "</p>"
    for title, table in (
        ("The paper", claim.paper),
        ("Ours", claim.ours(kept)),
        ("On a GPU", column(results, claim)),
    ):
        if table is not None and table.rows:
            yield f"<p>{title}:</p>{_table(table)}"
    if claim.needs or claim.timed:
        yield f"<p><code>python -m studies.papers {paper.name} --only {claim.name}</code></p>"
    yield "</details>"


def _table(table: Table) -> str:
    head, *rows = (
        "".join(f"<{tag}>{html.escape(cell)}" for cell in cells)
        for tag, cells in (("th", table.header), *(("td", row) for row in table.rows))
    )
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _picture(paper: Paper, claim: Claim, pictures: Path) -> Iterator[str]:
    path = pictures / f"{paper.name}_{claim.name}.png"
    if path.exists():
        data = base64.b64encode(path.read_bytes()).decode()
        yield f"<br><img alt='{html.escape(claim.name)}' src='data:image/png;base64,{data}'>"
