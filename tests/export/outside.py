"""Run where hybridtron is not: loads a folder with the code that it brings, and again as one may pass it on.

Into the folder go the logits of the tokens that lie there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM

sys.modules["hybridtron"] = None  # type: ignore[assignment]  # as if it were not installed: to import it raises
folder = Path(sys.argv[1])
model, report = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
assert not any(report.values()), report
model.save_pretrained(folder / "again")
model = AutoModelForCausalLM.from_pretrained(folder / "again", trust_remote_code=True)
with torch.no_grad():
    torch.save(model.eval()(torch.load(folder / "tokens.pt")).logits, folder / "logits.pt")
AutoModel.from_pretrained(folder, trust_remote_code=True)
