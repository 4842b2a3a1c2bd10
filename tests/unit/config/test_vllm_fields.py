"""Tests of `engine.vllm`: arguments that pass, and the messages for those that do not."""

import json
import subprocess
import sys
from typing import Any

import pytest
from config_cases import config_error

from grpo_ray.config.fields import field_descriptions
from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import Config
from grpo_ray.config.trl_fields import PASSED
from grpo_ray.config.vllm_fields import ONLINE_QUANTIZATION, OURS, REFUSED, REFUSED_VALUES, vllm_fields


def test_tables_name_arguments_of_vllm_once() -> None:
    assert set(OURS) | set(REFUSED) <= set(vllm_fields())
    assert not set(OURS) & set(REFUSED)
    assert {name for name, _ in REFUSED_VALUES} <= set(vllm_fields()) - set(OURS) - set(REFUSED)


def test_ours_names_existing_keys() -> None:
    known = {*field_descriptions(Config), *(f"grpo.{name}" for name in PASSED)}
    for keys in OURS.values():
        assert set(keys.replace(" and ", ", ").split(", ")) <= known


@pytest.mark.parametrize("name", REFUSED)
def test_refused_argument_gives_reason_in_one_line(name: str) -> None:
    assert config_error(f"engine.vllm={{{name}: s3cret}}") == f"engine.vllm.{name} {REFUSED[name]}"


@pytest.mark.parametrize("name", OURS)
def test_derived_argument_names_our_key(name: str) -> None:
    assert config_error(f"engine.vllm={{{name}: 1}}") == f"engine.vllm.{name} is derived; set {OURS[name]}"


@pytest.mark.parametrize(
    ("given", "rest"),
    [
        ("kv_cache_dtpye: fp8", "kv_cache_dtpye is not an argument of vLLM's engine; did you mean kv_cache_dtype?"),
        ("xyz: 1", "xyz is not an argument of vLLM's engine"),
        ("block_size: '16'", "block_size='16' must be a whole number, or null"),
        ("block_size: true", "block_size=True must be a whole number, or null"),
        ("enforce_eager: 1", "enforce_eager=1 must be true or false"),
        ("scheduling_policy: last", 'scheduling_policy=\'last\' must be "fcfs" or "priority"'),
        ("attention_config: x", "attention_config='x' must be a mapping from text to any value"),
        (
            "load_format: dummy",
            "load_format=dummy starts an engine with random weights, which evaluation would measure; remove it",
        ),
    ],
)
def test_wrong_argument_message_names_the_mistake(given: str, rest: str) -> None:
    assert config_error(f"engine.vllm={{{given}}}") == f"engine.vllm.{rest}"


def test_quantization_that_cannot_take_a_sync_is_refused() -> None:
    message = config_error("engine.vllm={quantization: awq}")
    assert message.startswith(
        "engine.vllm.quantization=awq cannot take the learner's weights at a sync; set one of fp8,"
    )
    for name in ONLINE_QUANTIZATION:
        load_config(None, [f"engine.vllm={{quantization: {name}}}", "model.dtype=bfloat16"])


def test_several_mistakes_one_line_each() -> None:
    assert len(config_error("engine.vllm={dtype: half, block_sise: 4, enforce_eager: 1}").splitlines()) == 3


@pytest.mark.parametrize(
    "given",
    [
        {"kv_cache_dtype": "fp8"},
        {"block_size": 16, "enable_prefix_caching": False, "max_num_batched_tokens": 8192},
        {"block_size": None, "kv_offloading_size": 4},
        {"cudagraph_capture_sizes": [1, 2, 4], "compilation_config": {"mode": 3}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"attention_backend": "FLASH_ATTN"},
    ],
)
def test_other_arguments_pass_unchanged(given: dict[str, Any]) -> None:
    config = load_config(None, [f"engine.vllm={json.dumps(given)}"])
    assert config.engine.vllm == given
    assert config.to_dict()["engine"]["vllm"] == given


def test_chunked_prefill_is_refused_without_gpus() -> None:
    assert "set it to false, or cluster.use_gpu=true" in config_error("engine.vllm={enable_chunked_prefill: true}")
    load_config(None, ["engine.vllm={enable_chunked_prefill: true}", "cluster.use_gpu=true"])
    load_config(None, ["engine.vllm={enable_chunked_prefill: false}"])


def test_compile_cache_must_be_absolute() -> None:
    message = config_error("engine.compile_cache=cache")
    assert message == (
        "engine.compile_cache='cache' must be an absolute path, beginning with / or ~, or null; the default is null"
    )
    assert load_config(None, ["engine.compile_cache=~/cache"]).engine.compile_cache == "~/cache"


def test_check_of_arguments_does_not_import_vllm() -> None:
    code = (
        "import sys; from grpo_ray.config.loader import load_config\n"
        "try: load_config(None, ['engine.vllm={block_sise: 16}'])\n"
        "except ValueError as error: print(error, 'vllm' in sys.modules, 'torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.endswith("did you mean block_size? False False\n")
