"""An HTML page with the results of one evaluation or several: tables, charts, and some right and wrong answers.

The page is a single file without scripts. Charts are embedded as data URIs.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from hybridtron.evaluate.results import Evaluated, main_rows, shown
from hybridtron.evaluate.sample_log import Line

SAMPLES = 2  # the page shows at most this number of right answers, and of wrong answers, for each task
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; margin: .8rem 0 1.6rem; } caption { text-align: left; font-weight: 600; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd; text-align: right; } th:first-child, td:first-child
{ text-align: left; } img { max-width: 100%; display: block; margin: .8rem 0; } h2 { margin-top: 2.2rem; }
pre { background: #f6f6f6; padding: .5rem .7rem; white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; }
.right { border-left: 4px solid #2a7f62; } .wrong { border-left: 4px solid #b3432b; } .about { color: #555; }
"""


def page(title: str, evaluations: Sequence[Evaluated], pictures: Iterable[tuple[str, bytes]] = ()) -> str:
    """Build the page.

    `pictures` has charts that compare all evaluations, each as a title and the contents of a PNG file.
    """
    parts = [f"<h1>{escape(title)}</h1>", *(image(*entry) for entry in pictures)]
    if len(evaluations) > 1:
        parts.append(side_by_side(evaluations))
    for evaluated in evaluations:
        if len(evaluations) > 1:
            heading = [f"<h2>{escape(evaluated.name)}</h2>"]
        else:
            heading = []
        parts += [*heading, *of_one(evaluated)]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def of_one(evaluated: Evaluated) -> list[str]:
    """Build the section for one checkpoint: the measurement's conditions, tables, charts and answers."""
    about = "; ".join(f"{key}: {_worded(value)}" for key, value in evaluated.about.items())
    parts = [f'<p class="about">{escape(about)}</p>']
    if evaluated.rows:
        cells = [(row["task"], str(row["length"]), row["metric"], shown(row), str(row["n"])) for row in evaluated.rows]
        parts.append(table("Results", ("task", "length", "metric", "value ± standard error", "n"), cells))
    for instrument_table in evaluated.tables.values():
        parts.append(table(instrument_table.title, instrument_table.header, instrument_table.cells))
        parts += [f"<p>{escape(instrument_table.note)}</p>"] if instrument_table.note else []
    if evaluated.left_out:
        parts.append(f"<p>Left out:</p><ul>{''.join(f'<li>{escape(text)}</li>' for text in evaluated.left_out)}</ul>")
    parts += [image(name, file.read_bytes()) for name, file in evaluated.pictures.items()]
    return [*parts, *samples(evaluated.lines)]


def _worded(value: object) -> str:
    """Format the value of a measurement condition, such as the dtype or the kernels."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items())
    return str(value)


def side_by_side(evaluations: Sequence[Evaluated]) -> str:
    """Build a table that compares runs by each task's first metric, with standard errors.

    There is a row for each task and length, and a column for each run.
    """
    tasks_of_runs = [main_rows(evaluated.rows) for evaluated in evaluations]
    tasks_and_lengths = dict.fromkeys(
        (task, row["length"]) for tasks in tasks_of_runs for task, rows in tasks.items() for row in rows
    )
    cells = []
    for task, length in tasks_and_lengths:
        values = [next((shown(r) for r in tasks.get(task, []) if r["length"] == length), "") for tasks in tasks_of_runs]
        cells.append((task, str(length), *values))
    return table("Side by side", ("task", "length", *(evaluated.name for evaluated in evaluations)), cells)


def samples(lines: Sequence[Line]) -> list[str]:
    """Show a few right and a few wrong answers for each task. An answer is right if its first metric is 1."""
    lines_by_task: dict[str, list[Line]] = {}
    for line in lines:
        if "metrics" in line:
            lines_by_task.setdefault(line["task"], []).append(line)
    parts = ["<h3>Samples</h3>"] if lines_by_task else []
    for task, task_lines in lines_by_task.items():
        right = [line for line in task_lines if next(iter(line["metrics"].values())) == 1]
        wrong = [line for line in task_lines if next(iter(line["metrics"].values())) != 1]
        parts.append(f"<h4>{escape(task)}: {len(right)} right, {len(wrong)} not</h4>")
        for kind, chosen in (("right", right), ("wrong", wrong)):
            for line in chosen[:SAMPLES]:
                text = f"[{line['length']}] ... {line['asked']}\nwanted:  {line['wanted']}\nwritten: {line['written']}"
                parts.append(f'<pre class="{kind}">{escape(text)}</pre>')
    return parts


def table(caption: str, header: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    """Build an HTML table."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def image(title: str, png: bytes) -> str:
    """Build an HTML figure with the picture and its title as the caption."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    title = escape(title)
    return f'<figure><figcaption>{title}</figcaption><img alt="{title}" src="{source}"></figure>'
