"""Inputs -> a folder of prepared tokens, by any number of processes, resumable after an interruption.

    OUTPUT.partial/plan.json             the inputs, the tokenizer and the settings
    OUTPUT.partial/records/part-*.npz    one for each finished part
    OUTPUT.partial/tokens/               the folder, which is renamed to OUTPUT when it is complete

The same inputs and settings give the same folder byte by byte, whatever the number of workers and interruptions. A
folder's manifest identifies inputs by name and size, so it does not depend on where they were. Data is not cleaned:
nothing is filtered by content, deduplicated or mixed.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hybridtron.data.folder import TokenFolder
from hybridtron.data.prepare.documents import ArgumentError, Input, InputError, PrepareError, Tally, listed
from hybridtron.data.prepare.formats import FORMATS
from hybridtron.data.prepare.parts import (
    TOKENS,
    Finished,
    FolderSettings,
    PrepareJob,
    changed_files,
    holds_documents,
    part_name,
    read_record,
    record_file,
    write_part,
)
from hybridtron.data.prepare.progress import PrepareProgress
from hybridtron.data.prepare.vocabulary import Vocabulary
from hybridtron.data.prepare.writer import assemble, install
from hybridtron.data.workers import side_by_side
from hybridtron.requirements import installed
from hybridtron.storage.digest import digest_of
from hybridtron.storage.durable import put, temporary_of

DEFAULTS = FolderSettings()
LATER = ("learn", "min_tokens", "max_tokens")
Origin = Mapping[str, str | int | float]
SMALLEST_SHARD = 2**10
LARGEST_SHARD = 2**32 - 2**12


def prepare(
    inputs: Sequence[Input],
    output: Path,
    vocabulary: Vocabulary,
    settings: FolderSettings = DEFAULTS,
    workers: int = 1,
    max_bad: float = 0.001,
    origin: Origin | None = None,
    work: Path | None = None,
) -> TokenFolder:
    """Return the folder at `output`, prepared now or resumed. A folder made by the same arguments is only opened.

    max_bad: fraction of an input's entries that may be bad
    work: folder for the unfinished output; by default `output` with the suffix .partial

    Raises PrepareError; the unfinished output stays, to be resumed, unless it has no documents.
    """
    _check(settings, workers)
    _check_learn(inputs, vocabulary, settings.learn)
    output = output.expanduser()
    job = PrepareJob(work or output.with_name(f"{output.name}.partial"), tuple(inputs), vocabulary, settings, max_bad)
    if output.exists():
        return _already_there(output, job)
    job.work.mkdir(parents=True, exist_ok=True)
    with _locked(job.work):
        finished = _resumed(job)
        try:
            _write_missing(job, finished, workers)
            _complete(job, output, origin)
        except PrepareError:
            if not holds_documents(job):
                shutil.rmtree(job.work, ignore_errors=True)
            raise
    shutil.rmtree(job.work, ignore_errors=True)
    return TokenFolder.open(output)


def _write_missing(job: PrepareJob, finished: Mapping[int, Finished], workers: int) -> None:
    missing = [number for number in range(len(job.parts)) if number not in finished]
    _clear(job, missing)
    progress = PrepareProgress(job, finished)
    with progress.bar:
        for place, moved in side_by_side(partial(write_part, job), missing, workers):
            if moved is None:
                progress.finish(missing[place])
            else:
                size, tokens = moved
                progress.advance(size, tokens)


def _check(settings: FolderSettings, workers: int) -> None:
    """Raise ArgumentError if a setting is out of range."""
    if not 0 <= settings.validation < 1:
        raise ArgumentError(f"--validation is {settings.validation}, must be a share from 0 to below 1, such as 0.5%")
    if not SMALLEST_SHARD <= settings.shard_size <= LARGEST_SHARD:
        raise ArgumentError(
            f"--shard-size is {settings.shard_size} bytes; {SMALLEST_SHARD} to {LARGEST_SHARD} are possible"
        )
    if workers < 1:
        raise ArgumentError(f"--workers is {workers}, must be at least 1")
    known = ("zstd", *(f"zstd:{level}" for level in range(1, 23)))
    if settings.compression is not None and settings.compression not in known:
        raise ArgumentError(f"--compression is {settings.compression}; none, zstd and zstd:1 to zstd:22 are known")

    min_tokens = settings.min_tokens
    max_tokens = settings.max_tokens
    for option, limit in (("--min-tokens", min_tokens), ("--max-tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise ArgumentError(f"{option} is {limit}, must be at least 1")
    if min_tokens is not None and max_tokens is not None and max_tokens < min_tokens:
        raise ArgumentError(f"--max-tokens is {max_tokens}, below --min-tokens {min_tokens}: no document would be left")


def _check_learn(inputs: Sequence[Input], vocabulary: Vocabulary, learn: str | None) -> None:
    """Raise ArgumentError unless all inputs can mark learned parts in this form."""
    if learn is None:
        return
    if other := [data_input.name for data_input in inputs if learn not in FORMATS[data_input.format].learn]:
        reads = "; ".join(known.described for known in FORMATS.values() if learn in known.learn)
        raise ArgumentError(f"--learn {learn} is for {reads or 'no format'}; these are not: {listed(other)}")
    if learn == "messages":
        if vocabulary.chat is None:
            where = "neither chat_template.jinja nor a chat_template in tokenizer_config.json"
            raise ArgumentError(f"--learn messages: the tokenizer {vocabulary.name} has no chat template: {where}")
        if fault := vocabulary.chat.fault():
            raise ArgumentError(f"--learn messages: the chat template of {vocabulary.name} {fault}")


def _plan(job: PrepareJob) -> dict[str, Any]:
    """Return the arguments that must be equal for a call to resume an earlier one."""
    inputs = [[data_input.format, data_input.shard, *map(str, data_input.files)] for data_input in job.inputs]
    tokenizer = f"{job.vocabulary.name} ({digest_of(job.vocabulary.json.encode())[:12]})"
    chosen = {"tokenizer": tokenizer, "eos": job.vocabulary.eos_token, "separator": job.vocabulary.separator}
    # Options of later versions appear only if given, so that folders made without them keep their identity.
    settings = {key: value for key, value in asdict(job.settings).items() if key not in LATER or value is not None}
    if job.settings.learn == "messages" and (chat := job.vocabulary.chat) is not None:
        chosen["chat-template"] = digest_of(repr((chat.text, chat.tokens)).encode())[:12]
    return {"inputs": inputs, **chosen, **{key.replace("_", "-"): value for key, value in settings.items()}}


def _identity(job: PrepareJob) -> str:
    """Return a digest of the arguments that make a folder, wherever its inputs are."""
    inputs = [[[file.name, file.stat().st_size] for file in data_input.files] for data_input in job.inputs]
    return digest_of(json.dumps(_plan(job) | {"inputs": inputs}).encode())


def _already_there(output: Path, job: PrepareJob) -> TokenFolder:
    folder = TokenFolder.open(output)
    if folder.manifest.origin.get("arguments") != _identity(job):
        raise ArgumentError(f"{output} was prepared with other arguments; delete it, or give another --output")
    if (job.work / "plan.json").exists() and not (job.work / TOKENS).exists():
        shutil.rmtree(job.work, ignore_errors=True)  # left by a call that was killed after it had renamed the folder
    return folder


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with its process; raise PrepareError if another call holds it."""
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PrepareError(f"{work} is being written by another process; wait for it, or end it") from None
        except OSError:  # a file system without locks
            pass
        yield


