"""Tests of the check of the policy's own files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from grpo_ray.config.loader import load_config
from grpo_ray.driver.preflight.audit import read_policy
from grpo_ray.driver.preflight.checks import check_policy
from grpo_ray.errors import ConfigError
from grpo_ray.models.warm_up import build_tokenizer


def test_fine_tuning_of_a_policy_without_an_end_token_is_refused(tmp_path: Path) -> None:
    for name, end in (("with", build_tokenizer().eos_token), ("without", None)):
        tokenizer = build_tokenizer()
        tokenizer.eos_token = end
        tokenizer.save_pretrained(tmp_path / name)
        LlamaConfig(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=1).save_pretrained(tmp_path / name)

    def context(name: str, kind: str) -> Any:
        overrides = [f"model.path={tmp_path / name}", f"run.kind={kind}", "data.train=a.jsonl"]
        return SimpleNamespace(config=load_config(None, overrides))

    assert check_policy(context("with", "sft")) == check_policy(context("without", "grpo")) == ()
    assert read_policy(context("with", "sft").config).tokenizer.eos_token is not None
    with pytest.raises(
        ConfigError, match=r"without: its tokenizer has no end token, with which run.kind=sft ends each"
    ):
        check_policy(context("without", "sft"))
    with pytest.raises(ConfigError, match="its tokenizer has no end token"):
        read_policy(context("without", "sft").config)
