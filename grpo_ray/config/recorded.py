"""Reading of `config.yaml` from a run folder, which may be damaged or downloaded from an untrusted source.

The user's own YAML is trusted: it may name code, such as `package.module:function`. A downloaded run folder is not:
evaluating or exporting it must run none of its author's code, so only settings that evaluation needs are taken.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from grpo_ray.config.benchmarks import find_benchmark
from grpo_ray.config.heldout_keys import AUTO
from grpo_ray.config.reward_names import REWARD_SCORES, derived_score, is_own_reward
from grpo_ray.config.schema import SECTIONS, DataConfig
from grpo_ray.config.sources import train_paths
from grpo_ray.config.yaml_documents import parse_yaml
from grpo_ray.errors import ConfigError, DamagedFileError
from grpo_ray.text.redaction import hidden_settings

RECORDED_CONFIG = "config.yaml"
"""Name of the file in a run folder."""
UNUSED_FIELDS = {
    "model": ("trust_remote_code", "lora", "peft", "adapter_optimizer", "quantization", "share_base"),
    "run": ("kind", "storage_path", "from_checkpoint", "best_metric", "stop_on", "notify"),
    "data": ("skip_solved", "prefer_mixed"),
    "rollout": ("isolation", "variables", "max_staleness", "anchor"),
}
"""Section -> fields that evaluation does not take from a run folder."""
REWARD_FIELDS = {"rewards": ("functions", "settings"), "grpo": ("reward_weights",)}
"""Section -> fields that evaluation takes from a run folder only if `heldout.score` is the run's own reward."""
ENGINE_FIELDS = (
    "placement",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "cpu_cache_gib",
    "max_model_len",
    "logprob_tolerance",
)
"""Fields of `engine` that evaluation takes from a run folder, besides `HARMLESS_ARGUMENTS` of `engine.vllm`."""
HARMLESS_ARGUMENTS = frozenset(
    {
        "block_size",
        "calculate_kv_scales",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enforce_eager",
        "kv_cache_dtype",
        "max_num_batched_tokens",
        "quantization",
    }
)
"""Arguments of vLLM's engine that evaluation takes from a run folder. Others name modules, files and addresses
(`worker_cls`, `kv_transfer_config`, `load_format` ...), or may do so in a later release of vLLM."""
HARMLESS_WORD = re.compile(r"\w[\w-]{0,31}")
"""Accepted text values of `HARMLESS_ARGUMENTS`: names of types."""
SANDBOX_FIELDS = ("sandbox_url", "sandbox_provider", "sandbox_token_variable")
"""Fields of `rollout` that evaluation takes only if the recorded tools are trusted: code and a token are sent there."""
CODE_FIELDS = ("tools", "environment", "function")
"""Fields of `rollout` that name code."""
PATH_FIELDS = (("grpo", "advantages"), ("heldout", "score"))
"""Fields beside those of rewards and tools that name code as package.module:function."""
HARMLESS_TOOLS = re.compile(r"grpo_ray\.(tools\.examples|inference\.rollout_examples):\w+")
"""Tools, environments and functions that evaluation runs if a run folder names them."""
PLAIN_SOURCE = re.compile(r"(?:(?:s3|gs|gcs|hf|abfs|abfss|az|https?|file)://)?(?!.*::)(?!.*://)", re.DOTALL)
"""Datasets that evaluation reads if a run folder names them. Other protocols of fsspec may run code: `reference://`
renders templates, and `::` chains protocols."""


def parse_recorded(data: bytes, where: str) -> dict[str, dict[str, Any]]:
    """Parse the `config.yaml` of a run folder.

    Args:
        data: content of the file.
        where: path or URI of the file, for messages.

    Returns:
        Section -> fields, as recorded.

    Raises:
        DamagedFileError: the file is not YAML, or has no sections.
    """
    try:
        settings = parse_yaml(data, is_trusted=False)
        if not isinstance(settings, dict) or not all(
            isinstance(name, str) and isinstance(section, Mapping | None) for name, section in settings.items()
        ):
            raise ValueError("it has no sections")
    except ValueError as error:
        raise DamagedFileError(f"{where} is damaged: {str(error)[:200]}") from None
    return {name: dict(section or {}) for name, section in settings.items()}


