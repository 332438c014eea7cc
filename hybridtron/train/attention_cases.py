"""Attention cases of a run: properties of the calls that the layers of a phase make to attention kernels.

These cases decide which kernel runs (`ops/attention/table.py`). The run's first lines show the kernel for each letter.
Before anything starts, `run.force_ops` is checked against all cases.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hybridtron.architecture.attention import AttentionSpec
from hybridtron.config.choices import Documents, Precision
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.ops.attention.table import AttentionCase
from hybridtron.ops.registry import forced_attention_problems
from hybridtron.planning.states import carried_parts
from hybridtron.problems import Problem


def attention_cases(phase: ResolvedPhase, multiple: int = 1) -> dict[str, AttentionCase]:
    """Return label -> case for each letter with full or windowed attention, such as `attention W`.

    Rows are `multiple` times as long as in training. Under context parallelism, a rank's rows have its share of the
    tokens.
    """
    arch = phase.arch
    tokens = multiple * phase.settings.seq_len
    length = tokens // phase.config.parallel.context
    if phase.precision.name is Precision.fp32:
        dtype = torch.float32
    else:
        dtype = torch.bfloat16
    documents = phase.documents is Documents.isolate
    shared_rows = phase.config.parallel.context > 1 or phase.chunks_together > 1
    carried = carried_parts(phase)
    cases = dict[str, AttentionCase]()
    for number, (letter, spec) in enumerate(zip(arch.letters, arch.specs, strict=True)):
        if not isinstance(spec, AttentionSpec):
            continue
        window = spec.window is not None and spec.window < tokens
        memory = shared_rows or "keys" in carried.get(number, {})
        label = f"attention {letter}"
        if label not in cases or memory:
            cases[label] = AttentionCase(
                dtype, spec.head(arch.sizes), length, window, documents, memory, phase.config.run.deterministic
            )
    return cases


def forced_problems(plan: RunPlan, name: str) -> list[Problem]:
    """List the fault of `run.force_ops.attention` if the named kernel can't compute all rows of a run.

    A generated token is a row that reads remembered keys.
    """
    cases = [case for phase in plan.phases for case in attention_cases(phase).values()]
    if problems := forced_attention_problems(name, cases):
        return problems
    longest = max((1, *plan.config.run.eval_lengths))
    longer = [case for phase in plan.phases for case in attention_cases(phase, longest).values()]
    if problems := forced_attention_problems(name, longer):
        cure = f"run.eval_lengths=[1], because only rows of {longest} times the training length ask for this"
        return [_with_cure(problem, cure) for problem in problems]
    if not plan.config.run.sample_tokens:
        return []
    generated = [replace(case, length=1, documents=False, memory=True) for case in (*cases, *longer)]
    return [_with_cure(problem, "run.sample_tokens=0") for problem in forced_attention_problems(name, generated)]


def _with_cure(problem: Problem, cure: str) -> Problem:
    return replace(problem, message=f"{problem.message}, or {cure}")
