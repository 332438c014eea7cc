"""What the length story trains (language.yaml, copying.yaml) and measures, and the strings that are copied."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtron.sweep.carry_out import Folder
from hybridtron.sweep.grid import SEED, Sweep, SweepRun, read
from hybridtron.train.records import read_record, write_whole

if TYPE_CHECKING:
    from torch import Tensor

HERE = Path(__file__).parent
LETTERS = 26  # what is copied; behind them start, separator, filling and end of document
START, SEPARATOR, FILLING, END = range(LETTERS, LETTERS + 4)


@dataclass(frozen=True)
class Sizes:
    """How much is done: the real story, or one of seconds."""

    seeds: tuple[str, ...] = ("1", "2", "3")
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # all, or these with further settings
    multiples: int = 16  # of the training context, that are read
    rows: int = 1024  # of held-out text that are read, evenly over all of it
    copy_lengths: tuple[int, int] = (4, 8)  # of the strings trained on
    copy_test: tuple[int, ...] = (4, 6, 8, 12, 16, 24)  # lengths that are tested
    copy_examples: int = 60_000


STORY = Sizes()
QUICK_COPYING = ("phases.0.tokens=460", "phases.0.seq_len=23", "phases.0.global_batch=4", "phases.0.micro_batch=4")
QUICK_COPYING += ("run.eval_tokens=256",)
QUICK = Sizes(
    seeds=("1",),
    variants={
        "language/base": (
            "phases.0.tokens=4K", "model.width=32", "data=folder", "model.vocab_size=32", "run.eval_tokens=256",
        ),
        "language/passing": ("phases.0.tokens=${steps:2}", "run.eval_tokens=256"),
        "copying/zero": QUICK_COPYING,
        "copying/passing": QUICK_COPYING,
    },
    multiples=4,
    rows=4,
    copy_lengths=(5, 10),
    copy_test=(8, 16),
    copy_examples=400,
)  # fmt: skip


def sweep_of(part: str, sizes: Sizes, root: Path) -> tuple[Sweep, Folder]:
    """The runs of `language` or of `copying`, at these sizes, and their folder."""
    sweep, chosen = read(HERE / f"{part}.yaml"), []
    for run in sweep.runs:
        more = sizes.variants.get(f"{part}/{run.variant}", None if sizes.variants else ())
        if more is not None and run.values[SEED] in sizes.seeds:
            settings = (*run.settings, *more)
            data = (f"data.path={root / 'strings'}",) if "data=folder" in settings else ()
            chosen.append(replace(run, settings=(*settings, *data)))
    return replace(sweep, runs=tuple(chosen)), Folder(root / part)


def measured(folder: Folder, run: SweepRun, measure: Callable[[Path], Any]) -> Any:
    """What is found on a run that has finished; it is measured once."""
    path = folder.of(run.name) / "measured.json"
    if not (found := read_record(path)):
        found = {"found": measure(folder.of(run.name))}
        write_whole(path, json.dumps(found))
    return found["found"]


def write_copying_data(sizes: Sizes, root: Path) -> None:
    """Prepared tokens in which every document is an example, filled up to one length, so that each is a row."""
    import numpy as np
    from tokenizers import Tokenizer, models

    from hybridtron.data.prepare.writer import write_folder

    if (root / "strings").exists():
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
    write_folder(root / "strings", splits, tokenizer, END + 1, END, origin)


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
