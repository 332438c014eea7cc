"""Convert text or tokens to a folder of prepared tokens, which training reads.

    hybridtron data prepare --input 'SlimPajama/train/chunk*/*.jsonl.zst' --tokenizer DIR --output data/slimpajama
    hybridtron data prepare --input notes/ more.parquet --tokenizer DIR --output data/notes --workers 8
    hybridtron data prepare --input chats.jsonl --learn messages --tokenizer DIR --output data/chats
    hybridtron data prepare --from hf:OWNER/NAME --tokenizer DIR --output data/name
    hybridtron data prepare --input embedded --vocab-size 2048 --output data/embedded-2048
    hybridtron data prepare --input embedded --packages torch sympy --vocab-size 8192 --output data/packages

--help lists the input formats. An interrupted command leaves the folder OUTPUT.partial. The same command then continues
from this folder; only the number of workers may differ. A command that failed before its first input file was finished
has nothing to continue, so the next command may have other options. --from downloads to OUTPUT.downloads, and keeps the
files there.

Exit codes: 0 the folder is complete, 1 the command was interrupted, or a disk or a process failed, 2 arguments or
inputs must be corrected, or a disk is full.
"""

from __future__ import annotations

import argparse
import glob
import math
import os
import re
import sys
from typing import TYPE_CHECKING

from hybridtron.file_errors import FULL, in_words, is_of_the_user
from hybridtron.limits import path_of
from hybridtron.problems import CommandParser

if TYPE_CHECKING:
    from pathlib import Path

    from hybridtron.data.folder import TokenFolder
    from hybridtron.data.manifest import SourceSplit
    from hybridtron.data.prepare.input_files import FoundInputs

