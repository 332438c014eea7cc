"""The model card (README.md) of an exported folder: facts from the checkpoint, and code that loads the model."""

from __future__ import annotations

from hybridtron.config.choices import Source
from hybridtron.config.resolve import ResolvedPhase, RunPlan
from hybridtron.config.units import readable
from hybridtron.interop.consumers import oldest_transformers, summary
from hybridtron.interop.native import Native, Settings
from hybridtron.interop.tokenizer import SpecialTokens
from hybridtron.requirements import installed

SHARED_PAD = "padding uses the eos token: mask padding by attention_mask, not by the token's id"


def card(plan: RunPlan, target: Native, special: SpecialTokens, settings: Settings) -> str:
    """Return the model card's text. `settings` is the content of config.json.

    The card states only facts that the checkpoint records. No checkpoint records a license, and the checkpoint of an
    imported model records neither its data nor its training.
    """
    config = plan.config
    tags = "\n".join(f"- {tag}" for tag in dict.fromkeys(("hybridtron", target.model_type)))
    parameters = sum(weight.size for weight in plan.arch.table.values())
    layers = "\n".join(f"- `{letter}`: {entry}" for letter, entry in config.model.layers.items())
    if target.files():
        of_model = ", trust_remote_code=True"
        of_tokenizer = ", trust_remote_code=False"  # without this, transformers asks whether it may run the code
    else:
        of_model = ""
        of_tokenizer = ""
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
{tags}
---

# {config.run.name}

A language model of {readable(parameters)} parameters.

- pattern: `{config.model.pattern}`, width {config.model.width}, vocabulary {config.model.vocab_size}
{layers}
{_training(plan)}
- license: none is stated
- {SHARED_PAD if special.shared else "padding has a token of its own" if special.pad is not None else "no pad token"}
- rows are padded on the left, as generation needs (`padding_side` in tokenizer_config.json)
{_begin(special)}- {_versions(settings)}
- {summary(settings)}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("."{of_model})
tokenizer = AutoTokenizer.from_pretrained("."{of_tokenizer})
```
"""


def _training(plan: RunPlan) -> str:
    if not plan.phases:
        return "- imported into hybridtron: data and training are unknown"
    recipe = plan.config.run.recipe
    lines = [] if recipe is None else [f"- recipe: `{recipe}`"]
    return "\n".join([*lines, *(f"- trained with hybridtron: {_phase(phase)}" for phase in plan.phases)])


def _phase(phase: ResolvedPhase) -> str:
    data = phase.data
    settings = phase.settings
    mixture = ", ".join(f"{name} x {entry.weight:g}" for name, entry in data.mixture.items())
    folder = data.path.rstrip("/").rpartition("/")[2]
    if data.source is Source.embedded:
        source = "the texts that come with Python"
    else:
        source = folder
    return f"`{settings.name}`, {settings.tokens} tokens of {mixture or source}, in rows of {settings.seq_len} tokens"


def _begin(special: SpecialTokens) -> str:
    if special.eos is None:
        return ""
    return f"- bos and eos are the same token: bos_token_id is {special.eos}\n"


def _versions(settings: Settings) -> str:
    needed = oldest_transformers(settings)
    installed_version = installed("transformers")
    return f"needs transformers {needed} or newer" + (
        f"; written with {installed_version}" if installed_version else ""
    )
