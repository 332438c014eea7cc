"""The Triton scan against the reference in float64, forward and backward, and as a GPU would get it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hybridtron.ops.scan import ScanInputs, selective_scan
from tests.ops.compiling import compile_calls
from tests.ops.conv.test_kernels import documents_with_borders
from tests.ops.recurrences import by_token, changed, computed, exact, floats, gradients, run, scan_inputs, some_loss

pytestmark = pytest.mark.usefixtures("interpreter")

slow = partial(pytest.param, marks=pytest.mark.slow)
# what is compiled for: one row of Samba 1.3B
LENGTH = 65536
CHANNELS = 4608


@pytest.fixture
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small tiles: chunks of 8 tokens, tiles of 4, 4 channels a block, and 2 parts in the chain at a time."""
    from hybridtron.ops.scan import kernels as scan
    from hybridtron.ops.scan import kernels_backward as back

    for module, name, value in (
        *((scan, "CHUNK", 8), (scan, "WARP_CHANNELS", 4), (scan, "CHAIN_PARTS", 2)),
        *((back, "CHUNK", 8), (back, "TILE", 4), (back, "CHANNELS", 4)),
    ):
        monkeypatch.setattr(module, name, value)


def on(device: torch.device, inputs: ScanInputs) -> ScanInputs:
    moved = changed(inputs, lambda t: t.to(device))
    if inputs.documents_BL is None:
        return moved
    return moved._replace(documents_BL=inputs.documents_BL.to(device))


def cases() -> Iterator[object]:
    everything = {"rows": 1, "length": 11, "channels": 3, "size": 2, "absent": (), "borders": (4, 9), "decay": 1.0}
    alike = {"one document", "no state", "no gate", "a whole chunk", "weak decays", "no decay at all"}  # to another
    for name, other in {
        "everything": {},
        "two rows, two blocks of channels, a padded state": {
            **{"rows": 2, "length": 6, "channels": 5, "size": 3, "borders": (4,)},
        },
        "one document": {"borders": None},
        "no state": {"absent": ("state_BEN",), "length": 5},
        "no gate": {"absent": ("z_BLE",), "length": 5},
        "bare": {"absent": ("z_BLE", "state_BEN"), "borders": None, "length": 5},
        "borders at the edges of tiles and chunks": {"borders": (4, 8, 12), "length": 13},
        "borders at the first tokens": {"borders": (1, 2), "length": 3},
        "one token": {"length": 1, "borders": None},
        "a whole chunk": {"length": 8, "borders": None},
        "strong decays": {"decay": 300.0},
        "weak decays": {"decay": 1e-6},
        "no decay at all": {"decay": 0.0},
    }.items():
        yield pytest.param(everything | other, id=name, marks=[pytest.mark.slow] * (name in alike))


@pytest.mark.parametrize("case", [*cases()])
@pytest.mark.usefixtures("_small_tiles")
def test_triton_scan_equals_the_reference(case: dict, everywhere: torch.device) -> None:
    sizes = {name: case[name] for name in ("rows", "length", "channels", "size")}
    inputs = scan_inputs(dtype=torch.float32, **sizes)._replace(**dict.fromkeys(case["absent"]))
    inputs = inputs._replace(A_EN=(inputs.A_EN * case["decay"]).detach())
    if case["borders"] is not None:
        documents = documents_with_borders(case["rows"], case["length"], *case["borders"])
        inputs = inputs._replace(documents_BL=documents)
    actual = computed(selective_scan, "triton", on(everywhere, inputs))
    for name, value in computed(selective_scan, "reference", exact(inputs)).items():
        assert actual[name].dtype == torch.float32
        close = 2e-6 * max(value.abs().max().item(), 1e-30)
        assert_close(actual[name].double().cpu(), value, rtol=1e-5, atol=close, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.usefixtures("_small_tiles")
def test_triton_scan_keeps_the_precision_of_small_steps(everywhere: torch.device) -> None:
    """softplus(-25) is 1.4e-11, and with 300 the decay is 0: neither step nor gradients lose a digit next to others."""
    dt = torch.tensor([-25.0, 0.5, 300.0]).expand(1, 5, 3)
    inputs = scan_inputs(1, 5, 3, dtype=torch.float32)._replace(dt_BLE=dt, dt_bias_E=torch.zeros(3))
    expected = computed(selective_scan, "reference", exact(inputs))
    actual = computed(selective_scan, "triton", on(everywhere, inputs))
    for name in ("last", "x_BLE", "dt_BLE", "A_EN", "dt_bias_E", "state_BEN"):
        # channel by channel: they differ by many orders of magnitude
        axis = expected[name].dim() - 1 - (not name.endswith("E"))
        for ours, theirs in zip(actual[name].unbind(axis), expected[name].unbind(axis), strict=True):
            close = max(3e-6 * theirs.abs().max().item(), 1e-30)  # below are what fp32 has no numbers for
            assert_close(ours.double().cpu(), theirs, rtol=1e-5, atol=close, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)])
