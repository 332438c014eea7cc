"""Every line of the GPU queue's parts on a CPU: tiny sizes, and stand-ins for packages that GPU machines have."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from hybridtron import device
from hybridtron.architecture.table import architecture
from hybridtron.config.load import load
from hybridtron.config.resolve import RunPlan
from hybridtron.engine import graphed
from hybridtron.engine.engine import Engine
from hybridtron.mixers.rwkv6 import read_before_step
from hybridtron.ops.attention import AttentionInputs, reference
from hybridtron.ops.attention.table import TABLE, case_of
from hybridtron.ops.conv import ConvInputs, causal_conv
from hybridtron.ops.delta import DeltaInputs, delta_scan
from hybridtron.ops.gla import GLAInputs, gla_scan
from hybridtron.ops.kernel_launch import recorded_launches, tuned_over
from hybridtron.ops.norm import RMSNormInputs, rms_norm
from hybridtron.ops.ssd import DecayInputs, decay_scan
from hybridtron.planning.count import count
from hybridtron.planning.memory import plan
from hybridtron.proving.gpu.queue import attention, child, experts_step, kernel_times, machine, norms, whole_step
from hybridtron.proving.gpu.queue.attention import AttentionShape
from hybridtron.proving.gpu.queue.kernel_times import DeviceSpan, Launched
from hybridtron.proving.gpu.queue.parts import FLA, PARTS, RECIPES, QueuePart, named
from hybridtron.proving.gpu.queue.rows import Recorder, Row, read
from hybridtron.proving.steps import load_checked
from hybridtron.rehearse import signatures

pytestmark = pytest.mark.skipif(device.compute_device().type != "cpu", reason="runs for real where there is a GPU")

ARGUMENTS = dict[str, Any]
THEIRS: dict[str, dict[str, Callable[[ARGUMENTS], Any]]] = {
    "ops.gla": {"chunk_gla": lambda g: _scaled(gla_scan(GLAInputs(g["q"], g["k"], g["v"], g["g"])), g)},
    "ops.rwkv6": {
        "chunk_rwkv6": lambda g: _scaled(read_before_step(GLAInputs(g["r"], g["k"], g["v"], g["w"]), g["u"]), g)
    },
    "ops.gated_delta_rule": {"chunk_gated_delta_rule": lambda g: _delta(g, g["g"].unsqueeze(-1))},
    "ops.kda": {"chunk_kda": lambda g: _delta(g, g["g"])},
    "ops.common.chunk_o": {},
    "ops.simple_gla": {
        "chunk_simple_gla": lambda g: _scaled(decay_scan(DecayInputs(g["q"], g["k"], g["v"], g["g"])), g)
    },
    "modules.causal_conv1d": {
        "causal_conv1d": lambda g: (
            causal_conv(ConvInputs(g["x"], g["weight"], g["bias"], activation=g["activation"] == "silu")),
            None,
        )
    },
    "modules.norm.fused_norm_gate": {
        "rms_norm_gated": lambda g: rms_norm(RMSNormInputs(g["x"], g["weight"], g["eps"])) * silu(g["g"])
    },
}
"""Functions of flash-linear-attention, by module, computed with our ops as its documentation has them."""


def _scaled(outputs: tuple[Tensor, Tensor], arguments: ARGUMENTS) -> tuple[Tensor, Tensor]:
    return outputs[0] * arguments["scale"], outputs[1]


def _delta(arguments: ARGUMENTS, g_BLHG: Tensor) -> tuple[Tensor, Tensor]:
    return _scaled(
        delta_scan(DeltaInputs(arguments["q"], arguments["k"], arguments["v"], arguments["beta"], g_BLHG)), arguments
    )


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put stand-ins in the place of flash-linear-attention, with the signatures of the version that is kept as data."""
    kept = signatures.stored_versions()[FLA]["functions"]

    def stand_in(name: str, compute: Callable[[ARGUMENTS], Any]) -> Callable[..., Any]:
        real = signatures.signature(kept[name])
        return lambda *plain, **by_name: compute(real.bind(*plain, **by_name).arguments)

    def package(name: str) -> SimpleNamespace:
        functions = THEIRS[name.removeprefix("fla.")]
        module = SimpleNamespace(**{function: stand_in(function, compute) for function, compute in functions.items()})
        return SimpleNamespace(module=module, reason="installed")

    monkeypatch.setattr("hybridtron.proving.gpu.queue.fla.optional_package", package)


