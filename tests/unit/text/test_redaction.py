"""Tests of redaction: secrets of every kind are hidden in all that is written or shown, and nothing else changes."""

import dataclasses
import io
import itertools
import json
import os
import pickle
import string
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import hypothesis.strategies as st
import pyarrow.parquet as pq
import pytest
import ray.train
import yaml
from config_cases import examples
from hypothesis import given
from page_samples import EVENTS, metric_rows, write_run
from rich.console import Console

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import SECTIONS, Config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.data.problem import Problem
from grpo_ray.driver import summary
from grpo_ray.driver.launch import record_config
from grpo_ray.driver.preflight.resume_fields import require_same_fields
from grpo_ray.driver.preflight.run_context import RunContext
from grpo_ray.driver.run import describe_training_failure
from grpo_ray.errors import ConfigError, DataError, GrpoRayError
from grpo_ray.evaluation.metrics import measurement_conditions
from grpo_ray.evaluation.records import make_records
from grpo_ray.export.checkpoint import find_checkpoint
from grpo_ray.observers.terminal.progress import ProgressLine
from grpo_ray.observers.trackers.history import TrackerFile
from grpo_ray.observers.trackers.tracker import Position
from grpo_ray.pages.report import write_page
from grpo_ray.rewards.metrics import reward_metric
from grpo_ray.storage.checkpoint_integrity import find_faults
from grpo_ray.storage.checkpoint_upload import CheckpointUploader
from grpo_ray.storage.checkpoints import list_checkpoints, prune_checkpoints
from grpo_ray.storage.jsonl import (
    EventsFile,
    MetricsFile,
    load_metrics_history,
    read_events,
    read_metrics,
    save_metrics_history,
)
from grpo_ray.storage.lease import RunLease, read_holder
from grpo_ray.storage.records.conversation_columns import ConversationRecord, MessageRecord, bound_messages
from grpo_ray.storage.records.groups import TEXT_BYTES, GroupRecord, attach_texts
from grpo_ray.storage.records.heldout_files import bound_heldout_text, write_heldout
from grpo_ray.storage.records.rollout_files import write_rollouts
from grpo_ray.storage.records.tokens import TokenRecord, without_token_texts
from grpo_ray.storage.retry import describe_error
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.text import redaction
from grpo_ray.text.redaction import (
    HIDDEN,
    find_secrets,
    hidden_settings,
    is_secret_name,
    redact,
    redact_record,
    redact_settings,
    redact_stream,
    redact_text,
    remember_secrets,
    strip_hidden,
)

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the secrets that are registered in this process, and keep git out of the tests."""
    monkeypatch.setattr(redaction, "_remembered", set())
    monkeypatch.setattr(summary, "versions", lambda: {"torch": "2.0.0", "commit": "none"})
    yield


# Texts


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (f"s3://KEY:{SECRET}@bucket/runs", "s3://HIDDEN@bucket/runs"),
        ("cannot open s3://KEY@bucket: why", "cannot open s3://HIDDEN@bucket: why"),
        ("https://me:pw@host/x and s3a://k:s@b", "https://HIDDEN@host/x and s3a://HIDDEN@b"),
        ("https://hf-token@huggingface.co/x", "https://HIDDEN@huggingface.co/x"),
        ("gs://user:pass@bucket/runs", "gs://HIDDEN@bucket/runs"),
        ("No such file: 's3:/me:secret@b/x.yaml'", "No such file: 's3:/HIDDEN@b/x.yaml'"),
        ("redis://:p/w@host:1", "redis://HIDDEN@host:1"),
        ("https://h/x?sig=abc%2F&se=1", "https://h/x?sig=HIDDEN&se=1"),
        ("https://h/x?X-Amz-Date=1&X-Amz-Signature=abc", "https://h/x?X-Amz-Date=1&X-Amz-Signature=HIDDEN"),
        ("s3://b/x?access_key=A&secret_key=B&region=r", "s3://b/x?access_key=HIDDEN&secret_key=HIDDEN&region=r"),
        ("Authorization: Bearer abcdefghijklmnop12", "Authorization: Bearer HIDDEN"),
        ("token hf_abcdefghijklmnopqrst is refused", "token HIDDEN is refused"),
        ("AKIAIOSFODNN7EXAMPLE", "HIDDEN"),
        ("Authorization: Basic dXNlcjpwYXNzd29yZDE=", "Authorization: Basic HIDDEN"),
        ("Authorization: Basic opaque/but+announced", "Authorization: Basic HIDDEN"),
        ("{'authorization': 'Basic dTpw'}", "{'authorization': 'Basic HIDDEN'}"),  # u:p
        ("refused: basic dXNlcjpwYXNzd29yZA.", "refused: basic HIDDEN"),  # user:password, without its padding
        ("npm_" + "a1" * 18, "HIDDEN"),
        ("gsk_" + "a1" * 12, "HIDDEN"),
        ("r8_" + "a1" * 12, "HIDDEN"),
        ("post to https://hooks.slack.com/services/T0/B0/abcdef12", "post to HIDDEN"),
        ("https://discord.com/api/webhooks/123/ab-Cd_9 and", "HIDDEN and"),
        ("a eyJhbGciOiJIUzI1.eyJzdWIiOiIxMj.SflKxwRJSMeKKF2QT4 b", "a HIDDEN b"),
        ("token=x-eyJhbGciOiJIUzI1.eyJzdWIiOiIxMj.SflKxwRJSMeKKF2QT4", "token=x-HIDDEN"),
        ("grpo.hub_token=abc", "grpo.hub_token=HIDDEN"),
        ("{judge: {api_key: 'abc', model: m}}", "{judge: {api_key: 'HIDDEN', model: m}}"),
        ('"client_secret": "abc"', '"client_secret": "HIDDEN"'),
        ("AWS_SECRET_ACCESS_KEY=abc x", "AWS_SECRET_ACCESS_KEY=HIDDEN x"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----!", "HIDDEN!"),
    ],
)
def test_redact_text_hides_secret(text: str, redacted: str) -> None:
    assert redact_text(text) == redacted.replace("HIDDEN", HIDDEN)
    assert redact_text(redact_text(text)) == redact_text(text)


@pytest.mark.parametrize(
    "text",
    [
        r"Thus $\frac{a:b}{c@d}$, so \boxed{5 & x=3 \\ y:=2}.",
        "the token: 5, the secret = 7, a key: C major, eos_token: '<|end|>', max_tokens=256",
        "Qwen/Qwen2.5-0.5B-Instruct", "trl-lib/DeepMath-103K", "9fed846c0ffee1234567890abcdef", "checkpoint-000100",
        "s3://bucket/a@b/c:d@e", "hdfs://host:9000/a@b", "abfs://container@account.net/a", "gs://anonymous@bucket/a",
        "s3://b/runs?endpoint_override=127.0.0.1:9000&scheme=http&region=us-east-1", "someone@example.com", "a://b",
        "a basic understanding of 12 things", "Basic multiplication1 of numbers", "eyJ.eyJ.x", "1.2.3",
        "numpy.linalg.svd", "basic multiplication understood",
        "we use basic addition/subtraction rules", "basic probability/statistics12", "Basic trigonometry+algebra= done",
        "hub_token=null", "grpo.num_generations=8", "std::vector<int>@x", "", "reward/judge_token_mean",
    ],
)  # fmt: skip
def test_redact_text_harmless_is_unchanged(text: str) -> None:
    assert redact_text(text) == text


def test_redact_texts_of_real_completions_are_unchanged(real_problems: Callable[[str], Path]) -> None:
    for line in real_problems("scored_completions.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert redact(row) == row


HOSTILE_UNITS = [
    *("a-", "://a", "s3://a:", "&a", "eyJa", "eyJ-", "eyJa.", "eyJaaaaaaaaaa.", "Basic ", "password", "x "),
    *("[hidden", "https://", "https://a:@", "s3://a:b@ ", "redis://:", "a:/", "@a:/", "://@:", "-----BEGIN "),
    *("-----BEGIN PRIVATE KEY-----", "hf_", "hf_ghp_sk-xoxAIzanpm_gsk_r8_AKIA", "api_key", "api_key\n", "api_key ="),
    *("password = [hidden-secret", "Bearer aaaaaaaaaaaaaaaa", "&sig=a", "&" + "a" * 59 + "=", "?a.", "keya-", "token"),
    "eyJaaaaaaaaaaaaa.eyJaaaaaaaaaaaaaa.",
]


@pytest.mark.parametrize("unit", HOSTILE_UNITS)
def test_redact_text_hostile_length_is_linear(unit: str) -> None:
    """Four times the text takes about four times as long, and sixteen times where a pattern is quadratic."""

    def seconds(size: int) -> float:
        text, times = unit * (size // len(unit)), []
        for _ in range(3):
            started = time.thread_time()
            redact_text(text)
            times.append(time.thread_time() - started)
        return min(times)

    assert seconds(200_000) < 10 * seconds(50_000) + 0.01


# Records


def test_redact_record_keeps_mathematics_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "unguessable/99")
    text = "Let password = 5 and api_key: 17, so secret_key=x; $a:b@c = 3.14159265358979$, 12345678901234567890"
    assert redact_record(text) == text and redact_text(text) != text
    secrets = ("unguessable/99", "hf_abcdefghijklmnopqrst", "s3://KEY:SECRET@bucket", "Bearer abcdefghijklmnop12")
    for secret in secrets:
        hidden = redact_record(f"{text} {secret} end")
        assert HIDDEN in hidden and hidden.startswith(text) and secret not in hidden


def test_records_of_completions_hide_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "unguessable/99")
    folder, secret = RunFolder(str(tmp_path), "run"), "unguessable/99"
    long = "x" * (TEXT_BYTES - 8) + secret + "y" * TEXT_BYTES  # cut within the secret if it were cut first
    messages = [MessageRecord("tool", secret, f"a {secret}"), MessageRecord("call", "f", json.dumps({"key": secret}))]
    conversation = ConversationRecord(
        turns=1, calls=1, call_errors=0, tool_seconds=0.0, ended="stop",
        messages=bound_messages([*messages, MessageRecord("user", "", long)], 4096),
    )  # fmt: skip
    group = GroupRecord(
        step=1, epoch=0, problem="a" * 16, rewards=(1.0,), correct=(1.0,), lengths=(3,), truncated=(False,),
        conversations=(conversation,), sample="first", advantages=(0.0,),
    )  # fmt: skip
    group = attach_texts(group, [{"role": "user", "content": f"Is it {secret}?"}], [long])
    write_rollouts(folder, [replace(group, tokens=(without_token_texts(token_record(["un", "guessable/99"])),))])
    row = {"scores": [1.0], "lengths": [3], "truncated": [False], "texts": [bound_heldout_text(long, 1)]}
    problem = Problem(id="a" * 16, prompt=[{"role": "user", "content": secret}], solution=f"${secret}$")
    row |= {"conversations": [conversation.to_json()]}
    write_heldout(folder, "heldout", 1, make_records([row], [problem]), policy="", conditions={})
    for path in tmp_path.rglob("*.parquet"):
        file = pq.ParquetFile(path)
        text = f"{file.read().to_pylist()} {file.schema_arrow.metadata}"
        assert "unguess" not in text and text.count(HIDDEN) >= 4, path


def token_record(texts: list[str]) -> TokenRecord:
    """Return a record of tokens with these texts."""
    ends = array("i", itertools.accumulate(map(len, texts)))
    logps = array("f", [0.0] * len(texts))
    text = "".join(texts).encode()
    return TokenRecord(text=text, ends=ends, head=len(texts), engine_logps=logps, masked=bytes(len(texts)))


# Names


def test_is_secret_name_recognises_names() -> None:
    secret = """api_key judge.password hub_token push_to_hub_token aws_secret token apiKey API-KEY Authorization
        secret_access_key access_key_id api_key_2 credentials client_secret X-Api-Key auth_tokens passphrase
        slack_webhook openai_key judge_key wandb_key webhook_url dsn sentry_dsn cookie service_account_json"""
    assert [name for name in secret.split() if not is_secret_name(name)] == []


def test_is_secret_name_harmless_is_false() -> None:
    from trl import GRPOConfig

    harmless = """max_completion_length tokenizer max_tokens_total monkey grpo.top_k pad_token eos_token sort_key
        primary_key cache_key metric_key public_key
        stop_token_ids tokens_saved key keys secretary author tokenizer.json manifest.json"""
    names = [*harmless.split(), *(f"{s}.{f.name}" for s, cls in SECTIONS.items() for f in dataclasses.fields(cls))]
    assert [name for name in names if is_secret_name(name)] == ["run.notify"]  # the address of a chat's webhook
    assert {name for name in GRPOConfig.__dataclass_fields__ if is_secret_name(name)} <= {
        "hub_token", "push_to_hub_token"
    }  # fmt: skip


# Settings


def test_redact_settings_hides_values_of_secret_names() -> None:
    nested = {"judge": {"api_key": "abc", "model": "m", "port": 8000}, "credentials": {"user": "u", "pins": [1, 2]}}
    assert redact_settings(nested) == {
        "judge": {"api_key": HIDDEN, "model": "m", "port": 8000},
        "credentials": {"user": HIDDEN, "pins": [HIDDEN, HIDDEN]},
    }
    assert redact_settings({"token": None, "password": True, "secret": ""}) == {
        "token": None, "password": True, "secret": ""
    }  # fmt: skip


def test_redact_settings_recursive_ends() -> None:
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    assert HIDDEN in str(redact_settings(loop)) and find_secrets(loop) == set()


def test_redact_keeps_numbers_of_metrics() -> None:
    row = {"reward/token": 0.5, "step": 3, "checkpoint": "checkpoint-000003", "files": {"secret": {"bytes": 5}}}
    assert redact(row) == row


def test_find_secrets_of_settings_and_uris() -> None:
    found = find_secrets(
        {
            "hub_token": "hunter2hunter2",
            "a": ["s3://KEYKEYKEY:sec%2Fret99@b/x?secret_key=queryquery"],
            "password": "short",
            "api_key": HIDDEN,
        }
    )
    assert found == {"hunter2hunter2", "KEYKEYKEY", "sec%2Fret99", "sec/ret99", "queryquery"}


def test_find_secrets_leaves_out_plain_words_of_uncertain_keys() -> None:
    certain = {"api_key": "certainly", "token": "tokenword", "credentials": {"target_key": "nestedword"}}
    uncertain = {"target_key": "solution", "answer_of_key": ["ground_truth", "Xy7-unguessable"], "judge_key": "a" * 25}
    assert find_secrets(certain | uncertain) == {"certainly", "tokenword", "nestedword", "Xy7-unguessable", "a" * 25}
    assert set(redact_settings(uncertain | {"answer_of_key": "x"}).values()) == {HIDDEN}
    remember_secrets({"m:Env": {"target_key": "solution"}})
    assert redact_record("The solution is 4.") == "The solution is 4."


def test_redact_knows_secrets_of_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SOME_TOKEN", "JUDGE_KEY", "MY_SECRET", "DB_PASSWORD"):
        monkeypatch.setenv(name, f"value-of-{name.lower()}")
    monkeypatch.setenv("RAY_AUTH_MODE", "token-mode-x")
    monkeypatch.setenv("SHORT_TOKEN", "word")
    text = "value-of-some_token value-of-judge_key value-of-my_secret value-of-db_password token-mode-x word"
    assert redact(text) == f"{HIDDEN} {HIDDEN} {HIDDEN} {HIDDEN} token-mode-x word"


def test_redact_short_known_secret_is_a_whole_word_only() -> None:
    remember_secrets({"api_key": 12345678})
    assert redact("key 12345678, sha 0a12345678ff") == f"key {HIDDEN}, sha 0a12345678ff"


def test_hidden_settings_names_paths() -> None:
    settings = {"grpo": {"hub_token": HIDDEN, "beta": 0.1}, "data": {"train": f"s3://{HIDDEN}@b", "x": [HIDDEN]}}
    assert hidden_settings(settings) == ["grpo.hub_token", "data.train", "data.x"]
    assert strip_hidden(f"s3://{HIDDEN}@b/x") == "s3://b/x"


# Configs


def test_config_pickled_to_a_worker_makes_secrets_known() -> None:
    config = load_config(None, ["rewards.settings={correctness: {token: unguessable-99}}"])
    sent = pickle.dumps(config)
    redaction._remembered.clear()
    assert pickle.loads(sent).rewards.settings["correctness"] == {"token": "unguessable-99"}
    assert redact("the hub refused unguessable-99") == f"the hub refused {HIDDEN}"


def test_config_repr_hides_secrets() -> None:
    config = load_config(
        None, ["rewards.settings={correctness: {token: unguessable-99}}", f"data.train=s3://K:{SECRET}@b/x.jsonl"]
    )
    assert "unguessable-99" not in repr(config) and SECRET not in repr(config)
    assert "num_generations" in repr(config)


@pytest.mark.parametrize(
    "uri", [f"s3://K:{SECRET}@bucket", f"https://h/d.jsonl?secret_key={SECRET}.a", "https://u:pw@h"]
)
def test_default_run_name_has_no_credentials(uri: str) -> None:
    for override in (f"data.train={uri}", f"model.path={uri}"):
        name = load_config(None, [override]).run.name
        assert not any(part in name for part in (SECRET[:6], SECRET[-6:], "pw", "hidden"))


def test_load_recorded_secret_is_refused_until_set_again() -> None:
    recorded = yaml.safe_dump(
        {"rewards": {"settings": {"judge": {"token": HIDDEN}}}, "model": {"path": f"s3://{HIDDEN}@b/m"}}
    )
    with pytest.raises(ConfigError, match=r"^model\.path, rewards\.settings\.judge\.token: .* set the real value"):
        load_config("config.yaml", text=recorded)
    overrides = ["rewards.settings={judge: {token: abc}}", "model.path=s3://b/m"]
    assert load_config("config.yaml", overrides, text=recorded).model.path == "s3://b/m"


def test_error_message_hides_secrets_after_pickling() -> None:
    error = DataError(f"s3://K:{SECRET}@b/x.jsonl: cannot be read")
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert str(each) == f"s3://{HIDDEN}@b/x.jsonl: cannot be read"
    assert isinstance(error, GrpoRayError)


# All writers: a secret in any field of the config appears in nothing that is written or shown

CHARACTERS = st.text(string.ascii_letters + string.digits + "/+-_=", min_size=12, max_size=40)
SECRETS = CHARACTERS.map(lambda text: f"Q7{text}z9")
"""Secrets that are no part of ordinary words."""

FORMS: dict[str, Callable[[str], Any]] = {
    "s3 key": lambda secret: f"s3://ACCESS:{quote(secret, safe='')}@bucket/data.jsonl",
    "s3 raw": lambda secret: f"s3://ACCESS:{secret}@bucket/data.jsonl",
    "password": lambda secret: f"https://user:{quote(secret, safe='')}@host/data.jsonl",
    "signature": lambda secret: f"https://host/data.jsonl?X-Amz-Signature={quote(secret, safe='')}&x=1",
    "sas": lambda secret: f"https://host/data.jsonl?sv=1&sig={quote(secret, safe='')}",
    "environment": lambda secret: f"before {secret} after",
}
TEXT_FIELDS = [
    "run.storage_path", "run.from_checkpoint", "run.takeover", "model.path", "data.train", "data.heldout",
    "data.system_prompt", "run.notify", "rollout.sandbox_url", "rollout.sandbox_provider", "rollout.function",
    "heldout.score",
]  # fmt: skip
MAPPING_FIELDS = [
    "data.columns", "rewards.settings", "grpo.model_init_kwargs", "grpo.generation_kwargs", "grpo.chat_template_kwargs",
    "grpo.fsdp_config", "grpo.hub_token", "grpo.optim_args", "engine.vllm", "rollout.settings", "rollout.environment",
]  # fmt: skip
"""Fields of these kinds, TRL's included."""


