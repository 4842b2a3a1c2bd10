"""Comparison of the table of vLLM's engine arguments with the installed release."""

import dataclasses
import json
from pathlib import Path

import pytest
import vllm
import vllm.envs
from library_contract.table import NEWER_VARIABLES
from vllm.engine.arg_utils import EngineArgs
from vllm_field_table import read_release

from grpo_ray.config.vllm_fields import DATA, ONLINE_QUANTIZATION, vllm_fields
from grpo_ray.inference.arguments import llm_arguments

VERSION = vllm.__version__.partition("+")[0]
MESSAGE = "run python scripts/vllm_field_table.py on the oldest and the newest supported release"


@pytest.fixture(scope="module")
def installed() -> dict[str, object]:
    if VERSION not in json.loads(DATA.read_text(encoding="utf-8"))["releases"]:
        pytest.skip(f"the table has no column for vLLM {VERSION}")
    return dict(read_release(Path(vllm.__file__).parent))


def test_table_has_the_arguments_of_the_installed_release(installed: dict[str, object]) -> None:
    listed = {name for name, field in vllm_fields().items() if not field.only or VERSION in field.only}
    assert listed == installed.keys(), MESSAGE
    fields = {field.name for field in dataclasses.fields(EngineArgs) if not field.name.startswith("_")}
    assert installed.keys() == fields


def test_table_allows_the_types_and_values_of_the_installed_release(installed: dict[str, object]) -> None:
    for name, field in vllm_fields().items():
        found = installed.get(name)
        if found is not None and field.types:
            assert set(found.types) <= set(field.types), name  # type: ignore[attr-defined]
            assert not field.values or set(found.values) <= set(field.values), name  # type: ignore[attr-defined]


def test_online_quantization_is_known_to_vllm() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    assert set(ONLINE_QUANTIZATION) <= set(QUANTIZATION_METHODS)


def test_installed_release_has_the_variables_that_older_ones_lack() -> None:
    assert vllm.envs.environment_variables.keys() >= NEWER_VARIABLES


def test_llm_arguments_exist(policy: Path) -> None:
    from grpo_ray.config.loader import load_config

    arguments = llm_arguments(str(policy), load_config(None, ["engine.vllm={block_size: 16}"]), max_num_seqs=5000)
    assert arguments.keys() <= {field.name for field in dataclasses.fields(EngineArgs)}
    assert (arguments["block_size"], arguments["max_num_seqs"], arguments["max_num_batched_tokens"]) == (16, 5000, 8192)
