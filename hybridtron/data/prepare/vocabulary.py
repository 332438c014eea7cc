"""Opens the tokenizer with which a folder is prepared: a tokenizer.json on this machine, and its chat template.

A tokenizer's name on a hub is not accepted, because the tokenizer may be changed or deleted there. An untrusted
tokenizer.json is limited in size. The time that its regular expressions take is not limited.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.processors import ByteLevel

from hybridtron.data.folder import MAX_TOKENIZER_BYTES
from hybridtron.data.prepare.chat import ChatTemplate
from hybridtron.data.prepare.documents import ArgumentError
from hybridtron.data.tokenizer_file import BadTokenizer, read_tokenizer
from hybridtron.nested import NotParsed, json_of
from hybridtron.safe_open import Unreadable, read_regular

KNOWN_EOS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
MAX_TEMPLATE_BYTES = 2**24  # bytes


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, with its chat template.

    json: contents of the tokenizer.json
    name: name of its folder or file, for messages
    eos_token, eos: text and id of the token that ends documents
    size: number of entries
    separator: token id between documents in packed tokens
    """

    json: str
    name: str
    eos_token: str
    eos: int
    size: int
    separator: int
    chat: ChatTemplate | None = None

    def tokenizer(self) -> Tokenizer:
        """Return a tokenizer that encodes a special token's name in a text as ordinary characters."""
        return _tokenizer(self.json)

    def with_offsets(self, special: bool) -> Tokenizer:
        """Return a tokenizer whose offsets include a token's leading spaces.

        special: True to encode a special token's name in a text as the special token, False to encode its characters
        """
        return _tokenizer_with_offsets(self.json, special)


def open_vocabulary(path: Path, eos_token: str | None = None, separator: str | None = None) -> Vocabulary:
    """Open a tokenizer by the path to its tokenizer.json or folder; raise ArgumentError if it can't be used."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise ArgumentError(
            f"--tokenizer: there is no {path}. Name a folder on this machine that has a tokenizer.json; to download "
            "one from a hub, run `hf download NAME tokenizer.json tokenizer_config.json --local-dir DIR`",
            code="no-file",
        )
    if not file.exists():
        cure = "try to write one with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        raise ArgumentError(f"--tokenizer: {path} has no tokenizer.json; {cure}", code="no-file")
    if file.name == "tokenizer.json":
        name = file.parent.resolve().name
    else:
        name = file.stem
    try:
        text = read_regular(file, MAX_TOKENIZER_BYTES).decode()
    except (Unreadable, UnicodeDecodeError) as error:
        raise ArgumentError(f"--tokenizer: {file} can't be read: {error}", code="unreadable") from error
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
        raise ArgumentError(
            f"--tokenizer: the tokenizer.json of {name} can't be read: {error}", code="unreadable"
        ) from error
    ids = tokenizer.get_vocab(with_added_tokens=True)
    eos_token = eos_token or next((token for token in KNOWN_EOS if token in ids), None)
    if eos_token is None:
        raise ArgumentError(
            f"the tokenizer {name} names no eos_token and has none of {KNOWN_EOS}; set --eos TOKEN", code="missing"
        )
    for option, token in (("--eos", eos_token), ("--separator", separator)):
        if token is not None and token not in ids:
            special = ", ".join(added.content for added in tokenizer.get_added_tokens_decoder().values())
            raise ArgumentError(
                f"{option}: the tokenizer {name} has no token {token!r}; its special tokens: {special or 'none'}",
                code="unknown-name",
            )
    size = max(len(ids), max(ids.values()) + 1)
    if separator:
        separator_id = ids[separator]
    else:
        separator_id = ids.get(bos_token or eos_token, ids[eos_token])
    vocabulary = Vocabulary(text, name, eos_token, ids[eos_token], size, separator_id)
    if vocabulary.eos in vocabulary.tokenizer().encode(eos_token, add_special_tokens=False).ids:
        cure = f'mark {eos_token!r} as "special": true among added_tokens in tokenizer.json'
        raise ArgumentError(
            f"--eos: the tokenizer {name} encodes {eos_token!r} in a text as eos, which ends a document; {cure}",
            code="unsupported",
        )
    return vocabulary


def chat_template_of(folder: Path) -> ChatTemplate | None:
    """Return a folder's chat template, with the special tokens in the tokenizer's configuration files.

    The result is None if the folder has no chat template.
    """
    configs = [_config(folder / config) for config in _CONFIGS]
    text = _template_text(folder, configs)
    tokens = {key: token for key in _TEMPLATE_TOKENS if (token := _named(configs, key))}
    if text is None:
        return None
    return ChatTemplate(text, tuple(tokens.items()), frozenset())


def _chat_template(folder: Path, vocabulary: Vocabulary) -> ChatTemplate | None:
    """Return a folder's chat template with the vocabulary's eos and special tokens; None if there is no template."""
    if (template := chat_template_of(folder)) is None:
        return None
    added = vocabulary.tokenizer().get_added_tokens_decoder().values()
    tokens = dict(template.tokens) | {"eos_token": vocabulary.eos_token}
    special = frozenset(token.content for token in added if token.special)
    return ChatTemplate(template.text, tuple(tokens.items()), special)


def _template_text(folder: Path, configs: list[dict]) -> str | None:
    """Return the text in chat_template.jinja if it exists, else the default template in tokenizer_config.json.

    The result is None if the folder has neither.
    """
    try:
        text = read_regular(folder / "chat_template.jinja", MAX_TEMPLATE_BYTES).decode()
    except FileNotFoundError:
        text = configs[0].get("chat_template")
        if isinstance(text, list):
            templates = {
                template.get("name"): template.get("template") for template in text if isinstance(template, dict)
            }
            text = templates.get("default")
    except (Unreadable, UnicodeDecodeError) as error:
        raise ArgumentError(
            f"--tokenizer: {folder / 'chat_template.jinja'} can't be read: {error}", code="unreadable"
        ) from error
    if isinstance(text, str) and text:
        return text
    return None


@lru_cache(maxsize=1)
def _tokenizer_with_offsets(text: str, special: bool) -> Tokenizer:
    tokenizer = read_tokenizer(text, spelled=not special)
    # The post-processor of a byte-level tokenizer usually removes leading spaces from a token's offsets. This
    # post-processor keeps the spaces, and changes nothing else.
    tokenizer.post_processor = ByteLevel(trim_offsets=False)
    return tokenizer


@lru_cache(maxsize=1)  # called for every batch of documents
def _tokenizer(text: str) -> Tokenizer:
    return read_tokenizer(text, spelled=True)


def _config(file: Path) -> dict:
    try:
        values = json_of(read_regular(file, MAX_TOKENIZER_BYTES))
    except FileNotFoundError:
        return {}
    except NotParsed as error:
        raise ArgumentError(f"--tokenizer: {file} {error}", code="malformed") from error
    except Unreadable as error:
        raise ArgumentError(f"--tokenizer: {file} can't be read: {error}", code="unreadable") from error
    if isinstance(values, dict):
        return values
    return {}


def _named(configs: list[dict], key: str) -> str | None:
    """Return a special token's text from the first configuration that has it as a string or as {"content": TEXT}."""
    for values in configs:
        token = values.get(key)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str) and token:
            return token
    return None
