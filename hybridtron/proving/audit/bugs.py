"""Planted bugs for testing the audit: each is patched into the package while a worker runs, and the audit must find it.

With each bug, training runs without an error but with wrong gradients: for example, an all-reduce is missing or done
twice, weights are cut in a wrong order, or a divisor is wrong. `BUGS` at the end of the file describes each bug's
effect. The constants before `BUGS` map attributes, as dotted paths, to their replacements.

Letters in names of tensors:

    L   tokens
    B   sequences
    D   channels in the residual stream
    V   vocabulary
    H   heads
    K   key heads (in x_BLKN)
    N   channels per key head
    1   a single token
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import mappings
from torch import Tensor
from torch.nn import functional

from hybridtron.architecture.base import Cut, Parameter
from hybridtron.architecture.moe import MoESpec
from hybridtron.architecture.table import Architecture
from hybridtron.config.pipeline_layout import stages_of
from hybridtron.config.schema import Config
from hybridtron.data.batch import Batch, SequenceShard
from hybridtron.engine.schedule import StepLoss, _loss_of, run_schedule
from hybridtron.engine.stage import Stage, build_stages, data_parallel
from hybridtron.mixers.retnet import log_gammas
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.loss import Loss
from hybridtron.ops.rotations import angles
from hybridtron.ops.sparse import hash_matrix, ranking_loss
from hybridtron.ops.ssd import decay_scan
from hybridtron.ops.transition import StateTransition
from hybridtron.parallel.context import _exchanged, _halo, _shifted, incoming_state, local_shard
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.linear import TensorGroup
from hybridtron.parallel.mesh import Mesh, RankGroup
from hybridtron.parallel.overlapped_linear import InputComm, _gathered
from hybridtron.parallel.sharding import cut
from hybridtron.parallel.vocabulary import linear_cross_entropy
from hybridtron.proving.audit.expert_bugs import EXPERT_BUGS
from hybridtron.proving.audit.layer_bugs import (
    ADAPTER_BUGS,
    BESIDE_BUGS,
    CHANNEL_SHIFT_BORDER,
    SHARING_BUGS,
    SHIFT_BORDER,
    Bug,
    Replaced,
    marked,
)


@contextmanager
def inject_bug(name: str | None) -> Iterator[None]:
    """Patch the bug `name` into the package while the block runs. With None, nothing is patched."""
    with ExitStack() as stack:
        for target, replacement in ({} if name is None else BUGS[name].replaced).items():
            stack.enter_context(patch(target, replacement))
        yield


# marked(substring, mark, value) sets the attribute `mark` of all weights whose name contains the substring. With
# partial_over_tensor=False, the gradients of these weights are not summed over tensor-parallel ranks.
KV_GRADIENT = marked("kv", "partial_over_tensor", False)
BC_GRADIENT = marked(".bc_", "partial_over_tensor", False)
FIRST_DECAYS: Replaced = {
    "hybridtron.mixers.retnet.log_gammas": lambda heads, first, device: log_gammas(heads, 0, device)
}
GROUPED_HEADS: Replaced = {
    "hybridtron.mixers.delta_rule.DeltaRule.for_every_head": (
        lambda self, x_BLKN: x_BLKN.repeat(1, 1, self.heads // self.key_heads, 1)
    )
}
GATE_GRADIENT = marked("gate_down", "partial_over_tensor", False)
ANGLE_GRADIENT = marked("angle_proj", "partial_over_tensor", False)
PAIR_NORM_GRADIENT = marked("C_norm", "partial_over_tensor", False)
ANGLES_OF_OTHER_HEADS: Replaced = {"hybridtron.mixers.mamba3.angles": lambda inputs: angles(inputs).roll(1, dims=2)}
SEES_NEXT_STEP: Replaced = {
    "hybridtron.mixers.mamba3.decay_scan": lambda inputs: decay_scan(inputs._replace(own_step_BLH=inputs.step_BLH))
}
HEAD_NORM_GRADIENT = marked("norm_weight", "partial_over_tensor", False)
QUERY_NORM: Replaced = {"hybridtron.mixers.attention.all_reduce_sum": lambda x, tensor: x * tensor.size}
QUERY_NORM_GRADIENT = marked("q_norm_weight", "partial_over_tensor", False)
MIX_GRADIENT = marked("mixer.mix", "partial_over_tensor", False)
DECAY_INPUT_GRADIENT = marked("decay_down", "partial_over_tensor", False)
SCORES_GRADIENT = marked("sparse.weight", "partial_over_tensor", False)
SPARSE_BACKWARD: Replaced = {"hybridtron.mixers.sparse.all_reduce_gradients": lambda x, tensor: x}
HASH_OF_RANK: Replaced = {
    "hybridtron.mixers.sparse.hash_matrix": lambda seed, *sizes: hash_matrix(
        seed + 2 * torch.distributed.get_rank(), *sizes
    )
}
RANKING_OF_EVERY_RANK: Replaced = {
    "hybridtron.mixers.sparse.ranking_loss": lambda *scored: torch.distributed.get_world_size() * ranking_loss(*scored)
}
LINEAR = "hybridtron.parallel.linear"
UNSUMMED_VALUES: Replaced = {
    f"{LINEAR}.reduce_scatter_last_dim_to_tensor_parallel_region": mappings.scatter_to_tensor_model_parallel_region
}
SUMMED_AS_IT_LEAVES: Replaced = {
    f"{LINEAR}.gather_from_tensor_model_parallel_region": mappings.all_gather_last_dim_from_tensor_parallel_region
}
NORM_GRADIENT = marked("norm.weight", "partial_over_tensor", False)
DOUBLE_NORM_GRADIENT = marked("norm.weight", "partial_over_tensor", True)
DECAY = marked("", "undecayed", False)
NORM_COUNTS_COPIES = marked("", "tensor_model_parallel", True)
X_PROJ_BACKWARD: Replaced = {"hybridtron.mixers.mamba.all_reduce_gradients": lambda x, tensor: x}
GROUP_NORM: Replaced = {"hybridtron.mixers.mamba2.all_reduce_sum": lambda x, tensor: x * tensor.size}
GROUP_NORM_BACKWARD: Replaced = {"hybridtron.parallel.linear.all_reduce_gradients": lambda x, tensor: x}
MISSING_REDUCTION: Replaced = {
    "hybridtron.parallel.linear.RowParallel.forward": lambda self, x: functional.linear(x, self.weight)
}


UNSUMMED_INPUT_GRADIENT: Replaced = {
    "hybridtron.parallel.overlapped_linear._summed": lambda dx_LBD, comm: (dx_LBD, None)
}


def _in_another_order(x_LBD: Tensor, comm: InputComm, in_background: bool = False) -> tuple[Tensor, None]:
    full_LBD, _ = _gathered(x_LBD, comm)
    return full_LBD.roll(len(x_LBD), 0) if in_background else full_LBD, None


REGATHERED_ORDER: Replaced = {"hybridtron.parallel.overlapped_linear._gathered": _in_another_order}


def _untied(
    arch: Architecture, config: Config, groups: Groups, *, dtype: torch.dtype, device: torch.device
) -> list[Stage]:
    stages = build_stages(arch, config, groups, dtype=dtype, device=device)
    for stage in stages:
        stage.share_embeddings_and_output_weights = False
    return stages


TIED_GRADIENT = {"hybridtron.engine.engine.build_stages": _untied}


def _multiplied_on_every_stage(self: Stage, received: list[Tensor | None]) -> None:
    (x_LBD,) = received
    if x_LBD is None:
        self.received = None
    else:
        self.received = x_LBD * self.model.embedding_multiplier


MULTIPLIED_STAGES: Replaced = {"hybridtron.engine.stage.Stage.set_input_tensor": _multiplied_on_every_stage}


def _scaled(
    stages: Any,
    batches: Sequence[Batch],
    *rest: Any,
    forward_only: bool = False,
    auxiliary: Sequence[str] = (),
    routers: Mapping[int, MoESpec] = MappingProxyType({}),
) -> StepLoss:
    loss = run_schedule(stages, batches, *rest, forward_only=forward_only, auxiliary=auxiliary, routers=routers)
    for stage in stages:
        stage.scale_gradients(1 / len(batches))
    return loss


MICRO_BATCH_SCALE = {"hybridtron.engine.engine.run_schedule": _scaled}


def _mean(
    x_LBD: Tensor, model: LanguageModel, batch: Batch, chunks: int, z_loss: float, tensor: TensorGroup
) -> tuple[Tensor, Tensor, Tensor]:
    total, tokens, report = _loss_of(x_LBD, model, batch, chunks, z_loss, tensor)
    return total / tokens.clamp(min=1), torch.ones_like(tokens), report


MASKED_TOKENS = {"hybridtron.engine.schedule._loss_of": _mean}


def _swapped(arch: Architecture, config: Config) -> tuple[range, ...]:
    first, *inner, last = stages_of(arch, config)
    return (first, *reversed(inner), last)


SWAPPED_VIRTUAL_CHUNKS = {"hybridtron.engine.stage.stages_of": _swapped}


def _without_z_loss(
    x_LBD: Tensor, weight_VD: Tensor, labels: Tensor, mask: Tensor, _: float, tensor: TensorGroup
) -> Loss:
    return linear_cross_entropy(x_LBD, weight_VD, labels, mask, 0.0, tensor)


MISSING_Z_LOSS = {"hybridtron.engine.schedule.linear_cross_entropy": _without_z_loss}


def _cut_otherwise(wrong: Callable[[Tensor, Parameter, Mesh], Tensor]) -> Replaced:
    """Return `wrong` as a replacement for `cut`, in both modules that cut full weights into tensor shards."""
    return {"hybridtron.model.init.cut": wrong, "hybridtron.engine.engine.cut": wrong}


def _at_rank(mesh: Mesh, rank: int) -> Mesh:
    return replace(mesh, dimensions={"tensor": replace(mesh.dimensions["tensor"], rank=rank)})


def _vocabulary_of_other_rank(full: Tensor, parameter: Parameter, mesh: Mesh) -> Tensor:
    is_vocabulary = len(full) > 64 and parameter.cuts == (Cut(0),) and not parameter.parts
    tensor = mesh.dimensions["tensor"]
    other_rank = _at_rank(mesh, tensor.size - 1 - tensor.rank)
    return cut(full, parameter, other_rank if is_vocabulary else mesh)


VOCABULARY_ORDER = _cut_otherwise(_vocabulary_of_other_rank)


def _convolution_of_first_rank(full: Tensor, parameter: Parameter, mesh: Mesh) -> Tensor:
    is_convolution = full.dim() == 2 and full.shape[1] == 4 and not parameter.fp32
    return cut(full, parameter, _at_rank(mesh, 0) if is_convolution else mesh)


CONV_CUT = _cut_otherwise(_convolution_of_first_rank)


def _bonus_of_first_rank(full: Tensor, parameter: Parameter, mesh: Mesh) -> Tensor:
    is_bonus = full.dim() == 2 and parameter.fp32
    return cut(full, parameter, _at_rank(mesh, 0) if is_bonus else mesh)


BONUS_CUT = _cut_otherwise(_bonus_of_first_rank)


def _as_one_block(full: Tensor, parameter: Parameter, mesh: Mesh) -> Tensor:
    return cut(full, replace(parameter, parts=()), mesh)


FUSED_CUT = _cut_otherwise(_as_one_block)


CONTEXT = "hybridtron.parallel.context"
HALO_BORDER: Replaced = {f"{CONTEXT}._halo": lambda x, count, shard: _halo(x, count, shard).roll(1, dims=1)}


def _decay_before(
    added: Tensor, transition: StateTransition | None, state: Tensor | None, shard: SequenceShard
) -> Tensor:
    assert transition is not None
    moved = transition._replace(values=_shifted(transition.values, shard, 1))
    return incoming_state(added, moved, state, shard)


DECAY_OF_OTHER_SHARE: Replaced = {f"{CONTEXT}.incoming_state": _decay_before}
SHARES_IN_OTHER_ORDER: Replaced = {f"{CONTEXT}._exchanged": lambda x, shard, hop: _exchanged(x, shard, -hop)}


def _with(name: str, change: Callable[[SequenceShard], Tensor]) -> Replaced:
    """Return a replacement that sets the field `name` of each rank's `SequenceShard` to `change(shard)`."""

    def shard_of(batch: Batch, context: RankGroup) -> Batch:
        local = local_shard(batch, context)
        shard = local.seq.shard
        assert shard is not None
        changed: dict[str, Any] = {name: change(shard)}
        shard = replace(shard, **changed)
        return replace(local, seq=replace(local.seq, shard=shard))

    return {"hybridtron.engine.schedule.local_shard": shard_of}


