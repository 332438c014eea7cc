"""Checkpoints in other programs' formats: torch loads them on two ranks, and they come back unchanged."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hybridtron.checkpoint.checkpoint import Checkpoint
from hybridtron.checkpoint.dcp_metadata import METADATA
from hybridtron.checkpoint.exchange import FORMATS, RECORD, write_out
from hybridtron.checkpoint.folder import folder_of
from hybridtron.checkpoint.save import Saver, meta_of
from hybridtron.cli import checkpoint
from hybridtron.cli.main import main
from hybridtron.config.resolve import RunPlan, resolve
from hybridtron.engine.engine import Engine
from hybridtron.parallel.groups import Groups
from hybridtron.parallel.pool import Seat
from tests.conftest import random_batch, small_run
from tests.distributed import run_distributed
from tests.pickles import Call
from tests.refusals import refusal

EMBEDDING = "embedding.weight"


@pytest.fixture
def source(alone: Groups, tmp_path: Path) -> Checkpoint:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    engine = Engine(resolve(small_run())[0], alone)
    engine.forward_backward([random_batch()])
    engine.step(1e-2)
    Saver(RunPlan.of(engine.config), folder, alone).save(
        engine, meta_of(engine, 1, {"eos": "0"}, 4.5), folder / "tokenizer.json"
    )
    return Checkpoint.open(folder_of(folder, 1))


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_checkpoint_comes_back_unchanged(
    format_name: str, source: Checkpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["checkpoint", "export", str(source.folder), str(out), "--to", format_name]) == 0
    assert main(["checkpoint", "import", str(out), str(tmp_path / "back")]) == 0
    back = Checkpoint.open(tmp_path / "back")
    assert back.meta == source.meta
    assert back.shapes == source.shapes
    assert any(key.startswith("master.") or "exp_avg" in key for key in back.shapes)
    assert all(torch.equal(back.whole(key), source.whole(key)) for key in source.shapes)
    capsys.readouterr()
    assert main(["checkpoint", "diff", str(source.folder), str(tmp_path / "back")]) == 0
    assert refusal(checkpoint.main, ["import", out, tmp_path / "back"]).code == "exists"


def test_safetensors_files_have_our_keys(source: Checkpoint, tmp_path: Path) -> None:
    write_out(source, tmp_path / "out", "safetensors")
    stored = {key: t for file in (tmp_path / "out").glob("*.safetensors") for key, t in load_file(file).items()}
    assert stored.keys() == source.shapes.keys()
    assert torch.equal(stored[EMBEDDING], source.whole(EMBEDDING))


def load_a_share(seat: Seat, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Load the rank's rows of the embedding, and the whole final norm, as torch's users do."""
    dist.init_process_group("gloo", init_method=f"file://{seat.meeting_file}", rank=seat.rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    sizes = json.loads((folder / "sizes.json").read_text())
    sharded = distribute_tensor(torch.zeros(sizes[EMBEDDING]), mesh, [Shard(0)])
    state = {EMBEDDING: sharded, "norm.weight": torch.zeros(sizes["norm.weight"])}
    dcp.load(state, checkpoint_id=folder)
    return state[EMBEDDING].to_local().clone(), state["norm.weight"]


@pytest.mark.gloo
def test_torch_loads_it_on_two_ranks(source: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_out(source, out, "dcp")
    (out / "sizes.json").write_text(json.dumps(source.shapes))
    shares = run_distributed(load_a_share, 2, out)
    rows, norms = zip(*shares, strict=True)
    assert len(rows[0]) < len(source.whole(EMBEDDING))
    assert torch.equal(torch.cat(rows), source.whole(EMBEDDING).float())
    assert all(torch.equal(norm, source.whole("norm.weight").float()) for norm in norms)


def test_the_metadata_of_dcp_runs_no_code(source: Checkpoint, tmp_path: Path) -> None:
    """Reading it as torch does would make a folder; the import refuses it, and names outside the folder too."""
    out = tmp_path / "out"
    write_out(source, out, "dcp")
    described = (out / METADATA).read_bytes()
    (out / METADATA).write_bytes(pickle.dumps(Call(tmp_path / "made")))
    refused = refusal(checkpoint.main, ["import", out, tmp_path / "back"])
    assert refused.code == "unreadable"
    assert "posix.mkdir" in str(refused)
    assert not (tmp_path / "made").exists()
    metadata = pickle.loads(described)
    place = next(iter(metadata.storage_data.values()))
    place.relative_path = "../elsewhere"
    (out / METADATA).write_bytes(pickle.dumps(metadata))
    assert refusal(checkpoint.main, ["import", out, tmp_path / "back"]).code == "malformed"
    (out / METADATA).write_bytes(described[:100])
    assert refusal(checkpoint.main, ["import", out, tmp_path / "back"]).code == "unreadable"
    assert not (tmp_path / "back").exists()


def test_other_folders_are_refused(source: Checkpoint, tmp_path: Path) -> None:
    def code() -> str:
        return refusal(checkpoint.main, ["import", tmp_path / "out", tmp_path / "back"]).code

    (tmp_path / "out").mkdir()
    assert code() == "no-file"
    (tmp_path / "out" / RECORD).write_text("{}")
    assert code() == "unreadable"
    (tmp_path / "out").rename(tmp_path / "first")
    write_out(source, tmp_path / "out", "safetensors")
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    (tmp_path / "out" / RECORD).write_text(json.dumps(record | {"files": {"../model-00000.safetensors": []}}))
    assert code() == "malformed"
    record["files"]["model-00000.safetensors"].append("no.such.weight")
    (tmp_path / "out" / RECORD).write_text(json.dumps(record))
    assert code() == "unreadable"
    assert not (tmp_path / "back").exists()
