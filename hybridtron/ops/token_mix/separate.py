"""Token mixing by torch's operations in the inputs' dtypes, for CPUs and for torch.compile.

If the dtypes differ, torch computes in the wider dtype, and the streams are cast to x's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtron.ops.dispatch import Implementation
from hybridtron.ops.token_mix.reference import TokenMixInputs, predecessors


def token_mix(inputs: TokenMixInputs) -> tuple[Tensor, ...]:
    """Return every stream (L, B, D) in x's dtype; if `change` is not None, all streams are views of one tensor."""
    x_LBD = inputs.x_LBD
    first_BD = None if inputs.first_BD is None else inputs.first_BD.to(x_LBD.dtype)
    difference_LBD = predecessors(x_LBD, first_BD, inputs.documents_BL) - x_LBD
    if inputs.change_SLBD is None:
        return tuple(torch.addcmul(x_LBD, difference_LBD, mix_D).to(x_LBD.dtype) for mix_D in inputs.mix_SD)
    mix_SLBD = inputs.change_SLBD + inputs.mix_SD[:, None, None]
    return torch.addcmul(x_LBD, difference_LBD, mix_SLBD).to(x_LBD.dtype).unbind()


SEPARATE = Implementation("separate", token_mix)
