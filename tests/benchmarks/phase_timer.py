"""Timer of the phases of a peer's steps in this process; a nested phase is not counted in the outer one.

The same methods are timed in every peer, as far as it has them. Waiting for other workers is part of the phase that
waits, mostly `gather` and `backward`. The rest of the step's wall-clock time is `other`. On a GPU a phase ends when its
work on the device is done.
"""

import functools
import importlib
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

METHODS = {
    "trl.generation.vllm_generation:VLLMGeneration.generate": "generate",
    "trl.generation.vllm_generation:VLLMGeneration.sync_weights": "sync",
    "grpo_ray.inference.engine:Engine.run_requests": "generate",
    "grpo_ray.inference.engine:Engine.sync_weights": "sync",
    "grpo_ray.inference.engine:Engine.prove_sync": "proof",
    "grpo_ray.learner.learner:Learner._prepare_inputs": "arranging",
    "grpo_ray.learner.rollouts.collector:Collector.collect": "around generation",
    "grpo_ray.learner.rollouts.sampler:OnPolicySampler.sample": "generate",
    "grpo_ray.learner.rollouts.scoring:Scorer.score": "rewards",
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
"""Method -> its phase. A forward pass outside the loss is `logps`."""


class PhaseTimer:
    """Seconds spent in each phase since `watch`."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0
        self._wait_for_device: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """Patch the classes of `METHODS` so that their methods are timed."""
        import torch
        from torch.optim import optimizer

        if torch.cuda.is_initialized():
            self._wait_for_device = torch.cuda.synchronize
        self._since = time.perf_counter()
        # The scheduler wraps the `step` of the optimizer object, so a patched class method would not be called.
        optimizer.register_optimizer_step_pre_hook(lambda *_: self._begin("optimizer"))
        optimizer.register_optimizer_step_post_hook(lambda *_: self._end())
        for path, phase in METHODS.items():
            module, _, name = path.partition(":")
            owner, _, method = name.partition(".")
            try:
                cls: Any = getattr(importlib.import_module(module), owner)
            except ImportError:  # a peer without vLLM or Ray
                continue
            setattr(cls, method, self._timed(getattr(cls, method), phase))

    def _charge(self) -> None:
        self._wait_for_device()
        now = time.perf_counter()
        self.totals[self._open[-1] if self._open else "other"] += now - self._since
        self._since = now

    def _begin(self, phase: str) -> None:
        self._charge()
        self._open.append(phase)

    def _end(self) -> None:
        self._charge()
        self._open.pop()

    def snapshot(self) -> dict[str, float]:
        """Return the seconds of each phase so far."""
        self._charge()
        return dict(self.totals)

    def _timed(self, function: Any, phase: str) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._begin("logps" if phase == "forward" and "loss" not in self._open else phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._end()

        return timed
