"""Signatures of other packages' functions, taken from their sources and stored with the package's version.

    python -m hybridtron.rehearse.signatures flash-attn 2.8.3 FOLDER

For the package's functions in SOURCES, the command reads the signatures from FOLDER, a checkout of the package. Then
the command prints a diff between the stored and the new signatures, and stores the new signatures in signatures.json.
Only parameters and their defaults (as text) are read; the package's code is not imported or run.

If a package is not installed, stubs with the stored signatures replace its functions (`package_stubs`).
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
    """Return the signatures of a package's functions and classes in SOURCES, read from the checkout `folder`."""
    signatures = {}
    for file, names in SOURCES[package].items():
        tree = ast.parse((folder / file).read_text())
        named = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        signatures |= {name: parameters(named[name]) for name in names}
    return signatures


def parameters(node: ast.FunctionDef | ast.ClassDef) -> Parameters:
    """Return each parameter's name, kind and default, for a function or class.

    A class has the parameters of its `__init__`, without `self`. A class without `__init__` is assumed to be a
    dataclass, with its fields as parameters.
    """
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


def stored_versions() -> dict[str, dict[str, Any]]:
    """Read signatures.json, and return for each package its "version" and its "functions".

    "functions" maps each function or class name to its parameters.
    """
    return json.loads(DATA.read_text())


def signature(parameters: Parameters) -> inspect.Signature:
    """Return an `inspect.Signature` with these parameters. The defaults in it are text, not values."""
    kinds = {"plain": inspect.Parameter.POSITIONAL_OR_KEYWORD, "keyword": inspect.Parameter.KEYWORD_ONLY}
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(str(name), kinds[str(kind)], default=empty if text is None else text)
            for name, kind, text in parameters
        ]
    )


def differences(old: dict[str, Parameters], new: dict[str, Parameters]) -> list[str]:
    """Return a diff between two signature sets, with one parameter per line."""
    before, after = (
        [f"{name}: {parameter[0]} = {parameter[2]}" for name, given in functions.items() for parameter in given]
        for functions in (old, new)
    )
    return [
        line for line in difflib.unified_diff(before, after, lineterm="", n=0) if line[:2] not in ("--", "++", "@@")
    ]


if __name__ == "__main__":
    name, version, source = sys.argv[1:]
    stored = stored_versions() if DATA.exists() else {}
    functions = read(name, Path(source))
    print(
        "\n".join(differences(stored.get(name, {"functions": {}})["functions"], functions))
        or "the signatures have not changed"
    )
    stored[name] = {"version": version, "functions": functions}
    DATA.write_text(json.dumps(stored, indent=1) + "\n")
