"""Options of vLLM that the plugin refuses or switches off. Stand-ins have the parts of vLLM that the plugin uses."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoConfig

from hybridtron.config.export_class import SHIPPED
from hybridtron.problems import Unusable
from hybridtron.serving import vllm_plugin
from hybridtron.serving.served_config import ServedConfig
from tests.refusals import raises_code

LIMITS = "hybridtron.serving.vllm_limits"


@dataclass
class ParallelOptions:
    """Stands for vLLM's ParallelConfig, whose world size counts the processes of one replica."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass
class ModelOptions:
    """Stands for vLLM's ModelConfig."""

    quantization: str | None = None


@dataclass
class CacheOptions:
    """Stands for vLLM's CacheConfig, with vLLM's default."""

    enable_prefix_caching: bool = True


@dataclass
class ServerOptions:
    """Stands for VllmConfig: all options of a server."""

    parallel_config: ParallelOptions = field(default_factory=ParallelOptions)
    model_config: ModelOptions = field(default_factory=ModelOptions)
    cache_config: CacheOptions = field(default_factory=CacheOptions)
    speculative_config: object | None = None


Verify = Callable[[ServerOptions], None]


class Registry:
    """Stands for vLLM's ModelRegistry."""

    models: dict[str, str]

    @classmethod
    def register_model(cls, name: str, place: str) -> None:
        cls.models[name] = place


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Install the stand-ins as modules, and return vLLM's table of checks by class."""
    Registry.models = {}
    checks: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {
        "vllm": {"ModelRegistry": Registry},
        "vllm.config": {"VllmConfig": ServerOptions},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.model_executor": {},
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.config": {"VerifyAndUpdateConfig": object, "MODELS_CONFIG_MAP": checks},
    }
    for name, contents in parts.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, LIMITS, ModuleType(LIMITS))  # so that no later test gets the stand-ins
    del sys.modules[LIMITS]
    return checks


@pytest.fixture
def verify(vllm: dict[str, Any]) -> Verify:
    """Return the plugin's check of a server's options."""
    return importlib.import_module(LIMITS).ServedLimits.verify_and_update_config


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (ServerOptions(parallel_config=ParallelOptions(tensor_parallel_size=2)), "--tensor-parallel-size"),
        (ServerOptions(parallel_config=ParallelOptions(pipeline_parallel_size=2)), "--pipeline-parallel-size"),
        (ServerOptions(speculative_config={"method": "ngram", "num_speculative_tokens": 3}), "--speculative-config"),
        (ServerOptions(model_config=ModelOptions("fp8")), "--quantization"),
    ],
)
def test_options_that_the_model_does_not_support_are_refused(
    options: ServerOptions, named: str, verify: Verify
) -> None:
    with raises_code(Unusable, "unsupported", named, "leave it out"):
        verify(options)


def test_refusal_names_only_the_option_that_is_set(verify: Verify) -> None:
    with pytest.raises(Unusable) as refused:
        verify(ServerOptions(model_config=ModelOptions("awq")))
    assert "--speculative-config" not in str(refused.value)
    assert "--tensor-parallel-size" not in str(refused.value)


def test_replicas_are_allowed(verify: Verify) -> None:
    verify(ServerOptions(parallel_config=ParallelOptions(data_parallel_size=4)))


@pytest.mark.parametrize("is_on", [True, False])
def test_prefix_caching_is_switched_off_with_a_line(
    is_on: bool, verify: Verify, caplog: pytest.LogCaptureFixture
) -> None:
    options = ServerOptions(cache_config=CacheOptions(is_on))
    with caplog.at_level(logging.WARNING):
        verify(options)
    assert options.cache_config.enable_prefix_caching is False
    assert ("prefix caching is off" in caplog.text) is is_on


def test_vllm_checks_options_of_the_registered_class(vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[type] = []
    monkeypatch.setattr(AutoConfig, "register", lambda name, config, exist_ok: configs.append(config))
    vllm_plugin.register()
    check = vllm[SHIPPED]
    with raises_code(Unusable, "unsupported", "--quantization"):
        check.verify_and_update_config(ServerOptions(model_config=ModelOptions("fp8")))
    assert Registry.models == {SHIPPED: "hybridtron.serving.vllm_model:ServedForCausalLM"}
    assert configs[-1] is ServedConfig


def test_old_vllm_serves_other_models_as_before(
    vllm: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(sys.modules["vllm.model_executor.models.config"], "MODELS_CONFIG_MAP")
    with caplog.at_level(logging.WARNING):
        vllm_plugin.register()
    assert "not served" in caplog.text
    assert Registry.models == {}
