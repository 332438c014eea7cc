"""Text and weights for runs on a GPU: for each path that sweeps name, the commands that make it.

Names of data sets and models are those of the Hugging Face Hub. Downloads go to /data/raw, tokenizers to
/data/tokenizers; a path that exists is not made again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hybridtron.sweep.grid import SweepRun


@dataclass(frozen=True)
class Material:
    """The commands that make a path.

    files: the download's patterns, first for runs shorter than the paper's, then for its size
    like: for weights, a recipe with the same model
    """

    lines: tuple[str, ...]
    files: tuple[str, str] = ("", "")
    like: str = ""


def download(kind: str, name: str, to: str, files: str) -> str:
    return f"hf download {name} --repo-type {kind} --include {files} --local-dir {to}"


def tokens(source: str, tokenizer: str, output: str, more: str = "") -> str:
    return (
        f"${{ON:-}} hybridtron data prepare --input '{source}' --tokenizer /data/tokenizers/{tokenizer} "
        f'--output {output} --workers "${{WORKERS:-8}}"{more}'
    )


def tokenizer(name: str, model: str) -> str:
    return download("model", model, f"/data/tokenizers/{name}", "'tokenizer*'")


def weights(model: str, like: str, *more: str) -> Material:
    """Return the commands that download and import a published model."""
    name = model.rpartition("/")[2].removesuffix("-hf")
    folder = f"/data/raw/{name}"
    return Material(
        (f"hf download {model} --local-dir {folder}", *more, f"hybridtron import {folder} --output imported/{name}"),
        like=like,
    )


def state_spaces(size: str, like: str) -> Material:
    """Return the commands for a state-spaces model, whose folder has no tokenizer."""
    copied = f"cp /data/tokenizers/neox/tokenizer.json /data/raw/{size}/"
    return weights(f"state-spaces/{size}", like, NEOX, copied)


def answers(task: str, name: str, length: int, tokenizer: str, *more: str) -> tuple[str, ...]:
    """Return the commands that write a task's samples as rows of a length, with only the answers learned."""
    samples = f"/data/raw/{name}"
    written = f"hybridtron tasks write {task} --length {length - 1} --training 100000 --evaluation 0"
    return (
        *more,
        f"[ -e {samples} ] || {written} --tokenizer /data/tokenizers/{tokenizer} --output {samples}",
        tokens(f"{samples}/training", tokenizer, f"/data/{name}", " --learn completion --validation 1%"),
    )


