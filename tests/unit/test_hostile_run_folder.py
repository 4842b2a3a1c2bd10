"""Tests that a run folder of a stranger runs no code of its author, and reads no file outside of it.

What transformers and PEFT do with such files is in tests/integration/test_security.py.
"""

import hashlib
import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from grpo_ray.cli import build_parser, load_eval_config, main, sort_overrides
from grpo_ray.config.loader import from_mapping, load_config
from grpo_ray.config.recorded import HARMLESS_ARGUMENTS, evaluation_settings, parse_recorded, recorded_code
from grpo_ray.config.schema import Config, RewardsConfig
from grpo_ray.config.vllm_fields import vllm_fields
from grpo_ray.data.ledger import Ledger
from grpo_ray.errors import CheckpointError, ConfigError, DamagedFileError
from grpo_ray.evaluation.scores import heldout_score
from grpo_ray.export.checkpoint import export, find_checkpoint
from grpo_ray.storage.checkpoint_integrity import find_faults
from grpo_ray.storage.checkpoints import load_reward_states
from grpo_ray.storage.run_folder import LINE_BYTES, RunFolder
from grpo_ray.text.redaction import HIDDEN

CHECKPOINT = "checkpoint-000002"


def stranger(folder: Path, config: dict[str, Any] | str, files: dict[str, Any] | None = None) -> Path:
    """Write a run folder with one checkpoint and the given config; return the checkpoint's path."""
    run = RunFolder(str(folder), "run")
    run.write_text(config if isinstance(config, str) else yaml.safe_dump(config), "config.yaml")
    run.write_json({"metrics": {"step": 2}, "serial": 1, "files": files or {}}, CHECKPOINT, "manifest.json")
    return folder / "run" / CHECKPOINT


def eval_config(checkpoint: Path, *arguments: str) -> Config:
    parsed = build_parser().parse_args(["eval", str(checkpoint), *arguments])
    sort_overrides(parsed)
    return load_eval_config(parsed)


def test_eval_trusts_remote_code_only_with_the_users_flag(tmp_path: Path) -> None:
    checkpoint = stranger(tmp_path, load_config(None, ["model.trust_remote_code=true"]).to_dict())
    assert not eval_config(checkpoint).model.trust_remote_code
    assert eval_config(checkpoint, "--trust-remote-code").model.trust_remote_code
    assert eval_config(checkpoint, "model.trust_remote_code=true").model.trust_remote_code


@pytest.mark.parametrize(
    "rollout",
    ["rollout.tools=['os:system']", "rollout.environment='evil:Env'", "rollout.environment={a: 'evil:Env'}",
     "rollout.tools=['grpo_ray.tools.python_tool:python']", "rollout.tools=['grpo_ray.tools.examples:x.y:z']",
     "rollout.function='evil:play'", "rollout.function='grpo_ray.inference.rollout_examples.x:z'"],
)  # fmt: skip
def test_eval_runs_tools_of_a_run_folder_only_with_the_users_flag(tmp_path: Path, rollout: str) -> None:
    checkpoint = stranger(tmp_path, load_config(None, [rollout]).to_dict())
    with pytest.raises(ConfigError, match="--trust-tools"):
        eval_config(checkpoint)
    assert eval_config(checkpoint, "--trust-tools").rollout.has_conversations


def test_eval_runs_the_example_functions_of_a_run_folder(tmp_path: Path) -> None:
    example = "grpo_ray.inference.rollout_examples:second_try"
    checkpoint = stranger(tmp_path, load_config(None, [f"rollout.function={example}"]).to_dict())
    assert eval_config(checkpoint).rollout.function == example


MIXTURE = {
    "a": {"path": "arithmetic", "rewards": ["correctness", "evil:a"]},
    "b": {"path": "x.jsonl", "rewards": ["boxed_format", "evil:b"]},
}


def mixture(**data: Any) -> dict[str, Any]:
    """Return a recorded config whose second source is scored by code of the stranger's."""
    return {
        "data": {"train": MIXTURE, **data},
        "rewards": {"functions": ["correctness", "evil:a", "boxed_format", "evil:b"], "settings": {"evil:a": {"x": 1}}},
        "grpo": {"reward_weights": [1.0, 2.0, 3.0, 4.0]},
    }


