"""Planted bugs of context parallelism, for testing the audit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from hybridtron.config.schema import Config
from hybridtron.data.batch import Batch, RowShare
from hybridtron.engine.stage import Stage, data_parallel
from hybridtron.parallel.context import ContextGroup, _exchanged, _halo, _shifted, own_share, state_before
from hybridtron.parallel.groups import Groups
from hybridtron.proving.audit.bug import Bug, Replaced

CONTEXT = "hybridtron.parallel.context"
HALO_BORDER: Replaced = {f"{CONTEXT}._halo": lambda x, count, share: _halo(x, count, share).roll(1, dims=1)}


def _decay_before(added: Tensor, total: Any, state: Tensor | None, share: RowShare) -> Tensor:
    return state_before(added, replace(total, factor=_shifted(total.factor, share, 1)), state, share)


DECAY_OF_OTHER_SHARE: Replaced = {f"{CONTEXT}.state_before": _decay_before}
SHARES_IN_OTHER_ORDER: Replaced = {f"{CONTEXT}._exchanged": lambda x, share, hop: _exchanged(x, share, -hop)}


def _with(name: str, change: Callable[[RowShare], Tensor]) -> Replaced:
    """Replace one field of every rank's `RowShare`, which describes its sequence shard."""

    def share_of(batch: Batch, context: ContextGroup) -> Batch:
        shard = own_share(batch, context)
        share = shard.seq.share
        assert share is not None
        changed: dict[str, Any] = {name: change(share)}
        share = replace(share, **changed)
        return replace(shard, seq=replace(shard.seq, share=share))

    return {"hybridtron.engine.schedule.own_share": share_of}


DOCUMENT_AT_CUT = _with("behind_B", lambda share: share.behind_B.clamp(min=1))
DOCUMENTS_OF_SHARE = _with("behind_B", lambda share: torch.full_like(share.behind_B, share.first))
BORDER_INSIDE = _with("unbroken_B", lambda share: torch.ones_like(share.unbroken_B))


def _labels_of_share(batch: Batch, context: ContextGroup) -> Batch:
    """Take the last label from the sequence shard itself, as if it were a full row."""
    shard = own_share(batch, context)
    last_B1 = shard.tokens_BL[:, -1:]
    return replace(shard, labels_BL=torch.cat((shard.labels_BL[:, :-1], last_B1), 1))


LABEL_AT_CUT: Replaced = {"hybridtron.engine.schedule.own_share": _labels_of_share}


def _lost_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.zeros_like(_exchanged(grad, ctx.share, -ctx.hop)), None, None


STATE_GRADIENT: Replaced = {f"{CONTEXT}._Shifted.backward": staticmethod(_lost_gradient)}


def _summed_over_data(
    stages: Sequence[Stage], config: Config, groups: Groups, dtype: torch.dtype
) -> list[DistributedDataParallel]:
    wrapped = data_parallel(stages, config, groups, dtype)
    assert groups.data.group is not None
    for buckets in (buckets for stage in wrapped for buckets in stage.bucket_groups):
        buckets.data_parallel_group = groups.data.group
    return wrapped


SUMS_OVER_DATA: Replaced = {"hybridtron.engine.engine.data_parallel": _summed_over_data}


def _by_own_tokens(stages: Sequence[Any], tokens: Tensor, groups: Groups) -> None:
    for stage in stages:
        stage.scale_gradients(1.0 / (tokens * groups.context.size))


TOKENS_OF_SHARE: Replaced = {"hybridtron.engine.stage._divide": _by_own_tokens}


def _all_to_come(x: Tensor, share: RowShare) -> Iterator[Tensor]:
    return (_shifted(x, share, -hop) for hop in range(share.size - 1, 0, -1))


KEYS_OF_LATER: Replaced = {"hybridtron.mixers.sparse.earlier_shares": _all_to_come}
CANDIDATES_OF_SHARE: Replaced = {"hybridtron.mixers.sparse.sum_over_shares": lambda x, share: x}


BLOCKS_OF_SHARE: Replaced = {"hybridtron.mixers.span.sum_over_shares": lambda x, share: x}


CONTEXT_BUGS = {
    "halo_border": Bug("a share reads the tokens before it one too early", HALO_BORDER, "samba", "cp2"),
    "decay_of_other_share": Bug("a state decays as in the share before", DECAY_OF_OTHER_SHARE, "mamba", "cp4"),
    "shares_in_other_order": Bug("states go from the last share to the first", SHARES_IN_OTHER_ORDER, "mamba2", "cp4"),
    "document_at_cut": Bug(
        "a document that begins with a share has the state of the one before", DOCUMENT_AT_CUT, "mamba", "cp4"
    ),
    "documents_of_share": Bug(
        "every share's first document reaches back to the row's", DOCUMENTS_OF_SHARE, "kda", "cp2"
    ),
    "border_inside": Bug("states pass through shares with a border", BORDER_INSIDE, "rwkv6", "cp4"),
    "label_at_cut": Bug("a share's last label is its own last token", LABEL_AT_CUT, "attention", "cp2"),
    "state_gradient": Bug("no gradient returns to the share before", STATE_GRADIENT, "mamba-mlp", "cp2"),
    "sums_over_data": Bug("gradients are summed over data-parallel ranks only", SUMS_OVER_DATA, "mamba", "cp2-dp2"),
    "keys_of_later": Bug("sparse attention remembers later shares", KEYS_OF_LATER, "mamba-hax", "cp2"),
    "blocks_of_share": Bug("chunks choose from their share's blocks", BLOCKS_OF_SHARE, "samba-span", "cp4"),
    "candidates_of_share": Bug("keys are ranked by a share's own queries", CANDIDATES_OF_SHARE, "mamba-hax", "cp2"),
    "tokens_of_share": Bug("gradients are divided by a share's tokens", TOKENS_OF_SHARE, "mamba2", "cp2"),
}
