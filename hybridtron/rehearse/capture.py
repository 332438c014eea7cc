"""Proves without a GPU that a CUDA graph can repeat the passes of a micro-batch (`engine/graphed.py`).

The passes of two micro-batches are rehearsed, in two steps with an update between them. The micro-batches differ in
everything that the host knows about them: their random keys, and the number of their documents. A kernel launch is
recorded with everything that a graph would repeat: the kernel, its scalar arguments, and the memory of its tensors. A
graph can repeat the passes if

- the host never waits for the device,
- nothing is copied between host and device, since a graph would repeat the address in the host's memory, and torch
  can't capture copies from memory that is not pinned,
- both micro-batches have equal launches.

Memory in two micro-batches is equal if launches at the same position have allocated it, or if it was allocated before
the passes and is the same storage. The proof has the limits of a rehearsal: tensors have no values, all streams count
as one, and other packages' kernels are stubs. So it can't replace a capture on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hybridtron.config.pipeline_layout import ProcessLaunch
from hybridtron.config.resolve import ResolvedPhase
from hybridtron.engine.graphed import GraphedPasses, StaticPasses, with_padded_boundaries
from hybridtron.ops.kernel_launch import kernel_name, recorded_launches
from hybridtron.parallel import groups
from hybridtron.rehearse import events
from hybridtron.rehearse.census import Census, Wait, form_of, on_device, tensors_in
from hybridtron.rehearse.collectives import Collectives
from hybridtron.rehearse.launches import Launches
from hybridtron.rehearse.step import batch_of, build_engine, counting

DOCUMENTS = (3, 5)  # number of documents in each row of the two micro-batches, if documents are isolated


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch with everything that a graph repeats.

    values: arguments by position; for a tensor: its memory, dtype, shape, strides and offset
    """

    place: str
    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Difference:
    """Launches at one position in two micro-batches, with a difference that a graph can't repeat.

    first, second: the launches; None if a micro-batch has no launch at this position
    what: the difference
    """

    first: RecordedLaunch | None
    second: RecordedLaunch | None
    what: str

    def __str__(self) -> str:
        launch = self.first or self.second
        assert launch is not None
        return f"{launch.place}: {launch.name}: {self.what}"


@dataclass(frozen=True)
class CaptureProof:
    """Result: the number of launches in the first micro-batch, and everything that prevents a graph."""

    launches: int
    waits: list[Wait]
    copies: list[RecordedLaunch]
    differences: list[Difference]

    @property
    def holds(self) -> bool:
        """True if nothing prevents a graph."""
        return not (self.waits or self.copies or self.differences)


