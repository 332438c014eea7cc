"""Options of vLLM that this package's class does not support: refused, or switched off with a line in the log."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from hybridtron.problems import Unusable

logger = init_logger(f"vllm.{__name__}")


class ServedLimits(VerifyAndUpdateConfig):
    """Check of vLLM's configuration, before vLLM starts processes for the model."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Switch prefix caching off, which vLLM has on by default. Raises Unusable for other options."""
        refused = {
            "--tensor-parallel-size, --pipeline-parallel-size": vllm_config.parallel_config.world_size > 1,
            "--speculative-config": vllm_config.speculative_config is not None,
            "--quantization": vllm_config.model_config.quantization is not None,
        }
        for option, is_set in refused.items():
            if is_set:
                raise Unusable(
                    f"{option}: not supported, since one process computes this model, a token at a time, with the "
                    "weights of the export: leave it out. --data-parallel-size starts more replicas",
                    code="unsupported",
                )
        if vllm_config.cache_config.enable_prefix_caching:
            # vLLM would copy states at the ends of blocks, by functions that ServedForCausalLM does not have
            logger.warning("hybridtron: prefix caching is off, since states are kept at a request's last token only")
            vllm_config.cache_config.enable_prefix_caching = False
