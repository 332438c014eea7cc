"""Dropout without a random state: a hash of token and channel numbers decides which elements are dropped."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.dropout import reference, triton
from hybridtron.ops.dropout.numbers import channel_numbers, token_numbers
from hybridtron.ops.dropout.reference import DropoutInputs

__all__ = ["DropoutInputs", "channel_numbers", "dropout", "token_numbers"]

dropout = Op(reference.dropout, (triton.TRITON,))