def _resumed(job: PrepareJob) -> dict[int, Finished]:
    """Return the parts that an earlier call finished; raise ArgumentError if it had other arguments or inputs.

    If no part with a document is finished, the work folder is cleared, and the plan written.
    """
    file = job.work / "plan.json"
    plan = _plan(job)
    if not file.exists():
        ours = {"lock", "records", TOKENS, temporary_of(file).name}
        if foreign := {entry.name for entry in job.work.iterdir()} - ours:
            raise ArgumentError(f"{job.work} is needed to work in, and holds something else: {listed(sorted(foreign))}")
    if not file.exists() or not holds_documents(job):  # no finished work is lost, whatever the arguments were
        for folder in (job.work / "records", job.work / TOKENS):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        put(file, json.dumps(plan).encode())
        return {}
    _refuse(job, _differences(json.loads(file.read_text(encoding="utf-8")), plan))
    records = {number: record for number in range(len(job.parts)) if (record := read_record(job, number))}
    changed = [file for number, record in records.items() for file in changed_files(job.parts[number], record)]
    if changed:
        _refuse(job, [f"inputs changed since they were prepared: {listed(changed)}"])
    for record in records.values():
        for tally in record.tallies:
            tally.judge()
    return records


def _refuse(job: PrepareJob, differences: Sequence[str]) -> None:
    if differences:
        cure = "give the same arguments to resume, or delete it to start from scratch"
        raise ArgumentError(f"{job.work} was begun otherwise: {'; '.join(differences)}. {cure}")


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    differences = [
        f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
        for key in {**now, **before}
        if key != "inputs" and before.get(key) != now.get(key)
    ]
    inputs_before, inputs_now = ({tuple(fields): fields[-1] for fields in plan["inputs"]} for plan in (before, now))
    for what, names in (
        ("new inputs", [name for fields, name in inputs_now.items() if fields not in inputs_before]),
        ("inputs that are gone", [name for fields, name in inputs_before.items() if fields not in inputs_now]),
    ):
        differences += [f"{what}: {listed(names)}"] if names else []
    return differences


