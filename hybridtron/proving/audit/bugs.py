"""Planted bugs for testing the audit: each is patched into the product while a worker runs, and the audit must find it.

Each trains silently with wrong gradients: a sum left out or made twice, a cut in the wrong order, a wrong divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import mappings
from torch import Tensor
from torch.nn import functional

from hybridtron.architecture.base import Cut, Parameter
from hybridtron.config.layout import stages_of
from hybridtron.config.schema import Config
from hybridtron.data.batch import Batch
from hybridtron.engine.schedule import StepLoss, _loss_of, run_schedule
from hybridtron.engine.stage import Stage, build_stages
from hybridtron.mixers.retnet import log_gammas
from hybridtron.mixers.token_shift import token_before
from hybridtron.model.lm import LanguageModel
from hybridtron.ops.loss import Loss
from hybridtron.ops.sparse import hash_matrix, ranking_loss
from hybridtron.ops.ssd import decay_scan
from hybridtron.ops.turns import angles
from hybridtron.parallel.cut import cut
from hybridtron.parallel.entered import Entry, _gathered
from hybridtron.parallel.linear import TensorGroup
from hybridtron.parallel.loss import linear_cross_entropy
from hybridtron.parallel.mesh import Mesh
from hybridtron.proving.audit.adapter_bugs import ADAPTER_BUGS
from hybridtron.proving.audit.beside_bugs import BESIDE_BUGS
from hybridtron.proving.audit.bug import Bug, Replaced, marked
from hybridtron.proving.audit.context_bugs import CONTEXT_BUGS
from hybridtron.proving.audit.sharing_bugs import SHARING_BUGS


@contextmanager
def injected(name: str | None) -> Iterator[None]:
    """Patch the bug of this name into the product while the block runs; None patches nothing."""
    with ExitStack() as stack:
        for target, replacement in ({} if name is None else BUGS[name].replaced).items():
            stack.enter_context(patch(target, replacement))
        yield


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
QUERY_NORM: Replaced = {"hybridtron.mixers.attention.sum_shares": lambda x, tensor: x * tensor.size}
QUERY_NORM_GRADIENT = marked("q_norm_weight", "partial_over_tensor", False)
MIX_GRADIENT = marked("mixer.mix", "partial_over_tensor", False)
DECAY_INPUT_GRADIENT = marked("decay_down", "partial_over_tensor", False)
SCORES_GRADIENT = marked("sparse.weight", "partial_over_tensor", False)
SPARSE_BACKWARD: Replaced = {"hybridtron.mixers.sparse.sum_gradients": lambda x, tensor: x}
HASH_OF_RANK: Replaced = {
    "hybridtron.mixers.sparse.hash_matrix": lambda seed, *sizes: hash_matrix(
        seed + 2 * torch.distributed.get_rank(), *sizes
    )
}
RANKING_OF_EVERY_RANK: Replaced = {
    "hybridtron.mixers.sparse.ranking_loss": lambda *scored: torch.distributed.get_world_size() * ranking_loss(*scored)
}


def _inside_shares(x_LBD: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Shift tokens as if two ranks each saw only their own half."""
    before_LBD, last_BD = token_before(x_LBD, *rest)
    return before_LBD.index_fill(0, torch.tensor([len(x_LBD) // 2]), 0), last_BD


SHIFT_BORDER: Replaced = {"hybridtron.mixers.rwkv6.token_before": _inside_shares}
CHANNEL_SHIFT_BORDER: Replaced = {"hybridtron.mixers.rwkv6_channel_mix.token_before": _inside_shares}
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
X_PROJ_BACKWARD: Replaced = {"hybridtron.mixers.mamba.sum_gradients": lambda x, tensor: x}
GROUP_NORM: Replaced = {"hybridtron.mixers.mamba2.sum_shares": lambda x, tensor: x * tensor.size}
GROUP_NORM_BACKWARD: Replaced = {"hybridtron.parallel.linear.sum_gradients": lambda x, tensor: x}  # not summed
MISSING_REDUCTION: Replaced = {
    "hybridtron.parallel.linear.RowParallel.forward": lambda self, x: functional.linear(x, self.weight)
}


UNSUMMED_INPUT_GRADIENT: Replaced = {"hybridtron.parallel.entered._summed": lambda dx_LBD, entry: (dx_LBD, None)}


def _in_another_order(x_LBD: Tensor, entry: Entry, in_background: bool = False) -> tuple[Tensor, None]:
    whole_LBD, _ = _gathered(x_LBD, entry)
    return whole_LBD.roll(len(x_LBD), 0) if in_background else whole_LBD, None


REGATHERED_ORDER: Replaced = {"hybridtron.parallel.entered._gathered": _in_another_order}


def _untied(*arguments: Any) -> list[Stage]:
    stages = build_stages(*arguments)
    for chunk in stages:
        chunk.share_embeddings_and_output_weights = False
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
    stages: Any, batches: Sequence[Batch], *rest: Any, forward_only: bool = False, auxiliary: Sequence[str] = ()
) -> StepLoss:
    loss = run_schedule(stages, batches, *rest, forward_only=forward_only, auxiliary=auxiliary)
    for chunk in stages:
        chunk.scale_gradients(1 / len(batches))
    return loss


MICRO_BATCH_SCALE = {"hybridtron.engine.engine.run_schedule": _scaled}


def _mean(
    x_LBD: Tensor, model: LanguageModel, batch: Batch, chunks: int, z_loss: float, tensor: TensorGroup
) -> tuple[Tensor, Tensor, Tensor]:
    total, tokens, report = _loss_of(x_LBD, model, batch, chunks, z_loss, tensor)
    return total / tokens.clamp(min=1), torch.ones_like(tokens), report


MASKED_TOKENS = {"hybridtron.engine.schedule._loss_of": _mean}


def _swapped(config: Config) -> tuple[range, ...]:
    first, *inner, last = stages_of(config)
    return (first, *reversed(inner), last)


SWAPPED_VIRTUAL_CHUNKS = {"hybridtron.engine.stage.stages_of": _swapped}


def _without_z_loss(
    x_LBD: Tensor, weight_VD: Tensor, labels: Tensor, mask: Tensor, _: float, tensor: TensorGroup
) -> Loss:
    return linear_cross_entropy(x_LBD, weight_VD, labels, mask, 0.0, tensor)


MISSING_Z_LOSS = {"hybridtron.engine.schedule.linear_cross_entropy": _without_z_loss}


def _cut_otherwise(wrong: Callable[[Tensor, Parameter, Mesh], Tensor]) -> Replaced:
    """Replace the function that cuts full weights into shards, wherever weights are filled."""
    return {"hybridtron.model.init.cut": wrong, "hybridtron.engine.engine.cut": wrong}


def _at_rank(mesh: Mesh, rank: int) -> Mesh:
    return replace(mesh, dimensions={"tensor": replace(mesh.dimensions["tensor"], rank=rank)})


def _vocabulary_of_other_rank(whole: Tensor, parameter: Parameter, mesh: Mesh) -> Tensor:
    is_vocabulary = len(whole) > 64 and parameter.cuts == (Cut(0),) and not parameter.parts
    tensor = mesh.dimensions["tensor"]
    other_rank = _at_rank(mesh, tensor.size - 1 - tensor.rank)
    return cut(whole, parameter, other_rank if is_vocabulary else mesh)


VOCABULARY_ORDER = _cut_otherwise(_vocabulary_of_other_rank)


def _convolution_of_first_rank(whole: Tensor, parameter: Parameter, mesh: Mesh) -> Tensor:
    is_convolution = whole.dim() == 2 and whole.shape[1] == 4 and not parameter.fp32
    return cut(whole, parameter, _at_rank(mesh, 0) if is_convolution else mesh)


CONV_CUT = _cut_otherwise(_convolution_of_first_rank)


def _bonus_of_first_rank(whole: Tensor, parameter: Parameter, mesh: Mesh) -> Tensor:
    is_bonus = whole.dim() == 2 and parameter.fp32
    return cut(whole, parameter, _at_rank(mesh, 0) if is_bonus else mesh)


BONUS_CUT = _cut_otherwise(_bonus_of_first_rank)


def _as_one_block(whole: Tensor, parameter: Parameter, mesh: Mesh) -> Tensor:
    return cut(whole, replace(parameter, parts=()), mesh)


FUSED_CUT = _cut_otherwise(_as_one_block)


BUGS = {
    "x_proj_backward": Bug("gradients of dt, B and C are not summed over ranks", X_PROJ_BACKWARD, "samba", "tp2"),
    "kv_gradient": Bug("replicated key/value heads keep their rank's part", KV_GRADIENT, "mamba-swa-mlp", "tp2"),
    "bc_gradient": Bug("replicated B and C keep their rank's part", BC_GRADIENT, "mamba2", "tp2"),
    "group_norm": Bug("the gated norm's mean is that of its rank's heads", GROUP_NORM, "mamba2", "tp2-sp"),
    "group_norm_backward": Bug("its gradient stays on its rank", GROUP_NORM_BACKWARD, "mamba2", "tp2"),
    "gla_gate_gradient": Bug("the decays' small input keeps its rank's part", GATE_GRADIENT, "sliding-gla", "tp2"),
    "angle_gradient": Bug("replicated angles keep their rank's part", ANGLE_GRADIENT, "mamba3-swa", "tp2"),
    "pair_norm_gradient": Bug("the norm of C keeps its rank's part", PAIR_NORM_GRADIENT, "mamba3-swa", "tp2-sp"),
    "angles_of_other_heads": Bug("heads turn by a neighbour's angles", ANGLES_OF_OTHER_HEADS, "mamba3-swa", "tp2"),
    "sees_next_step": Bug("a token reads itself by the next one's step", SEES_NEXT_STEP, "mamba3-swa", "tp2"),
    "first_decays": Bug("every rank has the first rank's decays", FIRST_DECAYS, "sliding-retnet", "tp2"),
    "gla_norm_gradient": Bug("heads' shared norm keeps its rank's part", HEAD_NORM_GRADIENT, "sliding-gla", "tp2-sp"),
    "delta_norm_gradient": Bug("heads' shared norm keeps its rank's part", HEAD_NORM_GRADIENT, "gated-deltanet", "tp2"),
    "grouped_heads": Bug("heads go round the key heads of their rank", GROUPED_HEADS, "gated-deltanet", "tp2-sp"),
    "kda_decay_gradient": Bug("the decays' small input keeps its rank's part", DECAY_INPUT_GRADIENT, "kda", "tp2-sp"),
    "kda_gate_gradient": Bug("the gate's small input keeps its rank's part", GATE_GRADIENT, "kda", "tp2"),
    "query_norm": Bug("queries are normed over their rank's heads", QUERY_NORM, "attention", "tp2"),
    "query_norm_gradient": Bug(
        "the norm of each head keeps its rank's part", QUERY_NORM_GRADIENT, "attention", "tp2-sp"
    ),
    "mix_gradient": Bug("what mixes tokens keeps its rank's part", MIX_GRADIENT, "rwkv6", "tp2"),
    "decay_input_gradient": Bug("so does the decays' small input", DECAY_INPUT_GRADIENT, "rwkv6", "tp2-sp"),
    "shift_border": Bug("a share's first token sees none before it", SHIFT_BORDER, "rwkv6", "tp2-sp"),
    "channel_shift_border": Bug("so it is in the channel mix", CHANNEL_SHIFT_BORDER, "rwkv6", "tp2-sp"),
    "bonus_cut": Bug("every rank has the bonus of the first rank's heads", BONUS_CUT, "rwkv6", "tp2"),
    "unsummed_values": Bug("receptance multiplies a rank's part of the values", UNSUMMED_VALUES, "rwkv6", "tp2"),
    "summed_as_it_leaves": Bug("gradients of shares of channels are summed", SUMMED_AS_IT_LEAVES, "rwkv6", "tp2"),
    "sparse_backward": Bug("gradients of sparse queries and keys are not summed", SPARSE_BACKWARD, "mamba-hax", "tp2"),
    "hash_of_rank": Bug("each rank draws a hash of its own", HASH_OF_RANK, "mamba-hax", "tp2-sp"),
    "ranking_of_every_rank": Bug("the ranking loss counts once a rank", RANKING_OF_EVERY_RANK, "mamba-hax", "tp2"),
    "scores_gradient": Bug("what scores keys keeps its rank's part", SCORES_GRADIENT, "mamba-hax", "tp2-sp"),
    "norm_gradient": Bug("norms keep the gradient of their rank's tokens", NORM_GRADIENT, "mamba-mlp", "tp2-sp"),
    "double_norm_gradient": Bug("norms' whole gradients are summed", DOUBLE_NORM_GRADIENT, "mamba-mlp", "tp2"),
    "tied_gradient": Bug("first and last stage keep their own embedding's gradient", TIED_GRADIENT, "samba", "pp2"),
    "multiplied_stages": Bug("what a stage gets is multiplied as embedded", MULTIPLIED_STAGES, "granite", "pp2"),
    "micro_batch_scale": Bug("gradients are divided by micro-batches too", MICRO_BATCH_SCALE, "attention", "dp2"),
    "masked_tokens": Bug("a mean over micro-batches, not over tokens", MASKED_TOKENS, "attention", "dp2"),
    "swapped_virtual_chunks": Bug(
        "inner chunks are in the wrong order", SWAPPED_VIRTUAL_CHUNKS, "mamba", "pp2-virtual2"
    ),
    "vocabulary_order": Bug("ranks hold each other's tokens", VOCABULARY_ORDER, "mamba", "tp2"),
    "conv_cut": Bug("every rank holds the first rank's convolution", CONV_CUT, "mamba-swa-mlp", "tp2"),
    "fused_cut": Bug("fused projections are cut as one block", FUSED_CUT, "mamba-mlp", "tp2"),
    "missing_reduction": Bug("outputs of row-parallel layers are not summed", MISSING_REDUCTION, "attention", "tp2"),
    "input_gradient": Bug("a mixer's input keeps its rank's gradient", UNSUMMED_INPUT_GRADIENT, "mamba-swa-mlp", "tp2"),
    "regathered_order": Bug(
        "tokens come in another order the second time", REGATHERED_ORDER, "mamba2-attention", "tp2-sp"
    ),
    "missing_z_loss": Bug("the z-loss is left out", MISSING_Z_LOSS, "attention", "pp2"),
    "decay": Bug("A_log is decayed, as megatron-core does by shape", DECAY, "mamba", "pp2"),
    "norm_counts_copies": Bug(
        "what both ranks hold counts twice in the gradient norm", NORM_COUNTS_COPIES, "samba", "tp2"
    ),
    **ADAPTER_BUGS,
    **CONTEXT_BUGS,
    **SHARING_BUGS,
    **BESIDE_BUGS,
}
