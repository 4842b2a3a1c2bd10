"""Observations of a real engine and a real learner on one GPU, each function in a process of its own.

`python probes.py NAME FILE SETTINGS` writes the observations of one function as JSON. The process is prepared as a
worker of Ray Train is.
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lone_process import lone_process_group

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import Config
from grpo_ray.device import select_device

MOVES = (0.01, 0.1, 1.0)
"""Distances by which the learner's weights move away from the engine's, in standard deviations of the weights."""


LEARNED = 16
"""Completions of which gradients are computed."""


class Pair:
    """A learner with its engine, and prompts."""

    def __init__(self, config: Config) -> None:
        import torch

        from grpo_ray.data.arithmetic import arithmetic_problems
        from grpo_ray.learner.learner import build_learner
        from grpo_ray.models.tokenizer import tokenize_prompts

        self.learner = build_learner(config, model_path=config.model.path, output_dir=tempfile.mkdtemp(), problems=[])
        self.engine, self.device = self.learner.engine, self.learner.accelerator.device
        problems = itertools.islice(arithmetic_problems("heldout"), config.sizes.completions_per_step)
        self.prompts = tokenize_prompts(self.learner.processing_class, [each.prompt for each in problems], {})
        self.random = torch.Generator(self.device).manual_seed(0)

    def generate(self) -> tuple[list[list[int]], list[list[float | None]]]:
        """Generate one completion of each prompt, always with the same seeds; return tokens and log-probabilities."""
        self.engine.llm.reset_prefix_cache()  # a cached prompt may be rounded differently
        requests = [self.engine.training_sampling | {"seed": seed} for seed in range(len(self.prompts))]
        completions = self.engine.run_requests(self.prompts, requests)
        return [each.token_ids for each in completions], [each.logps for each in completions]

    def batch_of(self, completions: list[list[int]], logps: list[list[float | None]] | None = None) -> Any:
        """Return the learner's batch of some completions; without log-probabilities of the engine they are 0."""
        from grpo_ray.learner.rollouts.rollout import Completions

        known = logps or [[0.0] * len(ids) for ids in completions]
        return self.learner.collector.padding.columns(Completions(self.prompts, completions, known))

    def sequences(self, completions: list[list[int]]) -> tuple[Any, Any, Any]:
        """Return ids and mask of the first LEARNED prompts with their completions, (B, L), and the completions' (B, T).

        Only some, because the activations of all would need a large GPU.
        """
        import torch

        batch = {name: each[:LEARNED] for name, each in self.batch_of(completions).items()}
        ids, mask = (
            torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], dim=1) for kind in ("ids", "mask")
        )
        return ids, mask, batch["completion_mask"]

    def gap(self, completions: list[list[int]], logps: list[list[float | None]]) -> dict[str, Any]:
        """Compare the engine's log-probabilities with the learner's, as the proof of a weight sync does."""
        from grpo_ray.errors import SyncError
        from grpo_ray.inference.sync_proof import measure_logprob_gap

        batch = self.batch_of(completions, logps)
        with self.learner.accelerator.autocast():  # which training wraps the model in
            learner_logps, mask = self.learner.logps(batch), batch["completion_mask"]
        engine_logps = batch["sampling_per_token_logps"]
        gap = measure_logprob_gap(learner_logps, engine_logps, mask, self.learner.accelerator)
        observed = {"mean": gap.mean, "max": gap.max, "tokens": gap.tokens, "proven": True}
        try:
            self.engine.prove_sync(learner_logps, engine_logps, mask, step=0)
        except SyncError:
            observed["proven"] = False
        return observed

    def move(self, distance: float) -> None:
        """Move each matrix that is trained, or by an adapter each matrix that has one, in standard deviations."""
        import torch

        weights = dict(self.learner.model.named_parameters())
        with torch.no_grad():
            for name, weight in weights.items():
                if not weight.requires_grad or weight.dim() != 2 or "lora_A" in name:
                    continue
                size = weight.std()
                if "lora_B" in name:  # begins as zero; the policy moves by scale x B A, a sum over the rank
                    lora, first = self.learner.config.model.lora, weights[name.replace("lora_B", "lora_A")]
                    assert lora is not None
                    size = self.learner.model.config.initializer_range / (lora.alpha / lora.rank**0.5 * first.std())
                weight.add_(distance * size * torch.randn(weight.shape, generator=self.random, device=weight.device))


