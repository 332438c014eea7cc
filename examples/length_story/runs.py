"""The runs of the length story: what each one trains, and what is measured on it when it has ended.

Everything is trained by train.py's own `main`. Language: a base, and from its weights one run for each intervention
(recipe=length/...). Copying: one run from zero states, and one with states passed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

INTERVENTIONS = {
    "zero": "length/zero",
    "random": "length/random",
    "fitted": "length/fitted",
    "passing": "length/state_passing",
    "tbtt": "length/tbtt",
}
"""By the name of the run: the recipe that it takes."""

COPYING = ("zero", "passing")
LETTERS = 26  # what is copied; behind them start, separator, filling and end of document
START, SEPARATOR, FILLING, END = range(LETTERS, LETTERS + 4)


@dataclass(frozen=True)
class Sizes:
    """How much is done: the real story, or one of seconds."""

    seeds: tuple[int, ...] = (1, 2, 3)
    interventions: tuple[str, ...] = tuple(INTERVENTIONS)
    base: tuple[str, ...] = ()  # key=value arguments on top of the base's recipe
    post: tuple[str, ...] = ("run.eval_tokens=16K",)  # and on top of every intervention's
    multiples: int = 16  # of the training context, that are read
    rows: int = 1024  # of held-out text that are read, evenly over all of it
    copy_lengths: tuple[int, int] = (4, 8)  # of the strings trained on
    copy_test: tuple[int, ...] = (4, 6, 8, 12, 16, 24)  # lengths that are tested
    copy_examples: int = 60_000
    copying: tuple[str, ...] = (  # key=value arguments of the runs that copy
        "phases.0.tokens=1M",
        "phases.0.global_batch=64",
        "phases.0.micro_batch=64",
        "run.eval_tokens=16K",
    )


STORY = Sizes()
QUICK = Sizes(
    seeds=(1,),
    interventions=("passing",),
    base=("phases.0.tokens=4K", "model.width=32", "data=folder", "model.vocab_size=32", "run.eval_tokens=256"),
    post=("phases.0.tokens=${steps:2}", "run.eval_tokens=256"),
    multiples=4,
    rows=4,
    copy_lengths=(5, 10),
    copy_test=(8, 16),
    copy_examples=400,
    copying=("phases.0.tokens=400", "phases.0.global_batch=4", "phases.0.micro_batch=4", "run.eval_tokens=256"),
)


@dataclass(frozen=True)
class Task:
    """One run: its settings, and its folder."""

    part: str  # language, or copying
    seed: int
    name: str
    folder: Path
    arguments: tuple[str, ...]


def chains(sizes: Sizes, root: Path) -> list[list[Task]]:
    """All runs; those of a chain need one another in their order, and chains nothing of each other."""
    found = []
    for seed in sizes.seeds:
        folder = root / f"seed{seed}"
        shared = (f"run.seed={seed}", "run.eval_every=1000000")
        folder_of_data = (f"data.path={root / 'copying'}",) if "data=folder" in sizes.base else ()
        settings = ("recipe=mamba2_laptop", *sizes.base, *folder_of_data, *shared, f"run.dir={folder / 'base'}")
        chain = [Task("language", seed, "base", folder / "base", settings)]
        for name in sizes.interventions:
            settings = (f"recipe={INTERVENTIONS[name]}", f"run.weights={folder / 'base'}", f"run.dir={folder / name}")
            chain.append(Task("language", seed, name, folder / name, (*settings, *sizes.post, *shared)))
        found.append(chain)
    for seed in sizes.seeds:
        for name in COPYING:
            folder = root / f"seed{seed}" / f"copying_{name}"
            found.append([Task("copying", seed, name, folder, copying_arguments(sizes, root, seed, name, folder))])
    return found


def copying_arguments(sizes: Sizes, root: Path, seed: int, name: str, folder: Path) -> tuple[str, ...]:
    """Training from scratch on one example a row."""
    row = example_length(sizes)
    return (
        "recipe=mamba2_laptop", "data=folder", f"data.path={root / 'copying'}", "data.epochs=null",
        "data.documents=join", "model.vocab_size=32", f"phases.0.seq_len={row}", f"states.mode={name}",
        f"run.dir={folder}", "run.eval_lengths=[1]", "run.eval_every=1000000", f"run.seed={seed}", *sizes.copying,
    )  # fmt: skip


def example_length(sizes: Sizes) -> int:
    """Tokens of an example: start, string, separator, copy and end."""
    return 2 * sizes.copy_lengths[1] + 3


def write_copying_data(sizes: Sizes, root: Path) -> None:
    """Prepared tokens in which every document is an example, filled up to one length, so that each is a row."""
    import numpy as np
    from tokenizers import Tokenizer, models

    from hybridtron.data.prepare.writer import write_folder

    if (root / "copying").exists():
        return
    random, (shortest, longest) = np.random.default_rng(0), sizes.copy_lengths

    def examples(count: int) -> Iterator[np.ndarray]:
        for length in random.integers(shortest, longest + 1, count):
            letters = random.integers(LETTERS, size=length)
            filling = np.full(2 * (longest - length), FILLING)
            yield np.concatenate([[START], letters, [SEPARATOR], letters, filling])  # its END is added

    tokenizer = Tokenizer(models.WordLevel({str(token): token for token in range(END + 1)}, unk_token="0")).to_str()
    splits = {"train": {"copying": examples(sizes.copy_examples)}, "validation": {"copying": examples(200)}}
    origin = {"corpus": "copying", "shortest": shortest, "longest": longest}
    write_folder(root / "copying", splits, tokenizer, END + 1, END, origin)


def share_done(task: Task) -> float:
    """How far a run is, from 0 to 1; what is left after its last step is measuring."""
    from hybridtron.config.load import load_saved
    from hybridtron.config.resolve import last_step

    config, metrics = task.folder / "config.yaml", task.folder / "metrics.jsonl"
    if measured(task) is not None:
        return 1.0
    if not (config.exists() and metrics.exists()):
        return 0.0
    return 0.95 * metrics.read_bytes().count(b"\n") / last_step(load_saved(config))


def carry_out(chain: list[Task], sizes: Sizes) -> None:
    """Train and measure what of a chain is not yet there. What train.py says goes to train.log."""
    import torch

    from hybridtron.cli import train

    torch.set_num_threads(1)
    for task in chain:
        if measured(task) is not None:
            continue
        task.folder.mkdir(parents=True, exist_ok=True)
        with (task.folder / "train.log").open("a") as log, redirect_stdout(log), redirect_stderr(log):
            code = train.main(list(task.arguments))
        if code:
            raise RuntimeError(f"{task.folder} ended with exit code {code}: see {task.folder / 'train.log'}")
        found = long_text_losses(task.folder, sizes) if task.part == "language" else copy_accuracy(task.folder, sizes)
        text = json.dumps({"arguments": task.arguments, "found": found})
        temporary = task.folder / ".measured.json"
        temporary.write_text(text)
        temporary.rename(task.folder / "measured.json")
        print(f"done: seed {task.seed}, {task.part}, {task.name}", file=sys.stderr, flush=True)


def measured(task: Task) -> Any:
    """What was found on a run that has ended, or None. A run of other arguments is no part of this story."""
    path = task.folder / "measured.json"
    if not path.exists():
        return None
    written = json.loads(path.read_text())
    if tuple(written["arguments"]) != task.arguments:
        raise ValueError(f"{task.folder} was trained by other arguments: delete it, or name another folder by --runs")
    return written["found"]


def long_text_losses(run: Path, sizes: Sizes) -> list[float]:
    """Mean loss by position over rows of held-out text, packed end to end and cut anywhere, as training rows are."""
    import torch

    from hybridtron.cli.given import newest_checkpoint
    from hybridtron.data.order.stream import DocumentStream, RowSpans
    from hybridtron.data.rows import gather
    from hybridtron.evaluate.held_out import open_sources, trained_model
    from hybridtron.evaluate.length import position_losses

    model, config, seq_len = trained_model(newest_checkpoint(run), None)
    tokens, sources = seq_len * sizes.multiples + 1, open_sources(config.data, None)
    stores = sources.stores("validation")
    streams = [DocumentStream(store) for store in stores]
    stride = sum(stream.tokens_per_epoch for stream in streams) // sizes.rows  # rows overlap: each position sees all
    rows = [
        RowSpans([(source, span) for span in stream.spans(start, tokens)], 0)
        for source, stream in enumerate(streams)
        for start in range(0, stream.tokens_per_epoch - tokens, stride)
    ]
    tokens_BT = torch.from_numpy(gather(stores, rows, sources.dtype, joined=True).tokens_BT.astype("int64"))
    return position_losses(model, tokens_BT, 2 * seq_len).tolist()


def copy_accuracy(run: Path, sizes: Sizes) -> dict[str, float]:
    """By length of the string: the share of its copy's letters that are the likeliest, given the right ones before."""
    import torch

    from hybridtron.cli.given import newest_checkpoint
    from hybridtron.data.batch import SeqInfo
    from hybridtron.evaluate.held_out import trained_model

    model, _, _ = trained_model(newest_checkpoint(run), None)
    generator, found = torch.Generator().manual_seed(1), {}
    for length in sizes.copy_test:
        letters_BL: Tensor = torch.randint(LETTERS, (128, length), generator=generator)
        start_B1, separator_B1 = torch.full((128, 1), START), torch.full((128, 1), SEPARATOR)
        tokens_BT = torch.cat([start_B1, letters_BL, separator_B1, letters_BL[:, :-1]], dim=1)
        with torch.no_grad():
            output = model(tokens_BT, None, SeqInfo.stream(len(tokens_BT), tokens_BT.shape[1])).output  # tokens first
        likeliest_BL = output[-length:].argmax(-1).T
        found[str(length)] = (likeliest_BL == letters_BL).double().mean().item()
    return found