def rows_of(part: QueuePart, folder: Path, modelled: dict[str, Any] | None = None) -> dict[str, Row]:
    """The part's rows by case; none of them has failed."""
    recorder = Recorder(folder / "rows.jsonl", part.name, tiny=True, modelled=modelled or {})
    part.function()(recorder)
    rows = read(folder)
    assert [row for row in rows if row["is"] != "measured"] == []
    return {row["case"]: row for row in rows}


def test_machine_part_records_settings_gpu_compiler_and_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "NVIDIA H100, $1"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setattr(machine, "compiler_key", lambda: "abc")
    rows = rows_of(named("machine"), tmp_path, {"compiler": "abc"})
    assert rows["host"]["settings"]["CUDA_LAUNCH_BLOCKING"] == "1"
    assert rows["gpu"]["lines"][0].startswith("NVIDIA H100, --query-gpu=name")
    assert rows["compiler"]["as in the carried cache"] is True
    assert rows["copy"]["tb_s"] > 0


STEPS = [part for part in PARTS if part.run == "whole_step:whole_step"]


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] * (n > 0), id=part.name) for n, part in enumerate(STEPS)]
)
def test_step_part_records_times_and_kernels(part: QueuePart, tmp_path: Path) -> None:
    rows = rows_of(part, tmp_path)
    assert list(rows) == ["rows/1", "rows/2", "rows/4", "tokens/16", "kernels", "graph"]
    assert all(rows[f"rows/{share}"]["ms"] > 0 for share in whole_step.SHARES)
    assert rows["kernels"]["kernels"] > 0
    assert "CUDA" in rows["graph"]["why"]


def test_captured_step_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def graph_of(call: Callable[[], object]) -> Callable[[], None]:
        call()
        return lambda: calls.append(call)

    monkeypatch.setattr(whole_step, "graph_of", graph_of)
    rows = rows_of(named("step gla_360m"), tmp_path)
    assert rows["graph"]["captured"] is True
    assert len(calls) == whole_step.ROUNDS + 2


GRAPHS = [part for part in PARTS if part.run == "graph_step:graph_step"]


