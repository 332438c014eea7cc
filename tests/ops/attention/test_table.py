"""The table of attention kernels: each row is reachable, each of its conditions counts, and the choice is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from hybridtron.determinism import deterministic
from hybridtron.device import Package, compute_device
from hybridtron.ops import dispatch
from hybridtron.ops.attention import AttentionInputs, AttentionMemory, attention, blocked, table, torch_kernels
from hybridtron.ops.attention.table import TABLE, AttentionCase, AttentionRow, case_of
from hybridtron.ops.dispatch import force, force_on_all_threads
from hybridtron.ops.registry import EXAMPLES, attention_choice, choices_by_case, forced_attention_problems
from hybridtron.planning.rates import GPU, GPUS
from hybridtron.problems import ConfigError

ROWS = {row.name: row for row in TABLE}
FLASH = {"flash-attn", "flash-attn-3", "flash-attn-4"}
AMPERE = (8, 0)
HOPPER = (9, 0)
BLACKWELL = (10, 0)
FULL = AttentionCase()
WINDOW = AttentionCase(window=True)
DOCUMENTS = AttentionCase(documents=True)
BOTH = AttentionCase(window=True, documents=True)
BACKENDS = {"cudnn", "flash", "mem_efficient", "math"}

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Set the GPU's compute capability, its flash-attn packages, and what torch has."""

    def made(
        capability: tuple[int, int],
        packages: set[str] | frozenset[str] = frozenset(),
        cudnn: tuple[int, int, int] | None = (9, 19, 0),
    ) -> None:
        held = {ROWS[name].package for name in packages}

        def package(name: str) -> Package:
            if name in held:
                return Package(name, ModuleType(name), "installed")
            return Package(name, None, "not installed")

        monkeypatch.setattr(dispatch, "optional_package", package)
        monkeypatch.setattr(table, "compute_capability", lambda: capability)
        monkeypatch.setattr(torch_kernels, "cudnn_version", lambda: cudnn)

    return made


