"""Functions that torch.compile leaves alone, whether or not its compiler was imported before they were defined."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hybridtron.ops.dispatch import untraced


class Around(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return left_alone(x.sin()).cos()


@untraced
def left_alone(x: Tensor) -> Tensor:
    return x.tan()


def test_torch_compile_leaves_untraced_functions_alone() -> None:
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        graphs.append(
            [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]
            or [str(node.target) for node in graph.graph.nodes if node.op == "call_method"]
        )
        return graph

    model = Around()
    x = torch.rand(3)
    model.compile(backend=backend)
    assert torch.equal(model(x), x.sin().tan().cos())
    assert graphs == [["sin"], ["cos"]]
