"""Run where hybridtron is not: loads folders with the code that they bring, as often as one may pass them on.

Into each folder go the logits of the tokens there.
"""

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
    model.save_pretrained(folder / "again")
    model = AutoModelForCausalLM.from_pretrained(folder / "again", trust_remote_code=True)
    with torch.no_grad():
        torch.save(model.eval()(tokens_BL).logits, folder / "logits.pt")
AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
