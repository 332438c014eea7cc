"""The tokenizer that a folder is prepared with: a tokenizer.json on this machine, and the token that ends documents.

A name on a hub is not accepted: the tokenizer must still exist tomorrow, unchanged. The file's size is limited here.
The time that the `tokenizers` package takes for its patterns is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import ByteLevel

from hybridtron.data.folder import LARGEST_TOKENIZER
from hybridtron.data.prepare.chat import ChatTemplate
from hybridtron.data.prepare.documents import ArgumentError
from hybridtron.data.tokenizer_file import BadTokenizer, read_tokenizer
from hybridtron.nested import NotParsed, json_of
from hybridtron.regular_files import Unreadable, read_regular

KNOWN_EOS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
LARGEST_TEMPLATE = 2**24  # bytes


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, as its file's text, with its chat template.

    eos: id of the token that ends documents
    size: number of entries
    separator: id of the token between documents in packed tokens
    """

    json: str
    name: str
    eos_token: str
    eos: int
    size: int
    separator: int
    chat: ChatTemplate | None = None

    def tokenizer(self) -> Tokenizer:
        """Return a tokenizer that treats special tokens in a text as ordinary text."""
        return _tokenizer(self.json)

    def with_offsets(self, special: bool) -> Tokenizer:
        """Return a tokenizer whose offsets cover all characters in a token.

        special: recognize special tokens in a text, instead of treating them as ordinary text
        """
        return _tokenizer_with_offsets(self.json, special)


def open_vocabulary(path: Path, eos_token: str | None = None, separator: str | None = None) -> Vocabulary:
    """Open the vocabulary in a tokenizer.json, by its path or its folder; raise ArgumentError if it can't be used."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise ArgumentError(
            f"--tokenizer: there is no {path}. Only a folder on this machine is taken, with a tokenizer.json in it; "
            "`hf download NAME tokenizer.json tokenizer_config.json --local-dir DIR` gets one from a hub"
        )
    if not file.exists():
        cure = "transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes one where it can"
        raise ArgumentError(f"--tokenizer: {path} has no tokenizer.json; {cure}")
    if file.name == "tokenizer.json":
        name = file.parent.resolve().name
    else:
        name = file.stem
    try:
        text = read_regular(file, LARGEST_TOKENIZER).decode()
    except (Unreadable, UnicodeDecodeError) as error:
        raise ArgumentError(f"--tokenizer: {file} can't be read: {error}") from error
    configs = [_config(file.parent / config) for config in _CONFIGS]
    vocabulary = vocabulary_of(
        text, name, eos_token or _named(configs, "eos_token"), separator, _named(configs, "bos_token")
    )
    return replace(vocabulary, chat=_chat_template(file.parent, vocabulary))


def vocabulary_of(
    text: str, name: str, eos_token: str | None, separator: str | None = None, bos_token: str | None = None
) -> Vocabulary:
    """Return the vocabulary in a tokenizer.json; raise ArgumentError if it can't be used.

    eos_token: by default, the first of KNOWN_EOS that the tokenizer has
    separator: token between documents in packed tokens; by default bos, or else eos
    """
    try:
        tokenizer = read_tokenizer(text)
    except BadTokenizer as error:
        raise ArgumentError(f"--tokenizer: the tokenizer.json of {name} can't be read: {error}") from error
    ids = tokenizer.get_vocab(with_added_tokens=True)
    eos_token = eos_token or next((token for token in KNOWN_EOS if token in ids), None)
    if eos_token is None:
        raise ArgumentError(f"--eos TOKEN is needed: the tokenizer {name} names no eos_token and has no {KNOWN_EOS}")
    for option, token in (("--eos", eos_token), ("--separator", separator)):
        if token is not None and token not in ids:
            special = ", ".join(added.content for added in tokenizer.get_added_tokens_decoder().values())
            raise ArgumentError(f"{option}: the tokenizer {name} has no token {token!r}; added ones: {special or '-'}")
    size = max(len(ids), max(ids.values()) + 1)
    if separator:
        separator_id = ids[separator]
    else:
        separator_id = ids.get(bos_token or eos_token, ids[eos_token])
    vocabulary = Vocabulary(text, name, eos_token, ids[eos_token], size, separator_id)
    if vocabulary.eos in vocabulary.tokenizer().encode(eos_token, add_special_tokens=False).ids:
        cure = 'mark it as "special": true among its added_tokens'
        raise ArgumentError(f"--eos: a text that spells {eos_token!r} would end there by the tokenizer {name}; {cure}")
    return vocabulary


def chat_template_of(folder: Path) -> ChatTemplate | None:
    """Return a folder's chat template, with the special tokens that its configurations name; None if it has none."""
    configs = [_config(folder / config) for config in _CONFIGS]
    text = _template_text(folder, configs)
    tokens = {key: token for key in _TEMPLATE_TOKENS if (token := _named(configs, key))}
    if text is None:
        return None
    return ChatTemplate(text, tuple(tokens.items()), frozenset())


def _chat_template(folder: Path, found: Vocabulary) -> ChatTemplate | None:
    """Return a folder's chat template with the vocabulary's eos; messages must not contain its special tokens."""
    if (template := chat_template_of(folder)) is None:
        return None
    added = found.tokenizer().get_added_tokens_decoder().values()
    tokens = dict(template.tokens) | {"eos_token": found.eos_token}
    special = frozenset(token.content for token in added if token.special)
    return ChatTemplate(template.text, tuple(tokens.items()), special)


def _template_text(folder: Path, configs: list[dict]) -> str | None:
    """Return chat_template.jinja's text, or the default template in tokenizer_config.json; None without either."""
    try:
        text = read_regular(folder / "chat_template.jinja", LARGEST_TEMPLATE).decode()
    except FileNotFoundError:
        text = configs[0].get("chat_template")
        if isinstance(text, list):
            templates = {
                template.get("name"): template.get("template") for template in text if isinstance(template, dict)
            }
            text = templates.get("default")
    except (Unreadable, UnicodeDecodeError) as error:
        raise ArgumentError(f"--tokenizer: {folder / 'chat_template.jinja'} can't be read: {error}") from error
    if isinstance(text, str) and text:
        return text
    return None


@lru_cache(maxsize=1)
def _tokenizer_with_offsets(text: str, special: bool) -> Tokenizer:
    tokenizer = read_tokenizer(text, spelled=not special)
    # A byte-level tokenizer's own post-processor commonly trims spaces off the offsets. This one does not, and does
    # nothing else, because no special tokens are added.
    tokenizer.post_processor = ByteLevel(trim_offsets=False)
    return tokenizer


@lru_cache(maxsize=1)  # requested for every batch of documents
def _tokenizer(text: str) -> Tokenizer:
    return read_tokenizer(text, spelled=True)


def _config(file: Path) -> dict:
    try:
        values = json_of(read_regular(file, LARGEST_TOKENIZER))
    except FileNotFoundError:
        return {}
    except NotParsed as error:
        raise ArgumentError(f"--tokenizer: {file} {error}") from error
    except Unreadable as error:
        raise ArgumentError(f"--tokenizer: {file} can't be read: {error}") from error
    if isinstance(values, dict):
        return values
    return {}


def _named(configs: list[dict], key: str) -> str | None:
    """Return a special token from the first configuration that names it, as a string or as {"content": ...}."""
    for values in configs:
        token = values.get(key)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str) and token:
            return token
    return None