DOCUMENT_AT_CUT = _with("behind_B", lambda shard: shard.behind_B.clamp(min=1))
DOCUMENTS_OF_SHARE = _with("behind_B", lambda shard: torch.full_like(shard.behind_B, shard.first))
BORDER_INSIDE = _with("unbroken_B", lambda shard: torch.ones_like(shard.unbroken_B))


def _labels_of_share(batch: Batch, context: RankGroup) -> Batch:
    """Return a rank's batch with a wrong last label: the shard's last token, not the next shard's first token."""
    local = local_shard(batch, context)
    last_B1 = local.tokens_BL[:, -1:]
    return replace(local, labels_BL=torch.cat((local.labels_BL[:, :-1], last_B1), 1))


LABEL_AT_CUT: Replaced = {"hybridtron.engine.schedule.local_shard": _labels_of_share}


def _lost_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return torch.zeros_like(_exchanged(grad, ctx.shard, -ctx.hop)), None, None


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


TOKENS_OF_SHARE: Replaced = {"hybridtron.engine.stage._divide_by_tokens": _by_own_tokens}


def _all_to_come(x: Tensor, shard: SequenceShard) -> Iterator[Tensor]:
    return (_shifted(x, shard, -hop) for hop in range(shard.size - 1, 0, -1))


