"""Files for the golden messages of `hybridtron data prepare`: small tokenizers, and inputs with every kind of fault."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

INDEX = struct.Struct("<QBQQ")  # of a Megatron index: version, dtype, sequences, document boundaries
HEADER = struct.Struct("<QBQ")  # of packed tokens: version, dtype, tokens
CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

LAST_ONLY = "{% for m in messages %}{{ m.content if loop.last else m.content | upper }} {% endfor %}"


def word_tokenizer(eos: str | None = "</s>", special: bool = True) -> bytes:
    """Return a tokenizer.json that knows two words, and eos as an added token."""
    vocab = {"?": 0, "a": 1, "b": 2}
    added = []
    if eos is not None:
        vocab[eos] = 3
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = [{"id": 3, "content": eos, "special": special, **flags}]
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "?"}
    rest = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    splitter = {"type": "Whitespace"}
    return json.dumps(
        {"version": "1.0", "added_tokens": added, "pre_tokenizer": splitter, "model": model} | rest
    ).encode()


def json_lines(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def mds_index(columns: Mapping[str, str], name: str = "shard.00000.mds", **changes: Any) -> bytes:
    """Return the index.json of an MDS folder with one shard."""
    raw = {"basename": name, "bytes": 3, "hashes": {"sha1": "0"}}
    shard: dict[str, Any] = {
        "column_encodings": list(columns.values()),
        "column_names": list(columns),
        "compression": None,
        "format": "mds",
        "raw_data": raw,
        "samples": 1,
        "version": 2,
        "zip_data": None,
    }
    return json.dumps({"version": 2, "shards": [shard | changes]}).encode()


def parquet(**columns: list) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


SPANS = {"text": "0123456789"}
USER = {"role": "user", "content": "a"}
PREPARE_FILES: Mapping[str, bytes] = {
    "words/tokenizer.json": word_tokenizer(),
    "no_eos/tokenizer.json": word_tokenizer(eos=None),
    "plain_eos/tokenizer.json": word_tokenizer(special=False),
    "torn_config/tokenizer.json": word_tokenizer(),
    "torn_config/tokenizer_config.json": b"{",
    "chat/tokenizer.json": word_tokenizer(),
    "chat/chat_template.jinja": CHATML.encode(),
    "torn_chat/tokenizer.json": word_tokenizer(),
    "torn_chat/chat_template.jinja": b"{% for m in messages %}",
    "strict_chat/tokenizer.json": word_tokenizer(),
    "strict_chat/chat_template.jinja": b"{{ raise_exception('roles must alternate') }}",
    "late_chat/tokenizer.json": word_tokenizer(),
    "late_chat/chat_template.jinja": LAST_ONLY.encode(),
    "good.jsonl": json_lines({"text": "a b"}, {"text": "b a"}),
    "long.jsonl": json_lines({"text": "a b " * 999}),
    "other.jsonl": json_lines({"text": "b b"}),
    "empty.jsonl": json_lines({"text": ""}, {"text": " "}),
    "keys.jsonl": json_lines({"txt": "a"}, {"text": ["a"]}, {"text": None}, "text", {"text": "a"}),
    "bytes.jsonl": b'{"text": "caf\xe9"}\n' + json_lines({"text": "a"}),
    "many.jsonl": json_lines(*({"text": number} for number in range(9)), {"text": "a"}),
    "spans.jsonl": json_lines(
        SPANS, SPANS | {"spans": []}, SPANS | {"spans": [[5, 12]]}, SPANS | {"spans": [[3, 3]]}, {"spans": [[0, 1]]}
    ),
    "more_spans.jsonl": json_lines(SPANS | {"spans": [[4, 9], [0, 5]]}, SPANS | {"spans": [[0, True]]}),
    "completions.jsonl": json_lines(
        {"prompt": "a"}, {"prompt": ["a"], "completion": "b"}, {"prompt": "a", "completion": ""}
    ),
    "conversations.jsonl": json_lines(
        {"messages": []},
        {"messages": [{"content": "a"}]},
        {"messages": [USER, {"role": "assistant"}]},
        {"messages": [USER]},
        {"messages": [{"role": "user", "content": "a</s>"}]},
    ),
    "conversation.jsonl": json_lines({"messages": [USER, {"role": "assistant", "content": "b"}, USER]}),
    "table.csv": b"a,b\n",
    "table.parquet": parquet(body=["a"], n=[1]),
    "photos/a.png": b"",
    "cut.jsonl.gz": b"\x1f\x8b",
    "cut.bin": b"LITPKDS" + HEADER.pack(1, 8, 5) + b"\1\0\2\0",
    "headless.bin": b"LITPKDS" + b"\1",
    "unparted.bin": b"LITPKDS" + HEADER.pack(1, 8, 2) + b"\1\0\2\0",
    "floats.bin": b"LITPKDS" + HEADER.pack(1, 6, 1) + b"\0\0\0\0",
    "megatron.bin": b"",
    "megatron.idx": b"something else",
    "new_megatron.bin": b"",
    "new_megatron.idx": b"MMIDIDX\0\0" + INDEX.pack(2, 8, 0, 0),
    "short_megatron.bin": b"\1\0",
    "short_megatron.idx": b"MMIDIDX\0\0" + INDEX.pack(1, 8, 1, 2) + struct.pack("<iqqq", 2, 0, 0, 1),
    "torn_megatron.bin": b"\1\0",
    "torn_megatron.idx": b"MMIDIDX\0\0" + INDEX.pack(1, 8, 1, 2) + struct.pack("<iqqq", 1, 0, 0, 9),
    "large_megatron.bin": b"\1\0\x09\0",
    "large_megatron.idx": b"MMIDIDX\0\0" + INDEX.pack(1, 8, 1, 2) + struct.pack("<iqqq", 2, 0, 0, 1),
    "mds_list/index.json": b"[]",
    "mds_without/index.json": mds_index({"text": "str"}),
    "mds_outside/index.json": mds_index({"text": "str"}, "../words.txt"),
    "mds_columns/index.json": mds_index({"body": "str", "tokens": "bytes"}),
    "mds_columns/shard.00000.mds": b"abc",
    "mds_version/index.json": mds_index({"text": "str"}, version=3),
    "mds_version/shard.00000.mds": b"abc",
    "mds_cut/index.json": mds_index({"text": "str"}),
    "mds_cut/shard.00000.mds": b"ab",
    "mds_changed/index.json": mds_index({"text": "str"}),
    "mds_changed/shard.00000.mds": b"abc",
    "taken.partial/mine.txt": b"my text",
}
"""Files below the folder where the commands run. Names say what is wrong with them."""
