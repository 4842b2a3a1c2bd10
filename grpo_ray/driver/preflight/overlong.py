"""Overlong prompts: problems whose prompts exceed the run's limit are left out before training.

The limit is `data.max_prompt_length`, or the engine's context minus the longest completion. The lengths of a dataset's
prompts are measured once. The result is kept in `overlong.json` of the run folder, under a hash of everything that it
depends on, so that a restart does not measure again.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_ray.config.schema import Config
from grpo_ray.data.ledger import DatasetFingerprint, ids_to_uint64
from grpo_ray.data.problem import Problem
from grpo_ray.data.stream import DatasetIndex, OnShard, ignore_shard, map_shards
from grpo_ray.driver.preflight.policy_files import fetch_policy_files, load_policy_tokenizer
from grpo_ray.errors import ConfigError, DamagedFileError, DataError
from grpo_ray.models.plausible_policy import require_plausible_policy
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.tools.definitions import measuring_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OVERLONG_FILE = "overlong.json"
"""File of the run folder with the overlong prompts of each split."""
PROMPTS_PER_BATCH = 256
"""Prompts rendered in one call."""
EXAMPLES = 3
"""Overlong prompts named in a message; the file has all of them."""


@dataclass(frozen=True)
class OverlongPrompt:
    """A problem that is left out."""

    id: str
    tokens: int
    """Length of its prompt."""


@dataclass(frozen=True)
class PromptLimit:
    """Longest prompt of a run."""

    tokens: int
    reason: str
    """Origin of the limit, for messages."""


def prompt_limit(config: Config, context: int) -> PromptLimit:
    """Return the length of the longest prompt that a run takes.

    Args:
        context: the engine's context in tokens.

    Raises:
        ConfigError: the longest prompt (`data.max_prompt_length`) or the longest completion alone fills the context.
    """
    longest, completion = config.data.max_prompt_length, config.grpo.max_completion_length
    if longest is not None:
        if longest >= context:
            raise ConfigError(
                f"data.max_prompt_length={longest} must be below the engine's context of {context} tokens, which holds "
                "prompt and completion; lower it, or raise engine.max_model_len"
            )
        return PromptLimit(longest, "data.max_prompt_length")
    if completion >= context:
        raise ConfigError(
            f"grpo.max_completion_length={completion} leaves no room for a prompt in the engine's context of {context} "
            "tokens; lower it, raise engine.max_model_len, or set data.max_prompt_length"
        )
    return PromptLimit(context - completion, f"the engine's context of {context} minus {completion} for the completion")


def leave_out_overlong(
    config: Config,
    name: str,
    index: DatasetIndex,
    folder: RunFolder | None,
    policy_path: str | None = None,
    on_shard: OnShard = ignore_shard,
    limits_template: bool = False,
) -> "FilteredIndex":
    """Leave out the problems of a split whose prompts are too long.

    Args:
        name: name of the split in messages and in the file.
        folder: run folder in which the result is kept; None: it is not kept.
        policy_path: policy whose tokenizer measures the prompts; None: `model.path`.
        on_shard: called with the number of shards read so far and of all shards, unless the result is known already.
        limits_template: render the policy's chat template in a process with limits.

    Raises:
        DataError: `data.overlong_prompts=error` and there are overlong prompts, or no problem is left.
        ConfigError: the policy's config or tokenizer cannot be read.
    """
    policy = PolicyTokenizer(policy_path or config.model.path, config.model.trust_remote_code, limits_template)
    limit = prompt_limit(config, engine_context(config, policy))
    arguments = measuring_arguments(config)
    key = measurement_key(config, index.fingerprint, policy.digest(), limit.tokens)
    found = read_overlong(folder, name, key)
    if found is None:
        measure = partial(find_overlong, policy=policy, limit=limit.tokens, arguments=arguments)
        per_shard = map_shards(index.split, measure, on_shard)
        found = sorted((each for shard in per_shard for each in shard), key=lambda each: each.id)
        if folder is not None:
            write_overlong(folder, name, key, limit.tokens, found)
    if not found:
        return FilteredIndex(index, "")
    message = describe_overlong(name, index.fingerprint.count, found, limit)
    require_overlong_dropped(config, index.split.name, message, found)
    where = f" ({folder.uri_of(OVERLONG_FILE)})" if folder is not None else ""
    overlong = np.sort(ids_to_uint64(each.id for each in found))
    return FilteredIndex(index.without_overlong(overlong), f"leaving out {message}{where}")


@dataclass(frozen=True)
class FilteredIndex:
    """Index of a split without overlong prompts."""

    index: DatasetIndex
    notice: str
    """Count and examples of the problems left out; "" if there are none."""


def require_overlong_dropped(config: Config, source: str, message: str, found: Sequence[OverlongPrompt]) -> None:
    """Raise DataError if there are overlong prompts and `data.overlong_prompts=error`.

    Args:
        source: the split's name in the config.
        message: from `describe_overlong`.
    """
    if found and config.data.overlong_prompts == "error":
        raise DataError(
            f"{source}: {message}; shorten or remove them, raise data.max_prompt_length, or set "
            "data.overlong_prompts=drop to leave them out"
        )


def describe_overlong(name: str, problems: int, found: Sequence[OverlongPrompt], limit: PromptLimit) -> str:
    """Describe the overlong prompts of a split in one line."""
    shown = ", ".join(f"{each.id} ({each.tokens})" for each in found[:EXAMPLES])
    shown += " ..." if len(found) > EXAMPLES else ""
    return (
        f"{len(found)} of {problems} {name} problems, whose prompts have more than {limit.tokens} tokens "
        f"({limit.reason}): {shown}"
    )


# Measuring


def evaluated_policy(config: Config, checkpoint: str) -> str:
    """Return the path of the policy whose tokenizer and context an evaluation uses; for an adapter, `model.path`.

    Raises:
        CheckpointError: the checkpoint's config or weights declare implausible sizes.
    """
    from grpo_ray.models.adapter_folders import has_adapter

    local = fetch_policy_files(checkpoint)
    require_plausible_policy(local, has_weights="://" not in checkpoint)  # weights at a URI are not downloaded here
    return config.model.path if has_adapter(local) else checkpoint


@dataclass(frozen=True)
class PolicyTokenizer:
    """Source of the policy's tokenizer; small and picklable, for tasks on other machines."""

    path: str
    """`model.path`."""
    trust_remote_code: bool
    limits_template: bool = False
    """Render the chat template in a process with limits."""

    def load(self) -> "PreTrainedTokenizerBase":
        """Return the tokenizer, loaded once per process. Raises ConfigError."""
        return _load_once(self)

    def digest(self) -> str:
        """Return a hash of everything that determines the length of a prompt."""
        from grpo_ray.models.tokenizer import tokenizer_digest

        return tokenizer_digest(self.load())