EMBEDDED = "embedded"
HELD_OUT = 5  # if the validation split is empty, the warning suggests a share that holds out about 5 documents
EMBEDDED_TAKES = {"input", "output", "vocab_size", "pre_tokenizer", "packages", "workers"}
LEARN = ("spans", "completion", "messages", "mask")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line. Wrong arguments end the process with exit code 2."""
    from hybridtron.data.pre_tokenizers import DEFAULT, PATTERNS
    from hybridtron.data.prepare.formats import known_formats

    parser = CommandParser(
        prog="hybridtron data prepare",
        description="Convert text or tokens to a folder of prepared tokens.",
        epilog=known_formats(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    sources = parser.add_mutually_exclusive_group(required=True)
    sources.add_argument("--input", nargs="+", metavar="PATH", help="files, folders, patterns with *, or: embedded")
    published = "files to download: https://..., or hf:OWNER/NAME[@REVISION][:PATTERN]"
    sources.add_argument("--from", nargs="+", dest="published", metavar="SOURCE", help=published)
    add("--output", type=path_of, required=True, metavar="DIR", help="the new folder")
    add("--tokenizer", type=path_of, metavar="DIR", help="a folder on this machine with tokenizer.json, or that file")
    add("--workers", type=int, default=1, metavar="N", help="processes of one thread each, at least 1 (default: 1)")
    add("--source", metavar="NAME", help="source of documents without a source (default: text)")
    add(
        "--validation",
        type=share,
        metavar="SHARE",
        help="held-out documents (default: 0.5%%); 100%%: all, for evaluation only",
    )
    add("--shard-size", type=size, metavar="BYTES", help="size of a shard before compression (default: 64MB)")
    add("--compression", metavar="KIND", help="zstd:LEVEL or none (default: none)")
    add("--learn", metavar="FORM", choices=LEARN, help="key that selects tokens with loss (default: all tokens)")
    add("--min-tokens", type=int, metavar="N", help="leave out documents of fewer tokens, eos included")
    add("--max-tokens", type=int, metavar="N", help="leave out documents of more tokens")
    add("--text-key", metavar="KEY", help="the key or column that holds the text (default: text)")
    add("--eos", metavar="TOKEN", help="end of a document (default: the tokenizer's eos, or a known name)")
    add("--separator", metavar="TOKEN", help="document boundary in packed tokens (default: bos, else eos)")
    add("--max-bad", type=share, metavar="SHARE", help="bad lines allowed in a file, rounded up (default: 0.1%%)")
    add("--vocab-size", type=int, metavar="N", help="for --input embedded: size of the vocabulary")
    splits = f"for --input embedded: how text is split before it is merged (default: {DEFAULT})"
    add("--pre-tokenizer", metavar="NAME", choices=tuple(PATTERNS), help=f"{splits}: {', '.join(PATTERNS)}")
    add("--packages", nargs="+", default=[], metavar="NAME", help="for --input embedded: packages to add")
    chosen = parser.parse_args(arguments)
    _check(parser, chosen)
    return chosen


def _check(parser: CommandParser, chosen: argparse.Namespace) -> None:
    """End the process with exit code 2 if an option is missing or out of range, or if options contradict each other."""
    if chosen.workers < 1:
        parser.refuse("--workers", "out-of-range", f"--workers is {chosen.workers}, must be at least 1")
    if chosen.input is not None and EMBEDDED in chosen.input:  # name a folder called `embedded` as ./embedded
        unsupported = {key for key, value in vars(chosen).items() if value is not None} - EMBEDDED_TAKES
        if len(chosen.input) > 1 or unsupported:
            named = ", ".join(f"--{key.replace('_', '-')}" for key in sorted(unsupported)) or "other inputs"
            parser.refuse(
                "--input",
                "conflict",
                "--input embedded allows only --output, --vocab-size, --pre-tokenizer, --packages and --workers: "
                f"leave out {named}",
            )
        if chosen.vocab_size is None:
            parser.refuse(
                "--vocab-size",
                "missing",
                "--input embedded needs --vocab-size N, equal to model.vocab_size: 2048 for a small model",
            )
    elif chosen.vocab_size is not None:
        parser.refuse(
            "--vocab-size",
            "conflict",
            "--vocab-size is only for --input embedded: leave --vocab-size out; the tokenizer sets the size",
        )
    elif chosen.pre_tokenizer is not None:
        parser.refuse(
            "--pre-tokenizer",
            "conflict",
            "--pre-tokenizer is only for --input embedded: leave --pre-tokenizer out; the tokenizer sets it",
        )
    elif chosen.packages:
        parser.refuse(
            "--packages",
            "conflict",
            "--packages is only for --input embedded: name the packages' folders as --input, with a --tokenizer",
        )
    elif chosen.tokenizer is None:
        parser.refuse(
            "--tokenizer", "missing", "--tokenizer is needed: name a folder on this machine with tokenizer.json"
        )


def share(text: str) -> float:
    """Parse a share such as `0.5%` or `0.005` to a fraction, for argparse."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*", text)
    if match:
        value = float(match[1]) / (100 if match[2] else 1)
    else:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share such as 0.5% or 0.005")
    return value


def size(text: str) -> int:
    """Parse a size such as `64MB` to bytes, for argparse."""
    from hybridtron.config.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main(arguments: list[str]) -> int:
    """Prepare the folder and print its contents. Returns the exit code."""
    chosen = parse(arguments)
    from hybridtron.data.folder import FolderError
    from hybridtron.data.prepare.documents import PrepareError
    from hybridtron.data.workers import WorkerEnded
    from hybridtron.storage.published import DownloadError

    try:
        if chosen.vocab_size is not None:
            folder = prepare_embedded(chosen)
        else:
            folder = prepare_inputs(chosen)
    except (DownloadError, FolderError, PrepareError, WorkerEnded) as error:
        print(error, file=sys.stderr)
        if isinstance(error, WorkerEnded):
            return 1
        return 2
    except OSError as error:
        if error.errno in FULL:
            note = f"; {chosen.output}.partial is kept: repeat the command to continue"
        else:
            note = ""
        print(f"{in_words(error, chosen.output)}{note}", file=sys.stderr)
        return 2 if is_of_the_user(error) else 1
    except KeyboardInterrupt:
        if chosen.vocab_size is not None:
            note = ""
        else:
            note = f"; {chosen.output}.partial is kept: repeat the command to continue"
        print(f"interrupted{note}", file=sys.stderr)
        return 1
    show(folder)
    return 0


