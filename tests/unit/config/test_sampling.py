"""Tests of the sampling options: which are accepted, their ranges, and the rules across fields."""

import datetime
from typing import Any

import pytest

from grpo_ray.config.loader import from_mapping
from grpo_ray.config.sampling import DEFAULTS, PROCESSING, REFUSED, TRL_FIELDS, SamplingOptions
from grpo_ray.config.schema import Config
from grpo_ray.errors import ConfigError

OFF_POLICY: dict[str, Any] = {"vllm_importance_sampling_mode": "token_truncate"}


def config(heldout: dict[str, Any] | None = None, rollout: dict[str, Any] | None = None, **grpo: Any) -> Config:
    return from_mapping({"grpo": grpo, "heldout": heldout or {}, "rollout": rollout or {}})


def test_sampling_options_default_is_the_policy_itself() -> None:
    assert config().sampling == DEFAULTS and DEFAULTS.changed == {} and DEFAULTS.processing == []


def test_sampling_options_generation_kwargs_override_trl_fields() -> None:
    # As TRL: `generation_kwargs` has the last word. null is TRL's default of min_p.
    sampling = config(top_p=0.5, min_p=None, generation_kwargs={"top_p": 0.9, "stop": ["\n"]}, **OFF_POLICY).sampling
    assert sampling.changed == {"top_p": 0.9, "stop": ["\n"]}
    assert sampling.processing == ["top_p"] and sampling.ends_early