@dataclass
class StorageNames:
    """Names for storages. A storage has the same name in two micro-batches if a graph would use the same memory.

    made: storage -> its number among the storages that the current micro-batch has allocated
    before: storages that were allocated before the passes; these references keep their keys from being reused
    """

    made: dict[int, int] = field(default_factory=dict)
    before: dict[int, tuple[int, Any]] = field(default_factory=dict)
    count: int = 0

    def begin(self) -> None:
        """Begin another micro-batch."""
        self.made.clear()
        self.count = 0

    def allocated(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Note the storages that an operation has allocated: those of outputs that share no input's storage."""
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in outputs:
            key = tensor.untyped_storage()._cdata
            if key not in known:
                self.made[key] = self.count
                self.count += 1

    def shown(self, value: Any) -> Any:
        """Return a launch's argument in a form that is equal if a graph can repeat the argument."""
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, list | tuple):
            return tuple(map(self.shown, value))
        return value

    def _of_tensor(self, tensor: Tensor) -> tuple[Any, ...]:
        if not on_device(tensor) and tensor.dim() == 0:
            return "scalar of the host", str(tensor.dtype), _constant(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata in self.made:
            memory = f"allocation {self.made[storage._cdata]}"
        else:
            number, _ = self.before.setdefault(storage._cdata, (len(self.before), storage))
            memory = f"memory {number} from before"
        return memory, str(tensor.dtype), tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


class LaunchRecorder(TorchDispatchMode):
    """Dispatch mode that records launches and copies. Enter it inside the census, whose source lines it uses."""

    def __init__(self, census: Census) -> None:
        super().__init__()
        self.census = census
        self.memory = StorageNames()
        self.launches: list[RecordedLaunch] = []
        self.host_copies: list[RecordedLaunch] = []
        self.copies = ()  # required by `events.Listener`

    def begin(self) -> None:
        """Begin to record another micro-batch."""
        self.memory.begin()
        self.launches = []
        self.host_copies = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = list(tensors_in((*args, *kwargs.values())))
        values = tuple(map(self.memory.shown, (*args, *sorted(kwargs.items()))))
        out = func(*args, **kwargs)
        outputs = list(tensors_in((out,)))
        form = form_of(func)
        if not func.is_view:
            self.memory.allocated(outputs, inputs)
        tensors = [*inputs, *outputs]
        if (form.counts and any(map(on_device, tensors))) or form.name == "_local_scalar_dense":
            launch = RecordedLaunch(self.census.place(), form.name, values)
            self.launches.append(launch)
            if any(not on_device(tensor) and tensor.dim() for tensor in tensors):
                self.host_copies.append(launch)
        return out

    def note_kernel(self, kernel: Any, grid: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Record a launch of one of our own Triton kernels."""
        values = (tuple(grid), self.memory.shown(arguments), tuple(sorted(options.items())))
        self.launches.append(RecordedLaunch(self.census.place(), kernel_name(kernel), values))

    def note_call(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Record a call to another package's function."""
        values = tuple((key, self.memory.shown(value)) for key, value in arguments.items())
        self.launches.append(RecordedLaunch(self.census.place(), name, values))

    # the methods of an `events.Listener`, which gets other packages' kernels

    def add(self, name: str, moved: int, flops: int, kind: str) -> None:
        self.launches.append(RecordedLaunch(self.census.place(), name, (moved, flops, kind)))

    def wait(self, kind: str) -> None: ...

    def arrived(self, copies: range) -> None: ...


def _constant(tensor: Tensor) -> Any:
    """Return the value of a scalar in the host's memory; None if it is not known."""
    if isinstance(tensor, FakeTensor):
        if tensor.constant is None:
            return None
        return tensor.constant.item()
    with _disable_current_modes():
        return tensor.item()


def differences_of(first: Sequence[RecordedLaunch], second: Sequence[RecordedLaunch]) -> list[Difference]:
    """Compare the launches of two micro-batches, up to the first position at which they run different kernels."""
    differences = []
    for before, after in zip_longest(first, second):
        if before is None or after is None or before.name != after.name or before.place != after.place:
            differences.append(Difference(before, after, f"then {_described(before)}, and {_described(after)}"))
            break
        if before.values != after.values:
            differences.append(Difference(before, after, _changed(before.values, after.values)))
    return differences


def _described(launch: RecordedLaunch | None) -> str:
    if launch is None:
        return "no more launches"
    return f"{launch.name} at {launch.place}"


def _changed(before: Any, after: Any) -> str:
    """Return the innermost values that differ, as text."""
    if isinstance(before, tuple) and isinstance(after, tuple) and len(before) == len(after):
        pairs = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
        return "; ".join(_changed(*pair) for pair in pairs)
    return f"{before} and {after}"


def lines_of(proof: CaptureProof, name: str) -> list[str]:
    """Return the proof as lines of text."""
    lists = {
        "waits of the host": [f"{wait.place}: {wait.kind}" for wait in proof.waits],
        "copies between host and device": [f"{launch.place}: {launch.name}" for launch in proof.copies],
        "launches that another micro-batch changes": list(map(str, proof.differences)),
    }
    lists = {title: list(dict.fromkeys(entries)) for title, entries in lists.items()}  # layers share lines
    lines = [f"{name}: the passes of a micro-batch have {proof.launches} launches"]
    for title, entries in lists.items():
        lines.append(f"{title}: {len(entries) or 'none'}")
        lines += [f"    {entry}" for entry in entries]
    if proof.holds:
        lines.append("As far as a rehearsal shows, a CUDA graph can repeat them. No GPU has captured them so far.")
    else:
        lines.append("A CUDA graph can't repeat them.")
    return lines


def prove_capture(phase: ResolvedPhase, collectives: Collectives) -> CaptureProof:
    """Rehearse the passes of two micro-batches on a single rank, and list the obstacles to a graph."""
    census = Census()
    collectives.begin(census)
    with counting(census, Launches()), groups_of_one(phase) as place:
        engine = build_engine(phase, place)
        engine.start_phase(phase, range(phase.settings.micro_batch))
        engine.graphed = GraphedPasses(engine.wrapped, engine.config.optim.z_loss, place, engine.device)
        first, second = (batch_of(phase, place.context, count).keyed(count, carried=False) for count in DOCUMENTS)
        recorder = LaunchRecorder(census)
        engine.forward_backward([first], 0)  # caches are filled, as in the passes before a capture
        engine.step(1e-4)
        (graph,) = engine.graphed.graphs.values()
        records = []
        waits: list[Wait] = []
        copies: list[RecordedLaunch] = []
        for batch in (first, second):
            recorder.begin()
            graph.passes.fill(with_padded_boundaries(batch))
            waits_before = len(census.waits)
            _record(graph.passes, recorder)
            waits += census.waits[waits_before:]
            copies += recorder.host_copies
            records.append(recorder.launches)
            engine.step(1e-4)
    differences = differences_of(*records)
    return CaptureProof(len(records[0]), waits, copies, differences)


def _record(passes: StaticPasses, recorder: LaunchRecorder) -> None:
    """Run the passes, and record their launches."""
    recorder.census.part = "passes"
    with (
        recorder,
        recorded_launches(recorder.note_kernel),
        events.listen(recorder),
        events.noted_calls(recorder.note_call),
    ):
        passes()
    recorder.census.part = "update"


@contextmanager
def groups_of_one(phase: ResolvedPhase) -> Iterator[groups.Groups]:
    """Yield the process groups of a single rank."""
    try:
        yield groups.start(phase.config.parallel, launch=ProcessLaunch(0, 1), fake=True)
    finally:
        groups.stop()
