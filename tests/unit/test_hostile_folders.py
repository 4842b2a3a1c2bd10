"""Tests that every command which reads a run folder refuses a stranger's with one line, in bounded time and memory.

The commands stop before they start Ray: all that a folder can do until then has happened. What a folder's config may
name is in test_hostile_run_folder.py.
"""

import hashlib
import json
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile_parquet import BOMBS
from page_samples import EVENTS, metric_rows, write_run

from grpo_ray.cli import build_parser, load_eval_config, main, sort_overrides
from grpo_ray.config.loader import load_config
from grpo_ray.data.problem import Problem
from grpo_ray.driver.launch import open_checkpoint_of_other_run
from grpo_ray.driver.preflight.overlong import PolicyTokenizer, _load_once, evaluated_policy, find_overlong
from grpo_ray.errors import CheckpointError, DataError, GrpoRayError
from grpo_ray.experiments.branch import find_start, require_sound
from grpo_ray.experiments.fork import branch_config
from grpo_ray.experiments.run import Run
from grpo_ray.export.checkpoint import find_checkpoint
from grpo_ray.export.hub import _files_of
from grpo_ray.models.adapter_folders import base_policy_path
from grpo_ray.models.embedded_policy import embedded_policy
from grpo_ray.models.plausible_policy import require_plausible_policy
from grpo_ray.pages.report.read import open_run
from grpo_ray.pages.watch.live_run import LiveRun
from grpo_ray.storage.checkpoints import load_reward_states, resolve_checkpoint
from grpo_ray.storage.records.heldout_files import HeldoutFile, read_heldout
from grpo_ray.storage.run_folder import RunFolder

CHECKPOINT = "checkpoint-000002"
MEMORY_KIB = 400_000
"""Largest increase of memory by a command, beyond its libraries and the memory that earlier tests took."""


