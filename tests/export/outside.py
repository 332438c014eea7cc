"""Run where hybridtron is not: loads folders with the code that they bring, and writes their logits beside them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM

assert importlib.util.find_spec("hybridtron") is None
for folder in map(Path, sys.argv[1:]):
    tokens_BL = torch.load(folder / "tokens.pt")
    model, report = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(report.values()), report
    assert AutoModel.from_pretrained(folder, trust_remote_code=True).config.pattern == model.config.pattern
    with torch.no_grad():
        torch.save(model.eval()(tokens_BL).logits, folder / "logits.pt")
