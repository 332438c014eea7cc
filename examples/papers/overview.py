"""All papers on one page: in Markdown for docs/, and as HTML of its own with the pictures inside."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.papers.claim import Claim, Kept, Paper, Said, Verdict, judged
from hybridtron.proving.measuring import grid

COLORS = {
    Said.AGREES: "#2e7d32",
    Said.NOT: "#c62828",
    Said.UNDECIDED: "#b26a00",
    Said.UNSEEN: "#546e7a",
    Said.WAITS: "#9e9e9e",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; vertical-align: top; padding: .4rem .6rem }
tr + tr { border-top: 1px solid #ddd } b { white-space: nowrap } img { max-width: 100% } small { color: #555 }
"""


def counts(papers: Sequence[Paper], kept: Kept) -> list[tuple[str, ...]]:
    """A row for each paper: how many of its claims came to what."""
    rows: list[tuple[str, ...]] = []
    for paper in papers:
        said = [judged(claim, kept).said for claim in paper.claims]
        rows.append((paper.title, *(str(said.count(one)) for one in Said)))
    return rows


def markdown(papers: Sequence[Paper], kept: Kept, pages: str) -> str:
    """`pages` is where the papers' own pages are, as a link from this one."""
    lines = ["# Four papers at the size of a laptop", ""]
    lines += ["What `make papers` found of their claims, each on tiny models, beside the paper's own numbers.", ""]
    lines += grid(("paper", *(one.value for one in Said)), counts(papers, kept))
    for paper in papers:
        lines += ["", f"## {paper.title}", "", f"[Tables, pictures and commands]({pages}/{paper.name}.md)", ""]
        rows = [(claim.where, claim.says, judged(claim, kept).said.value) for claim in paper.claims]
        lines += grid(("in the paper", "what it says", "ours"), rows)
    return "\n".join(lines) + "\n"


def page(papers: Sequence[Paper], kept: Kept, pictures: Path) -> str:
    """HTML that needs nothing else."""
    header = "".join(f"<th>{html.escape(text)}</th>" for text in ("paper", *(one.value for one in Said)))
    rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in counts(papers, kept))
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Four papers at the size of a laptop</title>",
        f"<style>{STYLE}</style><h1>Four papers at the size of a laptop</h1>",
        f"<table><tr>{header}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>",
    ]
    for paper in papers:
        parts.append(f"<h2>{html.escape(paper.title)}</h2><table>")
        parts += [_row(paper, claim, judged(claim, kept), pictures) for claim in paper.claims]
        parts.append("</table>")
    return "\n".join(parts) + "</html>\n"


def _row(paper: Paper, claim: Claim, verdict: Verdict, pictures: Path) -> str:
    said = f"<b style='color:{COLORS[verdict.said]}'>{html.escape(verdict.said.value)}</b>"
    about = f"{html.escape(claim.says)}<br><small>{html.escape(verdict.numbers)}</small>"
    return f"<tr><td>{html.escape(claim.where)}<td>{about}{''.join(_picture(paper, claim, pictures))}<td>{said}</tr>"


def _picture(paper: Paper, claim: Claim, pictures: Path) -> Iterator[str]:
    path = pictures / f"{paper.name}_{claim.name}.png"
    if path.exists():
        data = base64.b64encode(path.read_bytes()).decode()
        yield f"<br><img alt='{html.escape(claim.name)}' src='data:image/png;base64,{data}'>"
