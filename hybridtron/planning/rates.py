"""Rates for each kind of GPU, from which step times are estimated: peak rates, and rates that kernels reach.

Peak rates are from the vendor's data sheets, for dense matrices. The reached rates are rounded published measurements.
No number is fitted to steps that were measured with this package, so that measured steps can test the model
(benchmarks/step_model.md). A number may be changed only if a source supports the new number.

    products        bf16 matrix multiplications with a training step's shapes: 600 of 989 TFLOP/s with cuBLAS on an H100
                    SXM (550 to 700 in training frameworks' public tables, depending on the shape)
    attention       300 TFLOP/s: FlashAttention 2 on an H100, forward and backward (arXiv:2407.08608, Figures 5 and 6:
                    about 350 forward)
    GAINS           FlashAttention 3 relative to 2 on Hopper: 1.5 to 2 times forward, 1.5 to 1.75 backward
                    (arXiv:2407.08608, section 4). FlashAttention 4 reaches up to 1,613 TFLOP/s forward on a B200, 71%
                    of its peak, by its authors' numbers (FlashAttention 3: up to 75% of Hopper's peak). The factor 1.5
                    of FlashAttention 4 is assumed for Hopper and Blackwell; no published table was found for Hopper.
                    FP8 matrix multiplications have twice the peak of bf16. Their factor 1.7 is assumed, and does not
                    include the casts to FP8
    bandwidth       85% of the data sheet's value, for copies and elementwise kernels on large tensors
    HOST_S          host time per operation, while kernels run: 19 us for a torch operation with autograd and Megatron,
                    and 2.5 us for the driver. Real steps took this time on a 2.6 GHz Xeon (Sapphire Rapids class), with
                    tiny widths and launches that do nothing. Published values are 5 to 25 us (jiahuanglin.xyz, "From
                    PyTorch op to kernel launch")
    TRITON_S        additional host time per launch of a Triton kernel, because Triton's launcher is Python; measured in
                    the same steps as HOST_S
    FLOOR_S         shortest time of a kernel on the device
    GAP_S           time between two kernels on the device. FLOOR_S and GAP_S together are 3.5 us. NVIDIA's forum gives
                    3 us for kernels that do nothing, one after another (forums.developer.nvidia.com, thread 233645)
    MEMORY_S        latency of a load from the GPU's memory: 288 ns on an H100 SXM, by a chain of dependent loads
                    (github.com/ahmadsharif1/cuda_study, commit f2e2f70)
    CACHE_S         latency of a load from the L2 cache: 131 ns, from the same measurement
    CACHE           size of the L2 cache on Hopper, from the data sheet, in bytes
    LAUNCHES        roughly how many kernel launches a sub-layer's forward and backward pass have together:
                    `hybridtron rehearse` counts 22 for plain attention and MLPs, 50 for delta rules, 75 for Mamba and
                    95 for Mamba-2
    HEAD_ROOM       a guess: CUDA's context, NCCL's buffers and workspaces take 2 to 4 GB of 80, and the allocator's
                    fragmentation takes the rest
    WAIT_S          time per synchronization, while the device idles until the host has launched the next kernel
    host            50 GB/s to pinned memory. This is about 80% (a guess) of PCIe 5.0's 64 GB/s per direction with 16
                    lanes (data sheets for H100, H200 and B200: 128 GB/s both ways). GPUs that share a switch have less
    inside_node     rate in a ring over NVLink
    between_nodes   rate in a ring over one 400 Gbit/s network adapter per GPU
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9
TFLOP = 1e12


@dataclass(frozen=True)
class GPU:
    """One kind of GPU.

    capability: CUDA compute capability
    memory: bytes
    peak: peak FLOP/s in dense bf16 matrix multiplications
    products: FLOP/s that bf16 matrix multiplications reach
    attention: FLOP/s that FlashAttention 2 reaches in bf16
    bandwidth: bytes per second that kernels reach in the GPU's memory
    processors: how many streaming multiprocessors the GPU has
    clock: cycles per second under load
    inside_node, between_nodes: bytes per second that each rank in a ring sends
    node: GPUs per node
    host: bytes per second between the GPU and its host, in each direction
    """

    name: str
    capability: tuple[int, int]
    memory: float
    peak: float
    products: float
    attention: float
    bandwidth: float
    processors: int
    clock: float
    inside_node: float
    between_nodes: float
    node: int = 8
    host: float = 50 * GB

    def rate(self, kind: str, maker: str) -> float | None:
        """Return the FLOP/s that a kernel reaches.

        kind: "product" (a matrix multiplication) or "attention"; None is returned for other kinds
        maker: the kernel's implementation, such as "flash-3"; for keys of GAINS, the rate is multiplied by the factor
            in GAINS
        """
        rate = {"product": self.products, "attention": self.attention}.get(kind)
        if rate is None:
            return None
        return rate * GAINS.get(maker, 1.0)

    def link(self, ranks: int) -> float:
        """Return the bytes per second that each rank sends in a ring with `ranks` consecutive ranks."""
        if ranks <= self.node:
            return self.inside_node
        return self.between_nodes


HOPPER = {"capability": (9, 0), "peak": 989 * TFLOP, "products": 600 * TFLOP, "attention": 300 * TFLOP}
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("h100", **HOPPER, memory=80 * GB, bandwidth=0.85 * 3350 * GB, processors=132, clock=1.7e9,
            inside_node=360 * GB, between_nodes=45 * GB),
        GPU("h200", **HOPPER, memory=141 * GB, bandwidth=0.85 * 4800 * GB, processors=132, clock=1.7e9,
            inside_node=360 * GB, between_nodes=45 * GB),
        # For the B200 the fractions of the peak are assumed to be those of the H100, also for FlashAttention 2.
        GPU("b200", (10, 0), 180 * GB, 2250 * TFLOP, 1365 * TFLOP, 680 * TFLOP, 0.85 * 8000 * GB, 148, 1.8e9,
            720 * GB, 45 * GB),
    )
}  # fmt: skip

GAINS = {"flash-3": 1.6, "flash-4": 1.5, "fp8": 1.7}
"""Speed of faster kernels: attention relative to FlashAttention 2, and FP8 matrix multiplications relative to bf16."""
HEAD_ROOM = 0.1
"""Fraction of a GPU's memory that `inspect --fit` leaves for memory outside tensors (`UNSEEN`)."""
UNSEEN = (
    "CUDA's context and libraries (0.5 to 1 GB), NCCL's buffers, cuBLAS's workspaces, fragmentation of the allocator"
)
HOST_S = 21.5e-6
TRITON_S = 16e-6
FLOOR_S = 2.5e-6
GAP_S = 1e-6


def occupied_seconds(seconds: float) -> float:
    """Return how long a kernel occupies the device: its time or the floor, and the gap before the next kernel."""
    return max(seconds, FLOOR_S) + GAP_S


MEMORY_S = 288e-9
CACHE_S = 131e-9
CACHE = 50e6
LAUNCHES = 50
WAIT_S = 25e-6
