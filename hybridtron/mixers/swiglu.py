"""The gated MLP (equation in `architecture/swiglu.py`), a mixer without a state.

Legend: B rows (sequences), L tokens, D width.
"""

from __future__ import annotations

from torch import Tensor

from hybridtron.architecture.base import ModelSizes
from hybridtron.architecture.swiglu import SwiGLUSpec
from hybridtron.data.batch import SeqInfo
from hybridtron.mixers.base import Mixer, MixerOutput, State
from hybridtron.ops.swiglu import SwiGLUInputs, swiglu
from hybridtron.parallel.linear import TensorGroup, column_parallel, project_all, row_parallel


class SwiGLU(Mixer):
    """One fused matmul for gate and up, then the activation, then the down projection."""

    def __init__(self, spec: SwiGLUSpec, sizes: ModelSizes, tensor: TensorGroup) -> None:
        super().__init__()
        self.tensor = tensor
        self.multiplier = spec.gate_multiplier
        self.gate_up = column_parallel(sizes.width, 2 * spec.hidden, tensor)
        self.down = row_parallel(spec.hidden, sizes.width, tensor)

    def forward(self, x_LBD: Tensor, state: State | None, seq: SeqInfo) -> MixerOutput:
        (gate_up,) = project_all(x_LBD, self.tensor, self.gate_up)
        return MixerOutput(self.down(swiglu(SwiGLUInputs(gate_up, self.multiplier))), {}, {})
