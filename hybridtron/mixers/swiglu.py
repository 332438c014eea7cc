"""The gated MLP (equation in `architecture/swiglu.py`); it carries no state."""

from __future__ import annotations

from torch import Tensor

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, Out, State
from hybridtron.ops.swiglu import SwiGLUInputs, swiglu
from hybridtron.parallel.linear import TensorGroup, column_parallel, projected, row_parallel


class SwiGLU(Mixer):
    """Gate and up projections in one product, SwiGLU, and the down projection."""

    def __init__(self, spec: SwiGLUSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        self.tensor = tensor
        self.multiplier = spec.gate_multiplier
        self.gate_up = column_parallel(sizes.width, 2 * spec.hidden, tensor)
        self.down = row_parallel(spec.hidden, sizes.width, tensor)

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> Out:
        (gate_up,) = projected(x_LBD, self.tensor, self.gate_up)
        return Out(self.down(swiglu(SwiGLUInputs(gate_up, self.multiplier))), {}, {})
