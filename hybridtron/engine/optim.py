"""AdamW over fp32 master weights, with the treatment of each weight taken from the parameter table.

A weight that is computed in bf16 has an fp32 master that the optimizer updates, and its gradients are added up in
fp32; a weight kept in fp32 is its own master. Only weights that the table marks for it are decayed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridtron.config.schema import OptimConfig
from hybridtron.model.lm import LanguageModel


class Optimizer:
    """One step: clip the accumulated gradients by their norm, update the masters, copy them into the model."""

    def __init__(self, model: LanguageModel, config: OptimConfig) -> None:
        self.clip = config.clip
        self.weights = dict(model.named_parameters())
        self.masters = {name: _master(weight) for name, weight in self.weights.items()}
        decayed = [m for name, m in self.masters.items() if model.table[name].decay]
        others = [m for name, m in self.masters.items() if not model.table[name].decay]
        self.adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True,
        )

    def step(self, lr: float) -> tuple[float, bool]:
        """Update with this learning rate; returns the gradient norm before clipping and whether the step was taken.

        A step whose gradients are not finite is refused, and leaves weights and moments as they were.
        """
        grads = [master.grad for master in self.masters.values() if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        grad_norm = norm.item()  # the one place of a step that waits for the device
        accepted = grad_norm < float("inf")
        if accepted:
            torch.nn.utils.clip_grads_with_norm_(list(self.masters.values()), self.clip, norm)
            for group in self.adam.param_groups:
                group["lr"] = lr
            self.adam.step()
            self._copy_masters()
        self.adam.zero_grad()
        return grad_norm, accepted

    def norms(self) -> dict[str, float]:
        """Weight and gradient norms of each layer, and of the embedding, final norm and head."""
        layers: dict[str, list[Tensor]] = {}
        for name, master in self.masters.items():
            parts = name.split(".")
            layers.setdefault(".".join(parts[:2] if parts[0] == "layers" else parts[:1]), []).append(master)
        norms = {}
        for layer, masters in layers.items():
            norms[f"{layer}.weight_norm"] = torch.nn.utils.get_total_norm(masters).item()
            grads = [master.grad for master in masters if master.grad is not None]
            norms[f"{layer}.grad_norm"] = torch.nn.utils.get_total_norm(grads).item()
        return norms

    def state(self) -> dict[str, dict[str, Tensor]]:
        """By the weights' names: `exp_avg`, `exp_avg_sq`, and `master` where that is not the weight itself."""
        moments = {
            kind: {name: self._moments(master)[kind] for name, master in self.masters.items()}
            for kind in ("exp_avg", "exp_avg_sq")
        }
        masters = {name: master for name, master in self.masters.items() if master is not self.weights[name]}
        return {"master": masters, **moments}

    def load_state(self, state: dict[str, dict[str, Tensor]], steps: int) -> None:
        """Take over masters and moments after `steps` accepted steps; the weights themselves are already in place."""
        for name, master in state.get("master", {}).items():
            self.masters[name].data.copy_(master)
        for name, master in self.masters.items():
            moments = self._moments(master)
            moments["exp_avg"].copy_(state["exp_avg"][name])
            moments["exp_avg_sq"].copy_(state["exp_avg_sq"][name])
            moments["step"].fill_(steps)

    @property
    def accepted_steps(self) -> int:
        return int(self._moments(next(iter(self.masters.values())))["step"].item())

    def _moments(self, master: Tensor) -> dict[str, Tensor]:
        """Adam's own state of one weight, made here where no step has made it yet."""
        state = self.adam.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        return state

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for name, weight in self.weights.items():
            if self.masters[name] is not weight:
                weight.copy_(self.masters[name])


def _master(weight: Tensor) -> Tensor:
    """The fp32 weight that the optimizer updates. Gradients of a bf16 weight move into it as soon as they are made."""
    if weight.dtype in (torch.float32, torch.float64):
        return weight
    master = weight.detach().float().requires_grad_()

    def add_gradient(weight: Tensor) -> None:
        assert weight.grad is not None
        gradient = weight.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        weight.grad = None

    weight.register_post_accumulate_grad_hook(add_gradient)
    return master
