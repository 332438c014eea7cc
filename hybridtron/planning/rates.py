"""Rates of GPUs: peaks of each kind, and the share of them that real kernels reach.

Peaks are from the vendor's data sheets (dense, without sparsity). The reached rates are published measurements,
rounded; only BESIDE_S was measured with this package, so every time computed from them is a model's. A number changes
only with a source for the new one.

    products        600 of 989 TFLOP/s: bf16 products of a training step's shapes in cuBLAS on an H100 SXM (550 to 700
                    in public tables of training frameworks, by shape)
    attention       300 TFLOP/s: FlashAttention 2 on an H100, forward and backward (arXiv:2407.08608, Figures 5 and 6:
                    about 350 forward)
    GAINS           FlashAttention 3 beside 2 on Hopper: 1.5 to 2 times forward, 1.5 to 1.75 backward (arXiv:2407.08608,
                    section 4). FlashAttention 4: up to 1,613 TFLOP/s forward on a B200, 71% of its peak (its authors;
                    version 3 has up to 75% of Hopper's), taken as 1.5 times what is assumed of version 2 there and on
                    Hopper, for which no table was found. FP8 products with their casts counted apart: peaks are twice
                    those of bf16, of which 1.7 is assumed
    bandwidth       85% of the data sheet's: copies and elementwise kernels of large tensors
    LAUNCH_S        host time of one operation of torch, with autograd; kernels run meanwhile. The low end of
                    published ones: 5 to 25 us from Python's call to the GPU's queue (jiahuanglin.xyz, "From PyTorch op
                    to kernel launch"), 4 to 6 us measured for a launch in C++ (xiaguan/cuda-kernel-launch-lab)
    BESIDE_S        measured time of steps on an H200 beyond the rehearsal's model, for each launch: 17 to 36 us in six
                    recipes. With 29 the model is within 8% of all of them (benchmarks/gpu.md). It is not known
                    whether the host needs it or the device
    LAUNCHES        launches of both passes of a sub-layer, roughly: the rehearsal counts 22 for plain attention and
                    MLPs, 50 for delta rules, 75 for Mamba and 95 for Mamba-2
    HEAD_ROOM       a guess: context, NCCL's buffers and workspaces take 2 to 4 GB of 80, fragmentation the rest
    WAIT_S          time that a wait of the host costs: its device stands still until the next kernel is launched
    host            80%, a guess, of the 64 GB/s in each direction of PCIe 5.0 with 16 lanes (data sheets of H100, H200
                    and B200: 128 GB/s both ways), to pinned memory; GPUs that share a switch have less
    links           rates that a ring reaches over NVLink inside a node, and over one adapter of 400 Gbit/s a GPU
                    between nodes
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9
TFLOP = 1e12


@dataclass(frozen=True)
class GPU:
    """One kind of GPU. Bytes, FLOPs and seconds."""

    name: str
    capability: tuple[int, int]
    memory: float
    peak: float  # dense bf16
    products: float  # bf16, reached
    attention: float  # bf16, reached by FlashAttention 2
    bandwidth: float  # reached
    processors: int  # streaming multiprocessors
    clock: float  # cycles a second under load
    inside_node: float  # bytes a second that a ring sends, inside a node
    between_nodes: float
    node: int = 8  # GPUs of a node
    host: float = 50 * GB  # bytes a second between the GPU and its host, in each direction

    def rate(self, kind: str, maker: str) -> float | None:
        """Return the FLOPs a second of products or attention by a maker's kernel; None for other kinds of work."""
        rate = {"product": self.products, "attention": self.attention}.get(kind)
        if rate is None:
            return None
        return rate * GAINS.get(maker, 1.0)

    def link(self, ranks: int) -> float:
        """Return the bytes a second that each of this number of neighbouring ranks sends."""
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
        # FlashAttention 2 is not written for Blackwell; the same share of the peak is assumed as on Hopper
        GPU("b200", (10, 0), 180 * GB, 2250 * TFLOP, 1365 * TFLOP, 680 * TFLOP, 0.85 * 8000 * GB, 148, 1.8e9,
            720 * GB, 45 * GB),
    )
}  # fmt: skip

GAINS = {"flash-3": 1.6, "flash-4": 1.5, "fp8": 1.7}
"""Factors of the rate of attention by FlashAttention 2, or of products in bf16."""
HEAD_ROOM = 0.1
"""Share of a GPU's memory that `inspect --fit` leaves for buffers and other memory outside tensors."""
UNSEEN = (
    "CUDA's context and libraries (0.5 to 1 GB), NCCL's buffers, cuBLAS's workspaces, fragmentation of the allocator"
)
LAUNCH_S = 6e-6
BESIDE_S = 29e-6
LAUNCHES = 50
WAIT_S = 25e-6