KEYS_OF_LATER: Replaced = {"hybridtron.mixers.sparse.earlier_shards": _all_to_come}
CANDIDATES_OF_SHARE: Replaced = {"hybridtron.mixers.sparse.all_reduce_shards": lambda x, shard: x}


BLOCKS_OF_SHARE: Replaced = {"hybridtron.mixers.span.all_reduce_shards": lambda x, shard: x}


CONTEXT_BUGS = {
    "halo_border": Bug("the tokens read from the previous shard are rolled by one", HALO_BORDER, "samba", "cp2"),
    "decay_of_other_share": Bug("a state decays by the previous shard's decay", DECAY_OF_OTHER_SHARE, "mamba", "cp4"),
    "shares_in_other_order": Bug(
        "states are passed from the last shard to the first", SHARES_IN_OTHER_ORDER, "mamba2", "cp4"
    ),
    "document_at_cut": Bug(
        "a document that begins with a shard starts from the previous document's state", DOCUMENT_AT_CUT, "mamba", "cp4"
    ),
    "documents_of_share": Bug(
        "each shard's first document seems to begin at the start of the row", DOCUMENTS_OF_SHARE, "kda", "cp2"
    ),
    "border_inside": Bug("states pass through shards with a document boundary", BORDER_INSIDE, "rwkv6", "cp4"),
    "label_at_cut": Bug("the label of a shard's last token is this token itself", LABEL_AT_CUT, "attention", "cp2"),
    "state_gradient": Bug("no gradient returns to the previous shard", STATE_GRADIENT, "mamba-mlp", "cp2"),
    "sums_over_data": Bug("gradients are summed over data-parallel ranks only", SUMS_OVER_DATA, "mamba", "cp2-dp2"),
    "keys_of_later": Bug("sparse attention gets the keys of later shards", KEYS_OF_LATER, "mamba-hax", "cp2"),
    "blocks_of_share": Bug(
        "span attention selects blocks of the query's own shard only", BLOCKS_OF_SHARE, "samba-span", "cp4"
    ),
    "candidates_of_share": Bug(
        "keys are ranked by the queries of a single shard", CANDIDATES_OF_SHARE, "mamba-hax", "cp2"
    ),
    "tokens_of_share": Bug("gradients are divided by a single shard's tokens", TOKENS_OF_SHARE, "mamba2", "cp2"),
}
"""Bugs in context parallelism, by name. In the effects, a shard is a rank's shard of the sequence."""


