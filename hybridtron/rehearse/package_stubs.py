"""Stubs for packages that only a GPU machine has: modules whose functions have the real functions' signatures.

A rehearsal simulates a training step without a GPU, with stubs in place of packages such as flash-attn. A stub has the
same parameters as the real function (`signatures.py` stores them), so that a call with wrong arguments raises a
TypeError. The tensors that a stub returns have a shape and a dtype, but no values. Stubs count the bytes that the real
functions would read, write, and save for the backward pass (`attention_cost`, `recurrence_cost`, `fp8_cost`). If a
package is installed, Python finds the package before its stubs.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hybridtron.rehearse.events import report_call
from hybridtron.rehearse.signatures import signature, stored_versions

Given = Mapping[str, Any]
"""A call's arguments, by parameter name. Parameters that the call leaves at their defaults are absent."""
PACKAGE = "hybridtron.rehearse"
STUBS: dict[str, dict[str, dict[str, str]]] = {
    "flash-attn": {
        "flash_attn.flash_attn_interface": {
            "flash_attn_func": "attention_cost:flash_rows",
            "flash_attn_varlen_func": "attention_cost:flash_documents",
        },
    },
    "flash-attn-3": {
        "flash_attn_interface": {
            "flash_attn_func": "attention_cost:flash3_rows",
            "flash_attn_varlen_func": "attention_cost:flash3_documents",
        },
    },
    "flash-attn-4": {
        "flash_attn.cute.interface": {
            "flash_attn_func": "attention_cost:flash4_rows",
            "flash_attn_varlen_func": "attention_cost:flash4_documents",
        },
    },
    "causal-conv1d": {"causal_conv1d": {"causal_conv1d_fn": "recurrence_cost:causal_conv1d"}},
    "mamba-ssm": {
        "mamba_ssm.ops.selective_scan_interface": {"selective_scan_fn": "recurrence_cost:selective_scan"},
        "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": "recurrence_cost:chunk_scan"},
        "mamba_ssm.utils.determinism": {},
    },
    "transformer-engine": {
        "transformer_engine.pytorch": {
            "Linear": "fp8_cost:LinearStub",
            "autocast": "fp8_cost:autocast",
            "fp8_autocast": "fp8_cost:autocast",
        },
        "transformer_engine.pytorch.quantization": {"FP8GlobalStateManager": "fp8_cost:GlobalStateStub"},
        "transformer_engine.common.recipe": {
            "DelayedScaling": "fp8_cost:DelayedStub",
            "Float8CurrentScaling": "fp8_cost:CurrentStub",
            "Float8BlockScaling": "fp8_cost:BlockStub",
        },
    },
}
"""Implementations of the stubs: package -> module -> name in the module -> `file:name` of the implementation.

The file is in this folder. An implementation is a class, or a function whose only parameter is a `Given`. `_made` wraps
such a function in a stub, which has the real function's parameters.
"""


class StubFinder(MetaPathFinder, Loader):
    """Import finder and loader for the stubs of some packages in STUBS."""

    def __init__(self, packages: Sequence[str]) -> None:
        versions = stored_versions()
        self.modules: dict[str, dict[str, Any]] = {}
        for package in packages:
            for module, stubs in STUBS[package].items():
                for end in range(module.count(".") + 1):
                    outer = ".".join(module.split(".")[: end + 1])
                    self.modules.setdefault(outer, {"__version__": versions[package]["version"]})
                signatures = versions[package]["functions"]
                self.modules[module] |= {name: (work, signatures.get(name)) for name, work in stubs.items()}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname not in self.modules:
            return None
        holds_others = any(name.startswith(f"{fullname}.") for name in self.modules)
        return ModuleSpec(fullname, self, is_package=holds_others)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        for name, value in self.modules[module.__name__].items():
            setattr(module, name, value if isinstance(value, str) else _made(name, *value))


def _made(name: str, place: str, parameters: Any) -> Any:
    """Return the stub for a name in a real package.

    name: the name in the real package
    place: the stub's implementation, as `file:name` in this folder
    parameters: the stored parameters of the real function or class; None if none are stored

    If the implementation is a function, the stub checks a call's arguments against `parameters`, and passes them to the
    function as a `Given`. If the implementation is a class, the stub is a subclass with the signature in its attribute
    `real`. The class checks arguments against this signature. Without stored parameters, the implementation itself is
    the stub.
    """
    file, _, work = place.partition(":")
    does: Callable[[Given], Any] = getattr(importlib.import_module(f"{PACKAGE}.{file}"), work)
    if parameters is None:
        return does
    real = signature(parameters)

    @functools.wraps(does)
    def stub(*args: Any, **kwargs: Any) -> Any:
        arguments = real.bind(*args, **kwargs).arguments
        report_call(name, arguments)
        return does(arguments)

    if isinstance(does, type):  # the stub of a class is also a class, because other code may inherit from it
        subclass = type(name, (does,), {"real": real})
        subclass.__signature__ = real  # type: ignore[attr-defined]
        return subclass
    stub.__name__ = name
    stub.__signature__ = real  # type: ignore[attr-defined]
    return stub


@contextmanager
def appear_installed(packages: Sequence[str]) -> Iterator[None]:
    """Make these packages appear installed while the block runs, for code that only checks whether they are installed.

    The block must not import the packages, because imported stubs would remain in `sys.modules` after the block.
    """
    finder = StubFinder(packages)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
