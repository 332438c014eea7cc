"""The tokenizer of an export in a GGUF file: tokens, merges, special tokens and chat template.

llama.cpp has its own code for byte pairs and for each known way to split a text (`data/pre_tokenizers.py`). A tokenizer
with other features would give other tokens there, so it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtron.data.folder import MAX_TOKENIZER_BYTES
from hybridtron.data.pre_tokenizers import PATTERNS, known_name
from hybridtron.data.tokenizer_file import BadTokenizer, read_tokenizer
from hybridtron.interop.native import Settings
from hybridtron.nested import NotParsed, json_of
from hybridtron.problems import Unusable
from hybridtron.safe_open import Unreadable, read_regular

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from tokenizers import Tokenizer

SPECIAL = ("bos", "eos", "pad")
WHOLE_WORDS = "llama-bpe"  # with this pre-tokenizer, a word that is itself a token is taken whole, without merges
# options of a BPE model that llama.cpp does not have
NOT_THERE = ("unk_token", "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")


class CannotConvert(Unusable):
    """Raised if llama.cpp can't run a model or its tokenizer. The message has the reason."""


@dataclass(frozen=True)
class GgufVocabulary:
    """A tokenizer in llama.cpp's terms.

    tokens: the text of each id; ids that the tokenizer does not use have texts such as [PAD79]
    types: a member of gguf.TokenType for each id
    merges: pairs to merge, in order, such as "a b"
    splits_by: name of the pre-tokenizer
    special: ids of bos, eos and pad, by these names; a missing token has no entry
    template: the chat template, or None
    """

    tokens: list[str]
    types: list[int]
    merges: list[str]
    splits_by: str
    special: dict[str, int]
    template: str | None

    @classmethod
    def of(cls, folder: Path, config: Settings) -> GgufVocabulary:
        """Read a folder's tokenizer. Raises CannotConvert if llama.cpp would give other tokens."""
        from gguf import TokenType

        path = folder / "tokenizer.json"
        try:
            stored = read_regular(path, MAX_TOKENIZER_BYTES)
            tokenizer = read_tokenizer(stored)
            parsed: dict[str, Any] = json_of(stored)
        except (Unreadable, BadTokenizer, NotParsed) as error:
            raise CannotConvert(f"{path} can't be read: {error}", code="unreadable") from error
        splits_by = known_name(stored)
        if faults := list(_faults(parsed, tokenizer, splits_by)):
            raise CannotConvert(f"llama.cpp can't read {path}: {faults[0]}", code="unsupported")
        assert splits_by is not None
        size = config["vocab_size"]
        ids = tokenizer.get_vocab(with_added_tokens=True)
        if max(ids.values()) >= size:
            raise CannotConvert(f"{path} has tokens beyond the model's vocabulary of {size}", code="mismatch")
        tokens = [f"[PAD{number}]" for number in range(size)]
        types = [int(TokenType.UNUSED)] * size
        for token, number in ids.items():
            tokens[number] = token
            types[number] = int(TokenType.NORMAL)
        for entry in parsed.get("added_tokens") or []:
            types[entry["id"]] = int(TokenType.CONTROL if entry["special"] else TokenType.USER_DEFINED)
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in parsed["model"]["merges"]]
        return cls(tokens, types, merges, splits_by, _special(folder, config, ids), _template(folder))

    def write(self, writer: GGUFWriter) -> None:
        """Write the keys `tokenizer.*`. No token is added to a text, since training rows have none either."""
        writer.add_tokenizer_model("gpt2")  # llama.cpp's name for byte pairs
        writer.add_tokenizer_pre(self.splits_by)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        add = {"bos": writer.add_bos_token_id, "eos": writer.add_eos_token_id, "pad": writer.add_pad_token_id}
        for name, number in self.special.items():
            add[name](number)
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(False)
        if self.template is not None:
            writer.add_chat_template(self.template)


def _faults(parsed: dict[str, Any], tokenizer: Tokenizer, splits_by: str | None) -> Iterator[str]:
    """Yield a reason for each feature of a tokenizer.json that would change the tokens in llama.cpp."""
    model = parsed["model"]
    added = {entry["content"]: entry for entry in parsed.get("added_tokens") or []}
    if model.get("type") != "BPE":
        yield f"it has no byte pairs (BPE), but {model.get('type')}"
        return
    if splits_by is None:
        yield f"its pre-tokenizer is none of {', '.join(PATTERNS)}"
    if parsed.get("normalizer") is not None:
        yield f"it normalizes texts ({parsed['normalizer'].get('type')})"
    yield from (f"its option {name} is {model[name]!r}" for name in NOT_THERE if model.get(name))
    whole_words = bool(model.get("ignore_merges"))
    if whole_words and splits_by != WHOLE_WORDS:
        yield f"its option ignore_merges is true, which llama.cpp has for {WHOLE_WORDS} alone"
    if not whole_words and splits_by == WHOLE_WORDS:
        words = model["vocab"].keys() - added.keys()
        split_words = sorted(word for word in words if len(tokenizer.model.tokenize(word)) > 1)
        yield from (f"its merges do not give the token {token!r}, which llama.cpp takes whole" for token in split_words)
    stripping = [token for token, entry in added.items() if entry["lstrip"] or entry["rstrip"]]
    yield from (f"its token {token!r} takes the spaces beside it" for token in stripping)


def _special(folder: Path, config: Settings, ids: dict[str, int]) -> dict[str, int]:
    """Return the ids of special tokens: those that tokenizer_config.json names, else those in config.json."""
    path = folder / "tokenizer_config.json"
    named = json_of(read_regular(path, MAX_TOKENIZER_BYTES)) if path.is_file() else {}
    special: dict[str, int] = {}
    for name in SPECIAL:
        token = named.get(f"{name}_token")
        number = ids.get(token) if isinstance(token, str) else None
        if number is None:
            number = config.get(f"{name}_token_id")
        if isinstance(number, int):
            special[name] = number
    return special


def _template(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if not path.is_file():
        return None
    return read_regular(path, MAX_TOKENIZER_BYTES).decode()