@st.composite
def secret_configs(draw: st.DrawFn) -> tuple[Config | ConfigError, str]:
    """Draw a config with a secret in one of its fields, or the error of a field that is refused, and the secret."""
    secret = draw(SECRETS)
    form = draw(st.sampled_from(sorted(FORMS)))
    if draw(st.booleans()):
        field, value = draw(st.sampled_from(TEXT_FIELDS)), FORMS[form](secret)
    else:
        field = draw(st.sampled_from(MAPPING_FIELDS))
        value = {"uri": FORMS[form](secret), draw(st.sampled_from(["api_key", "token", "db_password"])): secret}
        if field in ("rewards.settings", "rollout.settings"):
            value = {"correctness": value}
        if field == "engine.vllm" and draw(st.booleans()):
            value = {"additional_config": value}  # otherwise the arguments are unknown
    if form == "environment":
        os.environ["PROPERTY_TEST_TOKEN"] = secret
    section, _, name = field.partition(".")
    text = yaml.safe_dump(
        {"run": {"name": "run"}} | {section: {name: value} | ({"name": "run"} if section == "run" else {})}
    )
    try:
        return load_config("run.yaml", text=text), secret
    except ConfigError as error:
        return error, secret


def written_everywhere(config: Config, secret: str, storage: Path) -> Iterator[str]:
    """Pass the texts of a config through everything that writes or shows; yield what was shown."""
    flat = json.dumps(config.to_dict())
    message = f"cannot open {config.data.train} of {config.model.path}: {config.grpo.trl} {flat} ({secret})"
    folder = RunFolder(str(storage), "run")
    shown = io.StringIO()
    progress = ProgressLine(10, Console(file=shown, width=10_000))
    context = RunContext(config, folder, progress)
    record_config(context)
    for file in (MetricsFile(folder), EventsFile(folder)):
        file.add({"step": 1, "event": "failed", "at": 1.0, "what": message, reward_metric(secret, 1, [])[0]: message})
        file.flush()
    save_metrics_history(folder.local or storage, [{"step": 1, "text": message}])
    for name in ("problems.json", "unverifiable.json", "summary.json", "heldout_before.json"):
        folder.write_json({"text": message, "list": [message]}, name)
    folder.write_json(
        {"metrics": {"step": 1}, "serial": 1, "files": {}, "what": message}, "checkpoint-000001", "manifest.json"
    )
    progress.phase(message)
    progress.notice(message)
    yield shown.getvalue()
    yield repr(config)
    for error in (ConfigError(message), DataError(message)):
        yield str(error)
        yield describe_training_failure(SimpleNamespace(controller_failure=error), folder)  # type: ignore[arg-type]
    yield describe_error(ConnectionError(message))
    stream = io.StringIO()
    redact_stream(stream)
    redact_stream(stream)  # once is enough
    print(message, file=stream)
    yield stream.getvalue()
    events = [*EVENTS, {"event": "notice", "at": 2e9, "what": message}]
    run = write_run(storage, "page", config=yaml.safe_load(folder.read_text("config.yaml")), events=events)
    write_page([str(run.local)])
    yield run.read_text("report.html")


