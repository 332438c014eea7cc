"""How long a step takes: a model, made of what was counted and of the rates in `rates`, of which one was
measured: what launches took besides (`expected_seconds`).

    a product           its FLOPs or its bytes, whichever takes longer; attention likewise, at its own rate
    a kernel of ours    as `kernel_time` says
    everything else     its bytes
    the host            launches; where they take longer than what they start, they count instead
    a collective        its bytes over the link; what is computed until it is waited for hides it
    copies to the host  likewise, one after the other in each direction; and from it
    a wait              a fixed time

A step's passes cost `once` and a time for each micro-batch; in a pipeline of p ranks with v virtual stages, (p - 1) / v
micro-batches' time is waited for besides.
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
    """Of some operations together."""

    launches: float = 0
    bytes: float = 0
    flops: float = 0
    seconds: float = 0

    def add(self, other: Work, times: float = 1) -> None:
        """Add another as often as it happens."""
        self.launches += times * other.launches
        self.bytes += times * other.bytes
        self.flops += times * other.flops
        self.seconds += times * other.seconds


Works = dict[tuple[str, str], Work]  # by part and kind


@dataclass
class PartTime:
    """Passes or an update: what the device does, and what keeps it from that."""

    costs: Works = field(default_factory=lambda: defaultdict(Work))
    exposed: float = 0  # seconds of collectives that nothing hides
    sent: float = 0  # bytes
    waits: float = 0

    @property
    def device(self) -> float:
        """Seconds of what is computed."""
        return sum(cost.seconds for cost in self.costs.values())

    @property
    def launches(self) -> float:
        """Of the host: one for each operation."""
        return sum(cost.launches for cost in self.costs.values())

    @property
    def host(self) -> float:
        """Seconds in which it launches them."""
        return LAUNCH_S * self.launches

    @property
    def seconds(self) -> float:
        """All of it."""
        return max(self.device, self.host) + self.exposed + WAIT_S * self.waits

    def plus(self, other: PartTime, times: float = 1) -> PartTime:
        """With another part, as often as it happens."""
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
    """Of one rank: a step's fixed part with its update, and a micro-batch's."""

    once: PartTime
    micro_batch: PartTime
    micro_batches: int
    waiting: float  # micro-batches' times that the pipeline waits

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.once.seconds + (self.micro_batches + self.waiting) * self.micro_batch.seconds

    @property
    def expected_seconds(self) -> float:
        """Of the step, with what each launch took beside the model where that was measured."""
        launches = self.once.launches + (self.micro_batches + self.waiting) * self.micro_batch.launches
        return self.seconds + BESIDE_S * launches

    @property
    def whole(self) -> PartTime:
        """All micro-batches and what is done once, without the pipeline's waiting."""
        return self.once.plus(self.micro_batch, self.micro_batches)


def step_time(step: RankStep, kernels: dict[int, KernelTime], gpu: GPU, virtual: int) -> StepTime:
    """`kernels`: the time of every different launch of a kernel of our own, by its number."""
    few, many = (part_time(part, kernels, gpu) for part in (step.passes_of_few, step.passes_of_many))
    update = part_time(step.update, kernels, gpu)
    more = step.many - step.few
    share = 1 / more if more else 0.0
    if more:
        micro_batch = PartTime().plus(many, share).plus(few, -share)
    else:
        micro_batch = PartTime().plus(many, 1 / step.many)
    once = PartTime().plus(many).plus(micro_batch, -step.many).plus(update)
    if micro_batch.waits < 0:  # where only a run's first step waits, which was that of few
        micro_batch.waits = 0.0
        once.waits = many.waits + update.waits
    return StepTime(once, micro_batch, step.micro_batches, (step.place.pipeline_size - 1) / virtual)


def work(operations: Iterable[Operation], kernels: dict[int, KernelTime], gpu: GPU) -> Work:
    """All of them together."""
    total = Work()
    for each in operations:
        total.add(Work(1, each.bytes, each.flops, operation_seconds(each, kernels, gpu)))
    return total


def part_time(part: CountedPart, kernels: dict[int, KernelTime], gpu: GPU) -> PartTime:
    """Of what was counted."""
    found = PartTime(waits=len(part.waits))
    seconds = [operation_seconds(each, kernels, gpu) for each in part.operations]
    for each, time in zip(part.operations, seconds, strict=True):
        found.costs[each.part, category(each)].add(Work(1, each.bytes, each.flops, time))
    until = [0.0, *accumulate(seconds)]
    for call in part.sent:
        found.sent += call.bytes
        found.exposed += exposed_seconds(call, until, part.first, gpu)
    found.sent += sum(copy.bytes for copy in part.copies)
    found.exposed += copies_seconds(part.copies, until, part.first, gpu)
    return found


def operation_seconds(each: Operation, kernels: dict[int, KernelTime], gpu: GPU) -> float:
    """Of one operation."""
    if each.kind == "kernel" and each.variant in kernels:
        return kernels[each.variant].seconds
    rate = gpu.rate(each.kind, each.name.partition(" ")[0])
    return max(each.bytes / gpu.bandwidth, each.flops / rate if rate else 0.0)


def exposed_seconds(call: Sent, until: Sequence[float], first: int, gpu: GPU) -> float:
    """`until`: the time of all operations before each one."""
    needed = call.bytes / (gpu.between_nodes if call.between_nodes else gpu.inside_node)
    asked, waited = (min(max(0, index - first), len(until) - 1) for index in (call.asked, call.waited))
    return max(0.0, needed - (until[waited] - until[asked]))


def copies_seconds(copies: Sequence[Sent], until: Sequence[float], first: int, gpu: GPU) -> float:
    """How long what is computed waits for copies between device and host: one after the other, in each direction."""
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
    """Products, attention, or the op that the line belongs to; what mixers do between ops is copies."""
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
