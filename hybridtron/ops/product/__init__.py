"""Matrix multiplications: `linear` for projections, and `matrix_product` for ops that compute their own gradients."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.product import onednn, reference
from hybridtron.ops.product.reference import LinearInputs, ProductInputs

__all__ = ["LinearInputs", "ProductInputs", "linear", "matrix_product"]

linear = Op(reference.linear, (onednn.LINEAR,))
matrix_product = Op(reference.matrix_product, (onednn.PRODUCT,))
