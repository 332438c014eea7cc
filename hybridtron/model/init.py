"""Initialise weights as a pure function of the seed, a weight's full name and its entry in the parameter table.

The construction order and the parallel layout do not matter: a model that is sharded over many ranks starts from the
unsharded model's values.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from hybridtron.architecture.base import Parameter
from hybridtron.architecture.inits import (
    Constant,
    EachExpert,
    Init,
    InverseSoftplus,
    LogRange,
    LogUniform,
    Normal,
    Orthogonal,
    Ramp,
    RowFactors,
    Rows,
    Uniform,
)
from hybridtron.model.lm import LanguageModel
from hybridtron.parallel.mesh import ONE_RANK, Mesh
from hybridtron.parallel.sharding import cut


def initialise(model: LanguageModel, seed: int) -> None:
    """Fill every weight in a full model, or in this rank's part of a model, in place. Each weight keeps its dtype."""
    for name, weight in model.named_parameters():
        parameter = model.table[name]
        mesh = model.slice.meshes[parameter.family]
        if isinstance(parameter.init, EachExpert):
            weight.data.copy_(_own_experts(parameter.init, parameter, mesh, seed, name))
        else:
            weight.data.copy_(cut(starting_value(parameter.init, parameter.shape, seed, name), parameter, mesh))


def _own_experts(init: EachExpert, parameter: Parameter, mesh: Mesh, seed: int, name: str) -> Tensor:
    """Return this rank's shard of the experts' initial weights. Only this rank's experts are drawn."""
    ranks = mesh.dimensions.get("expert", ONE_RANK)
    within = Mesh({name: group for name, group in mesh.dimensions.items() if name != "expert"})
    drawn = (
        starting_value(init.init, parameter.shape[1:], seed, f"{name}/{e}")[None]
        for e in ranks.part(parameter.shape[0])
    )
    return torch.cat([cut(expert, parameter, within) for expert in drawn])


def starting_value(init: Init, shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """Return the full initial weight on the CPU, in fp32 if that is torch's default dtype."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    match init:
        case Constant(value):
            return torch.full(shape, value)
        case Normal(std):
            return torch.empty(shape).normal_(0.0, std, generator=generator)
        case Uniform(bound):
            return torch.empty(shape).uniform_(-bound, bound, generator=generator)
        case LogRange():
            return torch.arange(1, shape[-1] + 1, dtype=torch.float32).log().expand(shape)
        case LogUniform(low, high):
            return torch.empty(shape).uniform_(low, high, generator=generator).log()
        case Orthogonal(0.0):  # orthogonal_ would draw and normalize numbers only to multiply them by 0
            return torch.zeros(shape)
        case Orthogonal(length):
            return nn.init.orthogonal_(torch.empty(shape), length, generator)
        case Ramp(first, last, exponent, zigzag):
            index = torch.arange(math.prod(shape), dtype=torch.float64)
            values = first + (last - first) * (index / max(1, len(index) - 1)) ** exponent
            # (index + 1) % 3 - 1 is 0, 1, -1, 0, 1, -1, ..., as in RWKV's public code
            return (values + zigzag * ((index + 1) % 3 - 1)).float().view(shape)
        case Rows(starts):
            # The seed is equal for all indices of the first axis. This is harmless, because a Ramp draws no numbers.
            return torch.stack([starting_value(start, shape[1:], seed, name) for start in starts])
        case EachExpert(of_expert):
            return torch.stack([starting_value(of_expert, shape[1:], seed, f"{name}/{e}") for e in range(shape[0])])
        case RowFactors(of_rows, blocks):
            counts = torch.tensor([rows for rows, _ in blocks])
            factors = torch.tensor([factor for _, factor in blocks]).repeat_interleave(counts)
            return starting_value(of_rows, shape, seed, name) * factors[:, None]
        case InverseSoftplus(low, high):
            step = torch.empty(shape).uniform_(math.log(low), math.log(high), generator=generator).exp()
            return step + torch.log(-torch.expm1(-step))  # the inverse of softplus at `step`
