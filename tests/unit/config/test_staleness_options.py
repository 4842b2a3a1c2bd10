"""Options that do not go with tokens of older weights."""

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.errors import ConfigError


@pytest.mark.parametrize(
    ("other", "fix"),
    [
        ("grpo.dynamic_sampling=2", "grpo.dynamic_sampling=0"),
        ("grpo.num_iterations=2", "grpo.num_iterations=1"),
        ("grpo.steps_per_generation=2", "grpo.steps_per_generation=1"),
        ("grpo.vllm_tensor_parallel_size=2", "grpo.vllm_tensor_parallel_size=1"),
        ("grpo.vllm_enable_sleep_mode=true", "grpo.vllm_enable_sleep_mode=false"),
        ("cluster.shard_learner=true", "cluster.shard_learner=false"),
    ],
)
def test_load_staleness_with_other_option_raises(other: str, fix: str) -> None:
    settings = ["grpo.save_steps=2", "cluster.use_gpu=true", other]
    load_config(None, settings)
    with pytest.raises(ConfigError, match=rf"rollout\.max_staleness=1 does not go with .* set {fix}, or"):
        load_config(None, [*settings, "rollout.max_staleness=1"])


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ("rollout.structured_outputs={regex: a}", "the form begins anew"),
        ("grpo.generation_kwargs={presence_penalty: 0.5}", "generation_kwargs.presence_penalty"),
        ("grpo.generation_kwargs={frequency_penalty: 0.5}", "generation_kwargs.frequency_penalty"),
        ("grpo.generation_kwargs={min_tokens: 5}", "generation_kwargs.min_tokens"),
        ("grpo.generation_kwargs={stop: [end]}", "generation_kwargs.stop"),
        ("grpo.generation_kwargs={bad_words: [never]}", "generation_kwargs.bad_words"),
        ("grpo.importance_sampling_level=sequence", "set grpo.importance_sampling_level=token"),
        ("grpo.vllm_importance_sampling_mode=sequence_mask", "mode=token_truncate or token_mask"),
    ],
)
def test_load_segments_with_other_option_raises(other: str, text: str) -> None:
    load_config(None, ["rollout.max_staleness=1", other])
    with pytest.raises(ConfigError, match=rf"rollout\.max_staleness=2 does not go with .*{text}"):
        load_config(None, ["rollout.max_staleness=2", other])


def test_load_segments_with_repetition_penalty_is_allowed() -> None:
    load_config(None, ["rollout.max_staleness=4", "grpo.repetition_penalty=1.1"])  # vLLM counts the prompt too


def test_load_turns_allow_what_a_whole_request_needs() -> None:
    tools = ["rollout.tools=['package.tools:add']", "rollout.max_staleness=2", "cluster.use_gpu=true"]
    load_config(None, [*tools, "grpo.generation_kwargs={min_tokens: 5}", "grpo.max_completion_length=300"])
    with pytest.raises(ConfigError, match="the tokens of a completion are sampled with several weights"):
        load_config(None, [*tools, "grpo.importance_sampling_level=sequence"])
    load_config(None, [*tools, "rollout.max_turns=2"])
    with pytest.raises(ConfigError, match=r"rollout\.max_staleness=2 is more than rollout\.max_turns=1: .* raise"):
        load_config(None, [*tools, "rollout.max_turns=1"])


def test_load_short_segments_on_gpus_raises() -> None:
    settings = ["cluster.use_gpu=true", "grpo.max_completion_length=1000"]
    load_config(None, [*settings, "rollout.max_staleness=3"])
    with pytest.raises(ConfigError, match=r"at most 250 tokens .* set rollout\.max_staleness=3"):
        load_config(None, [*settings, "rollout.max_staleness=4"])


def test_load_anchor_without_staleness_raises() -> None:
    with pytest.raises(ConfigError, match=r"no effect with rollout\.max_staleness=0"):
        load_config(None, ["rollout.anchor=behaviour"])


def test_load_generate_ahead_names_its_replacement() -> None:
    with pytest.raises(ConfigError, match=r"^unknown key grpo\.generate_ahead; set rollout\.max_staleness=1"):
        load_config(None, ["grpo.generate_ahead=true"])


def test_trl_fields_with_staleness_truncate_by_token() -> None:
    mode, bound = "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"
    stale = ["rollout.max_staleness=2"]
    assert load_config(None, stale).trl == {mode: "token_truncate", bound: 2.0}
    assert load_config(None, [*stale, f"grpo.{bound}=4.0"]).trl == {mode: "token_truncate", bound: 4.0}
    assert load_config(None, [*stale, f"grpo.{mode}=token_mask"]).trl == {mode: "token_mask"}
    assert load_config(None, []).trl == {}