def used_bytes(device: Any) -> int | None:
    """Return the memory in use on the GPU; None on the CPU."""
    import torch

    if device.type == "cpu":
        return None
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def observe_sync(config: Config) -> dict[str, Any]:
    """Return gaps with right weights, with stale ones, and after the next sync; memory between generations."""
    pair = Pair(config)
    observed: dict[str, Any] = {"tolerance": pair.engine.logprob_tolerance, "dtype": config.dtype}
    observed["sleeps"] = pair.engine.enable_sleep_mode
    pair.engine.sync_weights()
    first = pair.generate()
    observed["right"] = pair.gap(*first)
    observed["lengths"] = sorted(map(len, first[0]))
    observed["used between generations"] = used_bytes(pair.device)
    observed["repeated"] = pair.generate()[0] == first[0]
    # An engine that has slept gets the weights before it generates, so none of its weights can be stale.
    if not observed["sleeps"]:
        observed["stale"] = []
        for distance in MOVES:
            pair.move(distance)
            observed["stale"].append({"distance": distance, **pair.gap(*pair.generate())})
    else:
        pair.move(MOVES[-1])
    pair.engine.sync_weights()
    fresh = pair.generate()
    observed["fresh"] = pair.gap(*fresh)
    observed["changed"] = fresh[0] != first[0]
    return observed


def observe_ahead(config: Config) -> dict[str, Any]:
    """Return completions that are generated in a thread while the learner works, compared with others."""
    import torch

    from grpo_ray.inference.vllm_internals import runner_number
    from grpo_ray.learner.forward_pass import score_tokens
    from grpo_ray.learner.rollouts.bounded_staleness import run_in_thread

    pair = Pair(config)
    pair.engine.sync_weights()
    before = pair.generate()
    again = pair.generate()
    ids, mask, counted = pair.sequences(before[0])
    learner = pair.learner
    layout: Any = learner.savings.layout

    def learn() -> None:
        logps, _ = score_tokens(layout, learner.model, ids, mask, counted.size(1), learner.accelerator.autocast())
        (logps * counted).sum().backward()

    stream = torch.cuda.Stream(pair.device) if pair.device.type == "cuda" else None
    pending = run_in_thread(pair.generate, stream)
    passes = 0
    while not pending.done() or not passes:
        learn()
        passes += 1
    learner.model.zero_grad()
    ahead = pending.result()
    return {
        "model runner": runner_number(pair.engine.llm),
        "repeated": again[0] == before[0],
        "same completions": sum(a == b for a, b in zip(ahead[0], before[0], strict=True)) / len(before[0]),
        "gap": pair.gap(*ahead),
        "passes of the learner meanwhile": passes,
    }


def observe_packing(config: Config) -> dict[str, Any]:
    """Return errors of gradients in bfloat16, of packed and of padded rows, relative to those in float32."""
    from contextlib import nullcontext

    import torch

    from grpo_ray.learner.attention import VARLEN, packs_rows, register_varlen
    from grpo_ray.learner.forward_pass import score_tokens
    from grpo_ray.learner.trl_internals import attention_of

    pair = Pair(config)
    pair.engine.sync_weights()
    ids, mask, counted = pair.sequences(pair.generate()[0])
    weight = counted / counted.sum()
    weight[::2] *= -1  # advantages of 1 and -1
    learner, model = pair.learner, pair.learner.model
    if pair.device.type == "cpu":  # torch's kernel runs on GPUs only
        from varlen_reference import varlen_by_definition

        register_varlen(varlen_by_definition)
        model.set_attn_implementation(VARLEN)

    def gradient(layout: Any, autocast: Any) -> torch.Tensor:
        logps, _ = score_tokens(layout, model, ids, mask, counted.size(1), autocast)
        model.zero_grad()
        (logps * weight).sum().backward()
        return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])

    observed: dict[str, Any] = {"attention": attention_of(model), "packs": packs_rows(model)}
    packed = gradient("packed", learner.accelerator.autocast())
    model.set_attn_implementation("sdpa")
    padded = gradient("shifted", learner.accelerator.autocast())
    exact = gradient("shifted", nullcontext())
    size = exact.norm()
    return observed | {
        "tokens": int(mask.sum()),
        "error of packed rows": ((packed - exact).norm() / size).item(),
        "error of padded rows": ((padded - exact).norm() / size).item(),
    }


PROBES: dict[str, Callable[[Config], dict[str, Any]]] = {
    "sync": observe_sync,
    "ahead": observe_ahead,
    "packing": observe_packing,
}


def observe(rank: int, name: str, settings: Sequence[str]) -> dict[str, Any]:
    """Return the observations of a function, in this process, which is the only worker."""
    config = load_config(None, settings)
    select_device(config.cluster.use_gpu)
    from grpo_ray.driver.trainer import torch_config

    with lone_process_group(torch_config(config).backend):
        return PROBES[name](config)


def main() -> None:
    name, file, settings = sys.argv[1:]
    Path(file).write_text(json.dumps(observe(0, name, json.loads(settings))))


if __name__ == "__main__":
    main()
