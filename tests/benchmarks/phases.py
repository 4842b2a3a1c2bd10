"""Where a peer's steps go: seconds of each phase in this process, the inner ones not counted in the outer ones.

The same methods are timed in every peer; those that only ours has are timed there. Waiting for other workers is part of
the phase that waits: of `gather` and `backward` above all. The rest, up to the step's wall-clock time, is `other`.
"""

import functools
import importlib
import time
from collections import defaultdict
from typing import Any

METHODS = {
    "trl.generation.vllm_generation:VLLMGeneration.generate": "generate",
    "trl.generation.vllm_generation:VLLMGeneration.sync_weights": "sync",
    "grpo_ray.inference.engine:Engine.generate": "generate",
    "grpo_ray.inference.engine:Engine.sync_weights": "sync",
    "grpo_ray.inference.engine:Engine.prove_sync": "proof",
    "grpo_ray.training.exact_savings:ExactSavings._prepare_inputs": "arranging",
    "grpo_ray.resilience.nonfinite:NonFiniteMonitor.on_pre_optimizer_step": "finite numbers",
    "grpo_ray.training.report_callback:ReportCallback.on_step_end": "stop or leave",
    "grpo_ray.training.report_callback:ReportCallback.on_log": "report",
    "trl:GRPOTrainer._generate_single_turn": "generate",
    "trl:GRPOTrainer._calculate_rewards": "rewards",
    "trl:GRPOTrainer._generate_and_score_completions": "around generation",
    "trl:GRPOTrainer._get_per_token_logps_and_entropies": "forward",
    "trl:GRPOTrainer._compute_loss": "loss",
    "accelerate:Accelerator.backward": "backward",
    "accelerate:Accelerator.clip_grad_norm_": "clip",
    "accelerate:Accelerator.gather": "gather",
}
"""Method -> its phase. A forward pass outside of the loss is `logps`."""


class Phases:
    """Seconds spent so far in each phase, from `watch` on."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = defaultdict(float)
        self._within: list[str] = []
        self._since = 0.0

    def watch(self) -> None:
        """Time the methods above, in every object of their classes."""
        from torch.optim import optimizer

        self._since = time.perf_counter()
        # An optimizer's `step` is wrapped by its scheduler, so that of the class is not asked any more.
        optimizer.register_optimizer_step_pre_hook(lambda *_: self._begin("optimizer"))
        optimizer.register_optimizer_step_post_hook(lambda *_: self._end())
        for path, phase in METHODS.items():
            module, _, name = path.partition(":")
            owner, _, method = name.partition(".")
            try:
                held: Any = getattr(importlib.import_module(module), owner)
            except ImportError:  # a peer without vLLM or Ray
                continue
            setattr(held, method, self._timed(getattr(held, method), phase))

    def _turn(self) -> None:
        now = time.perf_counter()
        self.totals[self._within[-1] if self._within else "other"] += now - self._since
        self._since = now

    def _begin(self, phase: str) -> None:
        self._turn()
        self._within.append(phase)

    def _end(self) -> None:
        self._turn()
        self._within.pop()

    def snapshot(self) -> dict[str, float]:
        """Seconds of each phase up to now."""
        self._turn()
        return dict(self.totals)

    def _timed(self, function: Any, phase: str) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._begin("logps" if phase == "forward" and "loss" not in self._within else phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._end()

        return timed
