"""Ops, their implementations, and the choice of the implementation that runs.

An op is a function on tensors; trainable parameters are among its inputs. An op has a readable reference
implementation, which specifies the result. Most ops also have faster implementations:

    class RMSNormInputs(NamedTuple): ...                  # the op's signature, written once
    def rms_norm(inputs: RMSNormInputs) -> Tensor: ...    # the reference

    rms_norm = Op(reference.rms_norm, (TRITON, ...))      # in the op's folder, the preferred implementation first

A call runs the tuple's first implementation that is available on the device and supports the inputs. If there is none,
the call runs the reference. `force` overrides this choice, in tests and when searching for a bug. Only the tuple's
order decides which implementation is preferred; import order has no effect.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast

import torch

from hybridtron.determinism import is_deterministic
from hybridtron.device import optional_package
from hybridtron.problems import ConfigError, Problem

Inputs = TypeVar("Inputs", bound=tuple[Any, ...])
Outputs = TypeVar("Outputs")
Function = TypeVar("Function", bound=Callable[..., Any])

NONE_FORCED: dict[str, str] = {}
_forced: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("forced", default=NONE_FORCED)
_forced_on_all_threads: dict[str, str] = {}

Observer = Callable[["Op[Any, Any]", Any], object]
_observers: contextvars.ContextVar[tuple[Observer, ...]] = contextvars.ContextVar("observers", default=())


def _supports_all(inputs: tuple[Any, ...]) -> str | None:
    return None


def _nothing() -> str | None:
    return None


def _yes() -> bool:
    return True


def left_to_torch_compile() -> str | None:
    """Return the reason not to run a kernel if torch.compile is tracing, else None.

    torch.compile can fuse the reference with the operations around it. It can't fuse a Triton kernel or compiled C++.
    """
    if torch.compiler.is_compiling():
        return "torch.compile fuses the reference with the code around it"
    return None


def untraced(function: Function) -> Function:
    """Wrap a function so that torch.compile calls it without tracing it.

    `torch.compiler.disable` makes such a wrapper, but it imports torch's compiler, a third of all code that training
    imports. torch traces no function before the compiler is imported. So `torch.compiler.disable` is called only after
    another module has imported the compiler.
    """
    left: list[Any] = []

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        if not left and "torch._dynamo" in sys.modules:
            left.append(torch.compiler.disable(function))
        if left:
            return left[0](*arguments)
        return function(*arguments)

    return cast(Function, call)


@dataclass(frozen=True)
class Implementation(Generic[Inputs, Outputs]):
    """One way to compute an op.

    name                 the name, for `force` and for messages
    function             computes the op
    device               the type of device that the implementation runs on
    package              the Python package that the implementation needs, or None
    unsupported_reason   returns the reason why the implementation cannot compute the given inputs, or None
    repeats_bits         returns True if repeated forward and backward passes give the same bits in deterministic mode
                         (`hybridtron.determinism`)
    missing              returns the reason why another requirement, such as a C++ compiler, is missing, or None
    refusal              returns the reason why the function can't compute the given inputs, or None;
                         `unsupported_reason` also counts inputs for which another implementation is faster
    """

    name: str
    function: Callable[[Inputs], Outputs]
    device: Literal["cpu", "cuda", "any"] = "any"
    package: str | None = None
    unsupported_reason: Callable[[Inputs], str | None] = _supports_all
    repeats_bits: Callable[[], bool] = _yes
    missing: Callable[[], str | None] = _nothing
    refusal: Callable[[Inputs], str | None] = _supports_all

    def unavailable_reason(self, device: str) -> str | None:
        """Return the reason why this implementation can never run on this type of device, or None if it can."""
        if self.device not in (device, "any"):
            return f"only on {self.device}"
        if self.package is not None and (package := optional_package(self.package)).module is None:
            return package.reason
        if (reason := self.missing()) is not None:
            return reason
        if is_deterministic() and not self.repeats_bits():
            return "adds up in no fixed order, which run.deterministic=true rules out"
        return None


class Op(Generic[Inputs, Outputs]):
    """A function of one argument: a named tuple of inputs. A call runs the implementation `selected(inputs)`."""

    def __init__(
        self,
        reference: Callable[[Inputs], Outputs],
        implementations: Sequence[Implementation[Inputs, Outputs]] = (),
    ) -> None:
        self.name = reference.__name__
        self.__doc__ = reference.__doc__
        self.reference = Implementation("reference", reference)
        self.implementations = tuple(implementations)

    def __call__(self, inputs: Inputs) -> Outputs:
        for observe in _observers.get():
            observe(self, inputs)
        return self.selected(inputs).function(inputs)

    def selected(self, inputs: Inputs) -> Implementation[Inputs, Outputs]:
        """Return the implementation for these inputs: the forced implementation, else the first that can run.

        Raises ConfigError if `run.force_ops` forces an implementation that can't compute these inputs.
        """
        if (name := self.forced) is not None:
            implementation = self.named(name)
            demanded = _forced_on_all_threads.get(self.name) == name
            if demanded and (reason := implementation.refusal(inputs)) is not None:
                raise ConfigError([forced_problem(self.name, name, reason)])
            return implementation
        device = device_of(inputs)
        for implementation in self.implementations:
            if implementation.unavailable_reason(device) is None and implementation.unsupported_reason(inputs) is None:
                return implementation
        return self.reference

    @property
    def forced(self) -> str | None:
        """Name of the implementation that `force` or `force_on_all_threads` demands; None if this op is not forced."""
        for names in (_forced.get(), _forced_on_all_threads):
            if (name := names.get(self.name) or names.get("*")) is not None:
                return name
        return None

    def named(self, name: str) -> Implementation[Inputs, Outputs]:
        """Return the implementation with this name; raise ValueError if there is none."""
        every = (self.reference, *self.implementations)
        for implementation in every:
            if implementation.name == name:
                return implementation
        raise ValueError(
            f"{self.name} has no implementation {name!r}: {[implementation.name for implementation in every]}"
        )

    def choice(self, device: str) -> tuple[str, str]:
        """Return the name of the implementation that a call tries first on a device, and the reason as text.

        The text lists the preferred implementations that are unavailable, and says why each is unavailable.
        """
        if (name := self.forced) is not None:
            return name, "forced"
        skipped: dict[str, list[str]] = {}
        for implementation in self.implementations:
            reason = implementation.unavailable_reason(device)
            if reason is None:
                return implementation.name, reasons(skipped) or "first choice"
            skipped.setdefault(reason, []).append(implementation.name)
        return "reference", reasons(skipped) or "only implementation"


def forced_problem(op: str, name: str, reason: str) -> Problem:
    """Return a problem for `run.force_ops`: it forces an implementation that can't compute the model's calls."""
    fault = f"is {name}, which can't compute this model's {op} ({reason}): use reference, which computes everything"
    return Problem(f"run.force_ops.{op}", "unsupported", fault)


def device_of(inputs: tuple[Any, ...]) -> str:
    """Return the type of the device that holds the inputs, such as "cuda"."""
    return next(value.device.type for value in inputs if isinstance(value, torch.Tensor))


def reasons(skipped: dict[str, list[str]]) -> str:
    """Return as one text the reasons why implementations were not chosen. `skipped` maps each reason to their names."""
    return "; ".join(f"{_listed(names)}: {reason}" for reason, names in skipped.items())


def _listed(names: list[str]) -> str:
    """Join up to three names. Shorten a longer list, so that the names and a reason fit on a line of 80 columns."""
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} and {len(names) - 1} others"


def anything_forced() -> bool:
    """Return True if `force` or `force_on_all_threads` is in effect for any op.

    Code that can compute several ops by one fused function calls `anything_forced` first. If any op is forced, the code
    must call the ops one by one.
    """
    return bool(_forced.get() or _forced_on_all_threads)


@contextlib.contextmanager
def force(everything: str | None = None, /, **implementations: str) -> Iterator[None]:
    """Make ops run the chosen implementations inside the block.

    `force(selective_scan="chunked")` chooses for one op. `force("reference")` chooses for all ops that are not named
    by a keyword. The choice holds only on this thread. On a GPU, torch runs the backward pass on other threads, so the
    choice does not hold for ops that the backward pass recomputes; `force_on_all_threads` covers these ops too.
    """
    wanted = {**_forced.get(), **({"*": everything} if everything else {}), **implementations}
    token = _forced.set(wanted)
    try:
        yield
    finally:
        _forced.reset(token)


@contextlib.contextmanager
def force_on_all_threads(implementations: Mapping[str, str]) -> Iterator[None]:
    """Make ops run the chosen implementations inside the block, on every thread.

    `implementations` maps an op's name to an implementation's name. The key `*` stands for all ops without an entry.
    """
    before = dict(_forced_on_all_threads)
    _forced_on_all_threads.update(implementations)
    try:
        yield
    finally:
        _forced_on_all_threads.clear()
        _forced_on_all_threads.update(before)


@contextlib.contextmanager
def observed(observe: Observer) -> Iterator[None]:
    """Inside the block, call `observe` with each op and its inputs before the op computes."""
    token = _observers.set((*_observers.get(), observe))
    try:
        yield
    finally:
        _observers.reset(token)