def evaluation_settings(
    recorded: Mapping[str, Mapping[str, Any]],
    *,
    data_is_given: bool,
    trusts_tools: bool,
    trusts_engine: bool,
    trusts_rewards: bool = False,
    score: str | None = None,
) -> dict[str, dict[str, Any]]:
    """Select the recorded settings that an evaluation takes from a run folder.

    Args:
        data_is_given: True if the user names the problems.
        trusts_tools: True if the user allows the recorded tools and environments.
        trusts_engine: True if the user allows all recorded settings of the engine.
        trusts_rewards: True if the user allows the recorded reward functions.
        score: value of `heldout.score` that the user gives; None: as recorded.

    Raises:
        ConfigError: the recorded problems are at a location that is not opened on behalf of a run folder, or the run
            has tools, environments, engine arguments or scores that are not allowed.
    """
    settings = {name: dict(fields) for name, fields in recorded.items() if name in SECTIONS}
    rollout = settings.get("rollout", {})
    if not trusts_tools and (paths := untrusted_tools(*(rollout.get(name) for name in CODE_FIELDS))):
        raise ConfigError(
            f"the run folder names the tool, environment or function {paths[0]}, which is not run on its behalf; allow "
            "it with --trust-tools, or name your own config with --config"
        )
    if not trusts_tools:
        for name in SANDBOX_FIELDS:
            rollout.pop(name, None)
    if "engine" in settings:
        if not trusts_engine:
            settings["engine"] = _harmless_engine(settings["engine"])
        settings["engine"].pop("compile_cache", None)  # an engine would run the code that it finds in this folder
        settings["engine"].pop("adapter", None)  # merged here
    for section, names in UNUSED_FIELDS.items():
        for name in names:
            settings.get(section, {}).pop(name, None)
    data = settings.setdefault("data", {})
    if isinstance(train := data.get("train"), Mapping):  # a copy, which is changed below
        data["train"] = {name: dict(source) for name, source in train.items() if isinstance(source, Mapping)}
    if data_is_given:
        data.pop("heldout", None)
        data.pop("train", None)
    elif data.get("heldout", AUTO) not in (None, AUTO):
        _drop_training_data(data)
    _select_scores(settings, score, trusts_rewards)
    _drop_code_limits(settings)
    for name, paths in (("train", train_paths(data.get("train"))), ("heldout", _texts(data.get("heldout")))):
        for source in paths:
            benchmark = find_benchmark(source)
            if not PLAIN_SOURCE.match(benchmark[1] if benchmark else source):
                raise ConfigError(
                    f"data.{name}={source} of the run folder is not opened, because its protocol may run code; name "
                    "the problems with --data"
                )
    if hidden_settings(settings.get("rollout", {}).get("structured_outputs")):
        raise ConfigError(
            "rollout.structured_outputs of the run folder has parts that were hidden as secrets, so the form of its "
            "completions is not known; give the run's own YAML file with --config"
        )
    for section in settings.keys() - {"data"}:  # settings with hidden secrets, which only training needs
        settings[section] = {name: value for name, value in settings[section].items() if not hidden_settings(value)}
    return settings


