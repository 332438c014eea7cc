"""The model card (README.md) of an exported folder: facts from the checkpoint, and code that loads the model."""

from __future__ import annotations

from hybridtron.architecture.table import parameter_table
from hybridtron.config.choices import Source
from hybridtron.config.exportable import TRANSFORMERS
from hybridtron.config.resolve import ResolvedPhase, resolve
from hybridtron.config.schema import Config
from hybridtron.config.units import readable
from hybridtron.interop.native import Native
from hybridtron.interop.tokenizer import SpecialTokens
from hybridtron.requirements import installed

SHARED_PAD = "padding has no token of its own but is eos; mask padding by attention_mask, not by its id"


def card(config: Config, target: Native, special: SpecialTokens) -> str:
    """Return the model card's text.

    It has no facts that the checkpoint does not record: no license, and no training for an imported model.
    """
    tags = "\n".join(f"- {tag}" for tag in dict.fromkeys(("hybridtron", target.model_type)))
    parameters = sum(weight.size for weight in parameter_table(config.model).values())
    layers = "\n".join(f"- `{letter}`: {entry}" for letter, entry in config.model.layers.items())
    trust = ", trust_remote_code=True" if target.files() else ""
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
{_training(config)}
- license: none is stated
- {SHARED_PAD if special.shared else "padding has a token of its own" if special.pad is not None else "no pad token"}
- rows are padded on the left to generate, as tokenizer_config.json says
{_begin(special)}- {_versions()}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("."{trust})
tokenizer = AutoTokenizer.from_pretrained("."{trust})
```
"""


def _training(config: Config) -> str:
    if not config.phases:
        return "- imported from elsewhere: data and training are not known here"
    return "\n".join(f"- trained with hybridtron: {_phase(phase)}" for phase in resolve(config))


def _phase(phase: ResolvedPhase) -> str:
    data = phase.data
    settings = phase.settings
    mixture = ", ".join(f"{name} x {entry.weight:g}" for name, entry in data.mixture.items())
    folder = data.path.rstrip("/").rpartition("/")[2]
    if data.source is Source.embedded:
        source = "the texts that Python itself brings"
    else:
        source = folder
    return f"`{settings.name}`, {settings.tokens} tokens in rows of {settings.seq_len}, of {mixture or source}"


def _begin(special: SpecialTokens) -> str:
    if special.eos is None:
        return ""
    return f"- texts begin without a token of their own: bos_token_id is that of eos, {special.eos}\n"


def _versions() -> str:
    needed = ".".join(map(str, TRANSFORMERS))
    installed_version = installed("transformers")
    return f"needs transformers {needed} or newer" + (
        f"; written with {installed_version}" if installed_version else ""
    )
