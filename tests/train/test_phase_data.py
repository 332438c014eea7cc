"""The plan prints the data of each phase that the loader opens, whatever phases override of the run's data."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

from hybridtron.cli import train
from hybridtron.config.load import CONFIGS, load
from hybridtron.config.resolve import resolve
from hybridtron.config.schema import Config
from hybridtron.data.prepare.writer import write_folder
from hybridtron.data.sources import Sources
from tests.slow import slow_except
from tests.train.conftest import VOCAB, counting_documents

Read = list[tuple[str, str, float]]  # of each source its folder, its name there, and its share
SOURCES = {"one": ["a"], "two": ["a", "b"], "three": ["b", "c"]}  # of each folder
FOLDERS = ["data/one", "data/two", "data/three", "data/none"]
NAMES = ["a", "b", "c"]
PHASES = 3
CASES = {"command line": range(30), "recipe": range(30, 40)}


class Refused(Exception):
    """Raised for data of a phase that can't be read."""


class Case(NamedTuple):
    """Data keys for a run and its phases; a phase may lack a key, or set it to null (None)."""

    path: str
    mixture: dict[str, dict[str, Any]]
    phases: list[dict[str, Any]]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, int]]:
    """Small prepared folders, with the tokens of each source."""
    monkeypatch.chdir(tmp_path)
    tokens = {}
    for seed, (folder, names) in enumerate(SOURCES.items()):
        sizes = {name: 20 * (1 + number + seed) for number, name in enumerate(names)}
        train_split = {name: counting_documents(size, seed) for name, size in sizes.items()}
        splits = {"train": train_split, "validation": {name: counting_documents(20, 9) for name in names}}
        prepared = write_folder(Path("data") / folder, splits, "{}", VOCAB, VOCAB - 1, {})
        of_train = prepared.manifest.splits["train"]
        tokens[f"data/{folder}"] = {name: of_train[name].tokens for name in names}
    return tokens


def drawn_mixture(draw: random.Random) -> dict[str, dict[str, Any]]:
    """Draw one or two sources; most have a path at which they can be read."""
    entries = {}
    for name in draw.sample(NAMES, draw.choice([1, 2])):
        entry: dict[str, Any] = {"weight": draw.choice([1, 3])}
        holding = [folder for folder in FOLDERS if name in SOURCES.get(folder.removeprefix("data/"), [])]
        if draw.random() < 0.7:
            entry["path"] = draw.choice(holding if draw.random() < 0.9 else FOLDERS)
        if draw.random() < 0.2:
            entry["source"] = draw.choice(NAMES)
        entries[name] = entry
    return entries


def drawn(seed: int) -> Case:
    draw = random.Random(seed)
    phases = []
    for _ in range(PHASES):
        data: dict[str, Any] = {}
        if draw.random() < 0.5:
            data["path"] = draw.choice(FOLDERS if draw.random() < 0.3 else FOLDERS[:3])
        if draw.random() < 0.6:
            data["mixture"] = draw.choice([None, {}, drawn_mixture(draw)])
        phases.append(data)
    return Case(draw.choice(FOLDERS[:3]), drawn_mixture(draw) if draw.random() < 0.7 else {}, phases)


def expected(case: Case, phase: dict[str, Any], tokens: dict[str, dict[str, int]]) -> Read:
    """Sources that a phase reads, by the rules of docs/phases.md."""
    path = phase.get("path", case.path)
    mixture = phase.get("mixture", case.mixture) or {}
    if "path" in phase and mixture and all("path" in entry for entry in mixture.values()):
        raise Refused  # that path has no effect
    if not mixture:
        if path not in tokens:
            raise Refused
        whole = sum(tokens[path].values())
        return [(path, name, count / whole) for name, count in sorted(tokens[path].items())]
    sources: Read = []
    whole = sum(entry["weight"] for entry in mixture.values())
    for name, entry in mixture.items():
        folder = entry.get("path", path)
        available = tokens.get(folder, {})
        only = next(iter(available)) if len(available) == 1 else name
        source = entry.get("source") or (name if name in available else only)
        if source not in available:
            raise Refused
        sources.append((folder, source, entry["weight"] / whole))
    return sources


