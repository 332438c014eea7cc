"""The ops of which a mixture of experts consists, and their implementations, the preferred one first.

With experts on several ranks, messages between ranks come between these ops.
"""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.experts import gathered, permutation, products, reference

expert_choice = Op(reference.expert_choice)
expert_order = Op(permutation.expert_order)
to_experts = Op(permutation.to_experts, (gathered.TO,))
from_experts = Op(permutation.from_experts, (gathered.FROM,))
expert_linear = Op(products.expert_linear, (products.GROUPED, products.LOOPED))
