"""Tests of the record of a sweep and of the user's requests: what a killed sweep continues from."""

from pathlib import Path

import pytest

from grpo_ray.errors import ConfigError, DamagedFileError
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.sweep.requests import (
    SweepRequest,
    apply_request,
    delete_request,
    parse_request,
    read_requests,
    write_request,
)
from grpo_ray.sweep.state import RungDecision, SweepState, TrialRecord, begin_state, read_state
from grpo_ray.sweep.trials import SweepTrial

TRIALS = [SweepTrial(name=name, overrides={"run.seed": seed}) for seed, name in enumerate("abc")]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path), "rates")


def standings(state: SweepState) -> dict[str, str]:
    return {record.trial.name: record.standing for record in state.records}


def test_state_is_read_as_it_was_written(folder: RunFolder) -> None:
    assert read_state(folder) is None
    state = begin_state(folder, TRIALS)
    assert standings(state) == {"a": "active", "b": "active", "c": "active"}
    state = state.with_decision(RungDecision(step=4, values={"a": 0.5, "b": None, "c": 0.25}, kept=["a", "c"]))
    state = state.with_standing("c", "stopped", "by the user").with_request("0001-x")
    clone = SweepTrial(name="a-clone-1", overrides={"run.seed": 9}, parent="a")
    state = state.with_record(TrialRecord(trial=clone, started_from="checkpoint-000004"))
    state.write(folder)
    again = begin_state(folder, TRIALS)
    assert standings(again) == {"a": "active", "b": "dropped", "c": "stopped", "a-clone-1": "active"}
    assert again.record("b").reason == "at step 4"
    assert again.record("a-clone-1").started_from == "checkpoint-000004"
    assert again.decisions[0].values == {"a": 0.5, "b": None, "c": 0.25}
    assert again.requests == ("0001-x",)


def test_failed_trial_is_tried_again_by_the_next_launch(folder: RunFolder) -> None:
    begin_state(folder, TRIALS).with_standing("b", "failed", "no GPU").write(folder)
    assert standings(begin_state(folder, TRIALS)) == {"a": "active", "b": "active", "c": "active"}


def test_sweep_with_other_trials_is_refused(folder: RunFolder) -> None:
    begin_state(folder, TRIALS).write(folder)
    changed = [TRIALS[0], SweepTrial(name="b", overrides={"run.seed": 7}), SweepTrial(name="d", overrides={})]
    with pytest.raises(ConfigError, match=r"was begun with other trials: b, c, d differ; restore the sweep file"):
        begin_state(folder, changed)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"records": 3}', '{"records": [], "other": 1}'])
def test_damaged_record_is_one_line_with_the_mend(folder: RunFolder, content: str) -> None:
    folder.write_text(content, "sweep.json")
    with pytest.raises(DamagedFileError, match=r"sweep\.json .*damaged.*restore it, or delete it"):
        begin_state(folder, TRIALS)


def test_requests_are_read_in_order_and_deleted(folder: RunFolder) -> None:
    first = write_request(folder, SweepRequest(action="stop", trial="a"))
    second = write_request(folder, SweepRequest(action="clone", trial="b", overrides={"grpo.learning_rate": 1e-5}))
    folder.write_text("{", "requests", "99999999999999999999-damaged.json")
    found = read_requests(folder)
    assert [request_id for request_id, _ in found] == [first, second, "99999999999999999999-damaged"]
    assert found[0][1] == SweepRequest(action="stop", trial="a")
    assert found[1][1] is not None and dict(found[1][1].overrides) == {"grpo.learning_rate": 1e-5}
    assert found[2][1] is None
    for request_id, _ in found:
        delete_request(folder, request_id)
    assert read_requests(folder) == []


def test_requests_change_the_standing(folder: RunFolder) -> None:
    state = begin_state(folder, TRIALS)
    state, _ = apply_request(state, SweepRequest(action="stop", trial="b"))
    assert standings(state)["b"] == "stopped"
    with pytest.raises(ConfigError, match="b takes no steps: it is stopped"):
        apply_request(state, SweepRequest(action="stop", trial="b"))
    state, _ = apply_request(state, SweepRequest(action="resume", trial="b"))
    assert standings(state)["b"] == "active"
    state = state.with_decision(RungDecision(step=2, values={"a": 1.0, "b": 0.0, "c": 1.0}, kept=["a", "c"]))
    state, _ = apply_request(state, SweepRequest(action="resume", trial="b"))  # the user knows better than the rung
    assert standings(state) == {"a": "active", "b": "active", "c": "active"}
    with pytest.raises(ConfigError, match="there is no trial d; the sweep has a, b, c"):
        apply_request(state, SweepRequest(action="resume", trial="d"))