@pytest.mark.long
@given(drawn=st.data())
@examples(120)
def test_secret_in_any_field_is_never_written(drawn: st.DataObject) -> None:
    os.environ.pop("PROPERTY_TEST_TOKEN", None)
    redaction._remembered.clear()
    config, secret = drawn.draw(secret_configs())
    spellings = {secret, quote(secret), quote(secret, safe=""), secret[:10], secret[-10:]}
    try:
        with tempfile.TemporaryDirectory() as storage:
            if isinstance(config, ConfigError):
                shown = [str(config)]
            else:
                shown = list(written_everywhere(config, secret, Path(storage)))
            files = [path.read_bytes() for path in Path(storage, "run").rglob("*") if path.is_file()]
        assert isinstance(config, ConfigError) or len(files) == 8
        for spelling in spellings:
            assert not [text for text in shown if spelling in text]
            assert not [data for data in files if spelling.encode() in data]
    finally:
        os.environ.pop("PROPERTY_TEST_TOKEN", None)


def test_fields_of_the_property_test_are_all_that_hold_text() -> None:
    config = load_config().to_dict()
    sections: Mapping[str, Any] = SECTIONS
    texts = {
        f"{section}.{name}"
        for section, cls in sections.items()
        for name, field in cls.__dataclass_fields__.items()
        if field.type in (str, str | None) or "Mapping" in str(field.type)
    }
    # A name that is validated, the mapping of TRL's fields, and an adapter, whose fields are checked against a table.
    harmless = {"run.best_metric", "grpo.trl", "model.peft"}
    assert config and texts - harmless <= {*TEXT_FIELDS, *MAPPING_FIELDS}


