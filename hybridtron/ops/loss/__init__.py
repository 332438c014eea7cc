"""Cross-entropy, from logits, or from the input and the weight of the output head."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.loss import chunked, reference
from hybridtron.ops.loss.reference import CrossEntropyInputs, LinearCrossEntropyInputs, Loss, VocabularyShare

__all__ = [
    "CrossEntropyInputs", "LinearCrossEntropyInputs", "Loss", "VocabularyShare", "cross_entropy",
    "linear_cross_entropy",
]  # fmt: skip

cross_entropy = Op(reference.cross_entropy)
linear_cross_entropy = Op(reference.linear_cross_entropy, (chunked.CHUNKED,))