@lru_cache(maxsize=1)
def _load_once(policy: PolicyTokenizer) -> "PreTrainedTokenizerBase":
    local = fetch_policy_files(policy.path)
    return load_policy_tokenizer(policy.path, local, policy.trust_remote_code, policy.limits_template)


def engine_context(config: Config, policy: PolicyTokenizer) -> int:
    """Return the engine's context in tokens: `engine.max_model_len`, or else the smaller limit of model and tokenizer.

    Raises ConfigError.
    """
    from transformers import AutoConfig

    if config.engine.max_model_len is not None:
        return config.engine.max_model_len
    path = fetch_policy_files(policy.path)
    try:
        model = AutoConfig.from_pretrained(path, trust_remote_code=policy.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model.path={policy.path}: the config cannot be read: {reason}") from None
    return min(int(model.get_text_config().max_position_embeddings), policy.load().model_max_length)


def find_overlong(
    problems: Iterator[Problem], *, policy: PolicyTokenizer, limit: int, arguments: dict[str, Any]
) -> list[OverlongPrompt]:
    """Return the problems whose prompts have more than `limit` tokens, in order."""
    from grpo_ray.models.tokenizer import overlong_lengths

    found: list[OverlongPrompt] = []
    while batch := list(islice(problems, PROMPTS_PER_BATCH)):
        lengths = overlong_lengths(policy.load(), [problem.prompt for problem in batch], limit, arguments)
        found += [OverlongPrompt(batch[index].id, tokens) for index, tokens in lengths.items()]
    return found


# The file


def measurement_key(config: Config, problems: DatasetFingerprint, tokenizer: str, limit: int) -> str:
    """Return a hash of everything that the overlong prompts of a split depend on; 16 hex digits."""
    arguments = measuring_arguments(config)
    prompts: Any = config.data.system_prompt
    if config.is_mixture:
        prompts = {name: source.system_prompt for name, source in config.training_sources.items()}
    content = json.dumps([asdict(problems), tokenizer, limit, arguments, prompts], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def read_overlong(folder: RunFolder | None, name: str, key: str) -> list[OverlongPrompt] | None:
    """Return the overlong prompts recorded for a split under this key; None if they have to be measured."""
    if folder is None:
        return None
    try:
        entry = _read_file(folder)[name]
        return [OverlongPrompt(**each) for each in entry["problems"]] if entry["key"] == key else None
    except (KeyError, TypeError):  # no such split yet, or a damaged file: measured again
        return None


def write_overlong(folder: RunFolder, name: str, key: str, limit: int, found: list[OverlongPrompt]) -> None:
    """Record the overlong prompts of a split."""
    entry = {"key": key, "max_prompt_length": limit, "problems": [asdict(each) for each in found]}
    folder.write_json(_read_file(folder) | {name: entry}, OVERLONG_FILE)


def _read_file(folder: RunFolder) -> dict[str, Any]:
    """Return the file's content; empty if there is none, or if it is damaged."""
    try:
        content = folder.read_json(OVERLONG_FILE) if folder.exists(OVERLONG_FILE) else {}
    except DamagedFileError:
        return {}
    return content if isinstance(content, dict) else {}
