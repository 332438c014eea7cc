"""States of several requests in a server's slots: the logits of each request are those of its row alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridtron.hf.modeling_hybridtron import CACHE_NAME, HybridtronCache
from hybridtron.serving.request_states import GrowingState, largest_state, state_of
from tests.hf.test_modeling import ALL, close, model_of, tokens

LONGEST = 64


class Slots:
    """A server's tensors for every sub-layer, filled with what earlier requests may have left there."""

    def __init__(self, config: Any, slots: int) -> None:
        layers = range(len(config.pattern))
        self.declared = [state_of(config, index, torch.float32, LONGEST) for index in layers]
        self.tensors = []
        for declared in self.declared:
            shapes = declared.parts.values()
            self.tensors.append([torch.full((slots, *shape), 77, dtype=dtype) for shape, dtype in shapes])

    def load(self, cache: HybridtronCache, slots_B: Tensor) -> None:
        fresh_B = torch.full((len(slots_B),), cache.seen == 0)
        for index, (declared, tensors) in enumerate(zip(self.declared, self.tensors, strict=True)):
            if declared.parts:
                cache.states[index] = declared.read(tensors, slots_B, fresh_B)

    def store(self, cache: HybridtronCache, slots_B: Tensor) -> None:
        for index, (declared, tensors) in enumerate(zip(self.declared, self.tensors, strict=True)):
            if declared.parts:
                declared.write(tensors, slots_B, cache.states[index])
                cache.states[index] = {}


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_requests_in_turn_give_the_logits_of_their_rows(name: str) -> None:
    model = model_of(name)
    slots = Slots(model.config, 3)
    rows = [tokens(1, 41, seed=1), tokens(1, 41, seed=2)]
    caches = [HybridtronCache(model.config.num_hidden_layers) for _ in rows]
    parts: list[list[Tensor]] = [[], []]
    for pieces in zip(*(row.split([9, 1, 1, 14, 16], dim=1) for row in rows), strict=True):
        for number, piece in enumerate(pieces):
            slot = torch.tensor([2 - number])
            slots.load(caches[number], slot)
            parts[number].append(model(piece, **{CACHE_NAME: caches[number]}).logits)
            slots.store(caches[number], slot)
    for row, logits in zip(rows, parts, strict=True):
        assert close(torch.cat(logits, dim=1), model(row, use_cache=False).logits)


@torch.no_grad()
def test_single_tokens_of_several_requests_are_one_batch() -> None:
    model = model_of("samba")
    slots = Slots(model.config, 4)
    row_BL = tokens(2, 12)
    slots_B = torch.tensor([3, 1])
    cache = HybridtronCache(model.config.num_hidden_layers)
    logits = []
    for token_BL in row_BL.split(1, dim=1):
        slots.load(cache, slots_B)
        logits.append(model(token_BL, **{CACHE_NAME: cache}).logits)
        slots.store(cache, slots_B)
    assert close(torch.cat(logits, dim=1), model(row_BL, use_cache=False).logits)


def test_attention_in_pages_declares_nothing_and_other_attention_grows() -> None:
    samba = model_of("samba").config
    mamba, _, window, _ = (state_of(samba, index, torch.bfloat16, 8).parts for index in range(4))
    assert not window
    assert (mamba["ssm"][1], mamba["conv"][1]) == (torch.float32, torch.bfloat16)
    assert largest_state(samba, torch.bfloat16, 8).parts == mamba
    conv = state_of(model_of("conv").config, 0, torch.float32, 50)
    assert isinstance(conv, GrowingState)
    assert conv.parts["keys"][0][0] == 50