def test_redact_working_folder_in_environment_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/home/somebody/project")
    monkeypatch.setenv("OLDPWD", "/home/somebody/before")
    monkeypatch.setenv("DB_PWD", "unguessable/99")
    text = "/home/somebody/project/runs, /home/somebody/before: "
    assert redact(f"{text}unguessable/99") == f"{text}{HIDDEN}"


# Names that the package reads again: an environment variable with a secret's name may have one as its value

NAMES = ["heldout/accuracy", "accuracy", "model.safetensors", "process_start", "measured_on", "checkpoint-000001"]


@pytest.mark.parametrize("name", NAMES)
def test_name_in_environment_leaves_checkpoints_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METRIC_KEY", name)
    folder, local = RunFolder(str(tmp_path), "run"), tmp_path / "local"
    for step, accuracy in ((1, 0.5), (2, 0.75), (3, 0.25)):
        local.mkdir(exist_ok=True)
        (local / "model.safetensors").write_bytes(bytes([step]))
        metrics = {"step": step, "heldout/accuracy": accuracy}
        upload = CheckpointUploader(folder, 0, 1, metrics, step, 5.0, print, measured_on={"heldout": {"count": 3}})
        upload(ray.train.Checkpoint.from_directory(str(local)), f"checkpoint-00000{step}")
    prune_checkpoints(folder, "heldout/accuracy", keep=1)
    stored = list_checkpoints(folder)
    assert [each.step for each in stored] == [2, 3]  # the best and the latest
    assert [find_faults(each) for each in stored] == [[], []]
    assert {str(each.measured_on) for each in stored} == {"{'heldout': {'count': 3}}"}


