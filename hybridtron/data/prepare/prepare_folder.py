"""Prepares inputs as a folder of tokens, in any number of processes, and resumes after an interruption.

    OUTPUT.partial/plan.json             the inputs, the tokenizer and the settings
    OUTPUT.partial/records/part-*.npz    each finished part's record; a part is a group of inputs
    OUTPUT.partial/tokens/               the folder, which is renamed to OUTPUT when it is complete

Equal inputs and settings give a folder with equal bytes, for any number of worker processes and interruptions. The
manifest identifies an input by its file name and size, so moving the inputs to another folder changes nothing.
Documents are not filtered by content, and duplicates are kept.
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
LATER = ("learn", "min_tokens", "max_tokens")  # options that earlier versions did not have
Origin = Mapping[str, str | int | float]
MIN_SHARD_BYTES = 2**10
MAX_SHARD_BYTES = 2**32 - 2**12


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
    """Prepare the folder `output` and return it.

    An interrupted preparation with equal arguments is resumed. A complete folder that was prepared with equal arguments
    is opened without preparing it again.

    max_bad: maximum fraction of an input's entries that may be bad
    origin: additional entries for the manifest's `origin`
    work: folder for the unfinished output; by default `output` with the suffix .partial

    Raises PrepareError if the arguments or the inputs can't be used. The unfinished output is then kept if it has
    documents, so that a later call can resume.
    """
    _check(settings, workers)
    _check_learn(inputs, vocabulary, settings.learn)
    output = output.expanduser()
    job = PrepareJob(work or output.with_name(f"{output.name}.partial"), tuple(inputs), vocabulary, settings, max_bad)
    if output.exists():
        return _already_there(output, job)
    job.work.mkdir(parents=True, exist_ok=True)
    with _lock_folder(job.work):
        finished = _finished_parts(job)
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
        for index, moved in side_by_side(partial(write_part, job), missing, workers):
            if moved is None:
                progress.finish(missing[index])
            else:
                size, tokens = moved
                progress.advance(size, tokens)


def _check(settings: FolderSettings, workers: int) -> None:
    """Raise ArgumentError if a setting is out of range."""
    if not 0 <= settings.validation <= 1:
        raise ArgumentError(
            f"--validation is {settings.validation}; set a fraction from 0 to 1, such as 0.5%",
            code="out-of-range",
        )
    if not MIN_SHARD_BYTES <= settings.shard_size <= MAX_SHARD_BYTES:
        raise ArgumentError(
            f"--shard-size is {settings.shard_size} bytes; set {MIN_SHARD_BYTES} to {MAX_SHARD_BYTES} bytes",
            code="out-of-range",
        )
    if workers < 1:
        raise ArgumentError(f"--workers is {workers}, must be at least 1", code="out-of-range")
    known = ("zstd", *(f"zstd:{level}" for level in range(1, 23)))
    if settings.compression is not None and settings.compression not in known:
        raise ArgumentError(
            f"--compression is {settings.compression}; none, zstd and zstd:1 to zstd:22 are known", code="unknown-name"
        )

    min_tokens = settings.min_tokens
    max_tokens = settings.max_tokens
    for option, limit in (("--min-tokens", min_tokens), ("--max-tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise ArgumentError(f"{option} is {limit}, must be at least 1", code="out-of-range")
    if min_tokens is not None and max_tokens is not None and max_tokens < min_tokens:
        raise ArgumentError(
            f"--max-tokens is {max_tokens}, below --min-tokens {min_tokens}: no document would be left", code="conflict"
        )


def _check_learn(inputs: Sequence[Input], vocabulary: Vocabulary, learn: str | None) -> None:
    """Raise ArgumentError if an input's format, or the tokenizer, does not support this --learn value."""
    if learn is None:
        return
    if other := [data_input.name for data_input in inputs if learn not in FORMATS[data_input.format].learn]:
        reads = "; ".join(known.described for known in FORMATS.values() if learn in known.learn)
        raise ArgumentError(
            f"--learn {learn} supports only {reads or 'no format'}; other inputs: {listed(other)}", code="unsupported"
        )
    if learn == "messages":
        if vocabulary.chat is None:
            where = "neither chat_template.jinja nor a chat_template in tokenizer_config.json"
            raise ArgumentError(
                f"--learn messages: the tokenizer {vocabulary.name} has no chat template: {where}", code="missing"
            )
        if fault := vocabulary.chat.fault():
            raise ArgumentError(f"--learn messages: the chat template of {vocabulary.name} {fault}", code="malformed")


