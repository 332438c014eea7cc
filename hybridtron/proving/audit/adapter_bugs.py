"""Planted bugs of low-rank adapters, for testing the audit."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from torch import Tensor
from torch.nn import functional

from hybridtron.ops.dropout import channel_numbers, token_numbers
from hybridtron.parallel.adapters import adapter_of
from hybridtron.parallel.linear import RowParallel
from hybridtron.parallel.magnitude import row_lengths
from hybridtron.parallel.mesh import RankGroup
from hybridtron.proving.audit.bug import Bug, Replaced, marked

ADAPTERS = "hybridtron.parallel.adapters"


def _added_after_the_sum(self: RowParallel, x: Tensor) -> Tensor:
    summed = reduce_from_tensor_model_parallel_region(functional.linear(x, self.weight), group=self.tp_group)
    adapter = adapter_of(self)
    if adapter is None:
        return summed
    return summed + adapter.added(x)


ADAPTER_GRADIENT = marked("q.adapter.A", "partial_over_tensor", False)
ADAPTER_AFTER_SUM: Replaced = {"hybridtron.parallel.linear.RowParallel.forward": _added_after_the_sum}
DROPOUT_OF_RANK: Replaced = {
    f"{ADAPTERS}.token_numbers": lambda seed, *rest: token_numbers(seed + torch.distributed.get_rank(), *rest)
}
DROPOUT_OF_OWN_CHANNELS: Replaced = {
    f"{ADAPTERS}.channel_numbers": lambda seed, first, *rest: channel_numbers(seed, 0, *rest)
}
DROPOUT_OF_SHARE: Replaced = {
    f"{ADAPTERS}.token_numbers": lambda seed, positions_BL, first: token_numbers(seed, positions_BL, 0)
}
LENGTHS_OF_RANK: Replaced = {
    f"{ADAPTERS}.row_lengths": lambda W, A, B, scale, _: row_lengths(W, A, B, scale, RankGroup())
}
LENGTH_GRADIENT = marked("adapter.M", "partial_over_tensor", False)

ADAPTER_BUGS = {
    "adapter_gradient": Bug("A keeps what its rank's rows of B give it", ADAPTER_GRADIENT, "adapters", "tp2"),
    "adapter_after_sum": Bug("an adapter's part is added after the sum", ADAPTER_AFTER_SUM, "adapters", "tp2"),
    "lengths_of_rank": Bug("rows are as long as a rank's inputs say", LENGTHS_OF_RANK, "adapters-dora", "tp2"),
    "length_gradient": Bug("lengths keep their rank's part", LENGTH_GRADIENT, "adapters-dora", "tp2-sp"),
    "dropout_of_rank": Bug("each rank draws a dropout of its own", DROPOUT_OF_RANK, "adapters-dropout", "tp2"),
    "dropout_of_own_channels": Bug(
        "a rank's channels drop as the first rank's do", DROPOUT_OF_OWN_CHANNELS, "adapters-dropout", "tp2-sp"
    ),
    "dropout_of_share": Bug("every share drops as the first does", DROPOUT_OF_SHARE, "adapters-dropout", "cp2"),
}
