"""Bins of queries and keys by a random projection: similar vectors share a bin (locality-sensitive hashing).

    argmax  the index of the column of H with the largest product: h bins
    sign    the signs of the products as a binary number, the first column its highest digit: 2^h bins

Vectors are centred first. Their length does not matter, so they need not be normalized. Centred over its own features,
a vector has a bin that depends on no other token. Centred over the sequence, as in the code published with the method,
a later token changes the bins of earlier ones. The second way is only for reproducing results.

Legend as in `reference`, h hashes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


def hash_matrix(seed: int, size: int, hashes: int, device: torch.device) -> Tensor:
    """Draw standard normal numbers (N, h) in fp32, the same on every rank."""
    generator = torch.Generator().manual_seed(seed >> 1)
    return torch.randn(size, hashes, generator=generator).to(device, non_blocking=True)


@torch.no_grad()
def hash_bins(x_RSN: Tensor, documents_RS: Tensor, matrix_Nh: Tensor, rule: str, centre: str) -> Tensor:
    """Return the bin of every vector, (R, S) in int64."""
    wide_RSN = at_least_fp32(x_RSN)
    if centre == "features":
        mean_RSN = wide_RSN.mean(-1, keepdim=True)
    else:
        mean_RSN = _document_means(wide_RSN, documents_RS)
    products_RSh = (wide_RSN - mean_RSN) @ matrix_Nh.to(wide_RSN.dtype)
    if rule == "argmax":
        return products_RSh.argmax(-1)
    digits_h = 2 ** torch.arange(matrix_Nh.shape[1] - 1, -1, -1, device=x_RSN.device)
    return ((products_RSh > 0) * digits_h).sum(-1)


def _document_means(x_RSN: Tensor, documents_RS: Tensor) -> Tensor:
    """Return for every token the mean over its document, later tokens included."""
    number_RS = documents_RS + 1  # keys without a token have document -1
    number_RSN = number_RS[..., None].expand_as(x_RSN)
    sums_RDN = x_RSN.new_zeros(len(x_RSN), int(number_RS.max()) + 1, x_RSN.shape[2])
    counts_RDN = torch.zeros_like(sums_RDN).scatter_add_(1, number_RSN, torch.ones_like(x_RSN))
    return (sums_RDN.scatter_add_(1, number_RSN, x_RSN) / counts_RDN.clamp(min=1)).gather(1, number_RSN)
