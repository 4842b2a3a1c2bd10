"""Tests of the command line: its own parsing of files, options and overrides, in any order."""

import argparse
import errno
import importlib.util
import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

import grpo_ray
from grpo_ray import cli
from grpo_ray.cli import CHAOS_HANG_SECONDS, build_parser, load_chaos_config, load_eval_config, main, sort_overrides
from grpo_ray.config import loader
from grpo_ray.config.schema import Config
from grpo_ray.errors import ConfigError
from grpo_ray.resilience.error_triage import MEMORY_ADVICE
from grpo_ray.storage.run_folder import RunFolder

JOBS = Path(__file__).parents[2] / "jobs"

OVERRIDES = ["grpo.max_steps=30", "data.train=s3://bucket/x=y.jsonl"]

COMMANDS = {
    "train": [["CONFIG.yaml"]],
    "chaos": [["CONFIG.yaml"], ["--seed", "5"], ["--faults=hang"]],
    "check": [["CONFIG.yaml"], ["--sample", "9"], ["--json", "out.json"]],
    "eval": [["s3://b/runs?x=y"], ["--heldout", "math"], ["--num-samples", "4"]],
    "fork": [["s3://b/runs?x=y"], ["--at", "4"], ["--trust-settings"]],
    "replay": [["runs/a"], ["--step", "4"], ["--config=a.yaml"]],
}
"""Command -> its file and options; overrides are added to them."""


def parse(arguments: Sequence[str]) -> dict[str, object]:
    parsed = build_parser().parse_args(arguments)
    sort_overrides(parsed)
    return vars(parsed)


@pytest.mark.parametrize("command", COMMANDS)
def test_arguments_any_order_gives_same_command(command: str) -> None:
    parts = [*COMMANDS[command], *([override] for override in OVERRIDES)]
    expected = parse([command, *itertools.chain(*parts)])
    assert expected["overrides"] == OVERRIDES
    for order in itertools.permutations(parts):
        if order.index([OVERRIDES[0]]) < order.index([OVERRIDES[1]]):  # of two overrides of a field the last one wins
            assert parse([command, *itertools.chain(*order)]) == expected, order


def test_arguments_of_every_command_with_overrides_are_tested() -> None:
    parsers = build_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    actions = {name: parser._actions for name, parser in parsers.items()}  # type: ignore[union-attr]
    with_overrides = {name for name in actions if any(action.dest == "overrides" for action in actions[name])}
    assert with_overrides == set(COMMANDS)


@pytest.mark.parametrize(
    "line", ["export CHECKPOINT --dtype float32 FOLDER", "export --dtype=float32 CHECKPOINT FOLDER",
             "export CHECKPOINT FOLDER --dtype float32"],
)  # fmt: skip
def test_export_options_any_order(line: str) -> None:
    parsed = parse(shlex.split(line))
    assert (parsed["checkpoint"], parsed["folder"], parsed["dtype"]) == ("CHECKPOINT", "FOLDER", "float32")


def test_result_has_null_for_an_unknown_number() -> None:
    result = {"pass_at_1": {"value": 0.5, "low": math.nan, "high": math.inf}, "sets": [math.nan, 2], "name": "nan"}
    assert json.loads(cli.to_json(result), parse_constant=pytest.fail) == {
        "pass_at_1": {"value": 0.5, "low": None, "high": None}, "sets": [None, 2], "name": "nan",
    }  # fmt: skip


@pytest.mark.parametrize("command", [["fork", "run", "--at", "0"], ["replay", "run", "--step", "1"]])
def test_file_that_cannot_be_written_is_refused_at_once(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "no folder" / "out.json", tmp_path):
        assert main([*command, "--json", str(path)]) == 2
        assert f"--json {path} cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["check", "missing.yaml"], ["eval", "missing/checkpoint"]])
def test_result_that_cannot_be_written_is_refused_before_any_work(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--json", str(tmp_path / "no folder" / "out.json")]) == 2
    assert "--json" in capsys.readouterr().err


def test_command_that_lacks_its_run_names_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["eval"])
    assert capsys.readouterr().err.endswith("the following arguments are required: CHECKPOINT\n")


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"grpo-ray {grpo_ray.__version__}\n"