@pytest.mark.parametrize("top_k", [0, -1])
def test_sampling_options_top_k_off_processes_nothing(top_k: int) -> None:
    assert config(generation_kwargs={"top_k": top_k}).sampling.processing == []


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_generation_kwargs_refused_names_the_reason(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(generation_kwargs={name: 1})
    assert f"grpo.generation_kwargs.{name} {REFUSED[name]}" in str(error.value)


def test_generation_kwargs_unknown_lists_the_supported() -> None:
    with pytest.raises(ConfigError, match=r"generation_kwargs\.best_of is not supported; supported are .*top_p"):
        config(generation_kwargs={"best_of": 2})


def test_structured_outputs_regex_of_trl_names_ours() -> None:
    with pytest.raises(ConfigError, match=r"vllm_structured_outputs_regex is set in rollout\.structured_outputs"):
        config(vllm_structured_outputs_regex=r"\d+")


@pytest.mark.parametrize(
    ("form", "value"),
    [
        ({"regex": "[0-9]+"}, "[0-9]+"),
        ({"json": {"type": "object"}}, {"type": "object"}),
        ({"json": {}}, {}),
        ({"choice": ["yes", "no"]}, ["yes", "no"]),
        ({"grammar": 'root ::= "a"'}, 'root ::= "a"'),
    ],
)
def test_structured_outputs_are_an_option_of_each_request(form: dict[str, Any], value: Any) -> None:
    sampling = config(rollout={"structured_outputs": form}).sampling
    assert sampling.changed == {"structured_outputs": {next(iter(form)): value}}
    # The learner excludes the same tokens, so that no ratio has to correct for them.
    assert sampling.processing == [] and not sampling.ends_early


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "rollout.structured_outputs must have one of regex, json, choice and grammar, and has none"),
        ({"regex": "a", "choice": ["b"]}, "and has regex, choice"),
        ({"regex": ""}, "rollout.structured_outputs.regex="),
        ({"regex": 5}, "rollout.structured_outputs.regex=5 must be"),
        ({"choice": []}, "rollout.structured_outputs.choice="),
        ({"choice": [""]}, "rollout.structured_outputs.choice"),
        ({"json": "{}"}, "rollout.structured_outputs.json="),
        ({"regexp": "a"}, "regexp"),
        ({"compact": True}, "and has none"),
        (
            {"json": {"const": datetime.date(2024, 1, 1)}},
            "rollout.structured_outputs.json holds a value that is no JSON",
        ),
    ],
)
def test_structured_outputs_of_no_one_form_raise(form: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(rollout={"structured_outputs": form})
    assert message in str(error.value)


def test_structured_outputs_set_the_engines_own_settings() -> None:
    rollout: dict[str, Any] = {"structured_outputs": {"json": {}}}
    engine: dict[str, Any] = {"vllm": {"structured_outputs_config": {}}}
    with pytest.raises(ConfigError, match=r"engine\.vllm\.structured_outputs_config does not go with"):
        from_mapping({"rollout": rollout, "engine": engine})


def test_structured_outputs_of_several_turns_raise() -> None:
    rollout = {"structured_outputs": {"regex": "a"}, "environment": "grpo_ray.tools.examples:Guess"}
    with pytest.raises(ConfigError, match="structured_outputs is a form of completions of one turn"):
        config(rollout=rollout)


@pytest.mark.parametrize("option", [{"allowed_token_ids": [5]}, {"bad_words": ["x"]}, {"min_tokens": 2}])
def test_structured_outputs_with_an_option_that_may_leave_no_token_raise(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"does not go with grpo.generation_kwargs.{next(iter(option))}: together"):
        config(rollout={"structured_outputs": {"regex": "a"}}, generation_kwargs=option)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("temperature", 0),
        ("temperature", 0.005),  # vLLM would sample at 0.01, and the learner would not
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 2.5),
        ("top_k", True),
        ("min_p", 2),
        ("repetition_penalty", 0),
    ],
)
def test_sampling_field_out_of_range_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        config(**{name: value})
    assert f"grpo.{name}={value!r} must be" in str(error.value) and "the default is" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("presence_penalty", 3), ("stop", 5), ("stop_token_ids", [-1]), ("logit_bias", {5: "much"}), ("min_tokens", -1)],
)
def test_generation_kwargs_out_of_range_names_the_entry(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        config(generation_kwargs={name: value})
    assert f"grpo.generation_kwargs.{name}={value!r} must be" in str(error.value)


@pytest.mark.parametrize("name", PROCESSING)
def test_sampling_filter_needs_a_correction_by_token(name: str) -> None:
    values: dict[str, Any] = {"top_p": 0.9, "top_k": 5, "logit_bias": {5: 1.0}, "bad_words": ["x"], "min_tokens": 2}
    value = values.get(name, [3] if name == "allowed_token_ids" else 0.5)
    options: dict[str, Any] = {"generation_kwargs": {name: value}}
    # TRL's default is a ratio of whole completions.
    with pytest.raises(
        ConfigError, match=rf"vllm_importance_sampling_mode=sequence_mask does not go with grpo\.\S*{name}"
    ):
        config(**options)
    assert config(**options, **OFF_POLICY).sampling.processing == [name]
    assert config(**options, vllm_importance_sampling_correction=False).sampling.processing == [name]
    with pytest.raises(ConfigError, match=r"off_policy_mask_threshold=0\.5 does not go with"):
        config(**options, **OFF_POLICY, off_policy_mask_threshold=0.5)


def test_truncation_mask_with_stop_strings_refused() -> None:
    assert config(mask_truncated_completions=True).sampling == DEFAULTS
    with pytest.raises(ConfigError, match="mask_truncated_completions=true does not go with"):
        config(mask_truncated_completions=True, generation_kwargs={"stop": ["</answer>"]})


@pytest.mark.parametrize(
    ("heldout", "message"),
    [
        ({"temperature": -1}, "heldout.temperature=-1 must be a number of at least 0"),
        ({"temperature": 0.001}, "heldout.temperature=0.001 must be 0 or at least 0.01"),
        ({"num_samples": 0}, "heldout.num_samples=0 must be"),
        ({"num_samples": 4}, "heldout.num_samples=4 completions of a problem would all be the same"),
    ],
)
def test_heldout_sampling_impossible_refused(heldout: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(heldout)
    assert message in str(error.value)


def test_sampling_tables_name_existing_options() -> None:
    assert {*PROCESSING, *TRL_FIELDS} <= vars(DEFAULTS).keys()
    assert isinstance(DEFAULTS, SamplingOptions)
