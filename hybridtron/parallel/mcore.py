"""Translates our configuration into Megatron-core's. No other file builds a config of Megatron-core."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from hybridtron.config.choices import KeptFormat
from hybridtron.config.schema import OptimConfig, ParallelConfig
from hybridtron.device import compute_device


def layer_config(tensor: int, sequence: bool) -> ModelParallelConfig:
    """Return the config of one parallel linear layer."""
    return ModelParallelConfig(
        tensor_model_parallel_size=tensor,
        sequence_parallel=sequence,
        params_dtype=torch.get_default_dtype(),
        use_cpu_initialization=True,  # torch's device context decides where weights are allocated
        perform_initialization=False,  # model/init.py fills them
        gradient_accumulation_fusion=False,
    )


def schedule_config(width: int, dtype: torch.dtype, sent: torch.dtype, parallel: ParallelConfig) -> TransformerConfig:
    """Return the config that Megatron's schedules and data parallelism need for our model.

    `sent` is the type of the tensors sent between stages. The model is not built of Megatron's layers, so layer and
    head counts are placeholders that pass Megatron's checks.
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
        pipeline_dtype=sent,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
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
        # Over gloo, batched sends and receives of interleaved stages receive messages meant for one another.
        batch_p2p_comm=on_cuda and not interleaved,
        batch_p2p_sync=False,  # streams are in order: the host need not wait for each exchange
    )


def data_parallel_config(
    parallel: ParallelConfig, gradients: KeptFormat, dtype: torch.dtype
) -> DistributedDataParallelConfig:
    """Return the data-parallel config. Gradients of bf16 weights are summed as `gradients` says, others in their own
    type.
    """
    return DistributedDataParallelConfig(
        use_distributed_optimizer=parallel.distributed_optimizer,
        grad_reduce_in_fp32=dtype == torch.bfloat16 and gradients == KeptFormat.fp32,
        overlap_grad_reduce=bool(parallel.overlap_grad_reduce),
        overlap_param_gather=bool(parallel.overlap_param_gather),
    )


def optimizer_config(optim: OptimConfig, parallel: ParallelConfig, dtype: torch.dtype) -> OptimizerConfig:
    """Return the config of AdamW. Its learning rate is a placeholder, because each step sets its own."""
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
    """Return the gradients that count in the norm on this rank, each once over all ranks.

    Megatron-core 0.19 renamed the method.
    """
    newer = getattr(optimizer, "get_grads_for_grad_norm", None)
    if newer is None:
        return optimizer.get_main_grads_for_grad_norm()
    return newer()