LLAMA = tokenizer("llama", "TinyLlama/TinyLlama_v1.1")  # Llama-2's, without its licence
NEOX = tokenizer("neox", "EleutherAI/gpt-neox-20b")
PILE = download("dataset", "monology/pile-uncopyrighted", "/data/raw/pile", "{files}")
ULTRACHAT = "/data/raw/ultrachat"
TO_LINES = (  # writes JSON lines, as --learn messages reads them
    "python - <<'END'",
    "import json, pathlib, pyarrow.parquet as parquet",
    f"folder = pathlib.Path('{ULTRACHAT}')",
    "with open(folder / 'chats.jsonl', 'w') as lines:",
    "    for path in sorted(folder.glob('data/train_sft-*.parquet')):",
    "        for chat in parquet.read_table(path, columns=['messages']).to_pylist():",
    "            lines.write(json.dumps(chat) + '\\n')",
    "END",
)
MATERIAL = {
    "/data/slimpajama": Material(
        (
            LLAMA,
            download("dataset", "cerebras/SlimPajama-627B", "/data/raw/slimpajama", "{files}"),
            tokens("/data/raw/slimpajama/train/chunk1/*.jsonl.zst", "llama", "/data/slimpajama"),
        ),
        ("'train/chunk1/example_train_[1-4]??.jsonl.zst'", "'train/chunk1/*'"),  # about 4B and 60B tokens
    ),
    "/data/pile": Material(
        (NEOX, PILE, tokens("/data/raw/pile/train/*.jsonl.zst", "neox", "/data/pile")),
        (
            "'train/0[0-1].jsonl.zst'",
            "'train/0[0-5].jsonl.zst'",
        ),  # two or six of thirty files, with about 8B tokens each
    ),
    "/data/pile-long": Material(
        (
            NEOX,
            PILE,
            tokens("/data/raw/pile/train/*.jsonl.zst", "neox", "/data/pile-long", " --min-tokens 4096"),
        ),
        ("'train/0[0-1].jsonl.zst'", "'train/0[0-3].jsonl.zst'"),
    ),
    "/data/ultrachat": Material(
        (
            NEOX.replace("/neox", "/chat"),
            "cp examples/chat/chat_template.jinja /data/tokenizers/chat/",
            download("dataset", "HuggingFaceH4/ultrachat_200k", ULTRACHAT, "'data/train_sft-*'"),
            *TO_LINES,
            tokens(f"{ULTRACHAT}/chats.jsonl", "chat", "/data/ultrachat", " --learn messages"),
        )
    ),
    "/data/passkey-4096": Material(answers("passkey depth_steps=0", "passkey-4096", 4096, "llama", LLAMA)),
    "/data/passkey-2048": Material(answers("passkey digits=4 depth_steps=0", "passkey-2048", 2048, "neox", NEOX)),
    "/data/babi": Material(answers("babilong style=tuned essay=none", "babi", 1024, "neox", NEOX)),
    "data/language": Material(
        (
            NEOX,
            download("dataset", "togethercomputer/RedPajama-Data-1T-Sample", "/data/raw/redpajama", "'*.jsonl'"),
            tokens("/data/raw/redpajama/*.jsonl", "neox", "data/language"),
        )
    ),
    "data/code": Material(
        (
            NEOX,
            download("dataset", "bigcode/the-stack-dedup", "/data/raw/code", "'data/c++/*.parquet'"),
            tokens("/data/raw/code/data/c++/*.parquet", "neox", "data/code", " --text-key content"),
        )
    ),
    "data/pg19": Material(
        (
            NEOX,
            download("dataset", "emozilla/pg19", "/data/raw/pg19", "'data/train-*'"),
            tokens("/data/raw/pg19/data/*.parquet", "neox", "data/pg19"),
        )
    ),
    "data/joint_recall": Material(
        (
            "hybridtron tasks prepare joint_recall padded=true --length 1058 --training 1000000 --validation 10000 "
            "--seed 1 --output data/joint_recall",
        )
    ),
    "data/strings": Material(("python -m studies.length_story.runs data",)),
    **{
        f"imported/mamba2-{size}": state_spaces(f"mamba2-{size}", f"mamba2_{size}") for size in ("130m", "780m", "1.3b")
    },
    "imported/mamba2-370m": state_spaces("mamba2-370m", "mamba2_350m"),
    "imported/mamba2attn-2.7b": state_spaces("mamba2attn-2.7b", "mamba2_hybrid_2.7b"),
    "imported/mamba-130m": weights("state-spaces/mamba-130m-hf", "mamba_130m"),
    "imported/llama-7b": weights("huggyllama/llama-7b", "llama_7b_span"),
}
GROUPS = {
    "data=language": ("data/language",),
    "data=language_code": ("data/language", "data/code"),
    "data=pg19": ("data/pg19",),
    "recipe=tasks/joint_recall": ("data/joint_recall",),
    "recipe=copying_45m": ("data/strings",),
}
"""Settings of sweeps that choose data without naming its path, and the paths."""


def needed(runs: Iterable[SweepRun]) -> list[str]:
    """Return the paths that these runs read, each once."""
    return list(dict.fromkeys(path for run in runs for text in run.settings for path in _paths(text)))


def _paths(setting: str) -> Iterator[str]:
    yield from GROUPS.get(setting, ())
    key, _, value = setting.partition("=")
    if key in ("data.path", "run.weights"):
        yield value
