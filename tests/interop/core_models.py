"""Small GPTModels of megatron-core, saved and loaded by core's dist_checkpointing in processes of their own.

    python -m tests.interop.core_models save FOLDER RANK RANKS MODEL...
    python -m tests.interop.core_models load FOLDER RANK RANKS MODEL...

Each model's checkpoint is in FOLDER/MODEL. Both write the logits of `tokens()` beside it, if there is one rank. The
ranks divide the models by tensor parallelism. Weights do not depend on the number of ranks. core saves from processes
that it spawns, so these programs are no jobs of the tests' pool, whose processes may not have children.
"""

from __future__ import annotations

import subprocess
import sys
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

VOCAB = 80
TOKENS = 40
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "num_query_groups": 2, "rotary_base": 500, "layernorm_epsilon": 1e-5},
    "tied": {"num_attention_heads": 2, "kv_channels": 12, "rotary_base": 10000, "layernorm_epsilon": 1e-6},
}
ARGUMENTS = {  # of Megatron-LM, for the model `tied`
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "group_query_attention": False,
    "num_query_groups": 1,
    "kv_channels": 12,
    "rotary_base": 10000,
    "layernorm_epsilon": 1e-6,
    "position_embedding_type": "rope",
    "swiglu": True,
    "normalization": "RMSNorm",
    "params_dtype": torch.float32,
}


def run(action: str, folder: Path, ranks: int, *names: str) -> None:
    """Run this program on several ranks. Raises an error with the output of a rank that fails."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.interop.core_models", action, str(folder)]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), *names], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate()[0] for process in started]
    finally:
        for process in started:
            process.kill()
    failed = [output for process, output in zip(started, outputs, strict=True) if process.returncode]
    assert not failed, failed[0]


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def logits(folder: Path) -> Tensor:
    """Return the logits that `save` or `load` has written beside a folder."""
    return torch.load(folder.with_suffix(".logits"))


def main(action: str, folder: Path, rank: int, ranks: int, names: list[str]) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from hybridtron.device import megatron_context

    store = dist.FileStore(str(folder / f"store-{action}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    with megatron_context():
        model_parallel_cuda_manual_seed(1)
        for name in names:
            model = built(name, ranks)
            save_or_load(model, action, name, folder / name)
            if ranks == 1:
                write_logits(model, folder / name)
    dist.destroy_process_group()


def save_or_load(model: Any, action: str, name: str, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    state = model.sharded_state_dict()
    if action == "load":
        model.load_state_dict(dist_checkpointing.load({"model": state}, str(folder))["model"])
        return
    folder.mkdir(exist_ok=True)
    arguments = {}
    if name == "tied":
        arguments["args"] = Namespace(**ARGUMENTS)
    dist_checkpointing.save({"model": state, **arguments}, str(folder))


def write_logits(model: Any, folder: Path) -> None:
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    hidden = torch.ones(1, 1, TOKENS, TOKENS).tril() < 0.5
    with torch.no_grad():
        torch.save(model(tokens(), positions, hidden), folder.with_suffix(".logits"))


def built(name: str, ranks: int) -> Any:
    """Build a model whose weights, also norms, differ from their initial values."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(1)
    options = dict(MODELS[name])
    base = options.pop("rotary_base")
    config = TransformerConfig(
        num_layers=3,
        hidden_size=32,
        ffn_hidden_size=48,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        init_method_std=0.2,
        tensor_model_parallel_size=ranks,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **options,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB,
        max_sequence_length=TOKENS,
        position_embedding_type="rope",
        rotary_base=base,
        share_embeddings_and_output_weights=name == "tied",
        parallel_output=False,
    )
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() == 1:
                weight += 0.2 * torch.randn(
                    weight.shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode()))
                )
    return model


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
