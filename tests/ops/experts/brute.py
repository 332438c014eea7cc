"""Routing and experts by Python's own loops over tokens, experts and groups, in float64."""

import math

import torch
from torch import Tensor

from hybridtron.ops.experts import Router


def routed(logits: Tensor, correction: Tensor | None, options: Router) -> tuple[list[list[int]], list[list[float]]]:
    """Return each token's experts and weights."""
    chosen, weights = [], []
    for row in logits.tolist():
        if options.scores == "softmax":
            total = sum(math.exp(z) for z in row)
            scores = [math.exp(z) / total for z in row]
        else:
            scores = [1 / (1 + math.exp(-z)) for z in row]
        corrected = list(scores)
        if correction is not None:
            corrected = [s + b for s, b in zip(scores, correction.tolist(), strict=True)]
        size = len(row) // options.groups
        groups = [range(first, first + size) for first in range(0, len(row), size)]
        worth = [sum(sorted((corrected[e] for e in group), reverse=True)[:2]) for group in groups]
        kept = sorted(range(options.groups), key=lambda g: (-worth[g], g))[: options.group_limit]
        left = [e for g in kept for e in groups[g]]
        best = sorted(left, key=lambda e: (-corrected[e], e))[: options.top_k]
        of_best = [scores[e] for e in best]
        divisor = sum(of_best) if options.normalise else 1.0
        chosen.append(best)
        weights.append([w / divisor * options.scale for w in of_best])
    return chosen, weights


def mixed(
    x: Tensor, chosen: list[list[int]], weights: list[list[float]], gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """Return y, token by token."""
    rows = []
    for token, experts, factors in zip(x, chosen, weights, strict=True):
        y = torch.zeros_like(token)
        for expert, factor in zip(experts, factors, strict=True):
            first = gate_up[expert] @ token
            if activation == "swiglu":
                half = len(first) // 2
                hidden = first[:half] * torch.sigmoid(first[:half]) * first[half:]
            else:
                hidden = torch.where(first > 0, first, 0.0) ** 2
            y = y + factor * (down[expert] @ hidden)
        rows.append(y)
    return torch.stack(rows) if rows else torch.zeros_like(x)
