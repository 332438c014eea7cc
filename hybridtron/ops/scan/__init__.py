"""The selective scan of Mamba-1."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.scan import chunked, mamba_ssm, reference, triton
from hybridtron.ops.scan.reference import ScanInputs

__all__ = ["ScanInputs", "selective_scan"]

# mamba-ssm's kernel takes no initial state. Where there is a state, kernels that take it come before that kernel with
# the state's share added in torch.
selective_scan = Op(reference.selective_scan, (mamba_ssm.ALONE, triton.TRITON, mamba_ssm.COMPLETED, chunked.CHUNKED))
