"""Sparse attention in parallel with a recurrence, over the length: every pattern against full attention of equal width.

The full branch is timed in training: bins, scores and their ranking loss, the attention mask, attention and the gate,
forward and backward. Full attention is torch's, with as many values in four heads and keys as wide as its values.

A query sees no more keys than exist. So a token can cost the same at all lengths only if its budget is full in the
shortest row. There each of the BINS bins and each stride must hold as many keys as the pattern takes from it. `lsh, a
bin a key` has as many bins as keys, the paper's setting for language. At a few thousand tokens such a bin holds fewer
keys than a query may see, and its cost for each token rises until it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.sparse import PATTERNS, SparseOptions
from hybridtron.data.batch import SeqInfo
from hybridtron.device import compute_device
from hybridtron.mixers.sparse import SparseBranch
from hybridtron.parallel.linear import SINGLE_RANK
from hybridtron.proving.measuring import BenchReport, per_token

BINS = 16
HEADS = 4
FLAT = 1.2
"""Largest time of a token in the last row, as a multiple of the first row's."""


@dataclass(frozen=True)
class BranchBench:
    """A query's state channels, values and number of keys, and row lengths.

    Full attention is measured up to `most` tokens.
    """

    state: int
    values: int
    keys: int
    lengths: tuple[int, ...]
    most: int


FULL = BranchBench(16, 256, 64, (4096, 8192, 16384, 32768, 65536), 16384)
QUICK = BranchBench(4, 8, 4, (64, 128), 64)


def patterns(sizes: BranchBench) -> dict[str, SparseOptions]:
    """Return every pattern, with a budget that is full at the shortest row.

    One more has as many bins as keys; its budget is not full there.
    """
    options = {
        name: SparseOptions(
            name,
            sizes.keys,
            hashes=BINS if "bin" in rules else None,
            stride=sizes.lengths[0] // sizes.keys if "strided" in rules else None,
        )
        for name, rules in PATTERNS.items()
    }
    return {**options, "lsh, a bin a key": replace(options["lsh"], hashes=sizes.keys)}


def branch_passes(options: SparseOptions, length: int, sizes: BranchBench) -> Callable[[], object]:
    """Return a function that runs the branch in training over one row.

    It computes the gradients of keys, queries, values and the branch's own weights.
    """
    device = compute_device()
    generator = torch.Generator().manual_seed(length)
    branch = SparseBranch(options, sizes.state, sizes.values, ModelSizes(sizes.values, 1), SINGLE_RANK).to(device)
    for weight in branch.parameters():
        torch.nn.init.normal_(weight, std=max(weight.shape) ** -0.5)
    shapes = [(1, length, 1, sizes.state)] * 2 + [(1, length, sizes.values)] * 2
    *tensors, dy = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    inputs = [tensor.requires_grad_() for tensor in tensors]
    seq = replace(SeqInfo.stream(1, length), key=1).map(lambda tensor: tensor.to(device))

    def run() -> object:
        y_BLE, _, aux = branch(*inputs, {}, seq)
        return torch.autograd.grad((y_BLE * dy).sum() + sum(aux.values()), [*inputs, *branch.parameters()])

    return run


def full_passes(length: int, sizes: BranchBench) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(length)
    shape = (1, HEADS, length, sizes.values // HEADS)
    q, k, v, dy = (torch.randn(shape, generator=generator).to(compute_device()) for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    return lambda: torch.autograd.grad(attend(), inputs, dy)


def sparse(report: BenchReport) -> None:
    """Measure every pattern over the length, in one run."""
    sizes = report.pick(full=FULL, quick=QUICK)
    report.device = compute_device().type
    passes = {}
    for length in sizes.lengths:
        passes[length] = {name: branch_passes(options, length, sizes) for name, options in patterns(sizes).items()}
        if length <= sizes.most:
            passes[length]["full"] = full_passes(length, sizes)
    measured = report.sweep(passes)
    names = list(patterns(sizes))
    report.ratios("time, over full attention's", "tokens", measured, [(name, "full") for name in names], {})
    per_pattern = {name: per_token(measured, name) for name in names}
    of_full = per_token({n: timed for n, timed in measured.items() if "full" in timed}, "full")
    per_pattern["full"] = of_full + [""] * (len(measured) - len(of_full))
    cells = [(str(length), *(per_pattern[name][row] for name in per_pattern)) for row, length in enumerate(measured)]
    report.table("time of a token, over that in the shortest row", ("tokens", *per_pattern), cells)
    first = sizes.lengths[0]
    last = sizes.lengths[-1]
    for name in PATTERNS:
        grown = measured[last][name].fastest / last / (measured[first][name].fastest / first)
        report.at_most(f"{name}: a token of {last} / one of {first}", FLAT, grown)
    report.notes += [
        f"batch 1, one group of {sizes.state} state channels, {sizes.values} values, {sizes.keys} keys a query, fp32; "
        f"argmax bins, {BINS} of them but for `a bin a key`; stride {first // sizes.keys}",
        f"forward and backward of the whole branch in training; full is torch's causal scaled_dot_product_attention of "
        f"{HEADS} heads and as many values, up to {sizes.most} tokens; {report.repetitions} rounds",
    ]
