"""Time model for a step, from the recorded operations and the rates in `planning/rates`.

    a matrix product    the time for its FLOPs or for its bytes, whichever is longer
    attention           the time for its FLOPs, at attention's rate, or for its bytes, whichever is longer
    a Triton kernel     the time in `kernel_time`, for kernels of this package
    other operations    the time for their bytes
    each of these       at least the time in which the device starts and ends a kernel
    a launch            a fixed host time, longer for a Triton kernel. The host launches while the device computes, so
                        the host's time and the device's time are not added: the step takes the longer of them, and is
                        called host-bound or device-bound
    a collective        the time for its bytes over the link, minus the computation between the call and the wait for
                        its result
    a host-device copy  the time for its bytes, minus the computation between the copy and the wait for its result;
                        copies in the same direction run one after another
    a wait              a fixed time

No number in the model is fitted to measured steps.

A step's time has a fixed part, which arises once in a step, and a part for each micro-batch. In a pipeline with p ranks
and v virtual stages on each rank, the bubble (idle time) takes as long as (p - 1) / v micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hybridtron.planning.rates import GPU, HOST_S, TRITON_S, WAIT_S, occupied_seconds
from hybridtron.rehearse.census import FROM_HOST, TO_HOST, Operation, Sent
from hybridtron.rehearse.kernel_time import KernelTime
from hybridtron.rehearse.step import CountedPart, RankStep


@dataclass
class Work:
    """Sums over operations: launches, bytes, FLOPs, and seconds of the device and of the host."""

    launches: float = 0
    bytes: float = 0
    flops: float = 0
    seconds: float = 0
    host: float = 0

    def add(self, other: Work, times: float = 1) -> None:
        """Add other work, multiplied by `times`."""
        self.launches += times * other.launches
        self.bytes += times * other.bytes
        self.flops += times * other.flops
        self.seconds += times * other.seconds
        self.host += times * other.host


Works = dict[tuple[str, str], Work]
"""(part of the step, kind of work) -> work. Parts are forward, backward and update; `category` returns the kind."""


@dataclass
class PartTime:
    """Cost of a step's part: the device's work, exposed communication, and waits.

    Communication is exposed while no computation runs at the same time.
    """

    costs: Works = field(default_factory=lambda: defaultdict(Work))
    exposed: float = 0  # seconds of exposed collectives and copies
    sent: float = 0  # bytes
    waits: float = 0  # number of waits

    @property
    def device(self) -> float:
        """Device time: all operations' seconds, added up."""
        return sum(cost.seconds for cost in self.costs.values())

    @property
    def launches(self) -> float:
        """Launches by the host, one for each operation."""
        return sum(cost.launches for cost in self.costs.values())

    @property
    def host(self) -> float:
        """Host time: the seconds that the host takes to launch all operations."""
        return sum(cost.host for cost in self.costs.values())

    @property
    def idle(self) -> float:
        """Seconds in which neither host nor device works: exposed communication and waits."""
        return self.exposed + WAIT_S * self.waits

    @property
    def seconds(self) -> float:
        """Total seconds: device time or host time, whichever is longer, plus exposed communication and waits."""
        return max(self.device, self.host) + self.idle

    @property
    def bound(self) -> str:
        """Side that takes longer: "host-bound" or "device-bound"."""
        return "host-bound" if self.host > self.device else "device-bound"

    def plus(self, other: PartTime, times: float = 1) -> PartTime:
        """Return this part plus `times * other`."""
        total = PartTime(
            exposed=self.exposed + times * other.exposed,
            sent=self.sent + times * other.sent,
            waits=self.waits + times * other.waits,
        )
        for key, cost in self.costs.items():
            total.costs[key].add(cost)
        for key, cost in other.costs.items():
            total.costs[key].add(cost, times)
        return total


@dataclass(frozen=True)
class StepTime:
    """Modelled time of one rank's step.

    once           cost that arises once in a step, including the update
    micro_batch    cost per micro-batch
    micro_batches  how many micro-batches a step has
    waiting        length of the pipeline's bubble, in micro-batches
    """

    once: PartTime
    micro_batch: PartTime
    micro_batches: int
    waiting: float

    @property
    def seconds(self) -> float:
        """The step's modelled time in seconds."""
        return self.once.plus(self.micro_batch, self.micro_batches + self.waiting).seconds

    @property
    def whole(self) -> PartTime:
        """Cost of the full step without the pipeline's bubble."""
        return self.once.plus(self.micro_batch, self.micro_batches)


