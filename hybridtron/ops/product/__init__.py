"""Matrix products: those of projections, and those that a loss computes itself."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.product import onednn, reference
from hybridtron.ops.product.reference import LinearInputs, ProductInputs

__all__ = ["LinearInputs", "ProductInputs", "linear", "matrix_product"]

linear = Op(reference.linear, (onednn.LINEAR,))
matrix_product = Op(reference.matrix_product, (onednn.PRODUCT,))
