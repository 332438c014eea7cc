"""The registry of ops: importing the package registers every form of every op."""

from hybridtron.ops import (
    attention,
    conv1d,
    gated_norm,
    loss,
    norm_rope,
    scan,
    scan_mamba_ssm,
    span,
    span_blocked,
    span_choice,
    span_flex,
    span_past,
    ssd,
    ssd_mamba_ssm,
    swiglu,
)

__all__ = [
    "attention",
    "conv1d",
    "gated_norm",
    "loss",
    "norm_rope",
    "scan",
    "scan_mamba_ssm",
    "span",
    "span_blocked",
    "span_choice",
    "span_flex",
    "span_past",
    "ssd",
    "ssd_mamba_ssm",
    "swiglu",
]