@pytest.mark.parametrize("name", ["heldout/accuracy", "baseline", "checkpoint-000002"])
def test_name_in_environment_leaves_rows_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METRIC_KEY", name)
    folder = RunFolder(str(tmp_path), "run")
    rows = [{"step": 2, "heldout/accuracy": 0.5, "checkpoint": "checkpoint-000002"}]
    events = [{"event": "baseline", "at": 1.0, "metrics": {"heldout/accuracy": 0.25}}]
    for file, added in ((MetricsFile(folder), rows), (EventsFile(folder), events)):
        for row in added:
            file.add(row)
        file.flush()
    assert list(read_metrics(folder)) == rows and list(read_events(folder)) == events
    save_metrics_history(tmp_path, rows)
    assert list(load_metrics_history(tmp_path)) == rows


def test_name_in_environment_leaves_lease_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIELD_KEY", "process_start")
    folder = RunFolder(str(tmp_path), "run")
    with RunLease.acquire(folder, None, print) as lease:
        assert read_holder(folder) == lease.driver


def test_name_in_environment_leaves_metric_in_recorded_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRIC_KEY", "heldout/accuracy")
    folder = RunFolder(str(tmp_path), "run")
    record_config(RunContext(load_config(), folder, ProgressLine(1, Console(file=io.StringIO()))))
    assert yaml.safe_load(folder.read_text("config.yaml"))["run"]["best_metric"] == "heldout/accuracy"
    for step, accuracy in ((1, 0.75), (2, 0.5)):
        metrics = {"step": step, "heldout/accuracy": accuracy}
        folder.write_json({"metrics": metrics, "serial": step, "files": {}}, f"checkpoint-00000{step}", "manifest.json")
    assert find_checkpoint(str(tmp_path / "run")).step == 1  # the best one, which `grpo-ray export` writes