def _plan(job: PrepareJob) -> dict[str, Any]:
    """Return the arguments that must be unchanged when an interrupted preparation is resumed."""
    inputs = [[data_input.format, data_input.shard, *map(str, data_input.files)] for data_input in job.inputs]
    tokenizer = f"{job.vocabulary.name} ({digest_of(job.vocabulary.json.encode())[:12]})"
    chosen = {"tokenizer": tokenizer, "eos": job.vocabulary.eos_token, "separator": job.vocabulary.separator}
    # Options in LATER are left out if they are None, so that folders of earlier versions keep their identity.
    settings = {key: value for key, value in asdict(job.settings).items() if key not in LATER or value is not None}
    if job.settings.learn == "messages" and (chat := job.vocabulary.chat) is not None:
        chosen["chat-template"] = digest_of(repr((chat.text, chat.tokens)).encode())[:12]
    return {"inputs": inputs, **chosen, **{key.replace("_", "-"): value for key, value in settings.items()}}


def _identity(job: PrepareJob) -> str:
    """Return a digest of the arguments that determine a folder; inputs count by file name and size."""
    inputs = [[[file.name, file.stat().st_size] for file in data_input.files] for data_input in job.inputs]
    return digest_of(json.dumps(_plan(job) | {"inputs": inputs}).encode())


def _already_there(output: Path, job: PrepareJob) -> TokenFolder:
    folder = TokenFolder.open(output)
    if folder.manifest.origin.get("arguments") != _identity(job):
        raise ArgumentError(
            f"{output} was prepared with other arguments; delete it, or give another --output", code="exists"
        )
    if (job.work / "plan.json").exists() and not (job.work / TOKENS).exists():
        shutil.rmtree(job.work, ignore_errors=True)  # an earlier process was killed after it had renamed the folder
    return folder


@contextmanager
def _lock_folder(work: Path) -> Iterator[None]:
    """Hold the folder's lock during a `with` block; raise PrepareError if another process holds the lock.

    The operating system releases a killed process's lock.
    """
    with (work / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PrepareError(
                f"{work} is being written by another process; wait for that process, or end it", code="in-use"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


def _finished_parts(job: PrepareJob) -> dict[int, Finished]:
    """Return the parts that an interrupted preparation has finished.

    If no finished part has a document, the work folder is cleared, the plan is written, and the result is empty. Raises
    ArgumentError if the interrupted preparation had other arguments or inputs.
    """
    file = job.work / "plan.json"
    plan = _plan(job)
    if not file.exists():
        ours = {"lock", "records", TOKENS, temporary_of(file).name}
        if foreign := {entry.name for entry in job.work.iterdir()} - ours:
            raise ArgumentError(
                f"{job.work} is needed for the unfinished output, but has other files: {listed(sorted(foreign))}; "
                "move them away",
                code="exists",
            )
    if not file.exists() or not holds_documents(job):  # nothing is lost by starting again, even with other arguments
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
        cure = "Repeat the earlier arguments to resume, or delete this folder to start from scratch"
        raise ArgumentError(
            f"{job.work} was begun with other arguments or inputs: {'; '.join(differences)}. {cure}", code="changed"
        )


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
    """Remove unfinished parts' files, and empty source folders."""
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
            why = f"; --min-tokens or --max-tokens left out {left_out}"
        else:
            why = ""
        raise InputError(
            f"no document remains of {listed([data_input.name for data_input in job.inputs])}{why}", code="missing"
        )
    vocabulary = job.vocabulary
    assemble(
        job.work / TOKENS,
        (part.records for part in parts),
        vocabulary.json,
        vocabulary.size,
        vocabulary.eos,
        job.settings.compression,
        {**_origin(job, tallies), **(origin or {})},
    )
    install(job.work / TOKENS, output)


def _origin(job: PrepareJob, tallies: Sequence[Tally]) -> Origin:
    """Return the manifest's `origin`: the folder's inputs and settings, and how many documents were left out."""
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
