"""Interpolation between each token and its predecessor, for RWKV's mixers."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.token_mix import reference, separate, triton
from hybridtron.ops.token_mix.reference import TokenMixInputs

__all__ = ["TokenMixInputs", "token_mix"]

token_mix = Op(reference.token_mix, (triton.TRITON, separate.SEPARATE))