def opened(config: Config) -> list[Read]:
    """Folders, sources and shares that the loader opens in each phase, by the stores themselves."""
    phases = []
    for phase in resolve(config):
        sources = Sources.open(phase)
        places = [entry.folder.source_path("train", entry.source) for entry in sources.mixture]
        stores = [int(store.lengths.sum()) for store in sources.stores("train")]
        assert stores == [entry.tokens("train") for entry in sources.mixture]
        shares = np.array(sources.weights) / sum(sources.weights)
        phases.append([(str(p.parents[1]), p.name, share) for p, share in zip(places, shares, strict=True)])
    return phases


def printed(output: str) -> tuple[list[Read], list[bool]]:
    """Sources of each phase from the plan's table; and from its list, if a phase reads other data than before."""
    rows = re.findall(r"^p(\d) +(\w+) +([\d.]+)% .* (data/\w+)(?:, (\w+))?\s*$", output, re.MULTILINE)
    table: list[Read] = [[] for _ in range(PHASES)]
    for phase, name, share, folder, source in rows:
        table[int(phase)].append((folder, source or name, float(share) / 100))
    changes = [part.partition("\n\n")[0] for part in re.split(r"^p\d(?=\n|: same)", output, flags=re.MULTILINE)[1:]]
    return table, ["  reads: " in text for text in changes]


def phases_of(case: Case) -> list[dict[str, Any]]:
    sizes = {"tokens": 1280, "seq_len": 16, "global_batch": 4, "micro_batch": 2, "lr": 1e-3}
    return [{"name": f"p{index}", **sizes, "data": data} for index, data in enumerate(case.phases)]


def hydra(value: Any) -> str:
    """A value in the grammar of the command line."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}: {hydra(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(hydra, value)) + "]"
    return "null" if value is None else str(value)


def settings_of(case: Case) -> list[str]:
    """The case on a command line."""
    mixture = [f"data.mixture={hydra(case.mixture)}"] if case.mixture else []
    return [f"data.path={case.path}", *mixture, f"phases={hydra(phases_of(case))}"]


def recipe_of(case: Case, configs: Path) -> list[str]:
    """The case as a recipe, on one that has a mixture of its own."""
    data = {"path": case.path} | ({"mixture": case.mixture} if case.mixture else {})
    text = yaml.safe_dump(
        {"defaults": ["/recipe/laptop", "_self_"], "data": data, "phases": phases_of(case)}, sort_keys=False
    )
    (configs / "recipe/case.yaml").write_text(f"# @package _global_\n{text}")
    return ["recipe=case"]


SMALL = [
    "model.width=32", f"model.vocab_size={VOCAB}", "model.layers.W.window=8", "run.eval_tokens=256", "data=folder",
    "data.source=folder", "data.epochs=null", "run.eval_lengths=[1]", "run.plan=true",
]  # fmt: skip


def close(first: Read, second: Read, within: float) -> bool:
    same = [entry[:2] for entry in first] == [entry[:2] for entry in second]
    return same and all(abs(a[2] - b[2]) <= within for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("written", slow_except(CASES, "recipe"))
def test_the_plan_prints_the_folders_that_the_loader_opens(
    written: str,
    folders: dict[str, dict[str, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    configs = tmp_path / "configs"
    shutil.copytree(CONFIGS, configs, ignore=shutil.ignore_patterns("ablations", "samba*", "length"))
    loaded: list[Config] = []
    monkeypatch.setattr(train, "load", lambda arguments: loaded.append(load(arguments, configs)) or loaded[-1])
    refused = 0
    for seed in CASES[written]:
        case = drawn(seed)
        if written == "recipe":
            arguments = [*recipe_of(case, configs), *SMALL]
        else:
            arguments = [*settings_of(case), *SMALL]
        try:
            wanted = [expected(case, phase, folders) for phase in case.phases]
        except Refused:
            assert train.main(arguments) == 2, case
            refused += 1
            continue
        capsys.readouterr()
        assert train.main(arguments) == 0, (case, capsys.readouterr().err)
        table, changes = printed(capsys.readouterr().out)
        read = opened(loaded[-1])
        for index in range(PHASES):
            assert close(read[index], wanted[index], 1e-9), (seed, case)
            assert close(table[index], read[index], 5.1e-4), (seed, case)
        differs = [index > 0 and not close(read[index], read[index - 1], 1e-9) for index in range(PHASES)]
        assert [said or not differ for said, differ in zip(changes, differs, strict=True)] == [True] * PHASES, case
    assert len(CASES[written]) / 8 < refused < len(CASES[written]) / 1.5
