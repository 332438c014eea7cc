"""All ops by name, and the implementations that run on a device.

This file is for code that lists ops or forces their implementations. A module that calls an op imports the op from its
folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hybridtron.ops.attention import attention
from hybridtron.ops.attention.table import TABLE, AttentionCase
from hybridtron.ops.conv import causal_conv
from hybridtron.ops.delta import delta_gates, delta_scan
from hybridtron.ops.dispatch import Op, forced_problem, reasons
from hybridtron.ops.dropout import dropout
from hybridtron.ops.experts import (
    activated_again,
    expert_choice,
    expert_linear,
    expert_order,
    experts,
    from_experts,
    mlp_of_rows,
    route,
    to_experts,
)
from hybridtron.ops.gated_norm import gated_norm, gated_scale, gated_squares, norm_before_gate
from hybridtron.ops.geglu import geglu
from hybridtron.ops.gla import gla_gates, gla_scan
from hybridtron.ops.loss import cross_entropy, linear_cross_entropy
from hybridtron.ops.norm import add_rms_norm, rms_norm
from hybridtron.ops.product import linear, matrix_product
from hybridtron.ops.rope import apply_rope
from hybridtron.ops.rotations import angles, turn_pairs
from hybridtron.ops.scan import selective_scan
from hybridtron.ops.softmax import softmax_gradients, softmax_sums
from hybridtron.ops.span import span_attention
from hybridtron.ops.sparse import sparse_attention
from hybridtron.ops.squared_relu import squared_relu
from hybridtron.ops.ssd import decay_scan, ssd_scan
from hybridtron.ops.swiglu import swiglu
from hybridtron.ops.token_mix import token_mix
from hybridtron.problems import Problem, did_you_mean

OPS: dict[str, Op[Any, Any]] = {
    op.name: op
    for op in (
        activated_again, add_rms_norm, angles, apply_rope, attention, causal_conv, cross_entropy, decay_scan,
        delta_gates, delta_scan, dropout, expert_choice, expert_linear, expert_order, experts, from_experts, gated_norm,
        gated_scale, gated_squares, geglu, gla_gates, gla_scan, linear, linear_cross_entropy, matrix_product,
        mlp_of_rows, norm_before_gate, rms_norm, route, selective_scan, softmax_gradients, softmax_sums, span_attention,
        sparse_attention, squared_relu, ssd_scan, swiglu, to_experts, token_mix, turn_pairs,
    )
}  # fmt: skip


EXAMPLES = {
    "attention": AttentionCase(),
    "attention in a window": AttentionCase(window=True),
    "attention of documents": AttentionCase(documents=True),
}
"""Cases of attention that a report shows if there is no model: in bf16, for heads of 128 channels."""


def choices(device: str) -> list[tuple[str, str, str]]:
    """For every op, return its name, the implementation that a call tries first, and the reason for this choice."""
    return [(name, *op.choice(device)) for name, op in OPS.items()]


def attention_choice(case: AttentionCase, device: str) -> tuple[str, str]:
    """Return the name of the implementation that a call of the case runs on a device, and the reason as text.

    The text has the reason for the row's place in the table, then the reasons why earlier rows do not run.
    """
    if attention.forced is not None or device != "cuda":
        return attention.choice(device)
    skipped: dict[str, list[str]] = {}
    for row in TABLE:
        reason = attention.named(row.name).unavailable_reason(device) or row.skipped_reason(case)
        if reason is None:
            return row.name, "; ".join(filter(None, (row.reason, reasons(skipped))))
        skipped.setdefault(reason, []).append(row.name)
    return "blocked", reasons(skipped)


def choices_by_case(device: str, cases: Mapping[str, AttentionCase]) -> list[tuple[str, str, str]]:
    """Return `choices`; on CUDA, attention has a line for each case (label -> case) in place of one line."""
    lines = choices(device)
    if device != "cuda":
        return lines
    place = next(number for number, line in enumerate(lines) if line[0] == attention.name)
    lines[place : place + 1] = [(label, *attention_choice(case, device)) for label, case in cases.items()]
    return lines


def forced_attention_problems(name: str, cases: Iterable[AttentionCase]) -> list[Problem]:
    """List a problem for `run.force_ops` if the row `name` of attention's table can't compute one of the cases."""
    for row in TABLE:
        reasons = {reason for case in cases if row.name == name and (reason := row.refusal(case)) is not None}
        if reasons:
            return [forced_problem(attention.name, name, "; ".join(sorted(reasons)))]
    return []


def force_problems(implementations: Mapping[str, str], device: str | None = None) -> list[Problem]:
    """List the faults of the setting `run.force_ops`, which maps ops to implementations.

    A fault is an unknown op, an unknown implementation, or an implementation that can't run on the device. The key `*`
    stands for all ops; its value must be `reference`, the only implementation that every op has. If `device` is None,
    only names are checked.
    """
    key = "run.force_ops"
    problems = []
    for name, wanted in implementations.items():
        if name == "*":
            names: dict[str, str | None] = {"reference": None}
        elif name in OPS:
            every = (OPS[name].reference, *OPS[name].implementations)
            names = {each.name: device and each.unavailable_reason(device) for each in every}
        else:
            cure = f"name one of {', '.join(OPS)}, or * for all"
            problems.append(Problem(f"{key}.{name}", "unknown-name", f"is not an op{did_you_mean(name, OPS)}: {cure}"))
            continue
        if wanted not in names:
            fault = f"is {wanted!r}{did_you_mean(wanted, names)}, must be one of {', '.join(names)}"
            problems.append(Problem(f"{key}.{name}", "unknown-name", fault))
        elif (reason := names[wanted]) is not None:
            fault = f"is {wanted}, which can't run on this device ({reason}): use reference, which runs everywhere"
            problems.append(Problem(f"{key}.{name}", "unavailable", fault))
    return problems


def torch_alone() -> dict[str, str]:
    """Return keyword arguments for `dispatch.force` that replace compiled C++ and oneDNN on a CPU by plain torch.

    The arguments map op names to implementation names. Only ops that would run compiled C++ or oneDNN on a CPU have an
    entry.
    """
    faster = {"native", "onednn"}
    replacements = {}
    for name, op in OPS.items():
        replacement = next(
            implementation
            for implementation in (*op.implementations, op.reference)
            if implementation.name not in faster and not implementation.unavailable_reason("cpu")
        )
        if op.choice("cpu")[0] in faster:
            replacements[name] = replacement.name
    return replacements
