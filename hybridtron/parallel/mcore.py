"""Builds Megatron-core's configs from hybridtron's configuration. No other file builds a Megatron-core config."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybridtron.config.choices import KeptFormat
from hybridtron.config.schema import OptimConfig, ParallelConfig
from hybridtron.device import compute_device


def layer_config(tp_size: int, sequence: bool) -> ModelParallelConfig:
    """Return the config for a linear layer or embedding that is sharded over `tp_size` tensor-parallel ranks."""
    return ModelParallelConfig(
        tensor_model_parallel_size=tp_size,
        sequence_parallel=sequence,
        params_dtype=torch.get_default_dtype(),
        use_cpu_initialization=True,  # makes Megatron allocate weights on torch's default device
        perform_initialization=False,  # model/init.py initializes the weights
        gradient_accumulation_fusion=False,  # Megatron's fusion needs CUDA; fused_grad_accumulation.py replaces it
    )


def schedule_config(
    width: int, dtype: torch.dtype, pipeline_dtype: torch.dtype, parallel: ParallelConfig
) -> TransformerConfig:
    """Return the config for Megatron's pipeline schedules and its data parallelism.

    Weights have the dtype `dtype`. Pipeline stages send tensors with the dtype `pipeline_dtype` to each other. The
    model does not use Megatron's transformer layers. So the numbers of layers and heads are placeholders that pass
    Megatron's checks.
    """
    interleaved = parallel.virtual_pipeline > 1
    on_cuda = compute_device().type == "cuda"
    return TransformerConfig(
        num_layers=parallel.pipeline * parallel.virtual_pipeline,
        hidden_size=width,
        num_attention_heads=parallel.tensor,
        kv_channels=1,
        ffn_hidden_size=width,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if interleaved else None,
        sequence_parallel=parallel.sequence and parallel.tensor > 1,
        params_dtype=dtype,
        pipeline_dtype=pipeline_dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # losses are sums over tokens; engine/stage.py divides the gradients
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=interleaved and on_cuda,
        # Megatron can't batch sends and receives that overlap with computation. Over gloo, batched receives of
        # interleaved stages would get each other's messages.
        batch_p2p_comm=on_cuda and not interleaved,
        batch_p2p_sync=False,  # a CUDA stream runs in order, so the host need not wait for each exchange
    )


def data_parallel_config(
    parallel: ParallelConfig, gradients: KeptFormat, dtype: torch.dtype
) -> DistributedDataParallelConfig:
    """Return the config for data parallelism with weights in `dtype`.

    If `dtype` is bf16 and `gradients` is fp32, gradients are accumulated and reduced in fp32, otherwise in `dtype`.
    """
    return DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.distributed_optimizer,
        grad_reduce_in_fp32=dtype == torch.bfloat16 and gradients == KeptFormat.fp32,
        overlap_grad_reduce=bool(parallel.overlap_grad_reduce),
        overlap_param_gather=bool(parallel.overlap_param_gather),
    )


def optimizer_config(optim: OptimConfig, parallel: ParallelConfig, dtype: torch.dtype) -> OptimizerConfig:
    """Return the config for AdamW. The learning rate here is a placeholder: every step sets its learning rate."""
    return OptimizerConfig(
        optimizer="adam",
        lr=1.0,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=optim.clip,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_param_gather=bool(parallel.overlap_param_gather),
    )


def gradients_for_norm(optimizer: Any) -> list[Tensor]:
    """Return this rank's gradients for the norm over all ranks; a replicated gradient is returned on one rank only.

    Megatron-core 0.19 renamed `get_main_grads_for_grad_norm` to `get_grads_for_grad_norm`.
    """
    renamed = getattr(optimizer, "get_grads_for_grad_norm", None)
    if renamed is None:
        return optimizer.get_main_grads_for_grad_norm()
    return renamed()


def copy_masters_together(optimizer: Any) -> None:
    """Make Megatron's distributed optimizer copy all masters to the weights with one call.

    Megatron calls `copy_` for each weight, and a GPU would start a kernel for each call.
    """
    copy_each = optimizer._copy_main_params_to_model_params

    def copy_all() -> None:
        with _CollectedCopies() as copies:
            copy_each()
        if copies.targets:
            torch._foreach_copy_(copies.targets, copies.sources)

    optimizer._copy_main_params_to_model_params = copy_all


class _CollectedCopies(TorchFunctionMode):
    """Collects the arguments of `Tensor.copy_` calls inside a `with` block on this thread, instead of copying."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[Tensor] = []
        self.sources: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.copy_:
            return func(*args, **(kwargs or {}))
        target, source = args
        self.targets.append(target)
        self.sources.append(source)
        return target
