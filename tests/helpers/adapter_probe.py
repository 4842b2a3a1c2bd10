"""A real engine that receives adapters of many types in turn, for `test_adapters.py`."""

import copy
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lone_process import lone_process_group

STEPS, SYNCS = 3, 100


@lone_process_group()
def observe_adapters(policy: str, dtype: str, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Train each adapter for STEPS steps, each followed by a sync, then sync SYNCS times more.

    Args:
        policy: embedded policy; its output layer is separated from the embedding, so that both kinds of adapters fit.

    Returns:
        By name: `gaps`, mean difference of the log-probabilities of engine and learner after each step, nats; `moved`,
        that of the policy before and after the steps, by the learner; `stale`, the error of the proof after a step that
        was not sent; `kept`, whether all tensors of the learner are the same bits after the syncs.
    """
    import torch
    from adapters import adapted, load, settings_of, state
    from sampled import batch_of, sample
    from trl.trainer.utils import add_fused_lm_head

    from grpo_ray.config.loader import load_config
    from grpo_ray.config.peft_fields import starts_elsewhere
    from grpo_ray.data.arithmetic import arithmetic_problems
    from grpo_ray.errors import SyncError
    from grpo_ray.learner.learner import build_learner
    from grpo_ray.models.tokenizer import load_tokenizer, tokenize_prompts

    folder = Path(tempfile.mkdtemp())
    load(policy, tied=False).save_pretrained(folder)
    load_tokenizer(policy).save_pretrained(folder)
    settings = ["grpo.max_completion_length=16", "cluster.num_workers=1", f"model.dtype={dtype}"]
    config = load_config(None, [f"model.path={folder}", *settings])
    learner = build_learner(config, model_path=str(folder), output_dir=tempfile.mkdtemp(), problems=[])
    engine = learner.engine
    problems = itertools.islice(arithmetic_problems("heldout"), 8)
    prompts = tokenize_prompts(learner.processing_class, [problem.prompt for problem in problems], {})
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        base = load(folder, dtype, tied=False)
        add_fused_lm_head(base, temperature=learner.temperature, outputs=("log_probs", "entropy"))
        model = adapted(base, name)
        learner.model = engine.model = model
        trained = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
        generator = torch.Generator().manual_seed(1)

        def logps(completions: Any) -> torch.Tensor:
            with learner.accelerator.autocast(), torch.no_grad():
                return learner.logps(batch_of(learner, prompts, completions))

        def gap(completions: Any, others: Any) -> float:
            batch = batch_of(learner, prompts, completions, others)
            mask = batch["completion_mask"].bool()
            return float((logps(completions) - batch["sampling_per_token_logps"])[mask].abs().mean())

        def step() -> None:
            for each in trained:
                each.grad = torch.randn(each.shape, generator=generator)
            optimizer.step()

        engine.sync_weights()
        first, of_engine = sample(engine, prompts, range(len(prompts)))
        before, gaps = logps(first), [gap(first, of_engine)]
        for _ in range(STEPS):
            step()
            engine.sync_weights()
            gaps.append(gap(*sample(engine, prompts, range(len(prompts)))))
        moved = float((logps(first) - before).abs().mean())
        tensors, stale = state(model), ""
        kept = copy.deepcopy(tensors)
        for _ in range(SYNCS):
            engine.sync_weights()
        is_kept = all(torch.equal(kept[each], tensor) for each, tensor in state(model).items())
        step()
        try:
            engine.prove_weights()
        except SyncError as error:
            stale = str(error)
        found[name] = {"gaps": gaps, "moved": moved, "stale": stale, "kept": is_kept}
        found[name]["elsewhere"] = starts_elsewhere(settings_of(name))
    return found
