"""Names the kernels that an evaluated model uses, for the evaluation's results."""

from __future__ import annotations

from dataclasses import replace

import torch

from hybridtron.architecture.attention import AttentionSpec, HeadsSpec
from hybridtron.architecture.table import Architecture
from hybridtron.determinism import is_deterministic
from hybridtron.ops.attention.table import AttentionCase
from hybridtron.ops.registry import choices_by_case
from hybridtron.train.report import ops_of


def kernels_of(arch: Architecture, dtype: torch.dtype, seq_len: int, device: str) -> dict[str, str]:
    """Return op -> implementation; on CUDA, attention has an entry for each case of `reading_cases`."""
    cases = reading_cases(arch, dtype, seq_len)
    used = ops_of(arch) | set(cases)
    return {name: form for name, form, _ in choices_by_case(device, cases) if name in used}


def reading_cases(arch: Architecture, dtype: torch.dtype, seq_len: int) -> dict[str, AttentionCase]:
    """Return label -> case for each attention letter whose layers run an attention kernel outside training.

    A text is read in chunks. The first chunk has no remembered keys. All later chunks and generated tokens have some.
    """
    cases = dict[str, AttentionCase]()
    for letter, spec in zip(arch.letters, arch.specs, strict=True):
        if not isinstance(spec, HeadsSpec) or spec.attention_at_eval is None:
            continue
        window = spec.window if isinstance(spec, AttentionSpec) else None
        if spec.attention_at_eval not in ("full", f"window {window}"):  # Self-Extend and spans have no kernels
            continue
        hides = window is not None and window < seq_len
        first = AttentionCase(dtype, spec.head(arch.sizes), seq_len, hides, deterministic=is_deterministic())
        cases[f"attention {letter}"] = first
        cases[f"attention {letter}, later chunks"] = replace(first, memory=True)
        cases[f"attention {letter}, generated tokens"] = replace(first, length=1, memory=True)
    return cases
