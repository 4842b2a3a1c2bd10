"""Real learner and engine with tokens of older weights, and faults planted into their rounds."""

import itertools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from lone_process import lone_process_group

SETTINGS = [
    "cluster.num_workers=1", "grpo.prompts_per_step=4", "grpo.num_generations=2", "grpo.max_completion_length=24",
    "grpo.max_steps=6", "grpo.save_steps=100", "grpo.learning_rate=1e-2", "grpo.beta=0.0",
    "rewards.functions=['reward_spies:vary']", "heldout.score=correctness",
    # Longer than a block of the engine's cache, so that keys and values of older weights could be found there.
    "data.system_prompt='Add, subtract and multiply the numbers. Write the answer, and nothing else, in a box at the "
    "end of the last line.'",
]  # fmt: skip
"""Steps of eight completions. The weights move so far in a step that log-probabilities of two versions differ."""


def make_learner(policy: str, settings: Sequence[str], callback: Any = None) -> Any:
    """Return a real learner with its engine, on problems of the embedded dataset."""
    from grpo_ray.config.loader import load_config
    from grpo_ray.data.arithmetic import arithmetic_problems
    from grpo_ray.learner.hooks import LearnerHooks
    from grpo_ray.learner.learner import build_learner

    config = load_config(None, [f"model.path={policy}", *SETTINGS, *settings])
    assert config.data.system_prompt is not None
    system = config.data.system_prompt
    prompted = (each.with_system_prompt(system) for each in arithmetic_problems("train"))
    return build_learner(
        config,
        model_path=policy,
        output_dir=tempfile.mkdtemp(),
        problems=((problem, 0) for problem in itertools.islice(prompted, 200)),
        make_hooks=lambda _: LearnerHooks(callbacks=[] if callback is None else [callback]),
    )


@lone_process_group()
def observe_versions(policy: str, staleness: int) -> dict[str, Any]:
    """Train, and compute the log-probabilities of all tokens again with the saved weights of their versions.

    Returns:
        `gaps`: age of a token when it was trained on -> largest difference from the engine's log-probability, nats;
        `neighbours`: mean difference with the weights one step later; `rows`: age -> number of tokens; `logged`:
        metrics of each step.
    """
    import copy

    import torch
    from sampled import batch_of
    from transformers import TrainerCallback

    weights: dict[int, Any] = {}
    batches: dict[int, Any] = {}
    logged: list[dict[str, float]] = []

    class Keeper(TrainerCallback):
        """Copies the weights of each version, and the completions of each batch that is complete."""

        learner: Any

        def keep(self, step: int) -> None:
            weights[step] = copy.deepcopy(self.learner.model.state_dict())
            if (batch := self.learner.collector.sampler.open.get(step)) is not None:
                batches[step] = copy.deepcopy(batch)

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.keep(0)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.keep(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            logged.append(dict(logs))

    keeper = Keeper()
    learner = make_learner(policy, [f"rollout.max_staleness={staleness}"], keeper)
    keeper.learner = learner
    learner.train()
    gaps: dict[int, float] = defaultdict(float)
    neighbours: list[float] = []
    tokens: dict[int, int] = defaultdict(int)

    def logps(batch: Any, version: int) -> Any:
        learner.model.load_state_dict(weights[version])
        completions = [each.token_ids.tolist() for each in batch.rollouts]
        with torch.no_grad():
            return learner.logps(batch_of(learner, batch.prompt_ids, completions))

    for step, batch in batches.items():
        of_version = {version: logps(batch, version) for version in range(max(0, step - staleness), step + 1)}
        for row, rollout in enumerate(batch.rollouts):
            place = 0
            for version, count in rollout.runs:
                engine = torch.tensor(rollout.logps[place : place + count])
                own, later = (of_version[each][row, place : place + count] for each in (version, version + 1))
                age = step - version
                gaps[age] = max(gaps[age], (own - engine).abs().max().item())
                neighbours.append((later - engine).abs().mean().item())
                tokens[age] += count
                place += count
    return {
        "gaps": dict(gaps),
        "neighbours": sum(neighbours) / len(neighbours),
        "tokens": dict(tokens),
        "batches": sorted(batches),
        "logged": logged,
    }


Plant = Callable[[Any], None]


def _stop_proofs(engine: Any) -> None:
    """Leave out the checksums, so that only the probes are left."""
    engine._prove_weights = lambda: setattr(engine, "proofs", engine.proofs + 1)


def _old_layer(engine: Any) -> None:
    whole = type(engine)._iter_named_params
    frozen: dict[str, Any] = {}

    def sent() -> Any:
        for name, weight in whole(engine):
            yield name, frozen.setdefault(name, weight.clone()) if "layers.1." in name else weight

    engine._iter_named_params = sent


def _old_version(engine: Any) -> None:
    sync = type(engine).sync_weights
    calls = itertools.count()

    def first_only() -> None:
        if next(calls) == 0:
            sync(engine)
        else:
            engine.empty_prefix_cache()

    engine.sync_weights = first_only


def _kept_cache(engine: Any) -> None:
    engine.empty_prefix_cache = lambda: None


def _mixed_versions(engine: Any) -> None:
    """Change a weight of the engine in the middle of each round after the first."""
    from grpo_ray.inference.vllm_internals import engine_model

    step, run, passes, calls = engine.llm.llm_engine.step, type(engine).run_requests, itertools.count(), [0]

    def run_requests(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes, calls[0] = itertools.count(), calls[0] + 1
        return run(engine, *args, **kwargs)

    def step_and_change() -> Any:
        if next(passes) == 3 and calls[0] > 1:
            dict(engine_model(engine.llm).named_parameters())["model.norm.weight"].data.mul_(1.5)
        return step()

    engine.run_requests, engine.llm.llm_engine.step = run_requests, step_and_change


FAULTS: dict[str, tuple[Plant, ...]] = {
    "none": (),
    "old layer": (_old_layer,),
    "old layer, without checksums": (_stop_proofs, _old_layer),
    "old version": (_old_version,),
    "old version, without checksums": (_stop_proofs, _old_version),
    "kept cache": (_kept_cache,),
    "kept cache, without checksums": (_stop_proofs, _kept_cache),
    "mixed versions in a segment": (_mixed_versions,),
}
"""Fault -> changes of the engine before the first step."""


@lone_process_group()
def observe_stale_faults(policy: str, name: str) -> str:
    """Train with a planted fault; return the error that ended the run, "" without one."""
    from grpo_ray.errors import SyncError

    learner = make_learner(policy, ["rollout.max_staleness=2"])
    for plant in FAULTS[name]:
        plant(learner.engine)
    try:
        learner.train()
    except SyncError as error:
        return str(error)
    return ""
