"""Helpers for tests of recurrences: each op's random inputs, its results by name, and rows cut into pieces.

A recurrence takes tokens, parameters, the state before a row and its documents, and returns y and the state after the
row. Field names give the kind: fields with rows and tokens (`_BL`) are cut with a row, `state_...` is carried. An entry
in RECURRENCES puts an op, in all its forms for a CPU, under the contract of `test_recurrences`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridtron.device import compute_device
from hybridtron.ops import delta, gla, scan, ssd
from hybridtron.ops.delta import DeltaInputs, delta_scan
from hybridtron.ops.dispatch import Op, force
from hybridtron.ops.gla import GLAInputs, gla_scan
from hybridtron.ops.scan import ScanInputs, recurrence, selective_scan
from hybridtron.ops.ssd import DecayInputs, SSDInputs, decay_scan, ssd_scan

Inputs = Any  # of an op: a NamedTuple
TWO_DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])
STATE_TOKENS = 64  # a form keeps one state of these for its backward pass


@dataclass(frozen=True)
class Recurrence:
    """One op: `make(rows, length, dtype=..., **sizes)` gives random inputs, small without sizes, and `wide` ones.

    `strong` makes some decays forget all, in place. `small_chunks` are numbers in modules, by which eleven tokens are
    whole chunks and a ragged one.
    """

    name: str
    op: Op[Any, Any]
    make: Callable[..., Inputs]
    wide: dict[str, int]
    strong: Callable[[Inputs], None]
    small_chunks: tuple[tuple[ModuleType, str, int], ...] = ()

    @property
    def forms(self) -> list[str]:
        """All forms that run on a CPU, the reference first."""
        return [form.name for form in (self.op.reference, *self.op.implementations) if form.device != "cuda"]


def random_inputs(kind: type, tokens: torch.dtype, **fields: Tensor) -> Inputs:
    """Tokens in their type, parameters and states in fp32 or float64 as in a model; all want gradients."""
    wide = torch.promote_types(tokens, torch.float32)
    return kind(**{name: t.to(tokens if "_BL" in name else wide).requires_grad_() for name, t in fields.items()})


def scan_inputs(
    rows: int = 2, length: int = 11, channels: int = 3, size: int = 2, dtype: torch.dtype = torch.float64
) -> ScanInputs:
    return random_inputs(
        ScanInputs,
        dtype,
        x_BLE=normal(rows, length, channels),
        dt_BLE=normal(rows, length, channels),
        A_EN=-uniform(channels, size).mul(2).exp(),
        B_BLN=normal(rows, length, size),
        C_BLN=normal(rows, length, size),
        D_E=normal(channels),
        dt_bias_E=normal(channels) - 1,
        z_BLE=normal(rows, length, channels),
        state_BEN=normal(rows, channels, size),
    )


def ssd_inputs(
    rows: int = 2,
    length: int = 11,
    heads: int = 4,
    head: int = 3,
    groups: int = 2,
    size: int = 5,
    dtype: torch.dtype = torch.float64,
) -> SSDInputs:
    return random_inputs(
        SSDInputs,
        dtype,
        x_BLHP=normal(rows, length, heads, head),
        dt_BLH=normal(rows, length, heads),
        A_H=-uniform(heads).mul(2).exp(),
        B_BLGN=normal(rows, length, groups, size),
        C_BLGN=normal(rows, length, groups, size),
        D_H=normal(heads),
        dt_bias_H=normal(heads) - 1,
        state_BHPN=normal(rows, heads, head, size),
    )


def decay_inputs(*sizes: Any, **named: Any) -> DecayInputs:
    """The tokens, D and the state of SSD's inputs, with steps of tokens for the other parameters."""
    x, dt, _, B, C, D, _, state, _ = ssd_inputs(*sizes, **named)
    step, own_step = normal(2, *dt.shape)
    fields = {"q_BLGN": C, "k_BLGN": B, "v_BLHP": x, "g_BLH": -dt.exp(), "state_BHPN": state, "D_H": D}
    detached = {name: t.detach() for name, t in fields.items()}
    return random_inputs(DecayInputs, x.dtype, **detached, step_BLH=step, own_step_BLH=own_step)


def gla_inputs(
    rows: int = 2, length: int = 11, heads: int = 2, key: int = 3, value: int = 4, dtype: torch.dtype = torch.float64
) -> GLAInputs:
    """Decays as a model begins with, some of them strong."""
    return random_inputs(
        GLAInputs,
        dtype,
        q_BLHN=normal(rows, length, heads, key),
        k_BLHN=normal(rows, length, heads, key),
        v_BLHP=normal(rows, length, heads, value),
        g_BLHN=-normal(rows, length, heads, key).exp(),
        state_BHNP=normal(rows, heads, key, value),
    )


def delta_inputs(
    rows: int = 2,
    length: int = 11,
    heads: int = 2,
    key: int = 3,
    value: int = 4,
    dtype: torch.dtype = torch.float64,
    by_channel: bool = True,
) -> DeltaInputs:
    """Keys of length 1, and steps of up to 2."""
    return random_inputs(
        DeltaInputs,
        dtype,
        q_BLHN=normal(rows, length, heads, key),
        k_BLHN=F.normalize(normal(rows, length, heads, key), dim=-1),
        v_BLHP=normal(rows, length, heads, value),
        beta_BLH=2 * uniform(rows, length, heads),
        g_BLHG=-normal(rows, length, heads, key if by_channel else 1).exp(),
        state_BHNP=normal(rows, heads, key, value),
    )


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


