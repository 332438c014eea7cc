"""Stand-ins for packages of a GPU machine that are not installed here: modules made from stored signatures.

Each function has exactly the real one's parameters, and a call that does not fit raises a TypeError. Its results have
shapes and no values. The bytes that the real function would read, write and save are counted (`attention_work`,
`recurrence_work`, `fp8_work`). Installed packages are found before the stand-ins.
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

from hybridtron.rehearse.signatures import kept, signature

Given = Mapping[str, Any]  # the arguments of a call, by parameter name
ROOM = "hybridtron.rehearse"
WORKS: dict[str, dict[str, dict[str, str]]] = {
    "flash-attn": {
        "flash_attn.flash_attn_interface": {
            "flash_attn_func": "attention_work:flash_rows",
            "flash_attn_varlen_func": "attention_work:flash_documents",
        },
    },
    "flash-attn-3": {
        "flash_attn_interface": {
            "flash_attn_func": "attention_work:flash3_rows",
            "flash_attn_varlen_func": "attention_work:flash3_documents",
        },
    },
    "flash-attn-4": {
        "flash_attn.cute.interface": {
            "flash_attn_func": "attention_work:flash4_rows",
            "flash_attn_varlen_func": "attention_work:flash4_documents",
        },
    },
    "causal-conv1d": {"causal_conv1d": {"causal_conv1d_fn": "recurrence_work:causal_conv1d"}},
    "mamba-ssm": {
        "mamba_ssm.ops.selective_scan_interface": {"selective_scan_fn": "recurrence_work:selective_scan"},
        "mamba_ssm.ops.triton.ssd_combined": {"mamba_chunk_scan_combined": "recurrence_work:chunk_scan"},
        "mamba_ssm.utils.determinism": {},
    },
    "transformer-engine": {
        "transformer_engine.pytorch": {
            "Linear": "fp8_work:LinearStandIn",
            "autocast": "fp8_work:autocast",
            "fp8_autocast": "fp8_work:autocast",
        },
        "transformer_engine.pytorch.quantization": {"FP8GlobalStateManager": "fp8_work:GlobalStateStandIn"},
        "transformer_engine.common.recipe": {
            "DelayedScaling": "fp8_work:DelayedStandIn",
            "Float8CurrentScaling": "fp8_work:CurrentStandIn",
            "Float8BlockScaling": "fp8_work:BlockStandIn",
        },
    },
}
"""Package -> module -> name -> its stand-in, as `file:function` of this package, called with the bound arguments."""


class StandIns(MetaPathFinder, Loader):
    """Import finder and loader for some packages' stand-ins."""

    def __init__(self, packages: Sequence[str]) -> None:
        versions = kept()
        self.modules: dict[str, dict[str, Any]] = {}
        for package in packages:
            for module, works in WORKS[package].items():
                for end in range(module.count(".") + 1):
                    outer = ".".join(module.split(".")[: end + 1])
                    self.modules.setdefault(outer, {"__version__": versions[package]["version"]})
                signatures = versions[package]["functions"]
                self.modules[module] |= {name: (work, signatures.get(name)) for name, work in works.items()}

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
    """Build a stand-in with the stored parameters. Without stored ones it is the function or class itself."""
    file, _, work = place.partition(":")
    does: Callable[[Given], Any] = getattr(importlib.import_module(f"{ROOM}.{file}"), work)
    if parameters is None:
        return does
    real = signature(parameters)

    @functools.wraps(does)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return does(real.bind(*args, **kwargs).arguments)

    if isinstance(does, type):  # a class that other code can inherit from
        subclass = type(name, (does,), {"real": real})
        subclass.__signature__ = real  # type: ignore[attr-defined]
        return subclass
    stand_in.__name__ = name
    stand_in.__signature__ = real  # type: ignore[attr-defined]
    return stand_in


@contextmanager
def to_be_found(packages: Sequence[str]) -> Iterator[None]:
    """Make these packages appear installed inside the context. Nothing may be imported from them."""
    finder = StandIns(packages)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
