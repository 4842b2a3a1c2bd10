"""Faults of the weight sync, planted into a real engine and a real learner, for `test_weight_proof.py`."""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lone_process import lone_process_group

Fault = Callable[[], None]


@lone_process_group()
def observe_faults(policy: str, settings: Sequence[str]) -> dict[str, Any]:
    """Plant each fault into the sync after one optimizer step at a learning rate of 1e-6.

    Returns:
        `errors`: error of the proof by fault, "" without one; `gaps`: mean difference of the log-probabilities of
        engine and learner by fault, nats; `notes`: lines about weights that cannot be compared.
    """
    import torch
    from sampled import sample

    from grpo_ray.config.loader import load_config
    from grpo_ray.data.arithmetic import arithmetic_problems
    from grpo_ray.errors import SyncError
    from grpo_ray.inference import cpu_packing, local_engine
    from grpo_ray.inference.engine import Engine
    from grpo_ray.inference.vllm_internals import engine_model
    from grpo_ray.learner.hooks import LearnerHooks
    from grpo_ray.learner.learner import build_learner
    from grpo_ray.models.tokenizer import tokenize_prompts

    cpu_packing.is_faster_packed = lambda weight: True  # the policy's layers are too small to be packed otherwise
    config = load_config(
        None, [f"model.path={policy}", "grpo.max_completion_length=24", "cluster.num_workers=1", *settings]
    )
    notes: list[str] = []
    learner = build_learner(
        config,
        model_path=policy,
        output_dir=tempfile.mkdtemp(),
        problems=[],
        make_hooks=lambda _: LearnerHooks(notify=notes.append),
    )
    engine, model = learner.engine, learner.model
    errors: dict[str, str] = {}
    gaps: dict[str, float] = {}
    proofs: list[int] = []
    trained = [each for each in model.parameters() if each.requires_grad]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # which begins as zero
                parameter.normal_(std=0.02)
    optimizer = torch.optim.AdamW(trained, lr=1e-6, weight_decay=0.0)
    problems = itertools.islice(arithmetic_problems("heldout"), 12)
    prompts = tokenize_prompts(learner.processing_class, [problem.prompt for problem in problems], {})
    prompts = [prompt * 4 for prompt in prompts]  # whole blocks of the prefix cache

    def step() -> None:
        """Move each trained weight by the learning rate, in a random direction."""
        for each in trained:
            each.grad = torch.randn_like(each)
        optimizer.step()

    def mean_gap() -> float:
        """Generate, and compare log-probabilities; the learner computes one sequence at a time."""
        completions, of_engine = sample(engine, prompts, range(len(prompts)))
        total, tokens = 0.0, 0
        for prompt, completion, sampled in zip(prompts, completions, of_engine, strict=True):
            batch = {
                "prompt_ids": torch.tensor([prompt]),
                "completion_ids": torch.tensor([completion]),
                "prompt_mask": torch.ones(1, len(prompt), dtype=torch.long),
                "completion_mask": torch.ones(1, len(completion), dtype=torch.long),
            }
            with learner.accelerator.autocast(), torch.no_grad():
                logps = learner.logps(batch)[0]
            total += (logps - torch.tensor(sampled)).abs().sum().item()
            tokens += len(completion)
        return total / tokens

    def plant(name: str, fault: Fault) -> None:
        """Sync and generate without a fault, take a step, then sync with the fault."""
        before = engine.proofs
        engine.sync_weights()
        proofs.append(engine.proofs - before)
        mean_gap()
        step()
        errors[name] = ""
        try:
            fault()
            engine.prove_weights()
        except SyncError as error:
            errors[name] = str(error)
        gaps[name] = mean_gap()

    def sending(change: Callable[[str, Any], tuple[str, Any]]) -> Fault:
        """Return a sync in which each weight is changed on its way to the engine."""
        whole = Engine._iter_named_params

        def fault() -> None:
            Engine._iter_named_params = lambda self: itertools.starmap(change, whole(self))  # type: ignore[method-assign]
            try:
                engine.sync_weights()
            finally:
                Engine._iter_named_params = whole  # type: ignore[method-assign]

        return fault

    def then(change: Callable[[dict[str, Any]], None]) -> Fault:
        """Return a sync after which the engine's parameters are changed."""

        def fault() -> None:
            engine.sync_weights()
            change({name: each.data for name, each in engine._parameters().items()})

        return fault

    def swap_queries_and_keys(parameters: dict[str, Any]) -> None:
        layer = engine_model(engine.llm).model.layers[0].self_attn
        fused, queries, keys = parameters["model.layers.0.self_attn.qkv_proj.weight"], layer.q_size, layer.kv_size
        rows = fused[: queries + keys]
        rows.copy_(torch.cat([rows[queries:], rows[:queries]]))

    def flip_a_bit(parameters: dict[str, Any]) -> None:
        norm = parameters["model.norm.weight"]
        norm.view({2: torch.int16, 4: torch.int32}[norm.element_size()])[3] ^= 1

    def without(name: str, owner: Any, replacement: Callable[..., Any]) -> Fault:
        """Return a sync during which a function of ours is replaced."""
        kept = getattr(owner, name)

        def fault() -> None:
            setattr(owner, name, replacement)
            try:
                engine.sync_weights()
            finally:
                setattr(owner, name, kept)

        return fault

    def sent_without_adapter(self: Any) -> Iterator[tuple[str, Any]]:
        for name, weight in model.get_base_model().named_parameters():
            if "lora_" not in name:
                yield name.replace(".base_layer", ""), weight.data

    other = {"layers.0": "layers.1", "layers.1": "layers.0"}
    frozen: dict[str, Any] = {}

    def freeze() -> None:
        frozen.update({name: weight.clone() for name, weight in engine._iter_named_params()})

    pack, packs = local_engine.pack_on_next_use, itertools.count()
    faults: dict[str, Fault] = {
        "none": engine.sync_weights,
        "stale step": lambda: None,
        "stale layer": sending(lambda name, w: (name, frozen[name] if "layers.1." in name else w)),
        "swapped layers": sending(
            lambda name, w: (next((name.replace(a, b) for a, b in other.items() if a in name), name), w)
        ),
        "swapped queries and keys": then(swap_queries_and_keys),
        "one bit": then(flip_a_bit),
        "stale packed layers": without(
            "pack_on_next_use", local_engine, lambda layer: pack(layer) if next(packs) % 2 else None
        ),
        "stale prefix cache": without("empty_prefix_cache", engine, lambda: None),
    }
    if config.model.lora:
        faults["missing adapter"] = without("_iter_named_params", Engine, sent_without_adapter)
    freeze()
    for name, fault in faults.items():
        plant(name, fault)
    return {"errors": errors, "gaps": gaps, "notes": notes, "proofs": proofs, "tolerance": engine.logprob_tolerance}
