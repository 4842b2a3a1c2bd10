"""One optimizer step of one parameter, for tests of `NonFiniteMonitor` without a trainer."""

from types import SimpleNamespace

import torch

from grpo_ray.resilience.nonfinite import NonFiniteMonitor


class Scaler:
    """Loss scaler of float16 training with a fixed scale."""

    def __init__(self, scale: float):
        self.scale = scale

    def get_scale(self) -> float:
        return self.scale


def check_step(
    monitor: NonFiniteMonitor, loss: float, gradient: list[float], scaler: Scaler | None = None
) -> torch.Tensor:
    """Pass one step of one parameter through the monitor; return the parameter."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor(gradient)
    optimizer = torch.optim.AdamW([weight])
    optimizer.scaler = scaler  # accelerate's optimizer has one, or None
    monitor.observe_loss(torch.tensor(loss))
    args, state = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(global_step=0)
    monitor.on_pre_optimizer_step(args, state, None, optimizer=optimizer)
    return weight
