"""AdamW with a gradient clip that refuses what is not finite, and learning rates that are functions of the step."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sao.observe.metrics import Metric

Decay = Literal["none", "linear", "cosine"]

Progress = Callable[[int, int, dict[str, Metric]], None]
"""Called after an update with the updates done, those in all, and the metrics of this one."""


def learning_rate(
    peak: float, step: int, *, warmup_steps: int, decay: Decay = "none", total_steps: int | None = None
) -> float:
    """Rate of update `step` (0, 1, ...): a linear rise to `peak`, reached at step warmup_steps - 1, then a decay to 0.

    Depends on nothing but its inputs, so that a resumed run obeys a rate that was changed in its configuration.
    A decay needs `total_steps`; the rate would be 0 at that step.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if decay == "none":
        return peak
    if total_steps is None:
        raise ValueError(f"decay {decay!r} needs the total number of steps")
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return peak * (1 - progress if decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOutcome:
    """What became of one optimiser step."""

    grad_norm: float
    """Norm of the whole gradient before the clip."""
    applied: bool
    """False where the gradient was not finite: the weights and moments are as they were."""


class Optimiser:
    """AdamW over the parameters that require a gradient; fp32 copies are kept of those in a lower precision.

    Weight decay spares vectors (norms, biases). Its state is a flat mapping of tensors, named after the parameters.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        grad_clip: float,
    ) -> None:
        self._parameters = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        # An update of 1e-6 of a bf16 weight rounds to nothing, so steps are taken on an fp32 copy.
        self._copies = {
            name: nn.Parameter(parameter.detach().float().clone())
            for name, parameter in self._parameters.items()
            if parameter.dtype is not torch.float32
        }
        stepped = {name: self._copies.get(name, parameter) for name, parameter in self._parameters.items()}
        self._stepped = stepped
        self._grad_clip = grad_clip
        groups = [
            {"params": [p for p in stepped.values() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in stepped.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW([group for group in groups if group["params"]], betas=betas, fused=True)

    def refresh(self) -> None:
        """Take the weights as they are now: something else has changed them."""
        with torch.no_grad():
            for name, copy in self._copies.items():
                copy.copy_(self._parameters[name])

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def step(self, rate: float) -> UpdateOutcome:
        """Clip the gradient, step at `rate`, forget the gradient. One that is not finite changes nothing."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()  # Of all shards, so that all ranks agree on what follows.
        if not bool(torch.isfinite(norm)):
            self.zero_grad()
            return UpdateOutcome(grad_norm=float(norm), applied=False)
        torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._grad_clip, norm)
        for name, copy in self._copies.items():
            gradient = self._parameters[name].grad
            copy.grad = None if gradient is None else gradient.float()
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        with torch.no_grad():
            for name, copy in self._copies.items():
                self._parameters[name].copy_(copy)
                copy.grad = None
        self.zero_grad()
        return UpdateOutcome(grad_norm=float(norm), applied=True)

    def state(self) -> dict[str, Tensor]:
        """Moments, step counts and fp32 copies."""
        tensors = {f"{name}.copy": copy.detach() for name, copy in self._copies.items()}
        for name, parameter in self._stepped.items():
            for key, tensor in self._adam.state.get(parameter, {}).items():
                tensors[f"{name}.{key}"] = tensor
        return tensors

    def parameter_of(self, full_name: str, shape: tuple[int, ...]) -> Tensor:
        """The parameter whose state this is. Raises ValueError for a state of no such parameter, or of this shape."""
        name, _, key = full_name.rpartition(".")
        parameter = self._stepped.get(name)
        if parameter is None or key not in ("copy", "step", "exp_avg", "exp_avg_sq"):
            raise ValueError(f"optimiser state has {full_name!r}, which belongs to no trained parameter")
        if key != "step" and shape != tuple(parameter.shape):
            shapes = f"{shape}, its parameter {tuple(parameter.shape)}"
            raise ValueError(f"optimiser state {full_name!r} has shape {shapes}")
        return parameter

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave, held as the parameters are. Raises as `parameter_of`."""
        for full_name, tensor in tensors.items():
            self.parameter_of(full_name, tuple(tensor.shape))
        self._adam.state.clear()
        for full_name, tensor in tensors.items():
            name, _, key = full_name.rpartition(".")
            parameter = self._stepped[name]
            if key == "copy":
                parameter.data.copy_(tensor)
            else:
                self._adam.state[parameter][key] = tensor.to(parameter.device, torch.float32, copy=True)