def test_setting_in_environment_of_an_earlier_launch_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(None, ["data.train=arithmetic", "grpo.optim=adamw_torch"])
    with monkeypatch.context() as shell:
        shell.setenv("DATASET_KEY", "arithmetic")
        shell.setenv("OPTIMIZER_KEY", "adamw_torch")
        recorded = summary.describe_run(config)
    assert recorded["data"]["train"] == HIDDEN
    require_same_fields(config, recorded, "/runs/run", is_other_run=False)
    recorded["data"]["train"] = f"{HIDDEN}/problems.jsonl"
    with pytest.raises(ConfigError, match=r"data\.train=arithmetic differs"):
        require_same_fields(config, recorded, "/runs/run", is_other_run=False)


def test_run_id_in_trackers_is_kept_when_a_secret_becomes_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(str(tmp_path), "run")
    first = TrackerFile(folder, "deepmath-7b").run_id()
    monkeypatch.setenv("RUN_KEY", "deepmath-7b")
    TrackerFile(folder, "deepmath-7b").save("tensorboard", Position(1, 1))
    assert TrackerFile(folder, "deepmath-7b").run_id() == first
    assert TrackerFile(folder, "deepmath-7b").position("tensorboard") == Position(1, 1)


def test_conditions_of_measurement_are_as_in_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODE_KEY", "thinking-mode-b")
    config = load_config(None, ["grpo.chat_template_kwargs={mode: thinking-mode-b}"])
    conditions = measurement_conditions({"heldout": DatasetFingerprint(3, "ab")}, config)
    folder = RunFolder(str(tmp_path), "run")
    folder.write_json(conditions, "measured.json")
    assert folder.read_json("measured.json") == conditions
    write_heldout(folder, "heldout", 1, [], policy="", conditions=conditions["heldout"])
    assert b"thinking-mode-b" not in folder.read_bytes("heldout", "step-00000001.parquet")


