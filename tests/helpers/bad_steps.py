"""One optimizer step of one parameter, for tests of BadNumbers without a trainer."""

from types import SimpleNamespace
from typing import Any

import torch


class Scaler:
    """A loss scaler of float16 at a given scale."""

    def __init__(self, scale: float):
        self.scale = scale

    def get_scale(self) -> float:
        return self.scale


def check_step(bad_numbers: Any, loss: float, gradient: list[float], scaler: Scaler | None = None) -> torch.Tensor:
    """Have BadNumbers check one step of one parameter, and return that parameter."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor(gradient)
    optimizer = torch.optim.AdamW([weight])
    optimizer.scaler = scaler  # accelerate's optimizer has one, or None
    bad_numbers.see_loss(torch.tensor(loss))
    args, state = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(global_step=0)
    bad_numbers.on_pre_optimizer_step(args, state, None, optimizer=optimizer)
    return weight
