"""Signatures of other packages' functions, taken from their sources and stored with the package's version.

    python -m hybridtron.rehearse.signatures flash-attn 2.8.3 FOLDER

reads a package's functions from a checkout, prints the differences from the stored ones, and stores the new ones. Only
parameters and their defaults (as text) are taken; the package's code is not imported or run.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_suffix(".json")
SOURCES = {
    "flash-attn": {"flash_attn/flash_attn_interface.py": ("flash_attn_func", "flash_attn_varlen_func")},
    "flash-attn-3": {"hopper/flash_attn_interface.py": ("flash_attn_func", "flash_attn_varlen_func")},
    "flash-attn-4": {"flash_attn/cute/interface.py": ("flash_attn_func", "flash_attn_varlen_func")},
    "causal-conv1d": {"causal_conv1d/causal_conv1d_interface.py": ("causal_conv1d_fn",)},
    "fla-core": {
        "fla/ops/gla/chunk.py": ("chunk_gla",),
        "fla/ops/rwkv6/chunk.py": ("chunk_rwkv6",),
        "fla/ops/gated_delta_rule/chunk.py": ("chunk_gated_delta_rule",),
        "fla/ops/kda/chunk.py": ("chunk_kda",),
        "fla/ops/simple_gla/chunk.py": ("chunk_simple_gla",),
        "fla/modules/causal_conv1d/ops.py": ("causal_conv1d",),
        "fla/modules/norm/fused_norm_gate.py": ("rms_norm_gated",),
    },
    "mamba-ssm": {
        "mamba_ssm/ops/selective_scan_interface.py": ("selective_scan_fn",),
        "mamba_ssm/ops/triton/ssd_combined.py": ("mamba_chunk_scan_combined",),
    },
    "transformer-engine": {
        "transformer_engine/pytorch/module/linear.py": ("Linear",),
        "transformer_engine/pytorch/quantization.py": ("autocast", "fp8_autocast"),
        "transformer_engine/common/recipe/__init__.py": (
            "DelayedScaling",
            "Float8CurrentScaling",
            "Float8BlockScaling",
        ),
    },
}
Parameters = list[list[str | None]]  # name, kind, default as text


def read(package: str, folder: Path) -> dict[str, Parameters]:
    """Read the signatures of a package's functions and classes in SOURCES from a checkout."""
    signatures = {}
    for file, names in SOURCES[package].items():
        tree = ast.parse((folder / file).read_text())
        named = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        signatures |= {name: parameters(named[name]) for name in names}
    return signatures


def parameters(node: ast.FunctionDef | ast.ClassDef) -> Parameters:
    """Return a function's parameters. For a class these are its `__init__`'s, or a dataclass's fields."""
    if isinstance(node, ast.ClassDef):
        constructors = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        if constructors:
            return parameters(constructors[0])[1:]
        return [
            [item.target.id, "plain", ast.unparse(item.value) if item.value else None]
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + [ast.unparse(item) for item in arguments.defaults]
    described: Parameters = [[item.arg, "plain", default] for item, default in zip(plain, defaults, strict=True)]
    for item, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        described.append([item.arg, "keyword", None if default is None else ast.unparse(default)])
    return described


def kept() -> dict[str, dict[str, Any]]:
    """Read the stored data: package -> its version and its functions."""
    return json.loads(DATA.read_text())


def signature(given: Parameters) -> inspect.Signature:
    """Return a signature that calls can be bound to; defaults are text."""
    kinds = {"plain": inspect.Parameter.POSITIONAL_OR_KEYWORD, "keyword": inspect.Parameter.KEYWORD_ONLY}
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(str(name), kinds[str(kind)], default=empty if text is None else text)
            for name, kind, text in given
        ]
    )


def differences(old: dict[str, Parameters], new: dict[str, Parameters]) -> list[str]:
    """Return a diff between two sets of signatures, with one parameter per line."""
    before, after = (
        [f"{name}: {parameter[0]} = {parameter[2]}" for name, given in functions.items() for parameter in given]
        for functions in (old, new)
    )
    return [
        line for line in difflib.unified_diff(before, after, lineterm="", n=0) if line[:2] not in ("--", "++", "@@")
    ]


if __name__ == "__main__":
    name, version, source = sys.argv[1:]
    held = kept() if DATA.exists() else {}
    functions = read(name, Path(source))
    print("\n".join(differences(held.get(name, {"functions": {}})["functions"], functions)) or "as before")
    held[name] = {"version": version, "functions": functions}
    DATA.write_text(json.dumps(held, indent=1) + "\n")
