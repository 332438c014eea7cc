"""Our calls of other packages fit the signatures that were read from their sources, and so do the stand-ins."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridtron.rehearse import signatures
from hybridtron.rehearse.rehearsal import STAND_INS

PACKAGE = Path(__file__).parents[2] / "hybridtron"
KEPT = signatures.kept()
CALLERS = {
    "flash-attn": "ops/attention/flash_attn.py",
    "causal-conv1d": "ops/conv/causal_conv1d.py",
    "mamba-ssm": "ops/scan/mamba_ssm.py ops/ssd/mamba_ssm.py",
}
USED = {  # what transformer_engine.py hands over by name, as it asks the package which names it has
    "Linear": (2, ("bias", "params_dtype")),
    "autocast": (0, ("enabled", "recipe", "amax_reduction_group")),
    "fp8_autocast": (0, ("enabled", "fp8_recipe", "fp8_group")),
    "DelayedScaling": (0, ("amax_history_len", "amax_compute_algo")),
}


def calls(package: str) -> Iterator[tuple[str, int, list[str]]]:
    """Name, number of positional arguments and keywords of every call of the package's functions in our code."""
    for file in CALLERS[package].split():
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func.attr
                if name in KEPT[package]["functions"]:
                    # the one starred argument of ours stands for q, k and v
                    given = sum(3 if isinstance(each, ast.Starred) else 1 for each in node.args)
                    yield name, given, [str(keyword.arg) for keyword in node.keywords]


@pytest.mark.parametrize("package", CALLERS)
def test_our_calls_fit(package: str) -> None:
    found = list(calls(package))
    assert {name for name, *_ in found} == KEPT[package]["functions"].keys()
    for name, given, keywords in found:
        signatures.signature(KEPT[package]["functions"][name]).bind(*range(given), **dict.fromkeys(keywords))


@pytest.mark.parametrize("name", USED)
def test_what_transformer_engine_is_given_fits(name: str) -> None:
    positional, keywords = USED[name]
    signature = signatures.signature(KEPT["transformer-engine"]["functions"][name])
    signature.bind(*range(positional), **dict.fromkeys(keywords))


def test_a_call_that_does_not_fit_is_seen() -> None:
    signature = signatures.signature(KEPT["flash-attn-4"]["functions"]["flash_attn_func"])
    with pytest.raises(TypeError, match="dropout_p"):
        signature.bind(1, 2, 3, dropout_p=0.0)


def test_the_stand_ins_have_the_parameters_of_the_package() -> None:
    tree = ast.parse((STAND_INS / "flash_attn/flash_attn_interface.py").read_text())
    own = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, given in KEPT["flash-attn"]["functions"].items():
        assert [each[0] for each in signatures.parameters(own[name])] == [each[0] for each in given]


def test_a_version_that_changed_a_signature_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "causal_conv1d/causal_conv1d_interface.py"
    file.parent.mkdir()
    file.write_text("def causal_conv1d_fn(x, weight, bias=None, *, activation='silu'): ...\n")
    new = signatures.read("causal-conv1d", tmp_path)
    lines = signatures.differences(KEPT["causal-conv1d"]["functions"], new)
    assert "+causal_conv1d_fn: activation = 'silu'" in lines
    assert "-causal_conv1d_fn: seq_idx = None" in lines
    assert signatures.differences(new, new) == []
