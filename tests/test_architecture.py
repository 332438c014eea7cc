"""The package's structure: imports go one way, and only one file touches each owned thing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hybridtron"
ORDER = [
    "resources",
    "requirements",  # which commands check before all else is imported
    "safe_open",
    "inert_pickle",
    "nested",
    "file_errors",
    "problems",
    "limits",
    "own_folders",
    "listening",
    "progress",
    "compiled",
    "device",
    "determinism",
    "architecture",
    "optimizers",
    "config",
    "planning",
    "ops",
    "storage",
    "data",
    "parallel",
    "mixers",
    "model",
    "inference",
    "engine",
    "checkpoint",
    "train",
    "interop",
    "hf",  # shipped with models
    "serving",
    "tasks",
    "evaluate",
    "proving",
    "rehearse",
    "sweep",
    "cluster",
    "cli",
    "__main__",
]
OWNERS = {
    "mamba_ssm": "ops/*/mamba_ssm.py",  # one file for each of its kernels
    "fla": "proving/gpu/queue/fla.py",
    "causal_conv1d": "ops/conv/causal_conv1d.py",
    "flash_attn": "ops/attention/flash_attn.py",  # flash-attn 2 and 4
    "flash_attn_interface": "ops/attention/flash_attn.py",  # 3
    "wandb": "train/sinks.py",
    "mlflow": "train/sinks.py",
    "tensorboard": "train/sinks.py",
    "transformer_engine": "parallel/transformer_engine.py",
    "nvidia": "data/dali.py",
    "streaming": "storage/mosaic.py",
    "vllm": "serving/vllm_*.py",
    "boto3": "storage/s3.py",
    "botocore": "storage/s3.py",
    "brotli": "data/mds/compression.py",
    "snappy": "data/mds/compression.py",
    "wonderwords": "tasks/words.py",
    "pyarrow": "data/prepare/inputs.py",
    "lm_eval": "evaluate/harness.py",
    "rouge_score": "evaluate/harness_tasks.py",  # comes with lm_eval, and so does the next
    "datasets": "evaluate/harness_tasks.py",
    "jinja2": "data/prepare/template_program.py",
    # kernels of our own
    "triton": "ops/kernel_launch.py ops/kernel_compiled.py ops/gate_kernels.py ops/sum_kernels.py ops/*/kernels*.py"
    " ops/*/triton.py",
}
STUBBED = ("rehearse/package_stubs.py", "rehearse/signatures.py")
TORCH_FREE = (
    *("safe_open", "inert_pickle", "nested", "file_errors", "problems", "limits", "own_folders", "listening"),
    *("progress", "compiled"),
    *("architecture", "optimizers", "config", "planning", "tasks"),
)
GENERATED = "mixers_hybridtron"  # made by interop/shipped_code


def _imports(nodes: list[ast.AST]) -> list[str]:
    names = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names]
    return names


@dataclass(frozen=True)
class SourceFile:
    """One file of the package, parsed once for all rules."""

    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def name(self) -> str:
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def room(self) -> str:
        """`ops`, or `device` for device.py."""
        return self.path.relative_to(PACKAGE).parts[0].removesuffix(".py")

    @property
    def shipped(self) -> bool:
        """True for a file that is shipped beside an exported model's weights."""
        return self.room == "hf" and self.path.name.endswith("_hybridtron.py")

    @cached_property
    def imports(self) -> list[str]:
        return _imports(self.nodes)

    @property
    def executed_imports(self) -> list[str]:
        """Imports except those that only type checkers read."""
        unread = [n for n in self.nodes if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        skipped = {id(inside) for block in unread for inside in ast.walk(block)}
        return _imports([node for node in self.nodes if id(node) not in skipped])

    @cached_property
    def chains(self) -> list[str]:
        """Every attribute as it is written: `torch.cuda.synchronize`."""
        return [chain for node in self.nodes if isinstance(node, ast.Attribute) and (chain := dotted(node))]

    @cached_property
    def strings(self) -> list[str]:
        return [node.value for node in self.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]

    @property
    def functions(self) -> Iterator[ast.FunctionDef]:
        return (node for node in self.nodes if isinstance(node, ast.FunctionDef))


def dotted(node: ast.expr) -> str | None:
    """Return `a.b.c` for nested attributes of a name, or None if anything else is inside."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (inner := dotted(node.value)):
        return f"{inner}.{node.attr}"
    return None


SOURCES = [SourceFile(path) for path in sorted(PACKAGE.rglob("*.py"))]
SHIPPED = [source for source in SOURCES if source.shipped]
BESIDE = [
    SourceFile(path)
    for room in ("benchmarks", "examples", "slurm", "studies", "tools")
    for path in (ROOT / room).rglob("*.py")
]
EVERYTHING = [*SOURCES, *BESIDE, SourceFile(ROOT / "train.py")]
LINES_OF_A_FILE = 500
LINES_OF_A_FUNCTION = 60
LONG_FUNCTIONS = {  # Triton kernels, whose docstrings say why they are one function
    "hybridtron/ops/conv/kernels.py _backward",
    "hybridtron/ops/scan/kernels.py _retrace",
    "hybridtron/ops/scan/kernels_backward.py _gradients",
    "hybridtron/ops/delta/kernels_backward.py token_gradients",
}


def where(source: SourceFile) -> str:
    return source.path.relative_to(ROOT).as_posix()


def rooms_to_the_right(room: str, imports: list[str]) -> list[str]:
    """Imports of rooms that stand to the right of this one."""
    imported = (module.split(".")[1] for module in imports if module.startswith("hybridtron.") and "." in module)
    return [other for other in imported if other in ORDER and ORDER.index(other) > ORDER.index(room)]


def test_map_has_the_order_of_imports() -> None:
    """The map in hybridtron/README.md has every name of `ORDER`, in that order."""
    map_of_code = (PACKAGE / "README.md").read_text()
    (line,) = [line for line in map_of_code.splitlines() if line.startswith("`resources, ") and line.endswith("cli`")]
    assert line.strip("`").replace(" -> ", ", ").split(", ") == [name for name in ORDER if name != "__main__"]


def test_rooms_import_from_their_left_alone() -> None:
    inside = [source for source in SOURCES if source.name not in ("__init__.py", "__main__.py")]
    wrong = {source.name: rooms_to_the_right(source.room, source.imports) for source in inside}
    assert {name: rooms for name, rooms in wrong.items() if rooms} == {}


def test_import_rule_notices_a_wrong_import() -> None:
    assert rooms_to_the_right("model", ["hybridtron.train.trainer.run"]) == ["train"]


def test_imports_are_absolute() -> None:
    relative = {
        source.name: [name for name in source.imports if name.startswith(".")]
        for source in SOURCES
        if not source.shipped
    }
    assert {name: imports for name, imports in relative.items() if imports} == {}


def test_device_alone_names_torch_cuda() -> None:
    users = [
        source.name for source in SOURCES if any(n.startswith("torch.cuda") for n in [*source.chains, *source.imports])
    ]
    assert users == ["device.py", "rehearse/fake_cuda.py"]  # the latter answers in its place


def test_ops_and_mixers_know_no_process_groups() -> None:
    parallel = ("torch.distributed", "megatron")
    assert [
        source.name
        for source in SOURCES
        if source.room in ("ops", "mixers") and any(n.startswith(parallel) for n in [*source.chains, *source.imports])
    ] == []


def test_parallel_groups_alone_reads_the_groups_of_megatron() -> None:
    """Other files get process groups as values."""
    readers = [
        source.name
        for source in SOURCES
        if any("parallel_state" in name for name in [*source.chains, *source.imports, *source.strings])
    ]
    assert readers == ["parallel/groups.py"]


def foreign_packages(source: SourceFile) -> set[str]:
    """Optional packages that a file names though another one owns them."""
    named = {module.split(".")[0] for module in source.imports}
    named |= {text.split(".")[0] for text in source.strings if text.replace(".", "_").isidentifier()}
    owned = {name for name, owners in OWNERS.items() if any(fnmatch(source.name, owner) for owner in owners.split())}
    foreign = named & OWNERS.keys() - owned
    looking = ("requirements.py", "cli/doctor.py", "cli/fast_start.py", "proving/gpu/carry.py", "rehearse/peers.py")
    if source.name in (*looking, *STUBBED):
        return set()  # looked for, hidden, packed or stood for, not imported
    if source.name.startswith("config/check"):
        return foreign - {"wandb", "mlflow", "transformer_engine", "nvidia"}  # asked for, not imported
    return foreign


def test_optional_packages_stay_with_their_owner() -> None:
    foreign = {source.name: foreign_packages(source) for source in SOURCES}
    assert {name: packages for name, packages in foreign.items() if packages} == {}


def test_configuration_needs_no_torch() -> None:
    files = ("data/folder.py", "data/manifest.py", "data/mixture_spec.py", "data/problems.py")
    free = [s for s in SOURCES if s.room in TORCH_FREE or s.name in files]
    assert [s.name for s in free if any(module.split(".")[0] == "torch" for module in s.executed_imports)] == []


def files_read_elsewhere(source: SourceFile) -> list[int]:
    """Lines that read a file without safe_open."""
    calls = [node for node in source.nodes if isinstance(node, ast.Call)]
    methods = [(call, call.func) for call in calls if isinstance(call.func, ast.Attribute)]
    lines = [call.lineno for call, method in methods if method.attr in ("read_text", "read_bytes")]
    for call, method in methods:
        is_class = isinstance(method.value, ast.Name) and method.value.id[0].isupper()  # Checkpoint.open and the like
        if method.attr == "open" and not is_class:
            lines.append(call.lineno)
    return lines + [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "open"]


def test_imported_folders_are_read_as_regular_files() -> None:
    exempt = ("interop/shipped_code.py", "interop/definitions.py")  # read this package's own sources
    inside = [source for source in SOURCES if source.room == "interop" and source.name not in exempt]
    assert {source.name: lines for source in inside if (lines := files_read_elsewhere(source))} == {}


def test_rule_of_regular_files_notices_every_other_way_to_read() -> None:
    for way in ("path.read_text()", "(folder / 'a').read_bytes()", "path.open('rb')", "open(path)"):
        assert files_read_elsewhere(source_of(way)) == [1]
    assert files_read_elsewhere(source_of("Checkpoint.open(path)")) == []


def source_of(text: str) -> SourceFile:
    source = SourceFile(Path("x.py"))
    source.__dict__["nodes"] = list(ast.walk(ast.parse(text)))
    return source


PICKLED = {  # never what another process of a job could have written, nor a file, but for one reader
    "config/composed.py",  # copies within a process
    "config/saved.py",
    "inert_pickle.py",  # unpickles plain values only, with an inert record in place of each object
    "parallel/pool.py",  # a pool's own children, by pipes
}
OF_OBJECTS = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}


def unpickling(source: SourceFile) -> set[str]:
    """Return names by which a file would unpickle a peer's or a file's data: torch's object collectives, and pickle."""
    collectives = {name.rpartition(".")[2] for name in [*source.chains, *source.imports]} & OF_OBJECTS
    return collectives | {module.split(".")[0] for module in source.imports} & {"pickle", "cloudpickle", "dill"}


def test_ranks_send_no_pickles() -> None:
    users = {source.name: modules for source in SOURCES if (modules := unpickling(source))}
    assert users == {name: {"pickle"} for name in PICKLED}


def test_rule_of_pickles_notices_every_way_to_unpickle() -> None:
    ways = ["dist.all_gather_object(a, b)", "from torch.distributed import broadcast_object_list", "import pickle as p"]
    for way in [*ways, "from pickle import loads"]:
        assert len(unpickling(source_of(way))) == 1


def test_files_are_unpickled_as_weights_alone() -> None:
    calls = [
        (source.name, {word.arg: ast.unparse(word.value) for word in node.keywords})
        for source in SOURCES
        for node in source.nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert [name for name, _ in calls] == ["interop/reader.py"]
    assert all(words.get("weights_only") == "True" for _, words in calls)


KNOWS_WEIGHTS = (
    *("architecture", "optimizers", "planning", "parallel", "mixers", "model", "inference", "engine", "train"),
)
PARSERS = {"startswith", "endswith", "split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix"}
PARSED_NAMES = {
    "inference/parallel_reader.py": {"."},  # the module of a weight
    "model/shared.py": {"."},
    "parallel/adapters.py": {".weight"},
    "train/hooks.py": {"."},  # classes that a configuration names
    "architecture/adapters.py": {".adapter."},  # keys of checkpoints
    "engine/states.py": {"held."},
    "parallel/fp8_statistics.py": {"fp8_history."},
}


def parsed_names(source: SourceFile) -> set[str]:
    """Texts with a dot that a file looks for in a string, as it would to distinguish weights by their names."""
    calls = [node for node in source.nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    comparisons = [node for node in source.nodes if isinstance(node, ast.Compare)]
    looked_for = [node.args[0] for node in calls if node.func.attr in PARSERS and node.args]
    looked_for += [node.left for node in comparisons if isinstance(node.ops[0], ast.In | ast.NotIn)]
    texts = [node.value for node in looked_for if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {text for text in texts if "." in text}


def test_behavior_does_not_depend_on_weight_names() -> None:
    """The parameter table says who owns a weight, and how it is treated."""
    inside = [source for source in SOURCES if source.room in KNOWS_WEIGHTS]
    assert {source.name: texts for source in inside if (texts := parsed_names(source))} == PARSED_NAMES


def test_rule_of_names_notices_every_way_to_parse_one() -> None:
    ways = ["name.endswith('norm.weight')", "name.split('.')[1]", "name.partition('.mixer.')", "'.mixer.' in name"]
    for way in [*ways, "name in table", "line.split()"]:
        assert len(parsed_names(source_of(way))) == (way in ways)


def test_every_module_has_a_docstring() -> None:
    assert [where(source) for source in EVERYTHING if not ast.get_docstring(source.tree)] == []


def test_files_and_functions_are_short() -> None:
    long = {where(source) for source in EVERYTHING if source.path.read_text().count("\n") > LINES_OF_A_FILE}
    assert long == set()
    functions = [(where(source), node) for source in EVERYTHING for node in source.functions]
    long = {f"{file} {node.name}" for file, node in functions if node.end_lineno - node.lineno >= LINES_OF_A_FUNCTION}
    assert long <= LONG_FUNCTIONS


def test_functions_name_their_arguments() -> None:
    keywords = {where(source) for source in EVERYTHING for node in source.functions if node.args.kwarg}
    assert keywords <= {
        "hybridtron/ops/dispatch.py",  # force(op="implementation")
        "hybridtron/rehearse/collectives.py",  # stands for functions of torch
        "hybridtron/rehearse/package_stubs.py",  # for functions of other packages
        "hybridtron/rehearse/fp8_cost.py",  # for their classes
        "hybridtron/ops/kernel_launch.py",  # what Triton is given: the options of a launch
        "hybridtron/hf/modeling_hybridtron.py",  # the signatures of transformers
        "hybridtron/hf/configuration_hybridtron.py",
        "hybridtron/serving/served_config.py",
    }


def test_class_names_are_unique() -> None:
    """A search for a class then finds one thing."""
    files: dict[str, set[str]] = {}
    for source in SOURCES:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, set()).add(f"{source.name}:{node.lineno}")
    doubled = {name: sorted(where) for name, where in files.items() if len(where) > 1}
    assert doubled == {}


def test_shipped_files_need_torch_and_transformers_alone() -> None:
    standard = set(sys.stdlib_module_names)
    for source in SHIPPED:
        roots = {module.split(".")[0] for module in source.imports if not module.startswith(".")}
        assert roots - standard <= {"torch", "transformers"}, source.name
        beside = {module.split(".")[1] for module in source.imports if module.startswith(".")}
        assert beside <= {GENERATED, *(other.path.stem for other in SHIPPED)}, source.name
