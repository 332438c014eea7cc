"""Pages from download to table: a local server publishes the named files, and every command of a page runs."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from hybridtron.architecture.table import architecture
from hybridtron.cli import main as cli
from hybridtron.data.folder import TokenFolder
from hybridtron.data.prepare.embedded import train_tokenizer
from hybridtron.interop.original import Original
from studies.papers.samba_tables import TABLE_3
from tests.data.prepare.preparing import zstd
from tests.storage.publisher import Publisher, publishing_as_hub
from tests.studies.walking import FOLDER, ROW, Sizes, lines, walk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SOURCES = ("CommonCrawl", "C4", "Github", "Book", "ArXiv", "Wikipedia", "StackExchange")
LONG = "There is an important info hidden inside a lot of irrelevant text. The grass is green. The sky is blue. " * 24
SHORT = "The sun is yellow. Here we go. What is the pass key? The pass key is "
MAMBA2 = {"d_model": 32, "n_layer": 2, "vocab_size": 512, "rms_norm": True, "pad_vocab_size_multiple": 8}
TOKENIZER = "tokenizer.json"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    with publishing_as_hub(monkeypatch) as running:
        yield running


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def texts(count: int) -> list[str]:
    """Short texts, of which every sixth is longer than all rows that are read."""
    return [f"{LONG if number % 6 == 0 else SHORT}{number}." for number in range(count)]


def tokenizer() -> dict[str, bytes]:
    trained = train_tokenizer([LONG, *(SHORT + str(number) for number in range(300))], 512)
    return {TOKENIZER: trained.to_str().encode(), "tokenizer_config.json": b"{}"}


def pajama(begin: int) -> bytes:
    """Documents of all seven sources, compressed."""
    documents = [
        {"text": f"{begin} {text}", "meta": {"redpajama_set_name": f"RedPajama{name}"}}
        for text in texts(30)
        for name in SOURCES
    ]
    return zstd(lines(documents))


def plain(count: int) -> bytes:
    return lines([{"text": text} for text in texts(count)])


def questions() -> bytes:
    stored = io.BytesIO()
    parquet.write_table(pa.table({"question": texts(40), "answer": ["4"] * 40}), stored)
    return stored.getvalue()


def mamba2(folder: Path) -> dict[str, bytes]:
    """The files of a published Mamba-2, with random weights."""
    settings = {**MAMBA2, "ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 8}}
    kind = Original()
    rules = kind.rules(architecture(kind.model(settings)))
    stored = {rule.theirs: 0.02 * torch.randn(rule.shape) for rule in rules}
    torch.save({**stored, "lm_head.weight": stored["backbone.embedding.weight"]}, folder / "weights")
    return {"config.json": json.dumps(settings).encode(), "pytorch_model.bin": (folder / "weights").read_bytes()}


def rows_of(folder: Path, run: str) -> list[dict[str, Any]]:
    """The results of one of several runs that were evaluated together."""
    (file,) = folder.glob(f"{run}-step-*/results.json")
    return json.loads(file.read_text())["rows"]


NUMBERS = {"32": "1", "100000": "40", "55": "2", "100": "2", "1024": "4", "1%": "30%"}
SAMBA = Sizes(
    {
        **NUMBERS, "4096": "128", "8192": "256", "16384": "512", "1048576": str(8 * ROW), "65536": "", "262144": "",
        "4095": "255",
    },
    {
        "recipe=samba_421m": (
            "model.width=32", "model.vocab_size=512", "model.pattern=M-W-", "model.layers.M.state=4",
            "model.layers.W.heads=2", "model.layers.W.kv_heads=2", "model.layers.W.window=16",
            "model.layers.-.hidden=64",
        ),
        "recipe=llama2_swa_438m": (
            "model.width=32", "model.vocab_size=512", "model.pattern=W-", "model.layers.W.heads=2",
            "model.layers.W.kv_heads=2", "model.layers.W.window=16", "model.layers.-.hidden=64",
        ),
    },
    {"passkey": 256},
)  # fmt: skip


def test_samba_goes_from_download_to_table(
    server: Publisher, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.publish("TinyLlama/TinyLlama_v1.1", tokenizer(), kind="models")
    chunk = "train/chunk1/example_train"
    files = {f"{chunk}_{number}.jsonl.zst": pajama(number) for number in (999, 1000, 2047, 3000)}
    held_out = {"validation/chunk1/example_holdout_0.jsonl.zst": pajama(0)}
    server.publish("cerebras/SlimPajama-627B", files | held_out)
    server.publish("hoskinson-center/proof-pile", {"test/proofpile_test.jsonl.gz": gzip.compress(plain(60))})
    server.publish("openai/gsm8k", {"main/test-00000-of-00001.parquet": questions()})
    walked = walk("samba", workplace, SAMBA, lambda: "".join(capsys.readouterr()))
    assert walked.printed.count("20B tokens") == 1
    assert "GPU-hours" in walked.printed
    trained = TokenFolder.open(workplace / "data/slimpajama").manifest.splits
    assert set(trained["train"]) == {f"RedPajama{name}" for name in SOURCES}
    official = TokenFolder.open(workplace / "data/slimpajama-validation").manifest
    assert sum(source.documents for source in official.splits["validation"].values()) == 30 * len(SOURCES)
    for run in ("samba_421m", "llama2_swa_438m"):
        rows = rows_of(workplace / "tables/3", run)
        read = {row["length"]: row["value"] for row in rows if row["metric"] == "perplexity"}
        assert list(read) == [128, 256, 512]
        assert all(1 < perplexity < 600 for perplexity in read.values())
    for folder in ("figures/1", "figures/4", "figures/5"):
        assert (workplace / folder / "results.json").exists()


LENGTH = Sizes(
    {
        **NUMBERS, "100": "1", "2048": "1600", "8192": "", "32768": "", "131072": "", "2047": "255", "203": "23",
        "603": "43",
    },
    {
        "recipe=mamba2_45m": (
            "model.width=32", "model.vocab_size=512", "model.pattern=MM", "model.layers.M.state=8",
            "model.layers.M.head_dim=8",
        ),
        "recipe=copying_45m": (
            "model.width=32", "model.pattern=MM", "model.layers.M.state=8", "model.layers.M.head_dim=8",
        ),
        "recipe=length/official_780m": (),
    },
    {"passkey": 256, "strings": 24},
)  # fmt: skip


def test_length_generalization_goes_from_download_to_table(
    server: Publisher, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.publish("EleutherAI/gpt-neox-20b", tokenizer(), kind="models")
    pile = {f"train/0{number}.jsonl.zst": zstd(plain(120)) for number in (0, 3, 4)}
    server.publish("monology/pile-uncopyrighted", pile | {"val.jsonl.zst": zstd(plain(700)), "test.jsonl.zst": b""})
    server.publish("state-spaces/mamba2-780m", mamba2(workplace), kind="models")
    walked = walk("length", workplace, LENGTH, lambda: "".join(capsys.readouterr()))
    assert walked.printed.count("22.5B tokens") == 1
    names = {row["task"].partition("[")[0] for row in rows_of(workplace / "figures/6", "passing")}
    assert names >= {f"babilong_qa{number}" for number in range(1, 11)}
    for run in ("copying", "copying_passing"):
        assert {row["length"] for row in rows_of(workplace / "tables/1", run)} == {23, 43}
    assert len(list((workplace / "figures/5").glob("*/remembrance.jsonl"))) == 2
    for folder in ("figures/2", "figures/7"):
        assert (workplace / folder / "results.json").exists()


@pytest.mark.usefixtures("workplace")
def test_a_folder_of_too_few_shards_is_refused_with_what_is_missing(
    server: Publisher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the text of the walk, whose tokens are far fewer than the recipe's 20B."""
    server.publish("cerebras/SlimPajama-627B", {"train/chunk1/example_train_1000.jsonl.zst": pajama(1)})
    (tmp_path / TOKENIZER).write_bytes(tokenizer()[TOKENIZER])
    words = ["--tokenizer", str(tmp_path / TOKENIZER), "--output", "few", "--validation", "10%"]
    assert cli.main(["data", "prepare", "--from", "hf:cerebras/SlimPajama-627B:train/*", *words]) == 0
    capsys.readouterr()
    settings = ["recipe=samba_421m", "data=slimpajama", "data.path=few", "run.eval_lengths=[1]", "run.dir=run"]
    settings += ["phases.0.seq_len=64", "model.layers.W.window=64", "cluster=local"]
    assert cli.main(["train", *settings, "run.plan=true"]) == 2
    reported = capsys.readouterr().err
    assert "data.epochs" in reported
    assert "B more" in reported


def test_the_page_prints_the_paper_s_numbers() -> None:
    page = (FOLDER / "samba.md").read_text()
    for model, *printed in TABLE_3.rows:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {model} |")]
        assert row.endswith(f"| {', '.join(printed)} |")
