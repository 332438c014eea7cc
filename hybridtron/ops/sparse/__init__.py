"""Sparse attention to few keys: recent, first and strided keys, keys in the query's hash bin, and the best keys."""

from hybridtron.ops.dispatch import Op
from hybridtron.ops.sparse import dense, reference, tiled, triton
from hybridtron.ops.sparse.hashing import hash_bins, hash_matrix
from hybridtron.ops.sparse.memory import SparseKeys, SparseMemory, joined, merged, remember
from hybridtron.ops.sparse.ranking import candidates, query_directions, ranking_loss, worth_of_keys
from hybridtron.ops.sparse.reference import Budget, Seen, SparseInputs

__all__ = [
    "Budget", "Seen", "SparseInputs", "SparseKeys", "SparseMemory", "candidates", "hash_bins", "hash_matrix", "joined",
    "merged", "query_directions", "ranking_loss", "remember", "sparse_attention", "worth_of_keys",
]  # fmt: skip

sparse_attention = Op(reference.sparse_attention, (triton.TRITON, dense.DENSE, tiled.TILED))
