"""Run where hybridtron is not: loads a folder as its model card says, and again as one may pass it on.

Into the folder go the logits of the tokens that lie there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM

sys.modules["hybridtron"] = None  # type: ignore[assignment]  # as if it were not installed: to import it raises
folder = Path(sys.argv[1])
os.chdir(folder)
lines = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
exec(compile(lines, "README.md", "exec"), card := {"__name__": "card"})
assert card["tokenizer"]("w5 w7")["input_ids"] == [5, 7]
assert (card["tokenizer"].pad_token_id, card["tokenizer"].eos_token_id) == (79, 3)
card["model"].generate(**card["tokenizer"]("w5 w7", return_tensors="pt"), max_new_tokens=2)
model, report = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
assert not any(report.values()), report
model.save_pretrained(folder / "again")
model = AutoModelForCausalLM.from_pretrained(folder / "again", trust_remote_code=True)
with torch.no_grad():
    torch.save(model.eval()(torch.load(folder / "tokens.pt")).logits, folder / "logits.pt")
AutoModel.from_pretrained(folder, trust_remote_code=True)
