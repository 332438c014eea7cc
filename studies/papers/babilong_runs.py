"""Training runs on BABILong (babilong.yaml) and their evaluation: bAbI's qa1, tuned and few-shot, in texts of growing
length.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from hybridtron.sweep.grid import SweepRun
from studies.results import Part
from studies.study import answers, selected

HERE = Path(__file__).parent
CONTEXT = 256
END = "<|endoftext|>"
TASK = "babilong_qa1"
TUNED = "-babi"  # suffix of the names of tuned runs


@dataclass(frozen=True)
class Sizes:
    """Sizes for the real study, or for a quick one that takes a minute."""

    text: tuple[str, ...] = ()  # settings of the runs on text
    tuning: tuple[str, ...] = ()
    vocab_size: int = 1024
    training: int = 40_000  # stories
    lengths: tuple[int, ...] = (256, 512, 1024, 2048)  # evaluated lengths of a tuned model
    few_shot: tuple[int, ...] = (1024, 2048)  # evaluated lengths few-shot: the prompt alone has some 700 tokens
    asked: int = 200


STUDY = Sizes()
QUICK = Sizes(
    text=("phases.0.tokens=8K", "run.eval_tokens=2K"),
    tuning=("phases.0.tokens=8K", "run.eval_tokens=2K"),
    training=200,
    lengths=(256, 1024),
    few_shot=(1024,),
    asked=4,
)


def sizes_of(quick: bool) -> Sizes:
    """Return the sizes of the real study, or the quick ones."""
    return QUICK if quick else STUDY


def part_of(sizes: Sizes, runs: Path, data: Path) -> Part:
    """Return the sweep with its data paths and its measurement.

    `data` is the folder with the text and the stories.
    """

    def more(run: SweepRun) -> tuple[str, ...]:
        if run.variant.endswith(TUNED):
            return (*sizes.tuning, f"data.path={data / 'stories'}")
        return (*sizes.text, f"data.path={data / 'text'}")

    sweep, folder = selected(HERE / "babilong.yaml", runs, more)
    asked = {name: getattr(sizes, name) for name in ("vocab_size", "training", "lengths", "few_shot", "asked")}
    return Part(sweep, folder, lambda run, path: found_of(path, sizes, run.variant.endswith(TUNED)), asked)


def write_stories(sizes: Sizes, data: Path) -> None:
    """Write the text with its tokenizer, and a prepared folder of stories whose answers alone are learned.

    Folders that exist are kept.
    """
    from hybridtron.cli.data_prepare import main as prepare
    from hybridtron.cli.tasks import write_main
    from hybridtron.data.prepare.embedded import prepare_embedded

    text = data / "text"
    samples = data / "samples"
    prepare_embedded(text, sizes.vocab_size)
    with redirect_stdout(StringIO()):
        if not samples.exists():
            write_main([
                TASK, "style=tuned", "essay=none", "--length", str(CONTEXT), "--output", str(samples), "--training",
                str(sizes.training), "--evaluation", "0", "--tokenizer", str(text),
            ])  # fmt: skip
        if not (data / "stories").exists():
            prepare([
                "--input", str(samples / "training"), "--learn", "completion", "--validation", "2%", "--source", "babi",
                "--tokenizer", str(text), "--eos", END, "--output", str(data / "stories"),
            ])  # fmt: skip


def found_of(run: Path, sizes: Sizes, tuned: bool) -> list[dict[str, Any]]:
    """Measure the share of right answers by length.

    A tuned model is also asked without any text around the facts, which counts as length 0.
    """
    from hybridtron.cli.arguments import newest_checkpoint

    wanted: list[dict[str, Any]] = [{"lengths": [*sizes.few_shot], "options": {"style": "few_shot"}}]
    if tuned:
        wanted = [
            {"lengths": [CONTEXT], "options": {"style": "tuned", "essay": "none"}},
            {"lengths": [*sizes.lengths], "options": {"style": "tuned"}},
        ]
    rows = []
    for number, request in enumerate(wanted):
        task = {"task": TASK, "samples": sizes.asked, **request}
        results = answers(newest_checkpoint(run), {"tasks": [task]}, run / f"evaluation/{number}", batch=44)
        kept = ("value", "standard_error", "n")
        rows += [
            {"length": 0 if "essay" in request["options"] else row["length"], **{key: row[key] for key in kept}}
            for row in results
            if row["metric"] == "accuracy"
        ]
    return rows
