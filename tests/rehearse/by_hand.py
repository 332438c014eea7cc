"""Small programs on a simulated GPU, in a process of their own: the counted operations of each, as JSON.

`python -m tests.rehearse.by_hand` prints a dictionary with one entry for each function below.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from hybridtron.planning.rates import GPUS
from hybridtron.rehearse.rehearsal import RehearsalProcess

process = RehearsalProcess(GPUS["h100"])

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from hybridtron.ops.experts import RouteInputs, Router, experts_mlp, route  # noqa: E402
from hybridtron.ops.norm import RMSNormInputs, rms_norm  # noqa: E402
from hybridtron.rehearse.census import Census  # noqa: E402
from hybridtron.rehearse.fake_cuda import COMPOSITE  # noqa: E402
from hybridtron.rehearse.launches import Launches  # noqa: E402
from hybridtron.rehearse.step import counting  # noqa: E402


def tensor(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=grad)


def elementwise() -> None:
    x = tensor(1000)
    y = tensor(1000)
    _ = x * y  # 2 read, 1 written
    x.mul_(y)  # 2 read, 1 written
    x.zero_()  # 1 written
    x.copy_(y)  # 1 read, 1 written
    _ = x.view(10, 100).t()  # nothing
    _ = x + y[:1].expand(1000)  # 1000 and 1 read, 1000 written


def cast_and_pick() -> None:
    x = tensor(1000)
    table = tensor(5000, 8)
    _ = x.bfloat16()  # 4 bytes read and 2 written of each
    _ = functional.embedding(torch.zeros(3, dtype=torch.int64, device="cuda"), table)


def product() -> None:
    a = tensor(30, 40, dtype=torch.bfloat16, grad=True)
    b = tensor(40, 50, dtype=torch.bfloat16, grad=True)
    (a @ b).sum().backward()  # 2 x 30 x 40 x 50, three times


def added_up() -> None:
    a = tensor(30, 40, dtype=torch.bfloat16)
    b = tensor(40, 50, dtype=torch.bfloat16)
    total = tensor(30, 50)
    torch.addmm(total, a, b, out_dtype=torch.float32, out=total)  # all three read, the sum written


def grouped() -> None:
    """Route 16 tokens to 2 of 4 experts: 32 rows."""
    x = tensor(16, 24, dtype=torch.bfloat16, grad=True)
    gate_up = tensor(4, 2 * 40, 24, dtype=torch.bfloat16, grad=True)
    down = tensor(4, 24, 40, dtype=torch.bfloat16, grad=True)
    routing = route(RouteInputs(tensor(16, 4, grad=True), None, Router(2, normalise=True)))
    experts_mlp(x, routing, gate_up, down, "swiglu").backward(tensor(16, 24, dtype=torch.bfloat16))


def gate() -> None:
    x = tensor(1000, grad=True)
    functional.silu(x).backward(tensor(1000))  # forward 1 read 1 written, backward 2 read 1 written


def asked() -> None:
    x = tensor(4)
    x[0].item()
    float(x.sum())
    if x.sum() > 0:
        raise AssertionError("no value is a reason to do anything")
    x.tolist()
    x.nonzero()
    x.cpu()
    x.to("cpu", non_blocking=True)
    torch.tensor([1.0, 2.0], device="cuda")
    torch.zeros(4).to("cuda")
    torch.zeros(4).to("cuda", non_blocking=True)
    x.copy_(torch.zeros(4))
    torch.cuda.synchronize()
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())


def drawn() -> None:
    torch.randn(1000, generator=torch.Generator("cuda").manual_seed(1), device="cuda")  # 1 written


def one_number() -> None:
    for values in ([3], [3, 4]):
        _ = torch.tensor(values).to("cuda", non_blocking=True)


def held() -> None:
    x = tensor(1 << 20, grad=True)  # 4 MiB
    y = x.sin()  # 4 more, and x is kept
    z = y.cos()  # 4 more: 12
    del y  # kept for the backward pass all the same
    z.sum().backward()  # z, and in turn gradients of z's, y's and x's size; y goes with its use


def run_again() -> None:
    def many(x: Tensor) -> Tensor:
        return x.sin().cos().sin().cos()

    x = tensor(1 << 20, grad=True)
    checkpoint(many, x, use_reentrant=False).sum().backward()


def sent() -> dict[str, Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    calls = process.collectives.begin(current[0])
    census = current[0]
    x = tensor(1600)
    whole = tensor(1600 * 16)
    dist.all_reduce(x)
    dist.all_gather_into_tensor(whole, x)
    handle = dist.reduce_scatter_tensor(x, whole, async_op=True)
    _ = x * x
    handle.wait()
    dist.all_reduce(torch.ones(3))  # on the host: no traffic of the device
    dist.destroy_process_group()
    assert census is current[0]
    return {"sent": [[c.kind, c.bytes, c.ranks, c.between_nodes, c.waited - c.asked] for c in calls]}


def calls() -> list[list[float]]:
    """A sum, a product, and the norm of ten rows by a kernel of ours: launches, bytes, FLOPs, seconds by the model."""

    def programs() -> Iterator[tuple[str, Callable[[], object]]]:
        x = tensor(30, 40)
        y = tensor(40, 50)
        yield "sum", lambda: x + x
        yield "product", lambda: x @ y
        inputs = RMSNormInputs(tensor(10, 6, dtype=torch.bfloat16), tensor(6), 1e-5)
        yield "norm", lambda: rms_norm(inputs)

    works = process.calls(programs)
    assert list(works) == ["sum", "product", "norm"]
    return [[work.launches, work.bytes, work.flops, work.seconds] for work in works.values()]


def taken_apart() -> list[str]:
    """List operations with their own kernel on CPUs, which a device without one decomposes."""

    def has(name: str, key: str) -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)

    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    mixed = [name for name in names if has(name, "CompositeImplicitAutograd") and has(name, "CPU")]
    return sorted(name.removeprefix("aten::") for name in mixed)


current: list[Census] = []


def counted(run: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    census = Census()
    census.part = "passes"
    current[:] = [census]
    with counting(census, Launches()):
        more = run() or {}
    return {
        "operations": [[op.part, op.name, op.bytes, op.flops] for op in census.operations],
        "waits": [wait.kind for wait in census.waits],
        "most": max(census.memory.timeline().total, default=0),
        "left": census.memory.current,
        **more,
    }


if __name__ == "__main__":
    programs = (
        elementwise, cast_and_pick, product, added_up, grouped, gate, asked, drawn, one_number, held, run_again, sent,
    )  # fmt: skip
    results = {program.__name__: counted(program) for program in programs}
    results["calls"] = {"works": calls()}
    results["composite"] = {"listed": sorted(COMPOSITE), "taken apart": taken_apart()}
    print(json.dumps(results))