@pytest.mark.parametrize("command", ["train", "check", "chaos"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rewards.functions=[corectness]", "unknown reward 'corectness'; did you mean correctness?"),
        ("data.train=./missing.jsonl", "missing.jsonl: no such file or folder"),
        ("data.train=arithmetc", "did you mean arithmetic?"),
        ("data.train=math500", "data.train: math500 is a benchmark and is not trained on; name it in data.heldout"),
        ("data.heldout=math500=./missing.jsonl", "missing.jsonl: no such file or folder"),
        ("data.heldout={own: gpqa=./missing.csv}", "data.heldout.own: "),
        ("heldout.score=no_module:score", "'no_module:score' cannot be imported"),
        ("rollout.tools=[grpo_ray.tools.examples:multipy]", "has no 'multipy'; did you mean multiply?"),
        ("rollout.environment=no_module:Game", "rollout.environment: 'no_module:Game' cannot be imported"),
        ("rollout.function=no_module:play", "rollout.function: 'no_module:play' cannot be imported"),
        ("model.path=./missing", "missing: there is no such folder"),
    ],
)
def test_missing_name_is_refused_before_libraries_are_loaded(
    command: str, override: str, message: str, tmp_path: Path, loaded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    # With the short limit of `chaos`, calls of tools could take longer than a hang.
    config.write_text(f"run: {{storage_path: {tmp_path / 'runs'}, hang_seconds: 900}}\n")
    assert main([command, str(config), override]) == 2
    assert message in capsys.readouterr().err
    assert loaded == [] and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["train", "check"])
