"""The ops inside a mixture of experts, and each op's implementations, the preferred implementation first.

With experts on several ranks, messages between ranks come between these ops.
"""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.experts import activation, gathered, native, permutation, products, reference, triton

expert_choice = Op(reference.expert_choice, (native.CHOICE,))
expert_order = Op(permutation.expert_order, (triton.ORDER, native.ORDER))
to_experts = Op(permutation.to_experts, (triton.TO, native.TO, gathered.TO))
from_experts = Op(permutation.from_experts, (triton.FROM, native.FROM, gathered.FROM))
activated_again = Op(activation.activated_again, (activation.NATIVE,))
expert_linear = Op(products.expert_linear, (products.GROUPED, products.LOOPED))
