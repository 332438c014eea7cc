"""Which form of an op runs: the reference that is its specification, or a faster one with the same signature.

    @op
    def rms_norm(x, weight, eps): ...            # the reference

    @rms_norm.form("fused", device="cuda", package="some_kernels")
    def _(x, weight, eps): ...                   # preferred on CUDA where the package imports

A call runs the first usable form, those made for its device before those for any, else the reference; `force`
overrides that in tests.
`choices()` tells, for the start-up table, what runs on a device and why every other form does not.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, ParamSpec, TypeVar

import torch

from hybridtron.device import is_deterministic, optional_package

P = ParamSpec("P")
R = TypeVar("R")

NONE_FORCED: dict[str, str] = {}
_forced: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("forced_forms", default=NONE_FORCED)
OPS: dict[str, Op] = {}


@dataclass(frozen=True)
class Form(Generic[P, R]):
    """One way to compute an op. `refuses` looks at a call's arguments and answers why it can't take them, or None.

    `repeats` says whether it gives the same bits again, backward too, once `device.deterministic` asks for that.
    """

    name: str
    function: Callable[P, R]
    device: Literal["cpu", "cuda", "any"] = "any"
    package: str | None = None
    refuses: Callable[P, str | None] | None = None
    repeats: Callable[[], bool] | None = None

    def unusable(self, device: str) -> str | None:
        """Why this form can't run on a device at all, or None."""
        if self.device not in (device, "any"):
            return f"for {self.device}"
        if self.package is not None and (found := optional_package(self.package)).module is None:
            return found.reason
        if self.repeats is not None and is_deterministic() and not self.repeats():
            return "adds up in no fixed order, which run.deterministic=true rules out"
        return None


class Op(Generic[P, R]):
    """A function with a reference form and faster ones; calling it runs the best form that can take the call."""

    def __init__(self, reference: Callable[P, R]) -> None:
        self.name = reference.__name__
        self.__doc__ = reference.__doc__
        self.reference = Form("reference", reference)
        self.fast: list[Form[P, R]] = []
        OPS[self.name] = self

    def form(
        self,
        name: str,
        *,
        device: Literal["cpu", "cuda", "any"] = "any",
        package: str | None = None,
        refuses: Callable[P, str | None] | None = None,
        repeats: Callable[[], bool] | None = None,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        def add(function: Callable[P, R]) -> Callable[P, R]:
            self.fast.append(Form(name, function, device, package, refuses, repeats))
            self.fast.sort(key=lambda form: form.device == "any")
            return function

        return add

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        forced = _forced.get()
        name = forced.get(self.name) or forced.get("*")
        if name is not None:
            return self.named(name).function(*args, **kwargs)
        device = next(a.device.type for a in args if isinstance(a, torch.Tensor))
        for form in self.fast:
            if form.unusable(device) is None and (form.refuses is None or form.refuses(*args, **kwargs) is None):
                return form.function(*args, **kwargs)
        return self.reference.function(*args, **kwargs)

    def named(self, name: str) -> Form[P, R]:
        for form in (self.reference, *self.fast):
            if form.name == name:
                return form
        raise ValueError(f"{self.name} has no form {name!r}: {['reference', *(f.name for f in self.fast)]}")

    def choice(self, device: str) -> tuple[str, str]:
        """The form that runs on a device, and the reasons for it in words."""
        passed: dict[str, list[str]] = {}
        for form in self.fast:
            why_not = form.unusable(device)
            if why_not is None:
                return form.name, _reasons(passed) or "first choice"
            passed.setdefault(why_not, []).append(form.name)
        return "reference", _reasons(passed) or "only form"


def _reasons(passed: dict[str, list[str]]) -> str:
    return "; ".join(f"{', '.join(names)}: {why_not}" for why_not, names in passed.items())


def op(reference: Callable[P, R]) -> Op[P, R]:
    """Make a function the reference form of an op of its name."""
    return Op(reference)


@contextlib.contextmanager
def force(everything: str | None = None, /, **forms: str) -> Iterator[None]:
    """Run named forms inside the block: `force("reference")`, or `force(selective_scan="chunked")`."""
    wanted = {**_forced.get(), **({"*": everything} if everything else {}), **forms}
    token = _forced.set(wanted)
    try:
        yield
    finally:
        _forced.reset(token)


def choices(device: str) -> list[tuple[str, str, str]]:
    """(op, form, reason) of every op, for the start-up table."""
    return [(name, *OPS[name].choice(device)) for name in sorted(OPS)]
