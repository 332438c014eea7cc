"""The house keeps its shape: imports go one way, and what one file owns no other file touches."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hybridtron"
ORDER = [
    "hf",  # shipped with models: knows nothing else of the house
    "requirements",  # which commands check before all else is imported
    "regular_files",
    "problems",
    "device",
    "architecture",
    "config",
    "planning",
    "ops",
    "data",
    "parallel",
    "mixers",
    "model",
    "engine",
    "checkpoint",
    "train",
    "interop",
    "proving",
    "cluster",
    "cli",
]
SOURCES = sorted(PACKAGE.rglob("*.py"))
OWNERS = {
    "mamba_ssm": "ops/*_mamba_ssm.py",  # one file for each of its kernels
    "causal_conv1d": "ops/conv1d.py",
    "flash_attn": "ops/attention.py",
    "wandb": "train/sinks.py",
    "tensorboard": "train/sinks.py",
    "transformer_engine": "parallel/transformer_engine.py",
    "nvidia": "data/dali.py",
    "streaming": "data/store/mosaic.py",
    "pyarrow": "data/prepare/inputs.py",
    "triton": "ops/kernels/*.py ops/*_triton.py",  # kernels of our own, and the forms that offer them
}
TORCH_FREE = ("regular_files", "problems", "architecture", "config", "planning")
SHIPPED = sorted((PACKAGE / "hf").glob("*_hybridtron.py"))
GENERATED = "ops_hybridtron.py"


def part_of(path: Path) -> str:
    """The room that a file stands in: `ops`, or `device` for device.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == (path in SHIPPED and node.module.endswith("_hybridtron")), f"{path}: absolute imports"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attribute_chains(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def strings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def wrong_imports(path: Path, modules: Iterator[str]) -> list[str]:
    """Imports of a room that stands to the right of the file's own."""
    own = ORDER.index(part_of(path))
    rooms = (module.split(".")[1] for module in modules if module.startswith("hybridtron.") and "." in module)
    return [room for room in rooms if room in ORDER and ORDER.index(room) > own]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_only_from_its_left(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        return
    assert wrong_imports(path, imported_modules(path)) == []


def test_the_import_rule_catches_a_wrong_import() -> None:
    assert wrong_imports(PACKAGE / "model" / "lm.py", iter(["hybridtron.train.trainer.run"])) == ["train"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_device_names_torch_cuda(path: Path) -> None:
    if path.name != "device.py":
        assert not [chain for chain in attribute_chains(path) if chain.startswith("torch.cuda")]
        assert not [module for module in imported_modules(path) if module.startswith("torch.cuda")]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_ops_and_mixers_know_no_process_groups(path: Path) -> None:
    if part_of(path) in ("ops", "mixers"):
        names = [*attribute_chains(path), *imported_modules(path)]
        assert not [name for name in names if name.startswith(("torch.distributed", "megatron"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_optional_packages_stay_with_their_owner(path: Path) -> None:
    where = str(path.relative_to(PACKAGE))
    named = {module.split(".")[0] for module in imported_modules(path)}
    named |= {text.split(".")[0] for text in strings(path) if text.replace(".", "_").isidentifier()}
    own = {package for package, owners in OWNERS.items() if any(fnmatch(where, owner) for owner in owners.split())}
    foreign = named & OWNERS.keys() - own
    if where in ("requirements.py", "cli/doctor.py"):
        foreign = set()  # looked for, not imported
    if where.startswith("config/check"):
        foreign -= {"wandb", "transformer_engine", "nvidia"}  # asked for, not imported
    assert not foreign


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_configuration_needs_no_torch(path: Path) -> None:
    if part_of(path) in TORCH_FREE or path.relative_to(PACKAGE).as_posix() in (
        "data/folder.py",
        "data/mixture_spec.py",
    ):
        assert not [module for module in imported_modules(path) if module.split(".")[0] == "torch"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_fit_in_the_eye(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says what it is"
    assert text.count("\n") <= 400 or path.name == GENERATED
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 80, node.name
            assert node.args.kwarg is None or path.name == "dispatch.py" or path in SHIPPED, (
                f"{node.name} takes **kwargs"
            )


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_what_is_shipped_needs_torch_and_transformers_alone(path: Path) -> None:
    beside = {other.stem for other in SHIPPED}
    roots = {module.split(".")[0] for module in imported_modules(path)} - set(sys.stdlib_module_names)
    assert roots - beside <= {"torch", "transformers"}
