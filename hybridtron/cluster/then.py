"""Follow-up jobs of `hybridtron submit --then`: they evaluate or export a finished run.

    evaluate    hybridtron evaluate RUN
    export      hybridtron export RUN --output RUN-hf

Further words are arguments of the command: `--then "evaluate --suite samba"`. Each follow-up job is one process on one
node, with one GPU if nodes have GPUs. A job starts only if the previous job has succeeded: SLURM cancels the jobs after
a failed job. A run that requeues itself keeps its job's number, so the follow-up jobs wait for its last attempt.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from hybridtron.cluster.job import (
    SlurmJob,
    commands,
    container_lines,
    directives,
    joined,
    one_process,
    opening,
    software,
)
from hybridtron.config.saved import WITH_PASSWORD
from hybridtron.problems import Problem, did_you_mean

NAMES = ("evaluate", "export")


@dataclass(frozen=True)
class FollowUp:
    """A follow-up job.

    job: the job's settings
    number: place in the chain, from 1
    words: command of `hybridtron`, and its arguments
    """

    job: SlurmJob
    number: int
    words: tuple[str, ...]

    @property
    def script_path(self) -> Path:
        return self.job.run_dir / "slurm" / f"then-{self.number}-{self.words[0]}.sh"

    @property
    def command(self) -> str:
        """The command as a user would type it."""
        return shlex.join(["hybridtron", *self.words])


def follow_ups(texts: Sequence[str], job: SlurmJob) -> list[FollowUp]:
    """Build the follow-up jobs of a run's job. Call `then_problems` first."""
    return [
        FollowUp(_job_of(job, number, words), number, words)
        for number, words in enumerate((_words(text, job) for text in texts), 1)
    ]


def then_problems(texts: Sequence[str], job: SlurmJob) -> Iterator[Problem]:
    """Yield problems of follow-up commands: unknown names, passwords, unclosed quotes, and an existing export."""
    outputs: list[Path | None] = []
    for text in texts:
        if WITH_PASSWORD.search(text):
            yield Problem("--then", "secret", "contains a password, which would be written into the job's script")
            continue
        try:
            name = (shlex.split(text) or [""])[0]
        except ValueError as error:
            yield Problem("--then", "malformed", f"is {text!r}, which a shell can't split: {error}")
            continue
        if name not in NAMES:
            known = f"must begin with one of {', '.join(NAMES)}"
            yield Problem("--then", "unknown-name", f"is {text!r}{did_you_mean(name, NAMES)}, {known}")
            continue
        output = _output_of(_words(text, job))
        if output is not None and output in outputs:
            yield Problem("--then", "duplicate", f"writes {output} twice: name another folder with --output DIR")
        elif output is not None and name == "export" and output.exists():
            cure = "remove it, or name another folder: --then 'export --output DIR'"
            yield Problem("--then", "exists", f"export would write {output}, which exists: {cure}")
        outputs.append(output)


def script(follow_up: FollowUp) -> str:
    """Return a follow-up job's script."""
    job = follow_up.job
    options = directives(job)
    del options["cluster.stop_before"]  # the commands save nothing when SLURM signals them
    comments = [
        f"# Follow-up {follow_up.number}: {follow_up.command.splitlines()[0]}",
        f"# Written by hybridtron submit. Users may edit this script and submit it: sbatch {follow_up.script_path}",
    ]
    command = joined([*commands(job)["alone"], "hybridtron", *follow_up.words])
    lines = [*opening(job, options, comments), *container_lines(job), *software(job), f"exec {command}", ""]
    return "\n".join(lines)


def _job_of(job: SlurmJob, number: int, words: Sequence[str]) -> SlurmJob:
    """Build a job with one process. Its container also mounts the folder in which the command creates its output."""
    cluster = one_process(job.cluster)
    container = cluster.container
    if (output := _output_of(words)) is not None:
        above = (job.working_dir / output).parent
        container = replace(container, mounts=[f"{above}:{above}", *container.mounts])
    return replace(
        job,
        name=f"{job.name}-then-{number}",
        arguments=(),
        fitting=(1,),
        cluster=replace(cluster, container=container, stage=None, memory=None),  # `memory` concerns full nodes
        local_dir=None,
    )


def _words(text: str, job: SlurmJob) -> tuple[str, ...]:
    """Return a command's words: its name, the run's folder, the export's folder, and further arguments."""
    name, *further = shlex.split(text)
    if name == "export" and _output_of(further) is None:
        further = ["--output", str(job.run_dir.with_name(f"{job.run_dir.name}-hf")), *further]
    return (name, str(job.run_dir), *further)


def _output_of(words: Sequence[str]) -> Path | None:
    """Return the folder that a command's words name with --output, or None."""
    for word, following in pairwise([*words, ""]):
        if word == "--output":
            return Path(following)
        if word.startswith("--output="):
            return Path(word.partition("=")[2])
    return None