def recorded_code(recorded: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the recorded settings with which training would run code of the run folder's author, or call an address.

    `run.notify` is not among them: a fork and a replay leave it out.

    Args:
        recorded: section -> fields, from `parse_recorded`.

    Returns:
        Paths of fields with their values, such as `rewards.functions: my_rewards:short`; empty if there are none.
    """
    sections = {name: recorded.get(name, {}) for name in SECTIONS}
    data, rewards, rollout = sections["data"], sections["rewards"], sections["rollout"]
    train = data.get("train")
    functions = _texts(rewards.get("functions"))
    if isinstance(train, Mapping):
        functions += [
            name for source in train.values() if isinstance(source, Mapping) for name in _texts(source.get("rewards"))
        ]
    found = [f"rewards.functions: {name}" for name in dict.fromkeys(functions) if is_own_reward(name)]
    found += [f"rollout.{field}: {path}" for field in CODE_FIELDS for path in untrusted_tools(rollout.get(field))]
    if rollout.get("sandbox_url") is not None:
        found.append(f"rollout.sandbox_url: {rollout['sandbox_url']}")
    found += [
        f"{section}.{field}: {value}"
        for section, field in PATH_FIELDS
        if ":" in str(value := sections[section].get(field))
    ]
    settings = rewards.get("settings")
    if isinstance(settings, Mapping):
        found += [f"rewards.settings.{name}" for name in ("judge",) if name in settings]
    own = settings.get("code_tests") if isinstance(settings, Mapping) else None
    isolation = (rollout.get("isolation"), own.get("isolation") if isinstance(own, Mapping) else None)
    found += [f"isolation: {value}" for value in isolation if value not in (None, "required")]
    if sections["model"].get("trust_remote_code"):
        found.append("model.trust_remote_code: true")
    if sections["grpo"].get("model_init_kwargs"):
        found.append("grpo.model_init_kwargs")
    if (other := sections["run"].get("from_checkpoint")) is not None:
        found.append(f"run.from_checkpoint: {other}")
    if sections["engine"].get("compile_cache"):
        found.append(f"engine.compile_cache: {sections['engine']['compile_cache']}")
    try:
        _harmless_engine(sections["engine"])
    except ConfigError:
        found.append(f"engine.vllm: {sections['engine'].get('vllm')}")
    places = [*train_paths(train), *_texts(data.get("heldout"))]
    return found + [
        f"data: {place}" for place in places if not PLAIN_SOURCE.match((find_benchmark(place) or ("", place))[1])
    ]


def _drop_training_data(data: dict[str, Any]) -> None:
    """Drop the training problems, which an evaluation on other problems need not open; keep a mixture's rewards."""
    if isinstance(train := data.get("train"), Mapping):
        for source in train.values():
            source["path"] = DataConfig.train
    else:
        data.pop("train", None)


def _select_scores(settings: dict[str, dict[str, Any]], given: str | None, is_trusted: bool) -> None:
    """Set `heldout.score` in recorded settings, and drop the rewards that no score is computed from.

    In a mixture each source may have its own score. If `heldout.score` is not set, the scores are derived again from
    the rewards of the sources (`Config.heldout_score_of`).

    Args:
        given: the user's own value; None: as recorded.
        is_trusted: True if the user allows the recorded reward functions.

    Raises:
        ConfigError: the score is computed by recorded code that is not allowed.
    """
    heldout, rewards = settings.setdefault("heldout", {}), settings.setdefault("rewards", {})
    functions = _texts(rewards.get("functions")) or ["correctness"]
    train = settings.get("data", {}).get("train")
    if isinstance(train, Mapping) and not given and not heldout.get("score"):
        _select_rewards_of_sources(settings, train, functions, is_trusted)
        return
    found = [find_benchmark(each) for each in _texts(settings.get("data", {}).get("heldout"))]
    benchmarks = [each[0].score for each in found if each]
    only_benchmarks = bool(found) and all(found)  # no reward of the run is computed
    score = given or ("correctness" if only_benchmarks else heldout.get("score") or derived_score(functions))
    _require_trust(untrusted_rewards(score, functions, is_given=given is not None), is_trusted)
    heldout["score"] = score
    if isinstance(train, Mapping):
        for source in train.values():
            source.pop("rewards", None)
    if score == "reward":
        return
    recorded = rewards.get("settings")
    own_settings = recorded if isinstance(recorded, Mapping) else {}
    for section, names in REWARD_FIELDS.items():
        for name in names:
            settings.get(section, {}).pop(name, None)
    if score == "environment":
        rewards["functions"] = ["environment"]
    elif score in functions and ":" in score:
        rewards["functions"] = [score]
    named = [*benchmarks, score]  # the recorded score may be of any type
    used = [each for each in (*REWARD_SCORES, *rewards.get("functions", ())) if each in named]
    if kept := {name: value for name, value in own_settings.items() if name in used}:
        rewards["settings"] = kept


def _drop_code_limits(settings: dict[str, dict[str, Any]]) -> None:
    """Drop the settings of `code_tests` that weaken or overload the sandbox: it runs code of an untrusted policy."""
    all_settings = settings.get("rewards", {}).get("settings")
    if isinstance(all_settings, Mapping) and isinstance(own := all_settings.get("code_tests"), Mapping):
        kept = {name: value for name, value in own.items() if name not in ("isolation", "parallel", "memory_gib")}
        settings["rewards"]["settings"] = {**all_settings, "code_tests": kept}


def _require_trust(code: Collection[str], is_trusted: bool) -> None:
    """Raise ConfigError if scores are computed by recorded code that is not allowed."""
    if code and not is_trusted:
        raise ConfigError(
            f"the run folder scores held-out completions with its own code or model {next(iter(code))}, which is not "
            "run on its behalf; allow it with --trust-rewards, name your own config with --config, or another score, "
            "such as heldout.score=correctness"
        )


def _select_rewards_of_sources(
    settings: dict[str, dict[str, Any]], train: Mapping[str, Any], functions: list[str], is_trusted: bool
) -> None:
    """Keep the rewards that the scores of a recorded mixture are computed from, and their settings and weights."""
    own = {name: _texts(source.get("rewards")) or functions for name, source in train.items()}
    scores = {name: derived_score(rewards) for name, rewards in own.items()}
    used = {each for name, score in scores.items() for each in (own[name] if score == "reward" else [score])}
    _require_trust([each for each in functions if each in used and is_own_reward(each)], is_trusted)
    kept = [index for index, each in enumerate(functions) if each in used]
    rewards, grpo = settings["rewards"], settings.get("grpo", {})
    rewards["functions"] = [functions[index] for index in kept] or ["correctness"]
    if isinstance(all_settings := rewards.get("settings"), Mapping):
        rewards["settings"] = {name: value for name, value in all_settings.items() if name in used}
    if isinstance(weights := grpo.get("reward_weights"), list):
        grpo["reward_weights"] = [weight for index, weight in enumerate(weights) if index in kept]
    for name, source in train.items():
        source["rewards"] = [each for each in own[name] if each in used] or None


def untrusted_rewards(score: Any, functions: Collection[str], is_given: bool = False) -> list[str]:
    """Return the code and models that a score of held-out completions runs: an evaluation needs --trust-rewards.

    Args:
        score: `heldout.score`, with its default.
        functions: `rewards.functions`.
        is_given: True if the user names the score, so that code that it names is the user's own.
    """
    if score == "reward":
        return list(filter(is_own_reward, functions))
    return [score] if isinstance(score, str) and ":" in score and not is_given else []


def _harmless_engine(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded engine settings that cannot run code or open files and addresses.

    Raises:
        ConfigError: `engine.vllm` has any other argument.
    """
    taken = {name: engine[name] for name in ENGINE_FIELDS if name in engine}
    arguments = engine.get("vllm") or {}
    if not isinstance(arguments, Mapping):
        raise ConfigError("engine.vllm of the run folder is no mapping")
    for name, value in arguments.items():
        is_word = isinstance(value, str) and HARMLESS_WORD.fullmatch(value)
        is_plain = value is None or isinstance(value, bool | int | float) or is_word
        if name not in HARMLESS_ARGUMENTS or not is_plain:
            raise ConfigError(
                f"the run folder sets engine.vllm.{name}, which is not passed to the engine on its behalf; allow it "
                "with --trust-engine, or name your own config with --config"
            )
    return taken | ({"vllm": dict(arguments)} if arguments else {})


def untrusted_tools(*fields: Any) -> list[str]:
    """Return the paths in these values of `CODE_FIELDS` that an evaluation runs with --trust-tools only."""
    return [path for field in fields for path in _texts(field) if not HARMLESS_TOOLS.fullmatch(path)]


def _texts(value: Any) -> list[str]:
    """Return all texts in a setting: the setting itself, or those in a list or mapping, nested ones included."""
    if isinstance(value, Mapping | list | tuple):
        items = value.values() if isinstance(value, Mapping) else value
        return [text for item in items for text in _texts(item)]
    return [value] if isinstance(value, str) else []