def prepare_inputs(chosen: argparse.Namespace) -> TokenFolder:
    """Prepare the inputs. Faults of inputs and tokenizers are reported before slow modules are imported."""
    from hybridtron.data.prepare.documents import clean_name
    from hybridtron.data.prepare.input_files import find
    from hybridtron.data.prepare.vocabulary import open_vocabulary

    if chosen.published is not None:
        found_inputs = find(downloaded(chosen.published, chosen.output))
    else:
        found_inputs = find(chosen.input)
    report_skipped(found_inputs)
    vocabulary = open_vocabulary(chosen.tokenizer, chosen.eos, chosen.separator)
    from hybridtron.data.prepare.parts import FolderSettings
    from hybridtron.data.prepare.prepare_folder import prepare

    settings = FolderSettings(
        validation=0.005 if chosen.validation is None else chosen.validation,
        shard_size=chosen.shard_size or size("64MB"),
        compression=None if chosen.compression in (None, "none") else chosen.compression,
        text_key=chosen.text_key or "text",
        source=clean_name(chosen.source or "text"),
        learn=chosen.learn,
        min_tokens=chosen.min_tokens,
        max_tokens=chosen.max_tokens,
    )
    max_bad = 0.001 if chosen.max_bad is None else chosen.max_bad
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # each worker process uses one thread
    return prepare(found_inputs.inputs, chosen.output, vocabulary, settings, chosen.workers, max_bad)


def downloaded(sources: list[str], output: Path) -> list[str]:
    """Download published files. Returns the paths of those that are inputs, escaped as patterns."""
    from hybridtron.cli.downloads import download_folder, with_progress
    from hybridtron.data.prepare.documents import ArgumentError
    from hybridtron.data.prepare.formats import FORMATS
    from hybridtron.storage.published import DATA_SETS, is_published

    # a repository's text files are documentation, unless a pattern names them
    data = [suffix for name, input_format in FORMATS.items() if name != "text" for suffix in input_format.suffixes]
    inputs = (*data, *FORMATS["text"].suffixes)
    paths = []
    for source in sources:
        if not is_published(source):
            raise ArgumentError(
                f"--from {source} is neither https://... nor hf:OWNER/NAME: use --input for files on this machine",
                code="malformed",
            )
        paths += with_progress(source, download_folder(output), DATA_SETS, [*data, ".idx"])
    return [glob.escape(str(path)) for path in paths if path.name.lower().endswith(inputs)]


def report_skipped(inputs: FoundInputs) -> None:
    """Print the skipped files to stderr, with reasons and fixes."""
    from hybridtron.data.prepare.documents import listed

    if inputs.unknown:
        count = f"{len(inputs.unknown)} files without a known format (--help lists the formats)"
        print(f"skipped in folders: {count}: {listed(inputs.unknown)}", file=sys.stderr)
    if inputs.texts:
        count = f"{len(inputs.texts)} text files next to data in other formats, since they may be documentation"
        cure = "to read these files, name the files or a pattern as further --input"
        print(f"skipped in folders: {count} ({cure}): {listed(inputs.texts)}", file=sys.stderr)
    if inputs.repeated:
        twice = [f"{name} (the same as {first})" for name, first in inputs.repeated]
        print(f"skipped, since another input is the same file or folder: {listed(twice)}", file=sys.stderr)


