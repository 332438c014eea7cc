"""The tokenizer of an exported folder: the run's own, with a pad token where the model has an id to spare.

Padding with eos works, but who fine-tunes with it masks eos together with the padding, and the model forgets to stop.
bos is eos: documents are prepared without a token at their start, and what stands before one in a row is the eos of the
document before. A bos that the tokenizer has beside it has never been seen by the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridtron.data.prepare.chat import ChatTemplate
from hybridtron.data.same_vocabulary import is_readable
from hybridtron.data.tokenizer_file import read_tokenizer
from hybridtron.interop.writer import write_json

PAD = "<|pad|>"
CHAT = "chat"  # the key of a chat template in what a checkpoint says of its data
KNOWN_PADS = (PAD, "<pad>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>")


@dataclass(frozen=True)
class SpecialTokens:
    """Ids, as config.json names them; `shared` where padding has no id of its own."""

    eos: int | None
    pad: int | None

    @property
    def shared(self) -> bool:
        return self.pad is not None and self.pad == self.eos

    def settings(self) -> dict[str, int | None]:
        return {"bos_token_id": self.eos, "eos_token_id": self.eos, "pad_token_id": self.pad}


def write_tokenizer(
    folder: Path, stored: bytes, eos: int | None, vocab_size: int, length: int, chat: str | None = None
) -> SpecialTokens:
    """tokenizer.json, tokenizer_config.json and a chat template, from a checkpoint's."""
    values: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": length,
        "padding_side": "left",  # rows of unequal length continue at their last token
    }
    special = SpecialTokens(eos, eos)
    if is_readable(stored):
        stored, ids = _with_pad(stored, vocab_size)
        names = {number: token for token, number in ids.items()}
        pad = next((ids[token] for token in KNOWN_PADS if token in ids and ids[token] != eos), eos)
        special = SpecialTokens(eos, pad)
        values |= {f"{name}_token": names[eos] for name in ("bos", "eos") if eos in names}
        values |= {"pad_token": names[pad]} if pad in names else {}
        if chat is not None:
            template = ChatTemplate.of_stored(chat)
            named = {name: token for name, token in template.tokens if token in ids}
            values.pop("bos_token", None)  # where the template knew of none, it writes none
            values = named | values | {name: named[name] for name in ("bos_token", "eos_token") if name in named}
            (folder / "chat_template.jinja").write_text(template.text, encoding="utf-8")
    (folder / "tokenizer.json").write_bytes(stored)
    write_json(folder / "tokenizer_config.json", values)
    return special


def _with_pad(stored: bytes, vocab_size: int) -> tuple[bytes, dict[str, int]]:
    """With a pad token, unless there is one or no id is left; and the ids of all tokens."""
    ids = read_tokenizer(stored).get_vocab(with_added_tokens=True)
    free = max((number + 1 for number in ids.values()), default=0)
    if any(token in ids for token in KNOWN_PADS) or free >= vocab_size:
        return stored, ids
    values: dict[str, Any] = json.loads(stored)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {"id": free, "content": PAD, **plain, "special": True}
    values["added_tokens"] = [*(values.get("added_tokens") or []), added]
    return json.dumps(values, ensure_ascii=False, indent=2).encode(), ids | {PAD: free}