def write_manifest(run: Path) -> None:
    """List all files of the checkpoint in its manifest, with their real checksums, as a stranger would."""
    place = run / CHECKPOINT
    (place / "manifest.json").unlink(missing_ok=True)
    files = {
        str(path.relative_to(place)): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest() if path.stat().st_size < 1 << 26 else "",
        }
        for path in place.rglob("*")
        if path.is_file()
    }
    (place / "manifest.json").write_text(json.dumps({"metrics": {"step": 2}, "serial": 1, "files": files}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a harmless run folder with a checkpoint of an embedded policy."""
    folder = write_run(tmp_path, config=load_config(None, []).to_dict(), metrics=metric_rows(2), events=EVENTS[:2])
    run = Path(folder.path())
    (run / "rollouts").mkdir(exist_ok=True)
    shutil.copytree(embedded_policy("tiny-arithmetic"), run / CHECKPOINT)
    write_manifest(run)
    return run


# Commands: each returns what the user sees


def report(run: Path) -> str:
    main_status(["report", str(run)])
    page = run / "report.html"
    return page.read_text() if page.exists() else ""


def watch(run: Path) -> str:
    try:
        snapshot = LiveRun(open_run(str(run))).refresh()
    except GrpoRayError as error:
        return str(error)
    return "\n".join(snapshot.run.notes) if snapshot else ""


def in_python(run: Path) -> str:
    try:
        opened = Run(str(run))
        _ = opened.metrics, opened.events, opened.best_checkpoint
        opened.completions(texts=True)
        opened.heldout()
    except GrpoRayError as error:
        return str(error)
    return "\n".join(opened.notes)


def evaluate(run: Path) -> str:
    parsed = build_parser().parse_args(["eval", str(run / CHECKPOINT)])
    sort_overrides(parsed)
    try:
        config = load_eval_config(parsed)
        path = evaluated_policy(config, str(run / CHECKPOINT))
        policy = PolicyTokenizer(path, config.model.trust_remote_code, limits_template=True)
        problem = Problem(id="a" * 16, prompt=[{"role": "user", "content": "1 + 1"}], solution="2")
        find_overlong(iter([problem]), policy=policy, limit=100, arguments={})
    except GrpoRayError as error:
        return str(error)
    finally:
        _load_once.cache_clear()
    return ""


def export(run: Path) -> str:
    main_status(["export", str(run / CHECKPOINT), str(run.parent / "target")])
    return ""


def begin_with(run: Path) -> str:
    """Do what `grpo-ray train run.from_checkpoint=...` does with the folder."""
    indexes: Any = None
    try:
        open_checkpoint_of_other_run(load_config(None, ["data.accept_changes=true"]), str(run / CHECKPOINT), indexes)
    except GrpoRayError as error:
        return str(error)
    return ""


def resume(run: Path) -> str:
    main_status(["train", f"run.storage_path={run.parent}", f"run.name={run.name}"])
    return ""


def main_status(arguments: list[str]) -> None:
    """Run a command, which must end without a traceback."""
    assert main(arguments) in (0, 2)


def contains(run: Path) -> str:
    problems = run.parent / "problems.jsonl"
    problems.write_text('{"prompt": "1 + 1", "solution": "2"}\n')
    main_status(["contains", str(run / CHECKPOINT), str(problems)])
    problems.unlink()
    return ""


def fork(run: Path) -> str:
    """Do what `grpo-ray fork` does with the folder before it trains."""
    try:
        source = open_run(str(run))
        branch_config(source, [], config_path=None, trusts_settings=False)
        checkpoint = find_start(source, 2)
        assert checkpoint is not None
        require_sound(checkpoint)
    except GrpoRayError as error:
        return str(error)
    return ""


READERS: dict[str, Callable[[Path], str]] = {"report": report, "watch": watch, "python": in_python}
LOADERS: dict[str, Callable[[Path], str]] = {
    "eval": evaluate,
    "export": export,
    "from_checkpoint": begin_with,
    "fork": fork,
}


def shown(command: Callable[[Path], str], run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command; return all that it shows, and check its memory."""
    capsys.readouterr()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = command(run)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_KIB
    return text + capsys.readouterr().err


def require_line(text: str, *parts: str) -> None:
    """Check that one line has all parts."""
    assert any(all(part in line for part in parts) for line in text.splitlines()), text[-2000:]


@pytest.mark.parametrize("name", [*READERS, *LOADERS])
def test_harmless_folder_is_taken(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = {**READERS, **LOADERS}[name](run) + capsys.readouterr().err
    for refusal in ("cannot be read", "is damaged", "is sparse", "is a link", "is not in the"):
        assert refusal not in text
    if name == "export":
        assert {"config.json", "model.safetensors"} <= {path.name for path in _files_of(run.parent / "target")}


# Links, pipes and sparse files: refused before anything is read


def link_to(target: str) -> Callable[[Path], None]:
    def plant(path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return plant


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


PLANTS = {
    **{
        f"link {name}": (name, link_to("/etc/hostname"), "is a link that leads out of the run")
        for name in (
            *(f"{CHECKPOINT}/{file}" for file in ("chat_template.jinja", "generation_config.json", "tokenizer.json")),
            *(f"{CHECKPOINT}/{file}" for file in ("config.json", "model.safetensors", "manifest.json", "new.json")),
            *("config.yaml", "metrics.jsonl", "events.jsonl", "summary.json"),
        )
    },
    "link rollouts": ("rollouts", link_to("/etc"), "is a link that leads out of the run"),
    "link to nothing": ("metrics.jsonl", link_to("../../created.jsonl"), "is a link that leads out of the run"),
    "pipe": ("metrics.jsonl", pipe, "is no regular file"),
    **{
        f"sparse {name}": (name, sparse, "is sparse: it has 1099511627776 bytes, and 0 of them on disk")
        for name in (
            *("metrics.jsonl", "events.jsonl", "summary.json", "config.yaml", "heldout_before.json"),
            *("rollouts/steps-00000001-00000002.parquet", f"{CHECKPOINT}/model.safetensors"),
            *(f"{CHECKPOINT}/tokenizer.json", f"{CHECKPOINT}/trainer_state.json", f"{CHECKPOINT}/manifest.json"),
        )
    },
}
"""Name of a case -> file of the run folder, function that puts something in its place, part of the message."""


@pytest.mark.parametrize("name", PLANTS)
def test_unusual_file_is_refused_by_every_command(
    run: Path, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, plant, message = PLANTS[name]
    plant(run / file)
    before = sorted(run.rglob("*"))
    for command in (*READERS.values(), *LOADERS.values(), contains, resume):
        require_line(shown(command, run, capsys), f"run/{file}", message)
    assert sorted(run.rglob("*")) == before and not (tmp_path / "created.jsonl").exists()


def test_log_link_of_wandb_is_no_stranger_s(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = run / "wandb" / "offline-run-20260101_000000-abc" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to(run.parent / "cache" / "core-debug.log")
    assert "is a link" not in shown(report, run, capsys)
    (logs / "debug.log").symlink_to(run.parent / "cache" / "core-debug.log")
    require_line(shown(report, run, capsys), "debug.log", "is a link that leads out of the run")


def test_folder_that_is_no_run_is_named_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "project" / CHECKPOINT
    (folder / "venv" / "bin").mkdir(parents=True)
    (folder / "venv" / "bin" / "python").symlink_to("/usr/bin/python3")
    project = folder.parent
    for command in READERS.values():
        require_line(shown(command, project, capsys), "project is not a run folder")
    for path, text in ((project, "has no complete checkpoint"), (folder, "is not a complete checkpoint")):
        with pytest.raises(CheckpointError, match="is neither a complete checkpoint nor a run folder with one"):
            find_checkpoint(str(path))
        with pytest.raises(CheckpointError, match=text):
            resolve_checkpoint(str(path), "heldout/correctness_mean")


@pytest.mark.parametrize("name", READERS)
def test_checkpoint_is_no_run(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / CHECKPOINT / "metrics.jsonl").write_text('{"step": 2}\n')
    require_line(shown(READERS[name], run / CHECKPOINT, capsys), f"{CHECKPOINT} is a checkpoint; give its run folder")


def test_folder_that_a_live_run_deletes_is_passed_over(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list_folder = os.scandir
    (run / "empty").mkdir()

    def delete_first(path: Path) -> Any:
        if path == run / "empty":
            path.rmdir()
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", delete_first)
    open_run(str(run))
    assert not (run / "empty").exists()


def test_link_inside_of_the_run_is_followed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = run / CHECKPOINT / "chat_template.jinja"
    shutil.move(template, run / "template")
    template.symlink_to("../template")
    write_manifest(run)
    assert "link" not in shown(export, run, capsys)
    assert (run.parent / "target" / "chat_template.jinja").read_bytes() == (run / "template").read_bytes()


def test_manifest_of_a_checkpoint_names_every_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    temporary = ("manifest.json.7.tmp", "measured.json.4194304.tmp")  # of a process that was killed
    for harmless in (".hidden", "files-0.json", "files-11.json", "measured.json", *temporary):
        (run / CHECKPOINT / harmless).write_text("{}")
    assert "grpo-ray:" not in shown(export, run, capsys)
    shutil.rmtree(run.parent / "target")
    (run / CHECKPOINT / "special_tokens_map.json").write_text("{}")
    for command in LOADERS.values():
        require_line(shown(command, run, capsys), "special_tokens_map.json is not in the checkpoint's manifest")


# Files of a policy: config, tokenizer, weights


def config_with(**changes: Any) -> Callable[[Path], None]:
    def plant(place: Path) -> None:
        config = json.loads((place / "config.json").read_text())
        (place / "config.json").write_text(json.dumps(config | changes))

    return plant


def text_in(name: str, text: str) -> Callable[[Path], None]:
    def plant(place: Path) -> None:
        (place / name).write_text(text)

    return plant


def weights(header: Any, length: int | None = None) -> Callable[[Path], None]:
    """Return a function that replaces the weights by a file with this header and 16 bytes of numbers."""

    def plant(place: Path) -> None:
        data = json.dumps(header).encode()
        (place / "model.safetensors").write_bytes(struct.pack("<Q", length or len(data)) + data + bytes(16))

    return plant


def tensor(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def only_pickled_weights(place: Path) -> None:
    (place / "model.safetensors").unlink()
    (place / "pytorch_model.bin").write_bytes(bytes(10))


def without_weights(place: Path) -> None:
    (place / "model.safetensors").unlink()


DEEP = "[" * 100_000
POLICIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "config deep": (text_in("config.json", DEEP), "config.json is damaged: it is not JSON"),
    "config digits": (text_in("config.json", f'{{"a": {"9" * 10_000}}}'), "config.json is damaged: it is not JSON"),
    "config list": (text_in("config.json", "[]"), "config.json is damaged: it is no JSON object"),
    "config large": (text_in("config.json", " " * 5_000_000), "config.json is damaged: it has 5000000 bytes"),
    "layers": (config_with(num_hidden_layers=10**9), "config.json: num_hidden_layers is 1000000000, and the weights"),
    "vocabulary": (config_with(vocab_size=10**9), "config.json: vocab_size is 1000000000 and hidden_size"),
    "width": (config_with(hidden_size=10**7), "config.json: vocab_size is"),
    "number": (config_with(sliding_window=10**30), "config.json: sliding_window is larger than"),
    "context": (config_with(max_position_embeddings=10**11), "config.json: max_position_embeddings is larger than"),
    "entries": (config_with(layer_types=["a"] * 200_000), "config.json: layer_types has 200000 entries"),
    "nested": (config_with(text_config={"num_hidden_layers": 10**6}), "config.json: text_config.num_hidden_layers is"),
    "tokenizer deep": (text_in("tokenizer.json", DEEP), "tokenizer.json is damaged: it is not JSON"),
    "settings deep": (text_in("tokenizer_config.json", DEEP), "tokenizer_config.json is damaged: it is not JSON"),
    "template large": (text_in("chat_template.jinja", "a" * 5_000_000), "chat_template.jinja is damaged: it has"),
    "pickled weights": (only_pickled_weights, "config.json: num_hidden_layers is 2, and the weights have 0 tensors"),
    "no weights": (without_weights, "config.json: num_hidden_layers is 2, and the weights have 0 tensors"),
    "header length": (weights({}, 1 << 62), "model.safetensors is damaged: its header declares 4611686018427387904"),
    "header beyond": (weights({"a": tensor([8], 0, 32)}), "its tensors take 32 bytes, and the file has 16"),
    "header shape": (weights({"a": tensor([10**6, 10**6], 0, 16)}), "the size of a tensor is not that of its shape"),
    "header overlap": (weights({"a": tensor([4], 0, 16), "b": tensor([4], 0, 16)}), "tensors overlap"),
    "header negative": (weights({"a": tensor([-4], 0, 16)}), "the size of a tensor is not that of its shape"),
    "header no object": (weights([1]), "model.safetensors is damaged: its header cannot be used"),
}
"""Name of a case -> function that changes the checkpoint's folder, part of the message."""


@pytest.mark.parametrize("name", POLICIES)
def test_policy_of_impossible_size_is_refused(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    plant, message = POLICIES[name]
    plant(run / CHECKPOINT)
    write_manifest(run)
    for command in LOADERS.values():
        text = shown(command, run, capsys)
        require_line(text, message)
        assert "Traceback" not in text
    assert not (run.parent / "target").exists()


@pytest.mark.parametrize("name", POLICIES)
def test_base_policy_of_impossible_size_is_refused(run: Path, name: str) -> None:
    plant, message = POLICIES[name]
    adapter = run / CHECKPOINT
    (run / "policy").mkdir()
    for path in list(adapter.iterdir()):
        path.rename(run / "policy" / path.name)
    settings = {"peft_type": "LORA", "base_model_name_or_path": "tiny-arithmetic"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    folder = RunFolder(str(run.parent), run.name)
    assert base_policy_path(str(adapter), folder, str(run.parent)) == str(run / "policy")
    plant(run / "policy")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        base_policy_path(str(adapter), folder, str(run.parent))


@pytest.mark.parametrize("name", ["tf_model.h5", "flax_model.msgpack", "model.onnx", "rust_model.ot"])
def test_weights_of_other_frameworks_are_not_bounded(tmp_path: Path, name: str) -> None:
    shutil.copytree(embedded_policy("tiny-arithmetic"), tmp_path, dirs_exist_ok=True)
    sparse(tmp_path / name)
    require_plausible_policy(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.model.v3", "merges.txt", "modeling_new.py"])
def test_large_file_that_libraries_parse_is_refused(tmp_path: Path, name: str) -> None:
    shutil.copytree(embedded_policy("tiny-arithmetic"), tmp_path, dirs_exist_ok=True)
    sparse(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is damaged: it has 1099511627776 bytes"):
        require_plausible_policy(tmp_path)


def test_plain_folder_with_pickled_weights_is_taken(tmp_path: Path) -> None:
    shutil.copytree(embedded_policy("tiny-arithmetic"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")  # of the same size as a pickled one
    require_plausible_policy(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    require_plausible_policy(tmp_path, has_weights=False)


@pytest.mark.parametrize("text", ['{"model": 5}', '{"version": "1.0", "model": {"type": "nothing"}}', "[]"])
def test_tokenizer_of_another_form_is_one_line(run: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / CHECKPOINT / "tokenizer.json").write_text(text)
    write_manifest(run)
    for command in (evaluate, export):
        require_line(shown(command, run, capsys), CHECKPOINT, "cannot be read: ")


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_template_beyond_its_memory_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_template_refused(run, "{{ 'a' * 10**10 }}", "takes more than 1024 MiB of memory", capsys)


@pytest.mark.slow
def test_template_without_end_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_template_refused(run, ENDLESS, "takes more than 10 s of processor time", capsys)


def require_template_refused(run: Path, template: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (run / CHECKPOINT / "chat_template.jinja").write_text(template)
    write_manifest(run)
    require_line(shown(evaluate, run, capsys), CHECKPOINT, "its chat template", message)


# Records


@pytest.mark.parametrize("name", BOMBS)
def test_parquet_bomb_is_a_note_of_the_page(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    plant, message = BOMBS[name]
    plant(run / "rollouts" / "steps-00000001-00000002.parquet")
    for command in READERS.values():
        require_line(shown(command, run, capsys), "steps-00000001-00000002.parquet", message)


def test_heldout_file_of_other_columns_is_refused(run: Path) -> None:
    (run / "heldout").mkdir()
    BOMBS["text repeated"][0](run / "heldout" / "step-00000001.parquet")
    folder = RunFolder(str(run.parent), run.name)
    with pytest.raises(DataError, match=r"step-00000001\.parquet: cannot be read: it has no column solution"):
        read_heldout(folder, HeldoutFile("heldout", 1, 0, 0))


LINES: dict[str, tuple[str, Callable[[], Iterator[str]], str]] = {
    "layouts": (
        "metrics.jsonl",
        lambda: (json.dumps({"step": step, f"{step}" + "a" * 1_000_000: 1}) for step in range(1, 70)),
        "metrics.jsonl: too many rows or metrics; 20 rows are left out",
    ),
    "events": (
        "events.jsonl",
        lambda: (json.dumps({"event": "a", "at": 1, "x": [0] * 1_000_000}) for _ in range(10)),
        "events.jsonl: too many events; 3 are left out",
    ),
    "deep": ("metrics.jsonl", lambda: iter([DEEP]), "metrics.jsonl"),
    "digits": ("metrics.jsonl", lambda: iter(['{"step": ' + "9" * 10_000 + "}"]), "metrics.jsonl"),
}
"""Name of a case -> file, its lines, part of the note."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name == "events" else []) for name in LINES]
)
def test_huge_rows_are_a_note_of_the_page(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file, lines, message = LINES[name]
    (run / file).write_text("".join(f"{line}\n" for line in lines()))
    for command in READERS.values():
        require_line(shown(command, run, capsys), message)


@pytest.mark.parametrize("text", ["a: &a [x]\nb: *a", "run: " + "[" * 5000, "x: " + "y" * 300_000])
def test_config_that_is_no_plain_yaml_is_a_note_of_the_page(
    run: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "config.yaml").write_text(text)
    for command in READERS.values():
        require_line(shown(command, run, capsys), "config.yaml", "cannot be read")


def test_reward_states_of_a_sparse_file_are_not_read(run: Path) -> None:
    sparse(run / CHECKPOINT / "rewards_0.json")
    with pytest.raises(GrpoRayError, match=r"rewards_0\.json is damaged: it has 1099511627776 bytes"):
        load_reward_states(run / CHECKPOINT, 0)


@pytest.mark.slow
def test_commands_under_a_limit_of_memory_end_with_a_line(run: Path) -> None:
    """The command itself, in a process that the kernel keeps from taking more than 3 GiB."""
    BOMBS["text repeated"][0](run / "rollouts" / "steps-00000001-00000002.parquet")
    BOMBS["long list"][0](run / "rollouts" / "steps-00000003-00000004.parquet")
    limit = (3 << 30, 3 << 30)
    for arguments in (["report", str(run)], ["export", str(run / CHECKPOINT), str(run.parent / "plain")]):
        done = subprocess.run(
            [sys.executable, "-m", "grpo_ray.cli", *arguments],
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, limit),
        )
        assert done.returncode == 0, done.stderr
    assert "takes more than 536870912 bytes in memory" in (run / "report.html").read_text()
