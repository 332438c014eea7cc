"""The MLP with squared ReLU (equation in `architecture/squared_relu.py`), a mixer without a state.

Legend: B rows (sequences), L tokens, D width, E inner channels on this rank.
"""

from __future__ import annotations

from torch import Tensor

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.squared_relu import SquaredReLUSpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, MixerOutput, State
from hybridtron.ops.squared_relu import SquaredReLUInputs, squared_relu
from hybridtron.parallel.linear import TensorGroup, column_parallel, project_all, row_parallel


class SquaredReLU(Mixer):
    """Up projection, squared ReLU, and down projection."""

    def __init__(self, spec: SquaredReLUSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        self.tensor = tensor
        self.up = column_parallel(sizes.width, spec.hidden, tensor)
        self.down = row_parallel(spec.hidden, sizes.width, tensor)

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput:
        (up_LBE,) = project_all(x_LBD, self.tensor, self.up)
        return MixerOutput(self.down(squared_relu(SquaredReLUInputs(up_LBE))), {}, {})
