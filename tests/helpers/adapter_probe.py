"""A real engine that receives adapters of many types in turn, for `test_adapters.py`."""

import copy
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lone_process import lone_process_group

STEPS, SYNCS = 3, 100


@dataclass
class Observation:
    """How an adapter did in the engine."""

    gaps: list[float]
    """Mean difference of the log-probabilities of engine and learner at the start and after each step, nats."""
    moved: float
    """The same of the learner before and after the steps."""
    is_kept: bool
    """True if all tensors of the learner are the same bits after SYNCS further syncs."""
    stale: str
    """Error of the proof after a step that was not sent."""
    of_other_base: str
    """Error of the proof after a change of one frozen weight, or of one code in four bits, that was not sent."""


@lone_process_group()
def observe_adapters(
    policy: str, dtype: str, names: Sequence[str], method: str | None = None
) -> dict[str, Observation]:
    """Train each adapter for STEPS steps at random, each followed by a sync, then sync SYNCS times more.

    Args:
        method: `model.quantization`.
        policy: embedded policy; its output layer is separated from the embedding, so that both kinds of adapters fit.
    """
    from adapters import load

    from grpo_ray.config.loader import load_config
    from grpo_ray.learner.learner import build_learner
    from grpo_ray.models.tokenizer import load_tokenizer

    folder = Path(tempfile.mkdtemp())
    load(policy, tied=False).save_pretrained(folder)
    load_tokenizer(policy).save_pretrained(folder)
    settings = ["grpo.max_completion_length=16", "cluster.num_workers=1", f"model.dtype={dtype}"]
    config = load_config(None, [f"model.path={folder}", *settings])
    learner = build_learner(config, model_path=str(folder), output_dir=tempfile.mkdtemp(), problems=[])
    return {name: Probe(learner, folder, dtype, name, method).observe() for name in names}


class Probe:
    """One adapter in a learner whose engine is running."""

    def __init__(self, learner: Any, folder: Path, dtype: str, name: str, method: str | None) -> None:
        import torch
        from adapters import adapted, load, settings_of
        from trl.trainer.utils import add_fused_lm_head

        from grpo_ray.data.arithmetic import arithmetic_problems
        from grpo_ray.models.quantized import kept_modules, quantize_policy
        from grpo_ray.models.tokenizer import tokenize_prompts

        base = load(folder, dtype, tied=False)
        if method:
            quantize_policy(base, method, kept_modules(settings_of(name)))
        add_fused_lm_head(base, temperature=learner.temperature, outputs=("log_probs", "entropy"))
        self.learner, self.model = learner, adapted(base, name)
        learner.model = learner.engine.model = self.model
        self.trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-2, weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(1)
        problems = itertools.islice(arithmetic_problems("heldout"), 8)
        self.prompts = tokenize_prompts(learner.processing_class, [problem.prompt for problem in problems], {})

    def observe(self) -> Observation:
        import torch
        from adapters import state

        engine = self.learner.engine
        engine.sync_weights()
        first, of_engine = self.sample()
        before, gaps = self.logps(first), [self.gap(first, of_engine)]
        for _ in range(STEPS):
            self.step()
            engine.sync_weights()
            gaps.append(self.gap(*self.sample()))
        moved = float((self.logps(first) - before).abs().mean())
        kept = copy.deepcopy(state(self.model))
        for _ in range(SYNCS):
            engine.sync_weights()
        is_kept = all(torch.equal(kept[name], tensor) for name, tensor in state(self.model).items())
        self.step()
        stale = self.refusal()
        engine.sync_weights()
        assert self.refusal() == ""
        with torch.no_grad():
            self.frozen().view(-1)[7] += 1
        return Observation(gaps, moved, is_kept, stale, self.refusal())

    def refusal(self) -> str:
        """Return the error of the proof; "" if engine and learner have the same weights."""
        from grpo_ray.errors import SyncError

        try:
            self.learner.engine.prove_weights()
        except SyncError as error:
            return str(error)
        return ""

    def frozen(self) -> Any:
        """Return a frozen weight, or the codes of one."""
        from grpo_ray.models.quantized import quantized_layers

        for _, layer in quantized_layers(self.model):
            return layer.codes.data
        return next(
            each.data for name, each in self.model.named_parameters() if "up_proj" in name and not each.requires_grad
        )

    def sample(self) -> Any:
        from sampled import sample

        return sample(self.learner.engine, self.prompts, range(len(self.prompts)))

    def logps(self, completions: Any) -> Any:
        import torch
        from sampled import batch_of

        with self.learner.accelerator.autocast(), torch.no_grad():
            return self.learner.logps(batch_of(self.learner, self.prompts, completions))

    def gap(self, completions: Any, of_engine: Any) -> float:
        from sampled import batch_of

        batch = batch_of(self.learner, self.prompts, completions, of_engine)
        difference = self.logps(completions) - batch["sampling_per_token_logps"]
        return float(difference[batch["completion_mask"].bool()].abs().mean())

    def step(self) -> None:
        """Move each trained weight, in a random direction."""
        import torch

        for each in self.trained:
            each.grad = torch.randn(each.shape, generator=self.generator)
        self.optimizer.step()
