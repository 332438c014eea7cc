"""Time model of a step, from the recorded operations and the rates in `planning/rates`.

    a product           its FLOPs or its bytes, whichever takes longer; attention likewise, at its own rate
    a kernel of ours    as in `kernel_time`
    everything else     its bytes
    the host            launches; if they take longer than the device's work, they count instead
    a collective        its bytes over the link; all that is computed until it is waited for hides it
    copies to the host  and from it likewise, one after the other in each direction
    a wait              a fixed time

Only one rate was measured: the launch overhead in `expected_seconds`. A step's passes cost `once` and a time for each
micro-batch; in a pipeline of p ranks with v virtual stages, the bubble adds the time of (p - 1) / v micro-batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from hybridtron.planning.rates import BESIDE_S, GPU, LAUNCH_S, WAIT_S
from hybridtron.rehearse.census import FROM_HOST, TO_HOST, Operation, Sent
from hybridtron.rehearse.kernel_time import KernelTime
from hybridtron.rehearse.step import CountedPart, RankStep


@dataclass
class Work:
    """Sum of operations: launches, bytes, FLOPs and seconds."""

    launches: float = 0
    bytes: float = 0
    flops: float = 0
    seconds: float = 0

    def add(self, other: Work, times: float = 1) -> None:
        """Add other work, multiplied by `times`."""
        self.launches += times * other.launches
        self.bytes += times * other.bytes
        self.flops += times * other.flops
        self.seconds += times * other.seconds


Works = dict[tuple[str, str], Work]  # by part and kind


@dataclass
class PartTime:
    """Cost of passes or an update: the device's work, exposed communication, and waits."""

    costs: Works = field(default_factory=lambda: defaultdict(Work))
    exposed: float = 0  # seconds of collectives and copies that no computation hides
    sent: float = 0  # bytes
    waits: float = 0

    @property
    def device(self) -> float:
        """Device time: the seconds of all operations."""
        return sum(cost.seconds for cost in self.costs.values())

    @property
    def launches(self) -> float:
        """Launches by the host, one for each operation."""
        return sum(cost.launches for cost in self.costs.values())

    @property
    def host(self) -> float:
        """Host time: the seconds in which all operations are launched."""
        return LAUNCH_S * self.launches

    @property
    def seconds(self) -> float:
        """Seconds in all: the longer of device and host time, exposed communication, and waits."""
        return max(self.device, self.host) + self.exposed + WAIT_S * self.waits

    def plus(self, other: PartTime, times: float = 1) -> PartTime:
        """Return this part plus `times` times another."""
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
    """Modelled time of one rank's step: a part that a step has once, with its update, and a micro-batch's."""

    once: PartTime
    micro_batch: PartTime
    micro_batches: int
    waiting: float  # bubble of the pipeline, in micro-batches

    @property
    def seconds(self) -> float:
        """The step's seconds."""
        return self.once.seconds + (self.micro_batches + self.waiting) * self.micro_batch.seconds

    @property
    def expected_seconds(self) -> float:
        """The step's seconds, with the measured launch overhead added to the model."""
        launches = self.once.launches + (self.micro_batches + self.waiting) * self.micro_batch.launches
        return self.seconds + BESIDE_S * launches

    @property
    def whole(self) -> PartTime:
        """The full step's cost without the pipeline's bubble."""
        return self.once.plus(self.micro_batch, self.micro_batches)


def step_time(step: RankStep, kernels: dict[int, KernelTime], gpu: GPU, virtual: int) -> StepTime:
    """Model a step's time. `kernels` has the time of each distinct kernel launch, by its number."""
    few, many = (part_time(part, kernels, gpu) for part in (step.passes_of_few, step.passes_of_many))
    update = part_time(step.update, kernels, gpu)
    more = step.many - step.few
    share = 1 / more if more else 0.0
    if more:
        micro_batch = PartTime().plus(many, share).plus(few, -share)
    else:
        micro_batch = PartTime().plus(many, 1 / step.many)
    once = PartTime().plus(many).plus(micro_batch, -step.many).plus(update)
    if micro_batch.waits < 0:  # some waits are only in a run's first step, here the one of `few`
        micro_batch.waits = 0.0
        once.waits = many.waits + update.waits
    return StepTime(once, micro_batch, step.micro_batches, (step.place.pipeline.size - 1) / virtual)


def work(operations: Iterable[Operation], kernels: dict[int, KernelTime], gpu: GPU) -> Work:
    """Add up the work of all operations."""
    total = Work()
    for operation in operations:
        total.add(Work(1, operation.bytes, operation.flops, operation_seconds(operation, kernels, gpu)))
    return total


def part_time(part: CountedPart, kernels: dict[int, KernelTime], gpu: GPU) -> PartTime:
    """Return a counted part's cost."""
    total = PartTime(waits=len(part.waits))
    seconds = [operation_seconds(operation, kernels, gpu) for operation in part.operations]
    for operation, time in zip(part.operations, seconds, strict=True):
        total.costs[operation.part, category(operation)].add(Work(1, operation.bytes, operation.flops, time))
    until = [0.0, *accumulate(seconds)]
    for call in part.sent:
        total.sent += call.bytes
        total.exposed += exposed_seconds(call, until, part.first, gpu)
    total.sent += sum(copy.bytes for copy in part.copies)
    total.exposed += copies_seconds(part.copies, until, part.first, gpu)
    return total


def operation_seconds(each: Operation, kernels: dict[int, KernelTime], gpu: GPU) -> float:
    """Return one operation's modelled seconds."""
    if each.kind == "kernel" and each.variant in kernels:
        return kernels[each.variant].seconds
    rate = gpu.rate(each.kind, each.name.partition(" ")[0])
    return max(each.bytes / gpu.bandwidth, each.flops / rate if rate else 0.0)


def exposed_seconds(call: Sent, until: Sequence[float], first: int, gpu: GPU) -> float:
    """Return the seconds for which a call is not hidden by computation.

    `until` has the time before each operation, and `first` is the first operation's number in the census.
    """
    needed = call.bytes / (gpu.between_nodes if call.between_nodes else gpu.inside_node)
    asked, waited = (min(max(0, index - first), len(until) - 1) for index in (call.asked, call.waited))
    return max(0.0, needed - (until[waited] - until[asked]))


def copies_seconds(copies: Sequence[Sent], until: Sequence[float], first: int, gpu: GPU) -> float:
    """Return the seconds for which computation waits for copies between device and host.

    Copies in the same direction run one after the other.
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


def category(each: Operation) -> str:
    """Return an operation's kind of work: product, attention or op. Mixers' operations between ops are copies."""
    if each.kind in ("product", "attention"):
        return {"product": "products"}.get(each.kind, each.kind)
    if each.part == "update":
        return "optimizer"
    if each.name in (TO_HOST, FROM_HOST):
        return "copies of activations"
    if each.name.startswith("cast to fp8"):
        return "casts to FP8"
    room, _, rest = each.place.partition("/")
    if room == "ops":
        op = rest.partition("/")[0]
        return {"attention": "copies", "softmax": "loss"}.get(op, op.removesuffix(".py"))
    return NAMES.get(room, "gradients")