def test_eval_runs_rewards_of_a_mixture_only_with_the_users_flag() -> None:
    trust: dict[str, Any] = {"data_is_given": False, "trusts_tools": False, "trusts_engine": False}
    recorded = mixture()
    with pytest.raises(ConfigError, match="its own code or model evil:b, which is not run"):  # evil:a scores nothing
        evaluation_settings(recorded, **trust)
    taken = evaluation_settings(recorded, **trust, trusts_rewards=True)
    assert taken["rewards"] == {"functions": ["correctness", "boxed_format", "evil:b"], "settings": {}}
    assert taken["grpo"]["reward_weights"] == [1.0, 3.0, 4.0]
    config = from_mapping(taken)
    assert [config.heldout_score_of(name) for name in "ab"] == ["correctness", "reward"]
    assert config.rewards_of("b") == ("boxed_format", "evil:b") and recorded == mixture()
    given = evaluation_settings(recorded, **trust, score="correctness")
    assert "functions" not in given["rewards"] and from_mapping(given).heldout_score_of("b") == "correctness"


CODE = {
    "rewards.functions=['evil:f']": "rewards.functions: evil:f",
    "rewards.functions=['owner/model']": "rewards.functions: owner/model",
    "data.train={a: {path: arithmetic, rewards: ['evil:f']}}": "rewards.functions: evil:f",
    "rollout.tools=['evil:f']": "rollout.tools: evil:f",
    "rollout.environment=evil:E": "rollout.environment: evil:E",
    "rollout.function=evil:f": "rollout.function: evil:f",
    "rollout.sandbox_url=http://evil": "rollout.sandbox_url: http://evil",
    "rollout.isolation=none": "isolation: none",
    "rewards.settings={code_tests: {isolation: none}}": "isolation: none",
    "rewards.settings={judge: {url: http://evil}}": "rewards.settings.judge",
    "grpo.advantages=evil:f": "grpo.advantages: evil:f",
    "heldout.score=evil:f": "heldout.score: evil:f",
    "model.trust_remote_code=true": "model.trust_remote_code: true",
    "grpo.model_init_kwargs={attn_implementation: evil/kernel}": "grpo.model_init_kwargs",
    "run.from_checkpoint=https://evil/checkpoint-000002": "run.from_checkpoint: https://evil/checkpoint-000002",
    "engine.compile_cache=/tmp/evil": "engine.compile_cache: /tmp/evil",
    "engine.vllm={worker_cls: evil.Worker}": "engine.vllm: {'worker_cls': 'evil.Worker'}",
    "data.train=reference://x": "data: reference://x",
    "data.heldout={a: 'zip::x'}": "data: zip::x",
}
"""Override -> the first setting of a run folder for which `fork` and `replay` ask for trust."""


@pytest.mark.parametrize("override", CODE)
def test_fork_and_replay_ask_for_trust_in_settings_that_run_code(override: str) -> None:
    recorded = load_config().to_dict()
    section, _, field = override.partition("=")[0].partition(".")
    recorded[section] = {**recorded[section], field: yaml.safe_load(override.partition("=")[2])}
    assert recorded_code(recorded)[0] == CODE[override]


def test_fork_and_replay_take_harmless_settings_without_trust() -> None:
    # Both commands leave out the address of messages.
    examples = ["run.notify=https://example.org/post"]
    examples += ["rollout.tools=['grpo_ray.tools.examples:calculator']", "engine.vllm={enforce_eager: true}"]
    assert recorded_code(load_config(None, examples).to_dict()) == [] and recorded_code({}) == []


def test_eval_of_a_form_with_hidden_parts_is_refused_in_one_line() -> None:
    trust: dict[str, Any] = {"data_is_given": False, "trusts_tools": False, "trusts_engine": False}
    form = {"regex": "id [0-9]+"}
    assert evaluation_settings({"rollout": {"structured_outputs": form}}, **trust)["rollout"] == {
        "structured_outputs": form
    }
    hidden = {"json": {"properties": {"password": {"pattern": HIDDEN}}}}
    with pytest.raises(ConfigError, match="has parts that were hidden as secrets"):
        evaluation_settings({"rollout": {"structured_outputs": hidden}}, **trust)


def test_eval_takes_no_weaker_sandbox_for_programs_from_the_run_folder() -> None:
    own = {"isolation": "none", "parallel": 5000, "memory_gib": 900, "cpu_seconds": 3.0}
    sources: list[dict[str, Any]] = [{}, {"train": {"a": {"path": "x.jsonl"}}}]
    for data in sources:
        recorded = {"rewards": {"functions": ["code_tests"], "settings": {"code_tests": own}}, "data": data}
        taken = evaluation_settings(recorded, data_is_given=False, trusts_tools=False, trusts_engine=False)
        assert taken["rewards"]["settings"] == {"code_tests": {"cpu_seconds": 3.0}}
    assert own["isolation"] == "none"  # the record itself stays