def strong_steps(inputs: Inputs) -> None:
    """Let one token in five forget all; a sum of log decays in fp32 would be off by 1e-4 after some of them."""
    for name, value in floats(inputs).items():
        if name.startswith("A_"):
            value.fill_(-16)
        elif name.startswith("dt_BL"):
            value.fill_(-8)
            value[:, ::5] = 60
        elif name.startswith("dt_bias"):
            value.zero_()


def strong_heads(inputs: Inputs) -> None:
    """Let one token in five forget all, and the others little."""
    inputs.g_BLH.fill_(-1e-6)
    inputs.g_BLH[:, ::5] = -5000


def strong_keys(inputs: Inputs) -> None:
    """The last key forgets all at one token in five, the first of several at every token, and the others little."""
    g = next(value for name, value in floats(inputs).items() if name.startswith("g_"))
    g.fill_(-1e-3)
    g[..., :-1][..., :1] = -80
    g[:, 3::5, :, -1] = -80


HEADS = {"heads": 4, "key": 16, "value": 32}
RECURRENCES = (
    Recurrence(
        "scan",
        selective_scan,
        scan_inputs,
        {"channels": 24, "size": 4},
        strong_steps,
        ((scan.chunked, "CHUNK", 4), (recurrence, "GROUP", 2)),
    ),
    Recurrence(
        "ssd",
        ssd_scan,
        ssd_inputs,
        {"heads": 8, "head": 16, "size": 16},
        strong_steps,
        ((ssd.chunked, "CHUNK", 4),),
    ),
    Recurrence(
        "decay",
        decay_scan,
        decay_inputs,
        {"heads": 8, "head": 16, "size": 16},
        strong_heads,
        ((ssd.chunked, "CHUNK", 4),),
    ),
    Recurrence("gla", gla_scan, gla_inputs, HEADS, strong_keys, ((gla.chunked, "CHUNK", 5), (gla.decay, "SUB", 2))),
    *(
        Recurrence(
            f"delta by {gate}",
            delta_scan,
            partial(delta_inputs, by_channel=gate == "channel"),
            HEADS,
            strong_keys,
            ((delta.chunked, "CHUNK", 5), (gla.decay, "SUB", 2)),
        )
        for gate in ("channel", "head")
    ),
)


def floats(inputs: Inputs) -> dict[str, Tensor]:
    """Return the inputs that have gradients, by name."""
    return {name: t for name, t in inputs._asdict().items() if t is not None and t.is_floating_point()}


def by_token(inputs: Inputs) -> list[str]:
    return [name for name in floats(inputs) if "_BL" in name]


def state_of(inputs: Inputs) -> str:
    """The name of the state before the row."""
    return next(name for name in inputs._fields if name.startswith("state_"))


def with_state(inputs: Inputs, state: Tensor | None) -> Inputs:
    return inputs._replace(**{state_of(inputs): state})


def changed(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Other leaves in the place of all that has gradients."""
    return inputs._replace(**{name: change(t.detach()).requires_grad_() for name, t in floats(inputs).items()})


def exact(inputs: Inputs) -> Inputs:
    """Return the inputs in float64."""
    return changed(inputs, Tensor.double)


def cut(inputs: Inputs, tokens: slice, state: Tensor | None) -> Inputs:
    """Some tokens of the rows, after a state."""
    names = by_token(inputs)
    if inputs.documents_BL is not None:
        names.append("documents_BL")
    return with_state(inputs, state)._replace(**{name: getattr(inputs, name)[:, tokens] for name in names})


def run(op: Op[Any, Any], form: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
    with force(**{op.name: form}):
        return op(inputs)


def some_loss(y: Tensor, state: Tensor) -> Tensor:
    """Return a loss in which every output and every entry of the final state has its own weight, exact in bf16."""
    ramps = [torch.linspace(-64, 128, t.numel(), device=t.device).round().view_as(t) / 64 for t in (y, state)]
    return (ramps[0].to(y.dtype) * y).sum() + (ramps[1].to(state.dtype) * state).sum()


def gradients(loss: Tensor, inputs: Inputs) -> dict[str, Tensor]:
    wanted = floats(inputs)
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(wanted, grads, strict=True))


def computed(op: Op[Any, Any], form: str, inputs: Inputs) -> dict[str, Tensor]:
    """y, the last state and all gradients, by name."""
    y, last = run(op, form, inputs)
    weighted = some_loss(y.double(), last.double())
    return {"y": y.detach(), "last": last.detach()} | gradients(weighted, inputs)


def documents_of(*lengths: int, rows: int = 2) -> Tensor:
    """Indices as a packed batch has them: they do not begin at 0."""
    return torch.arange(5, 5 + len(lengths)).repeat_interleave(torch.tensor(lengths)).expand(rows, -1)


def assert_near_reference(op: Op[Any, Any], form: str, inputs: Inputs, tolerance: float) -> dict[str, Tensor]:
    """Compare a GPU form with the float64 reference, within a tolerance for each norm, and return its results.

    It runs on a GPU if there is one.
    """
    device = compute_device()
    on_device = changed(inputs, lambda t: t.to(device))
    if inputs.documents_BL is not None:
        on_device = on_device._replace(documents_BL=inputs.documents_BL.to(device))
    results = computed(op, form, on_device)
    for name, expected in computed(op, "reference", exact(inputs)).items():
        error = (results[name].cpu().double() - expected).norm() / expected.norm().clamp(min=1e-12)
        assert error <= tolerance, f"{name} is off by {error:.2g}"
    return results