def inputs_of(case: AttentionCase) -> AttentionInputs:
    """Meta tensors of the case: 2 rows, 4 heads, 2 key/value heads."""
    q, k = (torch.empty(2, case.length, n, case.channels, dtype=case.dtype, device="meta") for n in (4, 2))
    numbers = torch.empty(2, case.length, dtype=torch.int64, device="meta")
    memory = AttentionMemory(k, k, numbers[:, 0])
    window = max(1, case.length // 2) if case.window else None
    return AttentionInputs(q, k, k, window, numbers if case.documents else None, memory if case.memory else None)


def chosen(case: AttentionCase) -> str:
    """The row by the shown choice and, for the same case, by a call's own."""
    name, _ = attention_choice(case, "cuda")
    inputs = inputs_of(case)
    assert case_of(inputs) == case
    fitting = (
        form.name
        for form in attention.implementations
        if form.unavailable_reason("cuda") is None and form.unsupported_reason(inputs) is None
    )
    assert name == next(fitting)
    return name


@pytest.mark.parametrize(
    ("capability", "packages", "case", "row"),
    [
        (HOPPER, FLASH, FULL, "flash-attn-3"),
        (HOPPER, FLASH, BOTH, "flash-attn-3"),
        (HOPPER, FLASH - {"flash-attn-3"}, FULL, "cudnn"),
        (HOPPER, FLASH - {"flash-attn-3"}, WINDOW, "flash-attn-4"),
        (HOPPER, {"flash-attn"}, FULL, "cudnn"),
        (HOPPER, {"flash-attn"}, WINDOW, "flash-attn"),
        (HOPPER, {"flash-attn"}, DOCUMENTS, "flash-attn"),
        (HOPPER, {"flash-attn"}, replace(FULL, channels=256), "flash-attn"),
        (HOPPER, set(), FULL, "cudnn"),
        (HOPPER, set(), WINDOW, "flex"),
        (HOPPER, set(), DOCUMENTS, "flex"),
        (HOPPER, set(), replace(FULL, dtype=torch.float32), "sdpa"),
        (HOPPER, set(), replace(WINDOW, dtype=torch.float32), "flex"),
        (HOPPER, set(), replace(FULL, memory=True), "flex"),
        (HOPPER, FLASH, replace(BOTH, memory=True), "flex"),
        (HOPPER, set(), replace(WINDOW, length=100), "varlen"),
        (HOPPER, set(), replace(WINDOW, channels=8), "varlen"),
        (HOPPER, set(), replace(WINDOW, dtype=torch.float64), "blocked"),
        (HOPPER, set(), replace(FULL, memory=True, length=1), "blocked"),
        (BLACKWELL, FLASH, FULL, "flash-attn-4"),
        (BLACKWELL, FLASH, replace(FULL, channels=256), "flash-attn"),
        (BLACKWELL, set(), FULL, "sdpa"),
        (AMPERE, FLASH, FULL, "flash-attn"),
        (AMPERE, set(), FULL, "sdpa"),
        (AMPERE, set(), BOTH, "flex"),
        ((7, 5), FLASH, FULL, "sdpa"),
        ((7, 5), set(), replace(WINDOW, length=100), "blocked"),
    ],
)
def test_card_packages_and_case_select_the_row(
    capability: tuple[int, int], packages: set[str], case: AttentionCase, row: str, machine: Machine
) -> None:
    machine(capability, packages)
    assert chosen(case) == row


def test_every_row_is_selected_above() -> None:
    (marks,) = test_card_packages_and_case_select_the_row.pytestmark  # type: ignore[attr-defined]
    assert {arguments[3] for arguments in marks.args[1]} == {*ROWS, "blocked"}


REFUSED: dict[str, dict[str, AttentionCase]] = {
    "flash-attn-3": {
        "float32": replace(FULL, dtype=torch.float32),
        "at most 256 channels": replace(FULL, channels=264),
        "multiple of 8": replace(FULL, channels=36),
        "remembered": replace(FULL, memory=True),
    },
    "cudnn": {
        "float32": replace(FULL, dtype=torch.float32),
        "at most 128 channels": replace(FULL, channels=136),
        "multiple of 8": replace(FULL, channels=36),
        "window": WINDOW,
        "documents": DOCUMENTS,
        "remembered": replace(FULL, memory=True),
        "at least 2 tokens": replace(FULL, length=1),
    },
    "flash-attn-4": {
        "float32": replace(FULL, dtype=torch.float32),
        "at most 128 channels": replace(FULL, channels=136),
        "multiple of 8": replace(FULL, channels=36),
        "remembered": replace(FULL, memory=True),
    },
    "flash-attn": {
        "float32": replace(FULL, dtype=torch.float32),
        "at most 256 channels": replace(FULL, channels=257),
        "remembered": replace(FULL, memory=True),
    },
    "sdpa": {"window": WINDOW, "documents": DOCUMENTS, "remembered": replace(FULL, memory=True)},
    "flex": {"float64": replace(FULL, dtype=torch.float64), "at least 16 channels": replace(FULL, channels=8)},
    "varlen": {
        "float32": replace(FULL, dtype=torch.float32),
        "at most 256 channels": replace(FULL, channels=264),
        "multiple of 8": replace(FULL, channels=36),
        "remembered": replace(FULL, memory=True),
    },
}
LIMITS = ("dtypes", "heads", "window", "documents", "memory", "fewest")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_condition_of_a_row_counts(row: AttentionRow) -> None:
    """Each case differs from a case that the row takes by one condition, and a row without its limits takes all."""
    taken = [FULL, BOTH] if row.window else [FULL]
    assert [row.refusal(case) for case in taken] == [None] * len(taken)
    unlimited = AttentionRow(row.name, row.function, "", dtypes=None, memory=True)
    kept = {field.name: getattr(unlimited, field.name) for field in fields(row) if field.name in LIMITS}
    for words, case in REFUSED[row.name].items():
        reason = row.refusal(case)
        assert reason is not None
        assert words in reason
        assert row.skipped_reason(case) == reason
        assert replace(row, **kept).refusal(case) is None


def test_a_row_that_gains_nothing_can_be_forced() -> None:
    short = replace(WINDOW, length=127)
    assert "tokens" in (ROWS["flex"].skipped_reason(short) or "")
    assert ROWS["flex"].refusal(short) is None


@pytest.mark.parametrize(
    ("name", "largest"),
    [("flash-attn-3", 192), ("cudnn", 0), ("flash-attn-4", 128), ("flash-attn", 256), ("varlen", 256)],
)
def test_gradients_in_a_fixed_order_have_a_largest_head(name: str, largest: int) -> None:
    row = ROWS[name]
    wide = row.heads[-1]
    case = replace(FULL, channels=wide)
    assert row.refusal(case) is None
    assert ("order" in (row.refusal(replace(case, deterministic=True)) or "")) == (wide > largest)
    if largest:
        assert row.refusal(replace(FULL, channels=largest, deterministic=True)) is None


def test_deterministic_runs_use_no_cudnn(machine: Machine) -> None:
    machine(HOPPER)
    with deterministic(True):
        assert chosen(replace(FULL, deterministic=True)) == "sdpa"
        assert chosen(replace(WINDOW, deterministic=True)) == "flex"


@pytest.mark.parametrize(
    ("version", "reason"), [(None, "without cuDNN"), ((9, 15, 0), "9.15.0 is before 9.15.1"), ((9, 15, 1), None)]
)
def test_cudnn_must_compute_rows_of_any_length(
    version: tuple[int, int, int] | None, reason: str | None, machine: Machine
) -> None:
    machine(HOPPER, cudnn=version)
    if reason is None:
        assert chosen(FULL) == "cudnn"
    else:
        assert chosen(FULL) == "sdpa"
        assert reason in attention_choice(FULL, "cuda")[1]


def test_cards_without_kernels_are_named(machine: Machine) -> None:
    machine(AMPERE, FLASH)
    for row, cards in (("flash-attn-3", "9.x"), ("flash-attn-4", "9.x and 10.x"), ("cudnn", "9.x")):
        assert attention.named(row).unavailable_reason("cuda") == f"for compute capability {cards}"
    assert attention.named("varlen").unavailable_reason("cuda") is None


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_flash_attention_versions_are_ordered_by_rate(gpu: GPU, machine: Machine) -> None:
    """Compare on the devices that each version supports."""
    machine(gpu.capability, FLASH)
    available = [
        row.name for row in TABLE if row.name in FLASH and not attention.named(row.name).unavailable_reason("cuda")
    ]
    rates = [gpu.rate("attention", f"flash{name.removeprefix('flash-attn')}") for name in available]
    assert rates == sorted(rates, reverse=True)
    assert len(available) > 1


def test_the_choice_is_shown_for_each_case(machine: Machine) -> None:
    machine(HOPPER)
    lines = {name: (form, reason) for name, form, reason in choices_by_case("cuda", EXAMPLES)}
    assert {name: lines[name][0] for name in EXAMPLES} == {
        "attention": "cudnn",
        "attention in a window": "flex",
        "attention of documents": "flex",
    }
    _, reason = lines["attention in a window"]
    assert ROWS["flex"].reason in reason
    assert "cudnn, sdpa: takes no window" in reason
    assert "flash-attn-3, flash-attn-4, flash-attn: not installed" in reason
    with force("reference"):
        assert attention_choice(FULL, "cuda") == ("reference", "forced")


def test_choices_on_a_cpu_are_as_without_the_table() -> None:
    lines = choices_by_case("cpu", EXAMPLES)
    assert ("attention", *attention.choice("cpu")) in lines
    assert not any(name in EXAMPLES for name, *_ in lines if name != "attention")
    assert attention.choice("cpu")[0] in ("native", "blocked")


def test_a_forced_row_that_cannot_serve_is_refused() -> None:
    (problem,) = forced_attention_problems("sdpa", [FULL, WINDOW, replace(FULL, memory=True)])
    assert (problem.key, problem.code) == ("run.force_ops.attention", "unsupported")
    assert "takes no remembered keys; takes no window" in problem.message
    assert forced_attention_problems("sdpa", [FULL]) == []
    assert forced_attention_problems("reference", [WINDOW]) == []
    q = torch.randn(1, 8, 1, 8)
    with force_on_all_threads({"attention": "sdpa"}):
        attention(AttentionInputs(q, q, q))
        with pytest.raises(ConfigError, match="takes no window"):
            attention(AttentionInputs(q, q, q, window=4))


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[set[str]]]:
    """The backends that torch may choose from, for each call of scaled_dot_product_attention."""
    seen: list[set[str]] = []
    flags: Any = torch.backends.cuda
    attend = functional.scaled_dot_product_attention

    def noted(*arguments: Any, **options: Any) -> Tensor:
        seen.append({name for name in BACKENDS if getattr(flags, f"{name}_sdp_enabled")()})
        with sdpa_kernel(SDPBackend.MATH):
            return attend(*arguments, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    before = flags.cudnn_sdp_enabled()
    flags.enable_cudnn_sdp(True)  # torch's default
    yield seen
    flags.enable_cudnn_sdp(before)


def test_attention_runs_no_cudnn_except_for_its_row(backends: list[set[str]]) -> None:
    """Generation on every card runs `blocked`, whose backward pass calls torch's kernels again if rows are long."""
    compute_device.__wrapped__()
    q, k, v = (torch.randn(1, 17 * blocked.BLOCK, 1, 8).requires_grad_() for _ in range(3))
    rows = AttentionInputs(q, k, v)
    torch_kernels.cudnn(rows)
    assert backends.pop() == {"cudnn"}
    torch_kernels.sdpa(rows)
    blocked.blocked(rows)
    blocked.blocked(rows._replace(window=16))
    assert len(backends) == 2 + 17
    blocked.blocked(rows._replace(documents_BL=torch.zeros(q.shape[:2], dtype=torch.int64))).sum().backward()
    assert backends == [BACKENDS - {"cudnn"}] * (2 + 17 + 2 * 17)


def test_varlen_needs_windows_and_grouped_keys(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    assert torch_kernels.varlen_missing() is None

    def older(query: Tensor, window_size: tuple[int, int]) -> Tensor:
        return query

    for found, words in ((None, "has no varlen_attn"), (older, "has no enable_gqa")):
        monkeypatch.setattr(torch_kernels, "_varlen_attn", lambda found=found: found)
        machine(HOPPER)
        assert words in (attention.named("varlen").unavailable_reason("cuda") or "")
        assert chosen(replace(WINDOW, length=100)) == "blocked"