def step_time(step: RankStep, kernels: dict[int, KernelTime], gpu: GPU, virtual: int) -> StepTime:
    """Return a step's modelled time, from two recorded steps with different micro-batch counts.

    kernels  index of a distinct kernel launch (`Operation.variant`) -> time
    virtual  how many virtual stages a pipeline rank has
    """
    few, many = (part_time(part, kernels, gpu) for part in (step.passes_of_few, step.passes_of_many))
    update = part_time(step.update, kernels, gpu)
    more = step.many - step.few
    share = 1 / more if more else 0.0
    if more:
        micro_batch = PartTime().plus(many, share).plus(few, -share)
    else:
        micro_batch = PartTime().plus(many, 1 / step.many)
    once = PartTime().plus(many).plus(micro_batch, -step.many).plus(update)
    # some waits occur only in a run's first step; this may be the step with `few`, so the difference may be negative
    if micro_batch.waits < 0:
        micro_batch.waits = 0.0
        once.waits = many.waits + update.waits
    return StepTime(once, micro_batch, step.micro_batches, (step.place.pipeline.size - 1) / virtual)


def work(operations: Iterable[Operation], kernels: dict[int, KernelTime], gpu: GPU) -> Work:
    """Return all operations' work, added up."""
    total = Work()
    for operation in operations:
        total.add(operation_work(operation, kernels, gpu))
    return total


def operation_work(operation: Operation, kernels: dict[int, KernelTime], gpu: GPU) -> Work:
    """Return one operation's work."""
    seconds = operation_seconds(operation, kernels, gpu)
    return Work(1, operation.bytes, operation.flops, seconds, host_seconds(operation))


def part_time(part: CountedPart, kernels: dict[int, KernelTime], gpu: GPU) -> PartTime:
    """Return a counted part's cost."""
    total = PartTime(waits=len(part.waits))
    works = [operation_work(operation, kernels, gpu) for operation in part.operations]
    for operation, cost in zip(part.operations, works, strict=True):
        total.costs[operation.part, category(operation)].add(cost)
    until = [0.0, *accumulate(cost.seconds for cost in works)]
    for call in part.sent:
        total.sent += call.bytes
        total.exposed += exposed_seconds(call, until, part.first, gpu)
    total.sent += sum(copy.bytes for copy in part.copies)
    total.exposed += copies_seconds(part.copies, until, part.first, gpu)
    return total


def operation_seconds(operation: Operation, kernels: dict[int, KernelTime], gpu: GPU) -> float:
    """Return one operation's modelled seconds on the device, with the gap before the next operation."""
    if operation.kind == "kernel" and operation.variant in kernels:
        seconds = kernels[operation.variant].seconds
    else:
        rate = gpu.rate(operation.kind, operation.name.partition(" ")[0])
        seconds = max(operation.bytes / gpu.bandwidth, operation.flops / rate if rate else 0.0)
    return occupied_seconds(seconds)


def host_seconds(operation: Operation) -> float:
    """Return the seconds that the host takes to launch one operation."""
    return HOST_S + TRITON_S if operation.kind == "kernel" else HOST_S


def exposed_seconds(call: Sent, until: Sequence[float], first: int, gpu: GPU) -> float:
    """Return the seconds of a communication call during which no computation runs.

    until  device times: entry i is the total for the part's first i operations, and the last entry is for all of them
    first  index of the part's first operation in the census
    """
    needed = call.bytes / (gpu.between_nodes if call.between_nodes else gpu.inside_node)
    asked, waited = (min(max(0, index - first), len(until) - 1) for index in (call.asked, call.waited))
    return max(0.0, needed - (until[waited] - until[asked]))


def copies_seconds(copies: Sequence[Sent], until: Sequence[float], first: int, gpu: GPU) -> float:
    """Return the seconds for which computation waits for copies between host and device.

    Copies in the same direction run one after another.

    until  device times: entry i is the total for the part's first i operations, and the last entry is for all of them
    first  index of the part's first operation in the census
    """
    waited = 0.0
    ends = {TO_HOST: 0.0, FROM_HOST: 0.0}
    for copy in copies:
        asked, needed = (until[min(max(0, index - first), len(until) - 1)] for index in (copy.asked, copy.waited))
        ends[copy.kind] = max(ends[copy.kind], asked + waited) + copy.bytes / gpu.host
        if copy.waited > copy.asked:
            waited += max(0.0, ends[copy.kind] - needed - waited)
    return waited


NAMES = {"model": "residual stream", "mixers": "copies", "engine": "gradients", "parallel": "gradients"}


def category(operation: Operation) -> str:
    """Return an operation's kind of work, as reports name it.

    - "products", "attention", "optimizer", "copies of activations" and "casts to FP8" follow from the operation itself,
      not from its source line.
    - An operation with a source line in ops/ gets the op's name. Exceptions: "copies" in attention/, "loss" in
      softmax/.
    - Any other operation gets the name that NAMES has for its source line's folder, or else "gradients".
    """
    if operation.kind in ("product", "attention"):
        return {"product": "products"}.get(operation.kind, operation.kind)
    if operation.part == "update":
        return "optimizer"
    if operation.name in (TO_HOST, FROM_HOST):
        return "copies of activations"
    if operation.name.startswith("cast to fp8"):
        return "casts to FP8"
    folder, _, rest = operation.place.partition("/")
    if folder == "ops":
        op = rest.partition("/")[0]
        return {"attention": "copies", "softmax": "loss"}.get(op, op.removesuffix(".py"))
    return NAMES.get(folder, "gradients")