@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ("data: {train: ./missing.jsonl}", "missing.jsonl: no such file or folder"),
        ("data: {heldout: {own: ./missing.jsonl}}", "missing.jsonl: no such file or folder"),
        ("rewards: {functions: [corectness]}", "unknown reward 'corectness'; did you mean correctness?"),
    ],
)
def test_missing_name_of_a_later_stage_is_refused_before_libraries_are_loaded(
    command: str, stage: str, message: str, tmp_path: Path, loaded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stages.yaml"
    run = f"run: {{name: math, storage_path: {tmp_path / 'runs'}}}"
    path.write_text(f"{run}\nstages: [{{name: a}}, {{name: b, {stage}}}]\n")
    assert main([command, str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("grpo-ray: stage b: ") and message in error
    assert loaded == [] and not (tmp_path / "runs").exists()


def test_files_of_a_stage_that_has_ended_are_not_needed(tmp_path: Path, loaded: list[str]) -> None:
    path, missing = tmp_path / "stages.yaml", tmp_path / "missing"
    run = f"run: {{name: math, storage_path: {tmp_path}}}\nmodel: {{path: {missing}}}"
    path.write_text(f"{run}\nstages: [{{name: a, data: {{train: {missing}.jsonl}}}}, {{name: b}}]\n")
    assert main(["train", str(path)]) == 2
    (tmp_path / "math" / "01-a").mkdir(parents=True)
    (tmp_path / "math" / "01-a" / "summary.json").write_text("{}")
    with pytest.raises(LoadedError):
        main(["train", str(path)])
    assert loaded == ["02-b"]


def test_missing_checkpoint_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "checkpoint-000001", Path("no/such/checkpoint-000001")):
        assert main(["eval", str(path)]) == 2
        assert capsys.readouterr().err == f"grpo-ray: {path}: there is no such checkpoint\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--suite", "math500=./missing.jsonl"], "missing.jsonl: no such file or folder"),
        (["rollout.tools=[no_module:search]"], "rollout.tools: 'no_module:search' cannot be imported"),
        (["rollout.function=no_module:play"], "rollout.function: 'no_module:play' cannot be imported"),
        (["heldout.score=no_module:score"], "'no_module:score' cannot be imported"),
    ],
)
def test_missing_name_is_refused_before_eval_needs_ray(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "grpo_ray.driver.cluster.connection", None)
    assert main(["eval", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err


def test_run_folder_in_place_of_a_checkpoint_names_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("checkpoint-000002", "checkpoint-000010"):
        (tmp_path / name).mkdir()
    assert main(["eval", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"grpo-ray: {tmp_path}: is no checkpoint, since it has neither config.json nor adapter_config.json; it is a "
        f"run folder: name a checkpoint, such as {tmp_path}/checkpoint-000010\n"
    )


LONG_NAME = "x" * 300
"""Name of a file that no file system can have: tests may be run by a user who has every permission."""


def write_named_file(folder: Path) -> None:
    cli.write_json(str(folder / LONG_NAME), {})


def write_file_of_the_run(folder: Path) -> None:
    """Write a file through pyarrow."""
    RunFolder(str(folder), "run").write_text("", LONG_NAME)


@pytest.mark.parametrize("opens", [write_named_file, write_file_of_the_run])
def test_unusable_file_that_the_command_opens_is_one_line(
    opens: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "run_report", lambda arguments: opens(tmp_path))
    assert main(["report", "run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("grpo-ray: [Errno 36] ") and LONG_NAME in line
    assert line.endswith("; check the permissions, or name another file or folder")


def test_unusable_file_that_a_library_opens_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(arguments: object) -> int:  # this module stands for the library
        raise PermissionError(errno.EACCES, "Permission denied", "/cache/of/others/kernel.so")

    monkeypatch.setattr(cli, "run_report", refused)
    with pytest.raises(PermissionError, match=r"kernel\.so"):
        main(["report", "run"])


def test_report_options_between_runs() -> None:
    parsed = parse(["report", "a", "--out", "x.html", "b"])
    assert (parsed["runs"], parsed["out"]) == (["a", "b"], "x.html")


def test_watch_options_around_run() -> None:
    parsed = parse(["watch", "--open", "s3://bucket/run", "--port", "8080"])
    assert (parsed["folder"], parsed["port"], parsed["open"]) == ("s3://bucket/run", 8080, True)


def test_train_without_file_keeps_overrides() -> None:
    parsed = parse(["train", "grpo.max_steps=7", "run.seed=3"])
    assert (parsed["config"], parsed["overrides"]) == (None, ["grpo.max_steps=7", "run.seed=3"])


def test_override_longer_than_a_file_name_is_no_file() -> None:
    long = f"data.system_prompt={'x' * 5000}"
    assert parse(["train", "a.yaml", long])["overrides"] == [long]


def test_existing_file_with_equals_sign_is_the_config(tmp_path: Path) -> None:
    path = tmp_path / "some=name.yaml"
    path.write_text("grpo: {max_steps: 5}\nrun: {seed: 1}\n")
    parsed = parse(["train", "run.seed=3", str(path)])
    config = loader.load_config(parsed["config"], parsed["overrides"])  # type: ignore[arg-type]
    assert (config.grpo.max_steps, config.run.seed) == (5, 3)


def hang_seconds_of(*arguments: str) -> float:
    parsed = build_parser().parse_args(["chaos", *arguments])
    sort_overrides(parsed)
    return load_chaos_config(parsed).run.hang_seconds


def test_chaos_hang_limit_is_short_unless_the_user_sets_it(tmp_path: Path) -> None:
    silent, explicit = tmp_path / "silent.yaml", tmp_path / "explicit.yaml"
    silent.write_text("run: {seed: 1}\n")
    explicit.write_text("run: {hang_seconds: 900}\n")
    assert hang_seconds_of() == hang_seconds_of(str(silent)) == hang_seconds_of("run.seed=2") == CHAOS_HANG_SECONDS
    assert hang_seconds_of(str(explicit)) == 900
    assert hang_seconds_of(str(silent), "run.hang_seconds=7") == 7


@pytest.mark.parametrize("line", ["train a.yaml b.yaml", "eval CHECKPOINT grpo.max_steps"])
def test_second_file_raises(line: str) -> None:
    with pytest.raises(ConfigError, match="neither the only"):
        parse(line.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seconds", "5"], "--seconds has an effect with --attack only"),
        (["--attack", "--steps", "5"], "--steps has an effect with --forecast only"),
        (["--attack", "--price", "2"], "--price has an effect with --forecast only"),
        (["--attack", "--seconds", "nan"], "--seconds must be between 1 and 86400; got nan"),
        (["--attack", "--seconds", "0.5"], "--seconds must be between 1 and 86400; got 0.5"),
        (["--forecast", "--steps", "1"], "--steps must be at least 2"),
        (["--forecast", "--price", "-1"], "--price must be a number from 0 on; got -1"),
        (["--forecast", "--price", "inf"], "--price must be a number from 0 on; got inf"),
    ],
)
def test_check_refuses_options_before_anything_is_read(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "missing.yaml", *options]) == 2
    assert capsys.readouterr().err.startswith(f"grpo-ray: {message}")


def test_missing_file_exits_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "run.seed=3"]) == 2
    assert "there is no config" in capsys.readouterr().err


def test_unknown_option_exits(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["chaos", "run.seed=3", "--sed", "5"])
    assert "unrecognized arguments: --sed" in capsys.readouterr().err


@pytest.mark.parametrize(("job", "command"), [("train.py", "train"), ("evaluate.py", "eval")])
def test_job_takes_arguments_in_any_order(job: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    received = []

    def receive(arguments: argparse.Namespace) -> int:
        received.append(vars(arguments))
        return 0

    monkeypatch.setattr(cli, f"run_{command}", receive)
    (file, *options), overrides = COMMANDS[command], OVERRIDES
    words = [*itertools.chain(*options), overrides[0], *file, overrides[1]]
    monkeypatch.setattr("sys.argv", [os.fspath(JOBS / job), *words])
    spec = importlib.util.spec_from_file_location("__main__", JOBS / job)
    assert spec and spec.loader
    with pytest.raises(SystemExit, match="0"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert received[0]["overrides"] == overrides


class LoadedError(Exception):
    """Error that ends a command where it would import its libraries, and start Ray meanwhile."""


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs whose libraries a command has imported; the command ends there."""
    names: list[str] = []

    def load(config: Config, module: str = "") -> None:
        names.append(config.run.name)
        raise LoadedError

    monkeypatch.setattr(cli, "load_libraries", load)
    return names


def test_stages_start_the_cluster_of_the_stage_that_is_checked_first(tmp_path: Path, loaded: list[str]) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text(f"run: {{name: math, storage_path: {tmp_path}}}\nstages: [{{name: a}}, {{name: b}}]\n")
    with pytest.raises(LoadedError):
        main(["train", str(path)])
    assert loaded == ["02-b"]


def test_chaos_refuses_an_old_run_before_it_starts_ray(
    tmp_path: Path, loaded: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["chaos", f"run.storage_path={tmp_path}", "run.name=a", "--faults=exception"]
    with pytest.raises(LoadedError):
        main(command)
    assert loaded == ["a"] and "exception" in capsys.readouterr().out  # the plan of the faults
    (tmp_path / "a-chaos-0").mkdir()
    assert main(command) == 2
    assert "a-chaos-0 exists" in capsys.readouterr().err and loaded == ["a"]


def test_memory_kill_outside_training_is_one_line_of_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(arguments: object) -> int:
        raise RuntimeError("1 worker(s) were killed due to the node running low on memory. See ...")

    monkeypatch.setattr(cli, "run_check", killed)
    assert main(["check", "a.yaml"]) == 1
    assert capsys.readouterr().err == f"grpo-ray: a process of Ray died: {MEMORY_ADVICE}\n"


HEAVY = ("ray", "torch", "transformers", "trl", "vllm")

LIGHT_COMMANDS = {
    "train grpo.typo=1": "unknown key grpo.typo",
    "train grpo.temperature=hot": "grpo.temperature='hot' must be a number",
    "train grpo.deepspeed=x.json": "grpo.deepspeed is not supported",
    "train rewards.functions=[corectness]": "did you mean correctness?",
    "train rewards.functions=[./no/judge]": "/no/judge does not exist: it has no config.json",
    "check --example arithmetic rewards.functions=[corectness]": "did you mean correctness?",
    "train data.train=./none.jsonl": "none.jsonl: no such file or folder",
    "train --help": "grpo.temperature=1.0",
    "--help": "train from a YAML file",
}
"""Command -> text that it prints."""


@pytest.mark.parametrize("command", LIGHT_COMMANDS)
def test_main_mistake_or_help_imports_no_heavy_library(command: str) -> None:
    """Importing them takes seconds, and a mistake is to be refused at once."""
    script = (
        "import sys\nfrom grpo_ray.cli import main\n"
        f"try:\n    main({command.split()!r})\nexcept SystemExit:\n    pass\n"
        f"print('imported', sorted(sys.modules.keys() & set({HEAVY!r})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert LIGHT_COMMANDS[command] in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "imported []"


@pytest.fixture
def several_sets(tmp_path: Path) -> str:
    """Config of a run with two held-out sets, of which the second one ranks checkpoints."""
    path = tmp_path / "run.yaml"
    path.write_text("data: {heldout: {math: /m.jsonl, gsm8k: gsm8k}}\nrun: {best_metric: heldout/gsm8k/accuracy}\n")
    return str(path)


@pytest.mark.parametrize(
    ("options", "heldout"),
    [
        ([], {"math": "/m.jsonl", "gsm8k": "gsm8k"}),
        (["--heldout", "math"], {"math": "/m.jsonl"}),
        (["--heldout=gsm8k"], {"gsm8k": "gsm8k"}),
        (["--data", "/other.jsonl"], "/other.jsonl"),
    ],
)
def test_eval_config_measures_on_chosen_sets(several_sets: str, options: list[str], heldout: object) -> None:
    parsed = build_parser().parse_args(["eval", "CHECKPOINT", "--config", several_sets, *options])
    config = load_eval_config(parsed)
    assert config.data.heldout == heldout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--heldout", "mat"], "has no set of this name, but math, gsm8k; did you mean math?"),
        (["--heldout", "math", "data.heldout=gsm8k", "run.best_metric=reward/mean"], "has no named sets; leave"),
    ],
)
def test_eval_unknown_heldout_set_raises(several_sets: str, options: list[str], message: str) -> None:
    parsed = build_parser().parse_args(["eval", "CHECKPOINT", "--config", several_sets, *options])
    with pytest.raises(ConfigError, match=message):
        load_eval_config(parsed)


def test_eval_on_one_source_of_a_mixture(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {train: {sums: {path: arithmetic}, more: {path: gsm8k}}}\n")
    chosen = build_parser().parse_args(["eval", "CHECKPOINT", "--config", str(path), "--heldout", "more"])
    assert load_eval_config(chosen).heldout_keys == ["heldout/sums", "heldout/more"]  # of which one is measured
    wrong = build_parser().parse_args(["eval", "CHECKPOINT", "--config", str(path), "--heldout", "mor"])
    with pytest.raises(ConfigError, match=r"no source of this name, but sums, more; did you mean more\?"):
        load_eval_config(wrong)


@pytest.mark.parametrize("best_metric", ["reward/short_mean", "heldout/gsm8k/accuracy"])
@pytest.mark.parametrize("options", [[], ["--heldout", "math"], ["--data", "other.jsonl"]])
def test_eval_of_run_folder_takes_any_ranking(tmp_path: Path, best_metric: str, options: list[str]) -> None:
    """An evaluation ranks nothing, and does not load the reward that the run is ranked by."""
    settings = ["rewards.functions=[correctness, my.rewards:short]", f"run.best_metric={best_metric}"]
    run = loader.load_config(None, [*settings, "data.heldout={math: m.jsonl, gsm8k: gsm8k}"])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(run.to_dict()))
    parsed = build_parser().parse_args(["eval", str(tmp_path / "run" / "checkpoint-000002"), *options])
    assert load_eval_config(parsed).run.best_metric == "heldout/accuracy"


def test_main_ends_quietly_when_the_reader_of_its_output_has_ended() -> None:
    command = [sys.executable, "-m", "grpo_ray.cli", "train", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # as `head` does, before the command has written anything
    assert process.stderr.read() == ""
    assert process.wait() == 128 + signal.SIGPIPE
