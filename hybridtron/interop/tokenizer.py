"""The tokenizer of an exported folder: the checkpoint's tokenizer, with a pad token if the vocabulary has a free id.

- eos: the token after each document. It is not used for padding if another token is available: fine-tuning masks the
  padding, so with eos as padding the model would no longer learn to end a text.
- bos: the folder names eos as bos, unless the chat template has a bos token. Training rows have no start token: the
  token before a document is the eos of the previous document. If the tokenizer has a bos token, the model has never
  seen that token.
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
CHAT = "chat"  # key of the chat template in a checkpoint's `meta.data`
KNOWN_PADS = (PAD, "<pad>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>")


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of special tokens for config.json, or None if unknown. bos has the id of eos."""

    eos: int | None
    pad: int | None

    @property
    def shared(self) -> bool:
        """True if eos is used for padding."""
        return self.pad is not None and self.pad == self.eos

    def settings(self) -> dict[str, int | None]:
        return {"bos_token_id": self.eos, "eos_token_id": self.eos, "pad_token_id": self.pad}


def write_tokenizer(
    folder: Path, stored: bytes, eos: int | None, vocab_size: int, length: int, chat: str | None = None
) -> SpecialTokens:
    """Write tokenizer.json, tokenizer_config.json and, if `chat` is set, chat_template.jinja.

    stored: the checkpoint's tokenizer.json; if it can't be parsed, it is copied, and eos is used for padding
    length: the value for model_max_length
    chat: the checkpoint's chat template as stored
    """
    values: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": length,
        "padding_side": "left",  # so that in generation every row's last token is at the end of the row
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
            chat_tokens = {name: token for name, token in template.tokens if token in ids}
            values.pop("bos_token", None)  # set again below if the template has a bos token
            values = (
                chat_tokens
                | values
                | {name: chat_tokens[name] for name in ("bos_token", "eos_token") if name in chat_tokens}
            )
            (folder / "chat_template.jinja").write_text(template.text, encoding="utf-8")
    (folder / "tokenizer.json").write_bytes(stored)
    write_json(folder / "tokenizer_config.json", values)
    return special


def _with_pad(stored: bytes, vocab_size: int) -> tuple[bytes, dict[str, int]]:
    """Add a pad token, if the tokenizer has none and an id below `vocab_size` is free.

    Returns the content of tokenizer.json, and every token's id.
    """
    ids = read_tokenizer(stored).get_vocab(with_added_tokens=True)
    free_id = max((number + 1 for number in ids.values()), default=0)
    if any(token in ids for token in KNOWN_PADS) or free_id >= vocab_size:
        return stored, ids
    values: dict[str, Any] = json.loads(stored)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    pad_entry = {"id": free_id, "content": PAD, **flags, "special": True}
    values["added_tokens"] = [*(values.get("added_tokens") or []), pad_entry]
    return json.dumps(values, ensure_ascii=False, indent=2).encode(), ids | {PAD: free_id}