BUGS = {
    "x_proj_backward": Bug("gradients of dt, B and C are not summed over ranks", X_PROJ_BACKWARD, "samba", "tp2"),
    "kv_gradient": Bug(
        "gradients of replicated key/value heads are not summed over ranks", KV_GRADIENT, "mamba-swa-mlp", "tp2"
    ),
    "bc_gradient": Bug("gradients of replicated B and C are not summed over ranks", BC_GRADIENT, "mamba2", "tp2"),
    "group_norm": Bug("the gated norm's mean covers only the rank's own heads", GROUP_NORM, "mamba2", "tp2-sp"),
    "group_norm_backward": Bug(
        "the gradient of the gated norm's mean is not summed over ranks", GROUP_NORM_BACKWARD, "mamba2", "tp2"
    ),
    "gla_gate_gradient": Bug(
        "gradients of the decays' low-rank down-projection are not summed over ranks",
        GATE_GRADIENT,
        "sliding-gla",
        "tp2",
    ),
    "angle_gradient": Bug(
        "gradients of the replicated angle projection are not summed over ranks", ANGLE_GRADIENT, "mamba3-swa", "tp2"
    ),
    "pair_norm_gradient": Bug(
        "gradients of the norm of C are not summed over ranks", PAIR_NORM_GRADIENT, "mamba3-swa", "tp2-sp"
    ),
    "angles_of_other_heads": Bug(
        "each head rotates by a neighbouring head's angles", ANGLES_OF_OTHER_HEADS, "mamba3-swa", "tp2"
    ),
    "sees_next_step": Bug(
        "a token's output includes the part of its input that only the next token may read",
        SEES_NEXT_STEP,
        "mamba3-swa",
        "tp2",
    ),
    "first_decays": Bug("every rank has the first rank's decays", FIRST_DECAYS, "sliding-retnet", "tp2"),
    "gla_norm_gradient": Bug(
        "gradients of the norm shared by all heads are not summed over ranks",
        HEAD_NORM_GRADIENT,
        "sliding-gla",
        "tp2-sp",
    ),
    "delta_norm_gradient": Bug(
        "gradients of the norm shared by all heads are not summed over ranks",
        HEAD_NORM_GRADIENT,
        "gated-deltanet",
        "tp2",
    ),
    "grouped_heads": Bug("consecutive heads read different key heads", GROUPED_HEADS, "gated-deltanet", "tp2-sp"),
    "kda_decay_gradient": Bug(
        "gradients of the decays' low-rank down-projection are not summed over ranks",
        DECAY_INPUT_GRADIENT,
        "kda",
        "tp2-sp",
    ),
    "kda_gate_gradient": Bug(
        "gradients of the gate's low-rank down-projection are not summed over ranks", GATE_GRADIENT, "kda", "tp2"
    ),
    "query_norm": Bug("the norm of all queries covers only the rank's own heads", QUERY_NORM, "attention", "tp2"),
    "query_norm_gradient": Bug(
        "gradients of the queries' norm are not summed over ranks", QUERY_NORM_GRADIENT, "attention", "tp2-sp"
    ),
    "mix_gradient": Bug("gradients of the token shift are not summed over ranks", MIX_GRADIENT, "rwkv6", "tp2"),
    "decay_input_gradient": Bug(
        "gradients of the decays' low-rank down-projection are not summed over ranks",
        DECAY_INPUT_GRADIENT,
        "rwkv6",
        "tp2-sp",
    ),
    "shift_border": Bug(
        "in the time mix, a rank's first token sees no previous token", SHIFT_BORDER, "rwkv6", "tp2-sp"
    ),
    "channel_shift_border": Bug(
        "in the channel mix, a rank's first token sees no previous token", CHANNEL_SHIFT_BORDER, "rwkv6", "tp2-sp"
    ),
    "bonus_cut": Bug("every rank has the bonus of the first rank's heads", BONUS_CUT, "rwkv6", "tp2"),
    "unsummed_values": Bug(
        "receptance multiplies values that are not summed over ranks", UNSUMMED_VALUES, "rwkv6", "tp2"
    ),
    "summed_as_it_leaves": Bug(
        "the complete gradient of gathered channels is summed over ranks", SUMMED_AS_IT_LEAVES, "rwkv6", "tp2"
    ),
    "sparse_backward": Bug(
        "gradients of sparse queries and keys are not summed over ranks", SPARSE_BACKWARD, "mamba-hax", "tp2"
    ),
    "hash_of_rank": Bug("each rank draws its own hash matrix", HASH_OF_RANK, "mamba-hax", "tp2-sp"),
    "ranking_of_every_rank": Bug(
        "the ranking loss is multiplied by the number of ranks", RANKING_OF_EVERY_RANK, "mamba-hax", "tp2"
    ),
    "scores_gradient": Bug(
        "gradients of the weights that score keys are not summed over ranks", SCORES_GRADIENT, "mamba-hax", "tp2-sp"
    ),
    "norm_gradient": Bug(
        "gradients of norms are not summed over ranks with different tokens", NORM_GRADIENT, "mamba-mlp", "tp2-sp"
    ),
    "double_norm_gradient": Bug(
        "gradients of norms, complete on every rank, are summed over ranks", DOUBLE_NORM_GRADIENT, "mamba-mlp", "tp2"
    ),
    "tied_gradient": Bug(
        "gradients of the tied embedding are not summed over the first and last stage", TIED_GRADIENT, "samba", "pp2"
    ),
    "multiplied_stages": Bug(
        "every later stage applies the embedding multiplier again", MULTIPLIED_STAGES, "granite", "pp2"
    ),
    "micro_batch_scale": Bug(
        "gradients are also divided by the number of micro-batches", MICRO_BATCH_SCALE, "attention", "dp2"
    ),
    "masked_tokens": Bug("the loss is a mean over micro-batches instead of tokens", MASKED_TOKENS, "attention", "dp2"),
    "swapped_virtual_chunks": Bug(
        "the inner virtual stages are in the wrong order", SWAPPED_VIRTUAL_CHUNKS, "mamba", "pp2-virtual2"
    ),
    "vocabulary_order": Bug("two ranks hold each other's vocabulary shards", VOCABULARY_ORDER, "mamba", "tp2"),
    "conv_cut": Bug("every rank has the first rank's convolution weights", CONV_CUT, "mamba-swa-mlp", "tp2"),
    "fused_cut": Bug("fused projections are cut as one block, not part by part", FUSED_CUT, "mamba-mlp", "tp2"),
    "missing_reduction": Bug(
        "outputs of row-parallel layers are not summed over ranks", MISSING_REDUCTION, "attention", "tp2"
    ),
    "input_gradient": Bug(
        "gradients of mixers' inputs are not summed over ranks", UNSUMMED_INPUT_GRADIENT, "mamba-swa-mlp", "tp2"
    ),
    "regathered_order": Bug(
        "tokens that the backward pass gathers again are in a wrong order",
        REGATHERED_ORDER,
        "mamba2-attention",
        "tp2-sp",
    ),
    "missing_z_loss": Bug("the z-loss is left out", MISSING_Z_LOSS, "attention", "pp2"),
    "decay": Bug("weight decay is applied to A_log and to all other weights", DECAY, "mamba", "pp2"),
    "own_rates": Bug("all weights have the step's learning rate under muP", marked("", "lr_factor", 1.0), "mup", "tp2"),
    "norm_counts_copies": Bug(
        "replicated weights count once per rank in the gradient norm", NORM_COUNTS_COPIES, "samba", "tp2"
    ),
    **ADAPTER_BUGS,
    **CONTEXT_BUGS,
    **SHARING_BUGS,
    **BESIDE_BUGS,
    **EXPERT_BUGS,
}
"""All planted bugs, by name: effect, replaced attributes, and the case (architecture, layout) that finds the bug."""