def test_graph_part_without_a_gpu_records_why_nothing_was_captured(tmp_path: Path) -> None:
    row = rows_of(GRAPHS[0], tmp_path)["graph"]
    assert row["captured"] is False
    assert "run.cuda_graph" in row["why"]


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] * (n > 0), id=part.name) for n, part in enumerate(GRAPHS)]
)
def test_graph_part_compares_both_steps(part: QueuePart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a call in place of the capture, both steps compute the same bits."""

    def use_graphs(engine: Engine) -> None:
        engine.graphed = graphed.GraphedPasses(engine.wrapped, 0.0, engine.groups, engine.device)

    monkeypatch.setattr(graphed, "captured", lambda call, memory: call)
    monkeypatch.setattr(Engine, "use_graphs", use_graphs)
    row = rows_of(part, tmp_path)["graph"]
    assert row["captured"] is True
    assert row["loss_apart"] == row["norm_apart"] == 0
    assert min(row["plain_ms"], row["graph_ms"], row["plain_launched_ms"], row["graph_launched_ms"]) > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_step_on_a_gpu_has_a_valid_configuration(recipe: str) -> None:
    config = load_checked(whole_step.settings(recipe))
    rows, length = RECIPES[recipe]
    assert (config.phases[0].micro_batch, config.phases[0].seq_len) == (rows, length)
    smallest = whole_step.shrunk(config, rows=4).phases[0]
    assert (smallest.micro_batch, smallest.global_batch) == (rows // 4, rows // 4)


def test_step_part_records_the_kernel_of_each_case_of_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (phase,) = RunPlan.of(load(["recipe=laptop", "model.layers.W.window=64"])).phases
    monkeypatch.setattr(whole_step, "profile_call", lambda call: ([], []))
    monkeypatch.setattr(whole_step, "compute_device", lambda: torch.device("cuda"))
    steps: Any = SimpleNamespace(engine=SimpleNamespace(phase=phase))
    row: Row = {}
    whole_step.kernels(steps, row, Recorder(tmp_path / "rows.jsonl", "step"), "laptop")
    assert row["ops"]["attention W"] in {each.name for each in TABLE if each.window}
    assert "attention" not in row["ops"]


EXPERTS = [part for part in PARTS if part.run == "experts_step:experts_step"]


@pytest.mark.slow
@pytest.mark.parametrize("part", EXPERTS, ids=[part.name for part in EXPERTS])
def test_experts_part_times_a_step_beside_its_dense_sibling(part: QueuePart, tmp_path: Path) -> None:
    rows = rows_of(part, tmp_path)
    assert list(rows) == ["experts", "dense", "experts / dense"]
    assert rows["experts"]["kernels"] > 0
    assert rows["experts / dense"]["ratio"] == rows["experts"]["ms"] / rows["dense"]["ms"]


@pytest.mark.parametrize("part", EXPERTS, ids=[part.name for part in EXPERTS])
def test_dense_sibling_has_the_flops_of_the_step_with_experts(part: QueuePart) -> None:
    counts = []
    for texts in experts_step.settings(part.argument).values():
        config = load_checked(texts)
        counted = count(architecture(config.model), config.phases[0].seq_len)
        assert plan(RunPlan.of(config).phases[0], 1).fullest.memory.total < 72e9
        counts.append(counted)
    with_experts, dense = counts
    assert with_experts.parameters > 2 * dense.parameters
    assert with_experts.flops_per_token == pytest.approx(dense.flops_per_token, rel=0.01)


CONTESTS = [part for part in PARTS if part.run == "contests:contest"]


@pytest.mark.parametrize("part", CONTESTS, ids=[part.name for part in CONTESTS])
def test_contest_compares_our_op_with_the_other_package(part: QueuePart, tmp_path: Path, fla: None) -> None:
    """The other package, called as documented with converted inputs, agrees with our op."""
    rows = rows_of(part, tmp_path)
    assert list(rows) == ["tiny, ours", "tiny, theirs"]
    assert all(row["both_ms"] > 0 for row in rows.values())
    assert rows["tiny, theirs"]["apart"] < 1e-2


@pytest.mark.slow
def test_fp8_part_records_every_case(tmp_path: Path) -> None:
    assert len(rows_of(named("fp8"), tmp_path)) == 4


@pytest.mark.parametrize("kind", attention.SHAPES)
def test_attention_part_times_every_row_of_the_table(kind: str, tmp_path: Path) -> None:
    rows = rows_of(named(f"attention, {kind}"), tmp_path)
    for label, shape in attention.SHAPES[kind].items():
        names = {row.name for row in TABLE} - (set() if shape.compiles else {"flex"})
        assert all(rows.pop(f"{label}: {name}")["both_ms"] > 0 for name in names)
        assert set(rows.pop(f"{label}: order")["fastest first"].split()) == names
        assert rows.pop(f"{label}: reference")["is"] == "measured"
    assert rows == {}


def test_attention_part_takes_windows_and_documents_in_every_shape() -> None:
    """With tiny sizes too: documents begin inside of rows, at other tokens in each row."""
    for shape in (*attention.WINDOWS.values(), *attention.FULL.values()):
        for tiny in (True, False):
            if shape.tokens > 8192 and not tiny:
                continue
            case = case_of(attention.made(replace(shape, heads=2, kv_heads=1, channels=8), tiny))
            assert (case.window, case.documents) == (shape.window is not None, shape.documents > 1)
    documents_BL = attention.made(attention.WINDOWS["grouped, 4k, documents"], True).documents_BL
    assert documents_BL is not None
    assert not torch.equal(documents_BL[0], documents_BL[1])


def test_attention_part_leaves_out_rows_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SHAPES", {"full": {"small": replace(attention.TINY, window=16)}})
    monkeypatch.setattr(attention, "unable", lambda row, inputs: None if row.name == "flex" else "absent")
    monkeypatch.setattr(attention, "TABLE", [replace(row, function=attention.attention_op) for row in TABLE])
    recorder = Recorder(tmp_path / "rows.jsonl", "attention")
    attention.attention(recorder, "full")
    rows = {row["case"]: row for row in read(tmp_path)}
    assert rows["small: cudnn"]["why"] == "absent"
    assert rows["small: flex"]["both_ms"] > 0
    assert rows["small: order"]["fastest first"] == "flex"


def wrong_output(inputs: AttentionInputs) -> Tensor:
    return 1.1 * attention.attention_op(inputs)


def wrong_gradients(inputs: AttentionInputs) -> Tensor:
    """The op with an exact output and 1.1 times the gradients."""
    y = attention.attention_op(inputs)
    return y.detach() + 1.1 * (y - y.detach())


@pytest.mark.parametrize("wrong", [wrong_output, wrong_gradients])
def test_attention_part_fails_where_rows_differ(
    wrong: Callable[[AttentionInputs], Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SHAPES", {"full": {"small": attention.TINY}})
    monkeypatch.setattr(attention, "unable", lambda row, inputs: None)
    table = [replace(row, function=attention.attention_op) for row in TABLE]
    for name in ("cudnn", "sdpa"):
        place = next(number for number, row in enumerate(table) if row.name == name)
        table[place] = replace(table[place], function=wrong)
    monkeypatch.setattr(attention, "TABLE", table)
    recorder = Recorder(tmp_path / "rows.jsonl", "attention")
    attention.attention(recorder, "full")
    assert recorder.failures == ["small: cudnn", "small: sdpa"]
    order = {row["case"]: row for row in read(tmp_path)}["small: order"]["fastest first"]
    assert set(order.split()) == {row.name for row in TABLE} - {"cudnn", "sdpa"}


def test_attention_part_times_shapes_after_a_failed_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = attention.exact

    def exact(inputs: AttentionInputs) -> list[Tensor]:
        if inputs.window is not None:
            raise torch.OutOfMemoryError("no memory")
        return kept(inputs)

    monkeypatch.setattr(attention, "exact", exact)
    shapes = {"windowed": replace(attention.TINY, window=16), "small": attention.TINY}
    monkeypatch.setattr(attention, "SHAPES", {"full": shapes})
    recorder = Recorder(tmp_path / "rows.jsonl", "attention", tiny=True)
    attention.attention(recorder, "full")
    assert recorder.failures == ["windowed: reference"]
    assert [row["case"] for row in read(tmp_path) if row["case"].startswith("windowed")] == ["windowed: reference"]
    assert {row["case"] for row in read(tmp_path)} > {"small: reference", "small: sdpa", "small: order"}


@pytest.mark.parametrize("shape", [attention.TINY, attention.WINDOWS["grouped, window 2048 of 8k, documents"]])
def test_attention_reference_in_blocks_is_the_specification(shape: AttentionShape) -> None:
    inputs = attention.made(shape, True)
    q, k, v = (x.detach().float().requires_grad_() for x in inputs[:3])
    whole = attention.results(reference.attention, inputs._replace(q_BLHK=q, k_BLGK=k, v_BLGK=v))
    for actual, expected in zip(attention.exact(inputs, block=24), whole, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.slow
def test_step_with_another_package_has_our_loss(tmp_path: Path) -> None:
    rows = rows_of(named("step samba_421m beside mamba-ssm"), tmp_path)
    assert rows["ours"]["loss"] == rows["theirs"]["loss"]  # on a CPU both are the reference


def test_norms_part_records_every_grid(tmp_path: Path) -> None:
    rows = rows_of(named("norms"), tmp_path, {"calls": {norms.key(256, 96): {"ms": 0.5}}})
    assert rows["256x96"]["model_ms"] == 0.5
    assert {"torch_ms", "ours_ms", "264_ms", "1056_ms", "4224_ms"} <= rows["256x2304"].keys()


def test_norms_are_launched_with_the_listed_grids() -> None:
    grids: list[int] = []
    x_RD, dy_RD, weight_D = norms.tensors(8192, 2304)

    def note(kernel: Any, grid: tuple[int, ...], *_: Any) -> None:
        if kernel.fn.__module__ == "hybridtron.ops.norm.kernels":  # sums of the weights' gradients have other grids
            grids.append(grid[0])

    with recorded_launches(note):
        for _, call in norms.forms(x_RD.detach(), dy_RD, weight_D.detach()):
            call()
    assert tuple(grids[1:]) == norms.GRIDS


def test_child_process_exits_with_1_after_a_failed_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def part(recorder: Recorder) -> None:
        with recorder.case("one"):
            raise RuntimeError(f"no {recorder.modelled['compiler']}")

    (tmp_path / "modelled.json").write_text('{"compiler": "abc"}')
    monkeypatch.setattr(QueuePart, "function", lambda _: part)
    arguments = ["machine", str(tmp_path / "run.jsonl"), "--tiny", "--modelled", str(tmp_path / "modelled.json")]
    assert child.main(arguments) == 1
    assert read(tmp_path)[0]["why"] == "RuntimeError: no abc"


def test_kernels_are_labelled_by_their_launches() -> None:
    launches = [Launched("_backward", "norm.backward"), Launched("_backward", "conv.backward"), Launched("_walk", "x")]
    spans = [
        DeviceSpan("_backward", 5.0, 6.0),
        DeviceSpan("_backward", 1.0, 3.0),
        DeviceSpan("gemm", 3.0, 4.0),
        DeviceSpan("_walk", 7.0, 8.0),
    ]
    named_spans = kernel_times.label_spans([*spans, DeviceSpan("_walk", 9.0, 9.5)], launches)
    assert [span.name for span in named_spans] == ["norm.backward", "gemm", "conv.backward", "_walk", "_walk"]
    table = kernel_times.by_kernel(named_spans, {"norm.backward": 0.001})
    assert table[0] == {"kernel": "norm.backward", "calls": 1, "ms": 0.002, "model_ms": 0.001}


def test_idle_time_is_counted_between_kernels() -> None:
    """Two kernels overlap, and then nothing runs for 30 of 40 us."""
    spans = [DeviceSpan("a", 0.0, 5.0), DeviceSpan("b", 4.0, 8.0), DeviceSpan("c", 38.0, 40.0)]
    summed = kernel_times.idle(spans)
    assert summed == {"kernels": 3, "busy_ms": pytest.approx(0.01), "idle_share": 0.75, "gaps over 20 us": 1}
    assert kernel_times.idle([]) == {"kernels": 0, "busy_ms": 0.0, "idle_share": 0.0, "gaps over 20 us": 0}


def test_graph_is_captured_after_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture with stand-ins for functions that torch lacks in a build without CUDA."""
    seen: list[str] = []
    stream = SimpleNamespace(wait_stream=lambda _: seen.append("wait"))
    graph = SimpleNamespace(replay=lambda: seen.append("replay"))

    @contextlib.contextmanager
    def inside(name: str) -> Any:
        seen.append(name)
        yield
        seen.append(f"end of {name}")

    cuda = SimpleNamespace(
        empty_cache=lambda: seen.append("empty"), Stream=lambda: stream, current_stream=lambda: stream,
        stream=lambda _: inside("stream"), CUDAGraph=lambda: graph, graph=lambda _, capture_error_mode: inside("graph"),
    )  # fmt: skip
    monkeypatch.setattr(device, "torch", SimpleNamespace(cuda=cuda))
    device.graph_of(lambda: seen.append("call"))()
    assert seen == [
        "empty", "wait", "stream", "call", "end of stream", "wait", "graph", "call", "end of graph", "replay"
    ]  # fmt: skip


def test_autotuner_tries_few_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from triton.runtime.autotuner import Autotuner

    tried: list[int] = []
    monkeypatch.setattr(Autotuner, "run", lambda tuner, *_, **__: tried.extend(tuner.configs))
    with tuned_over(2):
        Autotuner.run(SimpleNamespace(configs=list(range(12))))  # type: ignore[arg-type]
    assert tried == [3, 9]
    Autotuner.run(SimpleNamespace(configs=[1, 2, 3]))  # type: ignore[arg-type]
    assert tried == [3, 9, 1, 2, 3]


def test_contests_need_no_module_of_the_other_package() -> None:
    assert not [name for name in sys.modules if name == "fla" and isinstance(sys.modules[name], ModuleType)]
