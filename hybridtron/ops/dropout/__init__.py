"""Dropout whose draws depend only on the numbers of tokens and channels, not on a random state."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.dropout import reference, triton
from hybridtron.ops.dropout.numbers import channel_numbers, token_numbers
from hybridtron.ops.dropout.reference import DropoutInputs

__all__ = ["DropoutInputs", "channel_numbers", "dropout", "token_numbers"]

dropout = Op(reference.dropout, (triton.TRITON,))
