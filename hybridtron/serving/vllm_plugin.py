"""Plugin of vLLM (entry point `vllm.general_plugins`): `vllm serve` runs exports with this package's class.

vLLM calls `register` in each of its processes, before it reads a model's configuration.
"""

from __future__ import annotations

import logging


def register() -> None:
    """Register this package's class with vLLM and transformers. vLLM imports the model itself when it builds it.

    With a vLLM or a transformers that is too old, nothing is registered, and vLLM serves other models as before.
    """
    try:
        from transformers import AutoConfig
        from vllm import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from hybridtron.config.export_class import SHIPPED
        from hybridtron.serving.served_config import ServedConfig
        from hybridtron.serving.vllm_limits import ServedLimits
    except ImportError as error:
        message = "hybridtron: exports with this package's class are not served: %s; install the extra `vllm`"
        logging.getLogger("vllm.hybridtron").warning(message, error)
        return
    AutoConfig.register(ServedConfig.model_type, ServedConfig, exist_ok=True)
    MODELS_CONFIG_MAP[SHIPPED] = ServedLimits
    ModelRegistry.register_model(SHIPPED, "hybridtron.serving.vllm_model:ServedForCausalLM")
