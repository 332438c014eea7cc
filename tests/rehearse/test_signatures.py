"""Our calls of other packages fit the signatures that were read from their sources, and so do the stubs."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hybridtron.rehearse import signatures
from hybridtron.rehearse.package_stubs import STUBS, StubFinder, appear_installed

PACKAGE = Path(__file__).parents[2] / "hybridtron"
KEPT = signatures.stored_versions()
CALLERS = {
    "flash-attn": "ops/attention/flash_attn.py",
    "flash-attn-3": "ops/attention/flash_attn.py",
    "flash-attn-4": "ops/attention/flash_attn.py",
    "fla-core": "proving/gpu/queue/fla.py",
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
    """Yield name, positional argument count and keywords for every call of the package's functions in our code."""
    for file in CALLERS[package].split():
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func.attr
                if name in KEPT[package]["functions"]:
                    # the one starred argument of ours stands for q, k and v
                    starred = sum(isinstance(argument, ast.Starred) for argument in node.args)
                    yield name, len(node.args) + 2 * starred, [str(keyword.arg) for keyword in node.keywords]


@pytest.mark.parametrize("package", CALLERS)
def test_calls_of_packages_fit_their_signatures(package: str) -> None:
    our_calls = list(calls(package))
    assert {name for name, *_ in our_calls} == KEPT[package]["functions"].keys()
    for name, positional, keywords in our_calls:
        signatures.signature(KEPT[package]["functions"][name]).bind(*range(positional), **dict.fromkeys(keywords))


@pytest.mark.parametrize("name", USED)
def test_calls_of_transformer_engine_fit_its_signatures(name: str) -> None:
    positional, keywords = USED[name]
    signature = signatures.signature(KEPT["transformer-engine"]["functions"][name])
    signature.bind(*range(positional), **dict.fromkeys(keywords))


def test_calls_that_do_not_fit_are_noticed() -> None:
    signature = signatures.signature(KEPT["flash-attn-4"]["functions"]["flash_attn_func"])
    with pytest.raises(TypeError, match="dropout_p"):
        signature.bind(1, 2, 3, dropout_p=0.0)


@pytest.fixture
def modules() -> dict[str, ModuleType]:
    """Create the modules of all packages that have stubs, without importing them."""
    finder = StubFinder(list(STUBS))
    modules_by_name = {}
    for name in finder.modules:
        spec = finder.find_spec(name)
        assert spec is not None
        modules_by_name[name] = importlib.util.module_from_spec(spec)
        finder.exec_module(modules_by_name[name])
    return modules_by_name


def test_stubs_have_the_parameters_of_the_packages(modules: dict[str, ModuleType]) -> None:
    compared = 0
    for package, works in STUBS.items():
        functions = KEPT[package]["functions"]
        for module, names in works.items():
            for name in names.keys() & functions.keys():
                assert inspect.signature(getattr(modules[module], name)) == signatures.signature(functions[name])
                compared += 1
    # the functions of other packages are only called by measurements
    assert compared == sum(len(KEPT[package]["functions"]) for package in STUBS)


def test_stubs_refuse_calls_that_do_not_fit(modules: dict[str, ModuleType]) -> None:
    conv = modules["causal_conv1d"].causal_conv1d_fn
    x_BCL = torch.zeros(2, 8, 5)
    weight_CW = torch.zeros(8, 4)
    assert conv(x_BCL, weight_CW, activation="silu").shape == x_BCL.shape
    with pytest.raises(TypeError, match="activated"):
        conv(x_BCL, weight_CW, activated="silu")


def test_results_of_stubs_have_the_documented_shapes(modules: dict[str, ModuleType]) -> None:
    """Compare shapes with the packages' own descriptions of their results."""
    B = 2
    L = 300
    E = 8
    N = 4
    H = 3
    P = 16
    G = 1
    scan = modules["mamba_ssm.ops.selective_scan_interface"].selective_scan_fn
    per_channel = torch.zeros(B, L, E).transpose(1, 2)
    per_state = torch.zeros(B, N, L)
    y, last = scan(per_channel, per_channel, torch.zeros(E, N), per_state, per_state, return_last_state=True)
    assert (y.shape, last.shape) == ((B, E, L), (B, E, N))
    ssd = modules["mamba_ssm.ops.triton.ssd_combined"].mamba_chunk_scan_combined
    x = torch.zeros(B, L, H, P)
    dt = torch.zeros(B, L, H)
    groups = torch.zeros(B, L, G, N)
    y, last = ssd(x, dt, torch.zeros(H), groups, groups, 256, return_final_states=True)
    assert (y.shape, last.shape) == ((B, L, H, P), (B, H, P, N))
    flash = modules["flash_attn.cute.interface"]
    q = torch.zeros(B, L, 4, 16)
    k = torch.zeros(B, L, 2, 16)
    y, sums = flash.flash_attn_func(q, k, k, causal=True, window_size=(None, None))
    assert y.shape == q.shape
    assert sums is None


def test_stubs_are_importable_on_request_alone() -> None:
    name = "transformer_engine"
    assert importlib.util.find_spec(name) is None
    with appear_installed(["transformer-engine"]):
        assert importlib.util.find_spec(name) is not None
    assert importlib.util.find_spec(name) is None


def test_changed_signatures_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "causal_conv1d/causal_conv1d_interface.py"
    file.parent.mkdir()
    file.write_text("def causal_conv1d_fn(x, weight, bias=None, *, activation='silu'): ...\n")
    new = signatures.read("causal-conv1d", tmp_path)
    lines = signatures.differences(KEPT["causal-conv1d"]["functions"], new)
    assert "+causal_conv1d_fn: activation = 'silu'" in lines
    assert "-causal_conv1d_fn: seq_idx = None" in lines
    assert signatures.differences(new, new) == []