def test_eval_on_named_sets_opens_no_source_of_a_recorded_mixture() -> None:
    recorded = mixture(heldout={"b": "y.jsonl"})
    recorded["data"]["train"] = {**MIXTURE, "b": {"path": "reference://x", "rewards": ["boxed_format"]}}
    recorded["rewards"]["functions"] = ["correctness", "evil:a", "boxed_format"]
    del recorded["grpo"]
    trust: dict[str, Any] = {"data_is_given": False, "trusts_tools": False, "trusts_engine": False}
    config = from_mapping(evaluation_settings(recorded, **trust))
    assert {source.dataset for source in config.training_sources.values()} == {"arithmetic"}
    assert config.heldout_score == "reward" and config.rewards_of("b") == ("boxed_format",)
    del recorded["data"]["heldout"]
    with pytest.raises(ConfigError, match=r"data\.train=reference://x of the run folder is not opened"):
        evaluation_settings(recorded, **trust)


@pytest.mark.parametrize("train", [{"a": 1}, {"a": None, 3: {"path": 4}}, {}, {"a": {"rewards": 3}}, [{"path": "x"}]])
def test_eval_of_a_damaged_mixture_is_refused_in_one_line(train: Any) -> None:
    settings = evaluation_settings(
        {"data": {"train": train}}, data_is_given=False, trusts_tools=False, trusts_engine=False
    )
    with pytest.raises(ConfigError, match=r"^data\.train"):
        from_mapping(settings)


ENGINE = load_config(None, []).to_dict()["engine"]


@pytest.mark.parametrize("name", sorted(set(vllm_fields()) - HARMLESS_ARGUMENTS))
def test_eval_passes_an_argument_to_the_engine_only_with_the_users_flag(name: str) -> None:
    recorded = {"engine": ENGINE | {"vllm": {name: "evil.module.Class"}}}
    with pytest.raises(ConfigError, match=rf"engine\.vllm\.{name}, .*--trust-engine"):
        evaluation_settings(recorded, data_is_given=False, trusts_tools=False, trusts_engine=False)
    trusted = evaluation_settings(recorded, data_is_given=False, trusts_tools=False, trusts_engine=True)
    assert trusted["engine"]["vllm"] == {name: "evil.module.Class"}


@pytest.mark.parametrize("trusts_engine", [False, True])
def test_eval_spans_as_many_gpus_as_a_dedicated_engine(trusts_engine: bool) -> None:
    overrides = ["engine.placement=dedicated", "engine.replicas=[2, 4]", "engine.tensor_parallel_size=4"]
    recorded = load_config(None, overrides).to_dict()
    taken = evaluation_settings(recorded, data_is_given=False, trusts_tools=False, trusts_engine=trusts_engine)
    config = load_config(settings=taken)
    assert config.tensor_parallel_size == 4
    assert config.engine.replica_range == ((2, 4) if trusts_engine else (1, 1))


@pytest.mark.parametrize("form", ["model.quantization=int4", "model.share_base=true", "engine.adapter=request"])
@pytest.mark.parametrize("trusts_engine", [False, True])
def test_eval_merges_an_adapter_that_the_run_kept_apart(form: str, trusts_engine: bool) -> None:
    recorded = load_config(None, ["model.lora={}", "model.dtype=bfloat16", form]).to_dict()
    taken = evaluation_settings(recorded, data_is_given=False, trusts_tools=False, trusts_engine=trusts_engine)
    config = from_mapping(taken)
    assert config.model.adapter is None and config.model.quantization is None and config.adapter_sync == "merge"


@pytest.mark.parametrize("value", ["evil.module.Class", "/etc/passwd", {"a": 1}, ["x"], "http://h", "", "-a", "a" * 33])
@pytest.mark.parametrize("name", sorted(HARMLESS_ARGUMENTS))
def test_eval_takes_numbers_and_names_of_types_for_the_engine(name: str, value: Any) -> None:
    trust: dict[str, Any] = {"data_is_given": False, "trusts_tools": False, "trusts_engine": False}
    with pytest.raises(ConfigError, match="--trust-engine"):
        evaluation_settings({"engine": {"vllm": {name: value}}}, **trust)
    for plain in (8192, True, "fp8_e4m3", "compressed-tensors", "auto-round", None):
        recorded = {"engine": {"vllm": {name: plain}}}
        assert evaluation_settings(recorded, **trust)["engine"] == recorded["engine"]


