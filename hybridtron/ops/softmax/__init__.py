"""The softmax of the language-model loss as two ops: sums over the vocabulary, and logit gradients."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.softmax import native, reference, triton
from hybridtron.ops.softmax.reference import SoftmaxGradientsInputs, SoftmaxSums, SoftmaxSumsInputs

__all__ = ["SoftmaxGradientsInputs", "SoftmaxSums", "SoftmaxSumsInputs", "softmax_gradients", "softmax_sums"]

softmax_sums = Op(reference.softmax_sums, (triton.SUMS, native.SUMS))
softmax_gradients = Op(reference.softmax_gradients, (triton.GRADIENTS, native.GRADIENTS))