def _clear(job: PrepareJob, missing: Sequence[int]) -> None:
    """Remove the leftovers from interrupted parts, and source folders without parts."""
    names = {part_name(number) for number in missing}
    for folder in (job.work / TOKENS).glob("*/*/*"):
        if folder.name in names:
            shutil.rmtree(folder)
    for number in missing:
        record_file(job, number).unlink(missing_ok=True)
    for source in (job.work / TOKENS).glob("*/*"):
        if not any(source.iterdir()):
            source.rmdir()


def _complete(job: PrepareJob, output: Path, origin: Origin | None) -> None:
    """Assemble the finished parts, and rename the folder to its final name."""
    finished = [read_record(job, number) for number in range(len(job.parts))]
    assert all(finished)
    parts = [part for part in finished if part]
    tallies = [tally for part in parts for tally in part.tallies]
    if not any(part.records for part in parts):
        left_out = sum(tally.short + tally.long for tally in tallies)
        if left_out:
            why = f" but {left_out} that --min-tokens or --max-tokens left out"
        else:
            why = ""
        raise InputError(f"there is no document in {listed([data_input.name for data_input in job.inputs])}{why}")
    vocabulary = job.vocabulary
    assemble(
        job.work / TOKENS,
        (part.records for part in parts),
        vocabulary.json,
        vocabulary.size,
        vocabulary.eos,
        job.settings.compression,
        {**_described(job, tallies), **(origin or {})},
    )
    install(job.work / TOKENS, output)


def _described(job: PrepareJob, tallies: Sequence[Tally]) -> Origin:
    """Describe for the manifest where a folder comes from, and how many documents were left out."""
    described: dict[str, str | int | float] = {
        "tool": "hybridtron",
        "version": installed("hybridtron") or "not installed",
        "tokenizer": job.vocabulary.name,
        "eos_token": job.vocabulary.eos_token,
        "inputs": len(job.inputs),
        "validation": job.settings.validation,
        "bad": sum(tally.bad for tally in tallies),
        "empty": sum(tally.empty for tally in tallies),
        "arguments": _identity(job),
    }
    if job.settings.learn is not None:
        described["learn"] = job.settings.learn
    if job.settings.learn == "messages" and job.vocabulary.chat is not None:
        described["chat"] = job.vocabulary.chat.stored()
    if job.settings.min_tokens is not None:
        described["too_short"] = sum(tally.short for tally in tallies)
    if job.settings.max_tokens is not None:
        described["too_long"] = sum(tally.long for tally in tallies)
    return described