def prepare_embedded(chosen: argparse.Namespace) -> TokenFolder:
    """Prepare the corpus `embedded`, which ships with Python, or open the output folder if it exists.

    Training with `data.source=embedded` prepares the same tokens. Raises ArgumentError if an existing output folder was
    made from another input or with another vocabulary size, or lacks one of the packages.
    """
    from hybridtron.data import pre_tokenizers
    from hybridtron.data.prepare import embedded
    from hybridtron.data.prepare.documents import ArgumentError

    pre_tokenizer = chosen.pre_tokenizer or pre_tokenizers.DEFAULT
    folder = embedded.prepare_embedded(chosen.output, chosen.vocab_size, chosen.packages, chosen.workers, pre_tokenizer)
    made_for = folder.manifest.origin.get("asked_vocab_size")
    if made_for is None:
        raise ArgumentError(
            f"{chosen.output} exists, made from another input than embedded: use another --output", code="exists"
        )
    if made_for != chosen.vocab_size:
        raise ArgumentError(
            f"{chosen.output} exists, made with --vocab-size {made_for}: use another --output", code="exists"
        )
    splits_by = pre_tokenizers.known_name(folder.tokenizer_file.read_bytes())
    if splits_by != pre_tokenizer:
        raise ArgumentError(
            f"{chosen.output} exists, made with --pre-tokenizer {splits_by}: use another --output", code="exists"
        )
    if missing := [package for package in chosen.packages if package not in folder.manifest.origin]:
        raise ArgumentError(
            f"{chosen.output} exists, made without the packages {', '.join(missing)}: use another --output",
            code="exists",
        )
    return folder


def _learned_cells(source: SourceSplit) -> list[str]:
    """Return a cell with the fraction of learned tokens, or no cell for a source without masks."""
    if source.learned is None:
        return []
    return [f"{source.learned / source.tokens:.1%}"]


def show(folder: TokenFolder) -> None:
    """Print tokens and documents by source and split, counts of omitted documents, and warnings about empty splits."""
    from rich.console import Console
    from rich.table import Table

    from hybridtron.data.pre_tokenizers import known_name

    manifest = folder.manifest
    console = Console(highlight=False, soft_wrap=True)
    table = Table("source", "split", box=None)
    masked = any(source.learned is not None for sources in manifest.splits.values() for source in sources.values())
    for title in ("tokens", "documents", "shards", *(["learned"] if masked else [])):
        table.add_column(title, justify="right")
    for split, sources in manifest.splits.items():
        for name, source in sources.items():
            counts = (source.tokens, source.documents, len(source.shards))
            table.add_row(name, split, *(f"{count:,}" for count in counts), *_learned_cells(source))
        shards = sum(len(source.shards) for source in sources.values())
        documents = sum(source.documents for source in sources.values())
        table.add_row("all", split, f"{manifest.tokens(split):,}", f"{documents:,}", f"{shards:,}", style="bold")
    console.print(table)
    console.print(f"{folder.path}: dtype {manifest.dtype}, vocabulary size {manifest.vocab_size}, eos {manifest.eos}")
    if (splits_by := known_name(folder.tokenizer_file.read_bytes())) is not None:
        console.print(f"{folder.path}: llama.cpp calls the tokenizer's way to split text {splits_by}")
    left_out = {"bad": "bad entries", "empty": "empty entries"}
    left_out |= {"too_short": "documents below --min-tokens", "too_long": "documents above --max-tokens"}
    for key, kind in left_out.items():
        if count := manifest.origin.get(key):
            console.print(f"left out: {count} {kind}")
    if not manifest.tokens("train") and manifest.origin.get("validation") != 1:
        console.print("warning: the split train is empty: add documents, or use a smaller --validation")
    if not manifest.tokens("validation") and manifest.origin.get("validation"):
        documents = sum(source.documents for source in manifest.splits["train"].values())
        enough = min(50, math.ceil(100 * HELD_OUT / max(documents, 1)))
        console.print(
            f"warning: the split validation is empty, but training needs held-out rows: add documents, or use "
            f"--validation {enough}% to hold out about {max(1, documents * enough // 100)} of {documents:,} documents"
        )