def test_eval_takes_no_folder_of_compiled_code_from_the_run_folder(tmp_path: Path) -> None:
    engine = {"compile_cache": str(tmp_path), "max_model_len": 64, "later_field": "x"}
    taken = evaluation_settings({"engine": engine}, data_is_given=False, trusts_tools=False, trusts_engine=False)
    assert taken["engine"] == {"max_model_len": 64}
    trusted = evaluation_settings({"engine": engine}, data_is_given=False, trusts_tools=False, trusts_engine=True)
    assert "compile_cache" not in trusted["engine"]


def test_eval_engine_of_a_run_folder_is_taken_by_the_command(tmp_path: Path) -> None:
    engine = {"vllm": {"worker_extension_cls": "evilrun.evil.Ext"}}
    checkpoint = stranger(tmp_path, {"engine": engine})
    with pytest.raises(ConfigError, match=r"engine\.vllm\.worker_extension_cls"):
        eval_config(checkpoint)
    assert main(["eval", str(checkpoint)]) == 2
    assert eval_config(checkpoint, "--trust-engine").engine.vllm == engine["vllm"]


@pytest.mark.parametrize("flags", [[], ["--trust-tools"]])
def test_eval_takes_no_isolation_from_the_run_folder(tmp_path: Path, flags: list[str]) -> None:
    checkpoint = stranger(tmp_path, load_config(None, ["rollout.isolation=none"]).to_dict())
    assert eval_config(checkpoint, *flags).rollout.isolation == "required"


def test_eval_sends_no_token_to_an_address_of_the_run_folder(tmp_path: Path) -> None:
    """A stranger could name an own address, and the variable of any secret of the user."""
    own = ["rollout.sandbox_url=https://evil.example", "rollout.sandbox_token_variable=HF_TOKEN"]
    tools = "rollout.tools=['grpo_ray.tools.examples:multiply']"
    checkpoint = stranger(tmp_path, load_config(None, [tools, *own]).to_dict())
    taken = eval_config(checkpoint).rollout
    assert (taken.sandbox_url, taken.sandbox_token_variable) == (None, None)
    remote = stranger(
        tmp_path, load_config(None, ["rollout.tools=['grpo_ray.tools.remote_python:python']", *own]).to_dict()
    )
    with pytest.raises(ConfigError, match="--trust-tools"):
        eval_config(remote)
    assert eval_config(remote, "--trust-tools").rollout.sandbox_url == "https://evil.example"


def test_eval_runs_the_examples_of_tools(tmp_path: Path) -> None:
    game = ["rollout.environment='grpo_ray.tools.examples:Guess'", "rewards.functions=[environment, 'evil:f']"]
    config = eval_config(stranger(tmp_path, load_config(None, game).to_dict()))
    assert config.rollout.has_turns and config.rewards.functions == ("environment",)


