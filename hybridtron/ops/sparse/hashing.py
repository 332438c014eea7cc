"""Bins of queries and keys by a random projection: similar vectors share a bin (locality-sensitive hashing).

In sparse attention with the rule `bin`, a query sees keys in its own bin. To find the bin for a query or key, a mean is
subtracted from the vector, and the difference is multiplied by a random matrix (N, h). The bin follows from the h
products, by one of two rules:

    argmax  the index of the largest product: h bins
    sign    the signs of the products as a binary number, with the first product as its highest digit: 2**h bins

There are two choices for the mean:

    features  over the vector's own features: the bin depends on no other token, and scaling the vector by a positive
              number does not change its bin
    document  over all vectors in the document: a later token changes earlier tokens' bins, so this choice serves only
              to reproduce results from the code published with the method

Legend: R rows (a row for each sequence in the batch and each head group), S vectors (queries or keys), N features, h
columns in the random matrix (hashes), D documents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtron.ops.precision import at_least_fp32


def hash_matrix(seed: int, size: int, hashes: int, device: torch.device) -> Tensor:
    """Return standard normal random numbers (N, h) in fp32, drawn on the CPU so that every rank gets equal numbers."""
    generator = torch.Generator().manual_seed(seed >> 1)
    return torch.randn(size, hashes, generator=generator).to(device, non_blocking=True)


@torch.no_grad()
def hash_bins(x_RSN: Tensor, documents_RS: Tensor, matrix_Nh: Tensor, rule: str, centre: str) -> Tensor:
    """Return every vector's bin, (R, S) in int64.

    `rule` is "argmax" or "sign". If `centre` is "features", the mean over a vector's own features is subtracted, else
    the mean over its document.
    """
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
    """Return for every token the mean vector of its document, including later tokens."""
    number_RS = documents_RS + 1  # from 0 on, since empty slots of the memory have document -1
    number_RSN = number_RS[..., None].expand_as(x_RSN)
    sums_RDN = x_RSN.new_zeros(len(x_RSN), int(number_RS.max()) + 1, x_RSN.shape[2])
    counts_RDN = torch.zeros_like(sums_RDN).scatter_add_(1, number_RSN, torch.ones_like(x_RSN))
    return (sums_RDN.scatter_add_(1, number_RSN, x_RSN) / counts_RDN.clamp(min=1)).gather(1, number_RSN)