def test_clone_has_its_parents_settings_and_its_own(folder: RunFolder) -> None:
    state = begin_state(folder, TRIALS)
    for number in (1, 2):
        state, line = apply_request(state, SweepRequest(action="clone", trial="b", overrides={"grpo.beta": 0.1}))
        assert line == f"b: cloned as b-clone-{number} with seed=1 beta=0.1"
    clone = state.record("b-clone-2").trial
    assert clone == SweepTrial(name="b-clone-2", overrides={"run.seed": 1, "grpo.beta": 0.1}, parent="b")


def test_words_of_a_request_are_parsed() -> None:
    request = parse_request("clone", ["b", "grpo.learning_rate=1e-5", "rewards.functions=[correctness]"])
    assert request.trial == "b"
    assert dict(request.overrides) == {"grpo.learning_rate": 1e-5, "rewards.functions": ["correctness"]}
    with pytest.raises(ConfigError, match="sweep stop takes a sweep and one of its trials; got none"):
        parse_request("stop", [])
    with pytest.raises(ConfigError, match=r"sweep stop changes no settings; leave run\.seed=1 out"):
        parse_request("stop", ["b", "run.seed=1"])


SECRETS = ["s3cr3t-of-the-first-judge", "s3cr3t-of-the-second-judge"]


def test_trials_that_vary_a_secret_continue_with_it(folder: RunFolder) -> None:
    trials = [SweepTrial(name=f"t{key[-7]}", overrides={"judge.api_key": key}) for key in SECRETS]
    begin_state(folder, trials).write(folder)
    assert not any(secret in folder.read_text("sweep.json") for secret in SECRETS)
    state = begin_state(folder, trials)
    assert [record.trial for record in state.records] == trials


def test_clone_with_a_secret_is_refused(folder: RunFolder) -> None:
    trials = [SweepTrial(name="a", overrides={"judge.api_key": SECRETS[0]}), SweepTrial(name="b", overrides={})]
    line = r"^a clone cannot have settings with secrets, which are not recorded \(judge\.api_key\); add"
    state = begin_state(folder, trials)
    state.write(folder)
    recorded = read_state(folder)
    assert recorded is not None  # that of the command, without secrets
    for each in (state, recorded):
        with pytest.raises(ConfigError, match=line):
            apply_request(each, SweepRequest(action="clone", trial="a"))
        with pytest.raises(ConfigError, match=line):
            apply_request(each, SweepRequest(action="clone", trial="b", overrides={"judge.api_key": SECRETS[1]}))


def test_request_below_the_folder_of_requests_is_none(folder: RunFolder) -> None:
    request = write_request(folder, SweepRequest(action="stop", trial="a"))
    folder.write_text("{}", "requests", "checkpoint-000001", "manifest.json")
    assert [request_id for request_id, _ in read_requests(folder)] == [request]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("grpo.learning_rat", "unknown key grpo.learning_rat; did you mean grpo.learning_rate?"),
        ("seed", "unknown key seed; did you mean run.seed?"),
        ("data.sets.own", "unknown key data.sets.own"),
        ("run.resume", "trials cannot vary run.resume; a trial always continues from its latest checkpoint"),
    ],
)
def test_key_that_a_clone_cannot_set_is_refused_at_once(key: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_request("clone", ["b", f"{key}=1"])
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("data.system_prompt=Use #1", "Use #1"),
        ("data.system_prompt=no", "no"),
        ("run.project=2026-01-31", "2026-01-31"),
        ("run.project=null", None),
        ("model.lora.rank=8", 8),
    ],
)
def test_override_of_a_clone_is_read_as_on_other_command_lines(word: str, value: object) -> None:
    assert parse_request("clone", ["b", word]).overrides == {word.partition("=")[0]: value}


@pytest.mark.parametrize("word", ["grpo.optim_args=2026-01-31", "rewards.settings={correctness: {1: 2}}"])
def test_value_of_a_clone_that_json_does_not_keep_is_refused(word: str) -> None:
    key = word.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key} has a date, or a key that is no text; put it in quotes$"):
        parse_request("clone", ["b", word])


@pytest.mark.parametrize("key", ["grpo.learning_rate", "grpo.beta", "grpo.weight_decay", "model.lora.rank", "run.seed"])
def test_key_of_the_config_may_be_set_by_a_clone(key: str) -> None:
    assert list(parse_request("clone", ["b", f"{key}=1"]).overrides) == [key]