def test_metric_of_reward_hides_secret_but_not_names_of_grading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "unguessable/99")
    monkeypatch.setenv("METRIC_KEY", "verifier_timeouts")
    assert reward_metric("calls/unguessable/99", 1, [])[0] == f"reward/calls/{HIDDEN}"
    assert reward_metric("reward/verifier_timeouts", 1, [])[0] == "reward/verifier_timeouts"


def test_redact_settings_keys_keep_names_and_hide_credentials() -> None:
    settings = {"heldout": 1, f"https://me:{SECRET}@host": 2, 3: 4}
    assert redact_settings(settings, ["heldout"]) == {"heldout": 1, f"https://{HIDDEN}@host": 2, 3: 4}


# Whole commands


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", f"data.train=https://me:{SECRET}@host.invalid/x.nothing", "run.seed=x"],
        ["train", "grpo.hub_token=unguessable/99", "rewards.settings={judge: unguessable/99}"],
        ["check", f"s3://me:{SECRET}@bucket/none.yaml"],
        ["report", f"s3://me:{SECRET}@no/run?endpoint_override=127.0.0.1:1&scheme=nothing"],
        pytest.param(["export", f"gs://me:{SECRET}@no/run?nothing=1", "target"], marks=pytest.mark.long),
        ["eval", f"nothing://me:{SECRET}@b/checkpoint-000001", "data.limit=x"],
    ],
)
def test_command_that_fails_shows_no_secret(arguments: list[str], tmp_path: Path) -> None:
    environment = os.environ | {"JUDGE_API_KEY": "unguessable/99"}
    done = subprocess.run(
        [sys.executable, "-m", "grpo_ray.cli", *arguments],
        capture_output=True, text=True, env=environment, cwd=tmp_path,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode and output
    assert SECRET not in output and quote(SECRET, safe="") not in output and "unguessable" not in output


def test_traceback_of_command_shows_no_secret(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom grpo_ray import cli\n"
        "def broken(arguments): raise RuntimeError('refused: ' + arguments.overrides[0])\n"
        "cli.run_train = broken\nsys.exit(cli.main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", f"model.path=s3://K:{SECRET}@b/m"], capture_output=True, text=True
    )
    assert "Traceback" in done.stderr and f"s3://{HIDDEN}@b/m" in done.stderr and SECRET not in done.stderr


def test_metric_rows_of_samples_are_unchanged() -> None:
    rows = metric_rows(20)
    assert redact(rows) == rows