@pytest.mark.usefixtures("_small_tiles")
def test_triton_scan_of_narrow_types_sums_in_fp32_and_repeats_bit_for_bit(
    dtype: torch.dtype, everywhere: torch.device
) -> None:
    inputs = scan_inputs(rows=1, length=10, dtype=dtype)._replace(documents_BL=documents_with_borders(1, 10, 5))
    first, again = (computed(selective_scan, "triton", on(everywhere, inputs)) for _ in range(2))
    expected = computed(selective_scan, "reference", exact(inputs))
    assert (first["y"].dtype, first["last"].dtype) == (dtype, torch.float32)
    assert_close(first["last"].double().cpu(), expected["last"], rtol=1e-5, atol=1e-5)
    assert all(first[name].dtype == value.dtype for name, value in floats(inputs).items())
    for name, value in expected.items():
        assert torch.equal(first[name], again[name])
        close = 2**-7 * value.abs().max().item()
        assert_close(first[name].double().cpu(), value, rtol=2**-7, atol=close, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.usefixtures("_small_tiles")
def test_documents_leak_no_bit_into_the_next(everywhere: torch.device) -> None:
    # inside the second tile
    border = 6
    length = 10
    documents = (torch.arange(length) >= border).int().expand(1, -1)
    inputs = on(everywhere, scan_inputs(1, length, 3, 2, torch.float32)._replace(documents_BL=documents))
    tokens = by_token(inputs)
    probed = []
    for factor in (1, -30):
        other = changed(inputs, Tensor.clone)
        with torch.no_grad():
            other.state_BEN.mul_(factor)
            for name in tokens:
                getattr(other, name)[:, :border] *= factor
        y, last = run(selective_scan, "triton", other)
        grads = gradients(some_loss(y[:, border:], last), other)
        assert not grads["state_BEN"].any()
        assert not any(grads[name][:, :border].any() for name in tokens)
        probed.append([y[:, border:], last, *grads.values()])
    assert all(torch.equal(first, second) for first, second in zip(probed[0], probed[1], strict=True))


@pytest.mark.usefixtures("_small_tiles")
@pytest.mark.parametrize("border", [slow(1), 6, slow(8)])  # inside a tile, and where a chunk begins
@pytest.mark.parametrize("value", [float("inf"), slow(float("nan"))])
def test_values_that_are_not_finite_stay_in_their_document(border: int, value: float, everywhere: torch.device) -> None:
    """Neither a state, forward, nor a gradient, backward."""
    length = 11
    documents = (torch.arange(length) >= border).int().expand(1, -1)
    sound = on(everywhere, scan_inputs(1, length, 3, 2, torch.float32)._replace(documents_BL=documents))
    broken = changed(sound, Tensor.clone)
    tokens = by_token(sound)
    results = []
    with torch.no_grad():
        broken.state_BEN.fill_(value)
        for tensor in (broken.x_BLE, broken.dt_BLE, broken.B_BLN):
            tensor[:, 0] = value
    for inputs in (sound, broken):
        y, last = run(selective_scan, "triton", inputs)
        grads = gradients(some_loss(y[:, border:], last), inputs)
        results.append([y[:, border:], last, *(grads[name][:, border:] for name in tokens)])
    assert all(torch.equal(first, second) for first, second in zip(results[0], results[1], strict=True))
    assert all(tensor.isfinite().all() for tensor in results[1])

    y, last = run(selective_scan, "triton", sound)
    wanted = [sound.x_BLE, sound.dt_BLE, sound.B_BLN, sound.C_BLN]
    grads, broken_grads = (
        torch.autograd.grad([y, last], wanted, [y.detach(), grad_last], retain_graph=True)
        for grad_last in (0 * last, last * value)
    )
    assert all(torch.equal(a[:, :border], b[:, :border]) for a, b in zip(grads, broken_grads, strict=True))


@pytest.mark.usefixtures("_small_tiles")
def test_triton_scan_accepts_any_memory_layout(everywhere: torch.device) -> None:
    """Use a mixer's layouts.

    The sequence is first in memory, x and z are parts of one projection, B and C of another, and channels are apart.
    """
    x, z = torch.randn(5, 2, 6).transpose(0, 1).split(3, dim=2)
    B, C = torch.randn(5, 2, 4).transpose(0, 1).split(2, dim=2)
    dt = torch.randn(3, 2, 5).permute(1, 2, 0)
    inputs = scan_inputs(rows=2, length=5, dtype=torch.float32)
    inputs = on(everywhere, inputs._replace(x_BLE=x, dt_BLE=dt, B_BLN=B, C_BLN=C, z_BLE=z))
    expected = computed(selective_scan, "chunked", inputs)
    for name, value in computed(selective_scan, "triton", inputs).items():
        assert_close(value, expected[name], rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_triton_scan_refuses_unsupported_inputs() -> None:
    def reason(inputs: ScanInputs) -> str | None:
        return selective_scan.named("triton").unsupported_reason(inputs)

    assert selective_scan.named("triton").device == "cuda"
    assert selective_scan.named("triton").repeats_bits()
    assert reason(scan_inputs(dtype=torch.float32)._replace(documents_BL=documents_with_borders(2, 11, 5))) is None
    assert "float64" in reason(scan_inputs())
    assert "257" in reason(scan_inputs(size=257, dtype=torch.float32))


def test_documents_select_triton_before_mamba_ssm() -> None:
    inputs = scan_inputs(dtype=torch.float32)._replace(state_BEN=None)
    for documents, first in ((None, "mamba-ssm"), (documents_with_borders(2, 11, 5), "triton")):
        with_documents = inputs._replace(documents_BL=documents)
        supporting = [
            form.name for form in selective_scan.implementations if form.unsupported_reason(with_documents) is None
        ]
        assert supporting[0] == first


def shipped() -> None:
    """64k tokens in one row, as they lie in the mixer; a state size that fills a warp alone; a small one."""
    for size, channels, dtype, whole in (
        *((16, CHANNELS, torch.bfloat16, True), (16, CHANNELS, torch.float32, False)),
        *((64, 64, torch.bfloat16, True), (256, 64, torch.bfloat16, True), (1, 64, torch.bfloat16, False)),
    ):
        with torch.device("meta"):
            x, z = torch.empty(LENGTH, 1, 2 * channels, dtype=dtype).transpose(0, 1).split(channels, dim=2)
            B, C = torch.empty(LENGTH, 1, 2 * size, dtype=dtype).transpose(0, 1).split(size, dim=2)
            per_channel = torch.empty(channels).requires_grad_()
            inputs = ScanInputs(
                x.detach().requires_grad_(),
                torch.empty(1, LENGTH, channels, dtype=dtype).requires_grad_(),
                torch.empty(channels, size).requires_grad_(),
                B.detach().requires_grad_(),
                C.detach().requires_grad_(),
                per_channel,
                per_channel,
            )
            if whole:
                inputs = inputs._replace(
                    z_BLE=z.detach().requires_grad_(),
                    state_BEN=torch.empty(1, channels, size).requires_grad_(),
                    documents_BL=torch.empty(1, LENGTH, dtype=torch.int32),
                )
            y, last = selective_scan.named("triton").function(inputs)
        (y.sum() + last.sum()).backward()


@pytest.mark.slow  # five sizes and types of five kernels
@pytest.mark.timeout(600)  # a compiler's minute, and several on a busy machine
def test_compiled_kernels_fit_an_h100() -> None:
    launches, buffers = compile_calls(__name__, "shipped")
    assert {launch.kernel for launch in launches} == {"_walk", "_chain", "_retrace", "_walk_back", "_gradients"}
    assert [fault for launch in launches for fault in launch.faults()] == []
    assert all(launch.instructions["atom"] == launch.instructions["red"] == 0 for launch in launches)
    for launch in launches:
        if launch.kernel == "_gradients":  # 12 warps on a multiprocessor, and no shuffles for every token
            assert (launch.registers <= 168, launch.instructions["shfl"] <= 64) == (True, True)
    assert max(buffers) == 2 * LENGTH * CHANNELS  # the projection that x and z are parts of: nothing has 16 values more
