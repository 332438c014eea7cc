"""Plugin of vLLM (entry point `vllm.general_plugins`): `vllm serve` runs exports with this package's class.

vLLM calls `register` in each of its processes, before it reads a model's configuration.
"""

from __future__ import annotations


def register() -> None:
    """Register this package's class with vLLM and transformers. vLLM imports the model itself when it builds it."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from hybridtron.config.export_class import SHIPPED
    from hybridtron.serving.served_config import ServedConfig

    AutoConfig.register(ServedConfig.model_type, ServedConfig, exist_ok=True)
    ModelRegistry.register_model(SHIPPED, "hybridtron.serving.vllm_model:ServedForCausalLM")
