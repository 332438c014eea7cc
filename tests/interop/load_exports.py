"""Load exports with the transformers in the path, without this package, and store what they compute.

    python load_exports.py FOLDER RESULTS

For each export in FOLDER: logits of two rows and eight greedy tokens, or the error. Exports with code are also loaded
by a device map, and trained for one step with gradient checkpointing. Nothing may be asked, and loading may not warn.
"""

from __future__ import annotations

import io
import logging
import sys
import warnings
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

IDS = torch.arange(48).view(2, 24) % 79


def computed(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    everywhere = torch.ones_like(IDS)
    with torch.no_grad():
        logits = model(IDS).logits
        tokens = model.generate(
            IDS, attention_mask=everywhere, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return logits, tokens


def use_of_code(folder: Path) -> str:
    """Return what is wrong with an export with code: a warning at load, a device map, or gradient checkpointing."""
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    transformers.logging.add_handler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        PreTrainedTokenizerFast.from_pretrained(folder)  # runs no code
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, device_map={"": "cpu"})
    transformers.logging.remove_handler(handler)
    warned = [str(warning.message) for warning in caught]
    if warned or said.getvalue():
        return f"warned: {warned} {said.getvalue()}"
    if tokenizer.padding_side != "left":
        return "pads on the right"
    model.train()
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    plain = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(IDS, labels=IDS).loss.backward()
    same = [torch.allclose(a, b.grad, atol=1e-6) for a, b in zip(plain, model.parameters(), strict=True)]
    return "" if all(same) else "gradients differ with checkpointing"


def main(folder: Path, results: Path) -> None:
    found: dict[str, object] = {"version": transformers.__version__}
    for path in sorted(path.parent for path in folder.glob("*/config.json")):
        try:
            found[path.name] = computed(path)
            if (path / "modeling_hybridtron.py").exists():
                found[f"{path.name}: use"] = use_of_code(path)
        except (ImportError, ValueError, RuntimeError) as error:
            found[path.name] = f"{type(error).__name__}: {error}"
    torch.save(found, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