def test_eval_users_own_config_keeps_its_trust(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("model: {trust_remote_code: true}\nrewards: {functions: ['my.module:f']}\n")
    config = eval_config(stranger(tmp_path, {}), "--config", str(own))
    assert config.model.trust_remote_code and config.rewards.functions == ("my.module:f",)


@pytest.fixture
def strangers_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return recorded rewards of a module that must not be imported."""
    (tmp_path / "strangers_rewards.py").write_text("raise SystemExit('ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return {"functions": ["strangers_rewards:f"], "settings": {"strangers_rewards:f": {"x": 1}}, "strict": False}


def test_eval_loads_a_reward_model_of_the_run_folder_only_with_the_users_flag(tmp_path: Path) -> None:
    checkpoint = stranger(tmp_path, {"rewards": {"functions": ["boxed_format", "strangers/model"]}})
    with pytest.raises(ConfigError, match="its own code or model strangers/model, which is not run on its behalf"):
        eval_config(checkpoint)
    assert eval_config(checkpoint, "--trust-rewards").rewards.functions == ("boxed_format", "strangers/model")
    assert eval_config(checkpoint, "heldout.score=correctness").rewards.functions == ("correctness",)


@pytest.mark.parametrize("own", [[], ["correctness"]], ids=["alone", "with correctness"])
def test_eval_imports_no_reward_of_the_run_folder(
    tmp_path: Path, strangers_rewards: dict[str, Any], own: list[str]
) -> None:
    strangers_rewards["functions"] += own
    checkpoint = stranger(tmp_path, {"rewards": strangers_rewards, "grpo": {"reward_weights": [2.0, 1.0]}})
    config = eval_config(checkpoint, *([] if own else ["heldout.score=correctness"]))
    heldout_score(config)
    assert config.rewards == RewardsConfig(strict=False) and config.heldout_score == "correctness"
    assert "strangers_rewards" not in sys.modules


@pytest.mark.parametrize("score", [None, "reward", "strangers_rewards:g"])
def test_eval_scores_with_code_of_the_run_folder_only_with_the_users_flag(
    tmp_path: Path, strangers_rewards: dict[str, Any], score: str | None
) -> None:
    recorded = {"rewards": strangers_rewards, "heldout": {"score": score}, "grpo": {"reward_weights": [2.0]}}
    checkpoint = stranger(tmp_path, recorded)
    with pytest.raises(
        ConfigError, match=r"its own code or model strangers_rewards:.*--trust-rewards.*heldout\.score="
    ):
        eval_config(checkpoint)
    trusted = eval_config(checkpoint, "--trust-rewards")
    if score == "strangers_rewards:g":
        assert trusted.heldout_score == score and trusted.rewards.functions == ("correctness",)
    else:
        assert trusted.heldout_score == "reward" and trusted.rewards.functions == ("strangers_rewards:f",)
        assert trusted.rewards.settings == {"strangers_rewards:f": {"x": 1}}
        assert trusted.grpo.trl["reward_weights"] == [2.0]
    assert eval_config(checkpoint, "heldout.score=my_rewards:style").heldout_score == "my_rewards:style"  # the user's
    assert "strangers_rewards" not in sys.modules


def test_eval_scores_with_built_in_rewards_of_the_run_folder(tmp_path: Path) -> None:
    rewards = {"functions": ["boxed_format", "soft_overlong"], "settings": {"soft_overlong": {"max_length": 8}}}
    config = eval_config(stranger(tmp_path, {"rewards": rewards}))
    assert config.heldout_score == "reward" and config.rewards.functions == ("boxed_format", "soft_overlong")


@pytest.mark.parametrize("score", [["a:b"], {"a": "b"}, 5, "no_such"])
def test_eval_score_of_the_run_folder_that_is_none_is_refused(tmp_path: Path, score: Any) -> None:
    with pytest.raises(ConfigError, match=r"heldout\.score"):
        eval_config(stranger(tmp_path, {"heldout": {"score": score}}))


@pytest.mark.parametrize("field", ["train", "heldout"])
@pytest.mark.parametrize(
    "source", ["reference://x.jsonl", "filecache::https://h/x.jsonl", "https://h/x.jsonl::s3://b", "/data/a::b.jsonl"]
)
def test_eval_opens_no_unusual_protocol_of_the_run_folder(tmp_path: Path, field: str, source: str) -> None:
    checkpoint = stranger(tmp_path, {"data": {"train": "deepmath", "heldout": None, field: source}})
    with pytest.raises(ConfigError, match=rf"data\.{field}=.* name the problems with --data"):
        eval_config(checkpoint)
    assert eval_config(checkpoint, "--data", "/x.jsonl").data.heldout == "/x.jsonl"


@pytest.mark.parametrize("heldout", [{}, {"heldout": "auto"}])
def test_eval_of_a_part_of_training_opens_no_unusual_protocol(tmp_path: Path, heldout: dict[str, str]) -> None:
    checkpoint = stranger(tmp_path, {"data": {"train": "reference://x.jsonl", **heldout}})
    with pytest.raises(ConfigError, match=r"data\.train=.* name the problems with --data"):
        eval_config(checkpoint)


def test_eval_measures_the_part_that_the_run_held_out(tmp_path: Path) -> None:
    config = eval_config(stranger(tmp_path, {"data": {"train": "/mine.jsonl", "heldout": "auto"}}))
    (source,) = config.heldout_sources.values()
    assert (source.dataset, source.is_part_of_training) == ("/mine.jsonl", True)


@pytest.mark.parametrize("source", ["deepmath", "owner/name", "s3://b/x.jsonl?region=r", "hf://datasets/a/b.parquet"])
def test_eval_takes_ordinary_problems_of_the_run_folder(tmp_path: Path, source: str) -> None:
    assert eval_config(stranger(tmp_path, {"data": {"heldout": source}})).data.heldout == source


def test_eval_without_training_problems_needs_none(tmp_path: Path) -> None:
    data = {"train": f"s3://{HIDDEN}@b/x.jsonl", "heldout": "gsm8k"}
    assert eval_config(stranger(tmp_path, {"data": data})).data.train == "arithmetic"


def test_eval_hidden_secret_that_it_needs_is_asked_for(tmp_path: Path) -> None:
    checkpoint = stranger(tmp_path, {"data": {"heldout": f"s3://{HIDDEN}@b/x.jsonl"}, "grpo": {"hub_token": HIDDEN}})
    with pytest.raises(ConfigError, match=r"^data\.heldout: .* set the real value again, as in data\.heldout=\.\.\."):
        eval_config(checkpoint)
    config = eval_config(checkpoint, "data.heldout=s3://K:S@b/x.jsonl")
    assert "hub_token" not in config.grpo.trl


@pytest.mark.parametrize(
    "text",
    [
        "run: !!python/object/apply:os.mkdir ['ran']",
        "rewards: !!python/name:os.system {}",
        "a: &a [x, x]\nb: &b [*a, *a]\ndata: {columns: *b}",
        "run: &r {name: *r}",
        "data: {system_prompt: " + "x" * 300_000 + "}",
        "run: " + "[" * 5_000,
    ],
    ids=["object", "name", "alias", "recursive", "large", "deep"],
)
def test_recorded_config_with_more_than_data_raises(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DamagedFileError, match=r"config\.yaml is damaged"):
        parse_recorded(text.encode(), "config.yaml")
    checkpoint = stranger(tmp_path, text)
    assert main(["eval", str(checkpoint)]) == 2 and main(["export", str(checkpoint.parent), "target"]) == 2
    assert not (tmp_path / "ran").exists()


def test_recorded_config_alias_bomb_ends_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    started = time.process_time()
    with pytest.raises(DamagedFileError, match="alias"):
        parse_recorded("\n".join(lines).encode(), "config.yaml")
    assert time.process_time() - started < 5  # expanded, it has 10**30 entries


@pytest.mark.parametrize("name", ["../../private.txt", "/etc/hostname", "a/../../../private.txt", ""])
def test_manifest_paths_outside_the_checkpoint_are_not_read(tmp_path: Path, name: str) -> None:
    private = tmp_path / "private.txt"
    private.write_text("private")
    right = {"bytes": 7, "sha256": hashlib.sha256(b"private").hexdigest()}
    checkpoint = stranger(tmp_path, {}, files={name: right})
    assert find_faults(find_checkpoint(str(checkpoint))) == [f"{name} is missing"]
    with pytest.raises(CheckpointError, match="is damaged"):
        export(str(checkpoint), tmp_path / "target")
    assert not (tmp_path / "target").exists()


class Payload:
    """An object whose unpickling ends the test, in place of an attacker's code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("unpickled",)


def test_ledger_with_pickled_objects_raises(tmp_path: Path) -> None:
    np.savez(tmp_path / "ledger.npz", header=np.array([Payload()], dtype=object))
    with pytest.raises(Exception, match="pickle"):
        Ledger.load(tmp_path)


def test_reward_states_are_read_as_json_only(tmp_path: Path) -> None:
    (tmp_path / "rewards_0.json").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(ValueError):
        load_reward_states(tmp_path, 0)
    (tmp_path / "rewards_0.json").write_text(json.dumps({"mine": {"seen": 3}}))
    assert load_reward_states(tmp_path, 5) == {"mine": {"seen": 3}}


def sparse(path: Path, size: int) -> None:
    with open(path, "wb") as file:
        file.truncate(size)


def test_huge_small_file_is_not_read(tmp_path: Path) -> None:
    checkpoint = stranger(tmp_path, {})
    sparse(checkpoint / "manifest.json", 1 << 40)
    folder = RunFolder(str(tmp_path), "run")
    with pytest.raises(DamagedFileError, match=r"manifest\.json is damaged: it has \d+ bytes; the limit is"):
        folder.read_bytes(CHECKPOINT, "manifest.json")
    sparse(checkpoint.parent / "config.yaml", 1 << 40)
    assert main(["eval", str(checkpoint)]) == 2


def test_huge_line_comes_in_parts(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.write_text("a\n", "metrics.jsonl")
    with open(folder.path("metrics.jsonl"), "ab") as file:
        file.truncate(3 * LINE_BYTES)
    lines = list(folder.read_lines("metrics.jsonl"))
    assert lines[0] == b"a\n" and [len(line) for line in lines[1:]] == [LINE_BYTES, LINE_BYTES, LINE_BYTES - 2]
