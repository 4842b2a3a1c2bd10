"""Tests of the phases of a launch that need no cluster: excluded problems, initial policy, resume point."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import yaml
from fake_hub import Repo, fake_hub
from rich.console import Console

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.driver.launch import (
    BEGUN_WITH,
    UNVERIFIABLE_FILE,
    DatasetIndexes,
    ResumePoint,
    begin_launch,
    find_resume_point,
    prepare_policy,
    read_unverifiable,
)
from grpo_ray.driver.preflight.run_context import RunContext
from grpo_ray.driver.preflight.same_run import check_same_run
from grpo_ray.errors import ConfigError
from grpo_ray.evaluation.metrics import measurement_conditions
from grpo_ray.models.embedded_policy import embedded_policy
from grpo_ray.observers.terminal.progress import ProgressLine
from grpo_ray.storage.checkpoints import CheckpointInfo, list_checkpoints, resume_candidates
from grpo_ray.storage.lease import RunLease
from grpo_ray.storage.run_folder import RunFolder

BEGIN = ResumePoint(None)
"""Resume point of a run without checkpoints."""


def test_read_unverifiable_returns_ids_unless_kept(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    assert read_unverifiable(load_config(), folder) == frozenset()  # `grpo-ray check` was not run
    folder.write_text(json.dumps(["a", "b"]), UNVERIFIABLE_FILE)
    assert read_unverifiable(load_config(), folder) == {"a", "b"}
    assert read_unverifiable(load_config(None, ["data.keep_unverifiable=true"]), folder) == frozenset()


def context_of(tmp_path: Path, path: str) -> RunContext:
    """Return the context of a launch with this `model.path`."""
    progress = ProgressLine(1, Console(file=io.StringIO()))
    return RunContext(load_config(None, [f"model.path={path}"]), RunFolder(str(tmp_path), "run"), progress)


def uploaded_weights(tmp_path: Path) -> bytes:
    return (tmp_path / "run" / "policy" / "model.safetensors").read_bytes()


def shipped_weights(name: str) -> bytes:
    return (embedded_policy(name) / "model.safetensors").read_bytes()


@pytest.mark.parametrize("path", ["some/policy-not-in-the-cache", "/models/policy"])
def test_prepare_policy_other_than_embedded_is_left_where_it_is(tmp_path: Path, path: str) -> None:
    policy = prepare_policy(context_of(tmp_path, path), BEGIN)
    assert (policy.path, policy.identity) == (path, path)
    assert list(tmp_path.iterdir()) == []


def test_prepare_policy_second_launch_reuses_the_upload(tmp_path: Path) -> None:
    first = prepare_policy(context_of(tmp_path, "tiny-tools"), BEGIN)
    assert first.path == str(tmp_path / "run" / "policy")
    assert uploaded_weights(tmp_path) == shipped_weights("tiny-tools")
    written = (tmp_path / "run" / "policy" / "model.safetensors").stat().st_mtime_ns
    assert prepare_policy(context_of(tmp_path, "tiny-tools"), BEGIN) == first
    assert (tmp_path / "run" / "policy" / "model.safetensors").stat().st_mtime_ns == written


def test_prepare_policy_of_an_earlier_launch_is_replaced(tmp_path: Path) -> None:
    """The first launch ended before its first checkpoint, so the second one may name another policy."""
    first = prepare_policy(context_of(tmp_path, "tiny-tools"), BEGIN)
    (tmp_path / "run" / "policy" / "left.json").touch()
    second = prepare_policy(context_of(tmp_path, "tiny-guess"), BEGIN)
    assert uploaded_weights(tmp_path) == shipped_weights("tiny-guess") and second.identity != first.identity
    assert not (tmp_path / "run" / "policy" / "left.json").exists()


def test_prepare_policy_interrupted_upload_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_policy(context_of(tmp_path, "tiny-tools"), BEGIN)

    def interrupt(folder: RunFolder, text: str, *names: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunFolder, "write_text", interrupt)
        prepare_policy(context_of(tmp_path, "tiny-guess"), BEGIN)
    prepare_policy(context_of(tmp_path, "tiny-tools"), BEGIN)  # not the weights of the interrupted launch
    assert uploaded_weights(tmp_path) == shipped_weights("tiny-tools")


def test_prepare_policy_of_a_run_with_checkpoints_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of the package may bring another policy of this name, but the run's adapters belong to the old one."""
    begun = prepare_policy(context_of(tmp_path, "tiny-tools"), BEGIN)
    checkpoint_in(RunFolder(str(tmp_path), "run"), 2, 0.5)
    monkeypatch.setattr("grpo_ray.driver.launch.embedded_policy_digest", lambda name: "0" * 16)
    own = ResumePoint(list_checkpoints(RunFolder(str(tmp_path), "run"))[0])
    assert prepare_policy(context_of(tmp_path, "tiny-tools"), own) == begun
    assert uploaded_weights(tmp_path) == shipped_weights("tiny-tools")


def local_policy(folder: Path, weights: bytes) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


def test_prepare_policy_in_a_folder_is_identified_by_its_weights(tmp_path: Path) -> None:
    """A launch that ended before its first checkpoint may have measured other weights in the same folder."""
    path = local_policy(tmp_path / "policy", b"a" * 100_000)
    first = prepare_policy(context_of(tmp_path, path), BEGIN)
    (tmp_path / "policy").rename(tmp_path / "moved")
    assert prepare_policy(context_of(tmp_path, str(tmp_path / "moved")), BEGIN).identity == first.identity
    other = local_policy(tmp_path / "policy", b"a" * 50_000 + b"b" + b"a" * 49_999)
    assert prepare_policy(context_of(tmp_path, other), BEGIN).identity != first.identity


def begun_run(tmp_path: Path, path: str) -> RunContext:
    """Return the context of a run with a checkpoint that began with this `model.path`."""
    begun = context_of(tmp_path, path)
    prepare_policy(begun, BEGIN)
    begun.folder.write_text(yaml.safe_dump({"model": {"path": path}}), "config.yaml")
    checkpoint_in(begun.folder, 2, 0.5)
    return begun


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_check_same_run_policy_may_move_but_not_change(tmp_path: Path, scheme: str) -> None:
    path = scheme + local_policy(tmp_path / "policy", b"a" * 100)
    assert check_same_run(begun_run(tmp_path, path)) == ()
    moved = (tmp_path / "policy").rename(tmp_path / "moved")
    for each in (f"{scheme}{moved}", f"file://{moved}"):  # from a folder to a store too
        assert check_same_run(context_of(tmp_path, each)) == ()
    with pytest.raises(ConfigError, match=r"model\.path=.*other differs from .*policy"):
        check_same_run(context_of(tmp_path, scheme + local_policy(tmp_path / "other", b"b" * 100)))
    with pytest.raises(ConfigError, match=r"policy: its weights are not those that the run .*run began with; restore"):
        check_same_run(context_of(tmp_path, scheme + local_policy(tmp_path / "policy", b"b" * 100)))


def test_check_same_run_names_changed_config_and_tokenizer(tmp_path: Path) -> None:
    path = local_policy(tmp_path / "policy", b"a")
    begun_run(tmp_path, path)
    (tmp_path / "policy" / "README.md").write_text("no part of the policy")
    assert check_same_run(context_of(tmp_path, path)) == ()
    (tmp_path / "policy" / "config.json").write_text('{"rope_theta": 1}')
    (tmp_path / "policy" / "chat_template.jinja").touch()
    with pytest.raises(ConfigError, match="its config and tokenizer are not those"):
        check_same_run(context_of(tmp_path, path))


def test_prepare_policy_unreadable_store_shows_no_credentials(tmp_path: Path) -> None:
    path = "s3://KEYKEYKEY:SECRETSECRET@/policy?region=us-east-1"  # no bucket
    with pytest.raises(ConfigError, match=r"model\.path=s3://.*: cannot be read: .*; correct it, or") as refused:
        prepare_policy(context_of(tmp_path, path), BEGIN)
    assert "SECRET" not in str(refused.value)


def test_check_same_run_embedded_policy_replaces_that_of_a_dead_launch(tmp_path: Path) -> None:
    """The first launch died before its first checkpoint, and the run trained an embedded policy: its own is none."""
    path = local_policy(tmp_path / "policy", b"a")
    prepare_policy(context_of(tmp_path, path), BEGIN)
    begun_run(tmp_path, "tiny-tools")
    with pytest.raises(ConfigError, match=r"model\.path=.*policy differs from tiny-tools"):
        check_same_run(context_of(tmp_path, path))
    assert check_same_run(context_of(tmp_path, "tiny-tools")) == ()


FIRST, SECOND = "1" * 40, "2" * 40
"""Two revisions of a policy on the hub."""


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache of the policy `org/policy` with both revisions; its current one is the first."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cache = tmp_path / "hub" / "models--org--policy"
    for commit in (FIRST, SECOND):
        local_policy(cache / "snapshots" / commit, commit.encode())
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(FIRST)
    return cache


def test_prepare_policy_of_the_hub_is_identified_by_its_revision(tmp_path: Path, hub_cache: Path) -> None:
    first = prepare_policy(context_of(tmp_path, "org/policy"), BEGIN)
    assert (first.path, first.identity) == ("org/policy", f"commit {FIRST}")
    (hub_cache / "refs" / "main").write_text(SECOND)
    assert prepare_policy(context_of(tmp_path, "org/policy"), BEGIN).identity == f"commit {SECOND}"


@pytest.mark.parametrize(
    ("second", "refusal"),
    [
        ({"config.json": b"{}", "model.safetensors": b"a", "README.md": b"new"}, None),
        ({"config.json": b"{}", "model.safetensors": b"b"}, "its weights are not those that the run .* began with"),
        (None, f"is at revision {SECOND}, the run .* began with {FIRST}, and the hub does not list their files"),
    ],
)
def test_check_same_run_new_revision_is_refused_if_files_differ(
    tmp_path: Path,
    hub_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    second: dict[str, bytes] | None,
    refusal: str | None,
) -> None:
    begun = begun_run(tmp_path, "org/policy")
    assert check_same_run(context_of(tmp_path, "org/policy")) == ()
    (hub_cache / "refs" / "main").write_text(SECOND)
    with fake_hub() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.endpoint)
        server.repos["org/policy"] = Repo(False, revisions={FIRST: {"config.json": b"{}", "model.safetensors": b"a"}})
        if second is not None:
            server.repos["org/policy"].revisions[SECOND] = second
        if refusal is None:
            assert check_same_run(context_of(tmp_path, "org/policy")) == ()
            own = ResumePoint(list_checkpoints(begun.folder)[0])
            assert prepare_policy(context_of(tmp_path, "org/policy"), own).identity == f"commit {FIRST}"
            return
        with pytest.raises(ConfigError, match=refusal) as refused:
            check_same_run(context_of(tmp_path, "org/policy"))
    mend = f"run `hf download org/policy --revision {FIRST}` and set model.path to the folder that it prints"
    assert mend in str(refused.value)
    assert check_same_run(context_of(tmp_path, str(hub_cache / "snapshots" / FIRST))) == ()


def test_run_from_checkpoint_begins_at_step_zero_with_its_policy(tmp_path: Path) -> None:
    other = RunFolder(str(tmp_path), "other")
    name = checkpoint_in(other, 8, 0.5)
    context, lease = launch(tmp_path, f"run.from_checkpoint={tmp_path}/other/{name}", "grpo.max_steps=8")
    with lease:
        resume = find_resume_point(context, indexes_of("a"))
        assert (resume.step, resume.is_of_other_run) == (0, True)
        policy = prepare_policy(context, resume)
        assert policy.measured_path == str(tmp_path / "other" / name)
        assert policy.identity.startswith(f"{tmp_path}/other/{name} ")
        # With checkpoints of its own, it still has begun with that one, as long as that one is the same.
        own = ResumePoint(list_checkpoints(context.folder)[0]) if checkpoint_in(context.folder, 2, 0.5) else None
        assert own is not None and own.step == 2 and prepare_policy(context, own) == policy
        other.delete_folder(name)
        gone = prepare_policy(context, own)
        assert (gone.measured_path, gone.identity) == (None, policy.identity)


def test_prepare_policy_forgets_the_checkpoint_that_a_dead_launch_began_with(tmp_path: Path) -> None:
    name = checkpoint_in(RunFolder(str(tmp_path), "other"), 8, 0.5)
    context, lease = launch(tmp_path, f"run.from_checkpoint={tmp_path}/other/{name}")
    with lease:
        prepare_policy(context, find_resume_point(context, indexes_of("a")))
    context, lease = launch(tmp_path)
    with lease:
        policy = prepare_policy(context, find_resume_point(context, indexes_of("a")))
        assert policy.measured_path == policy.path and not context.folder.exists(BEGUN_WITH)


def test_resume_point_step_is_the_checkpoints(tmp_path: Path) -> None:
    checkpoint = CheckpointInfo(RunFolder(str(tmp_path), "run"), "checkpoint-000004", {"step": 4}, serial=2, files={})
    assert (ResumePoint(None).step, ResumePoint(checkpoint).step) == (0, 4)


def checkpoint_in(folder: RunFolder, step: int, accuracy: float, measured_on: Any = None) -> str:
    """Write a complete checkpoint without files; return its name."""
    name = f"checkpoint-{step:06d}"
    metrics = {"step": step, "heldout/accuracy": accuracy}
    manifest = {"metrics": metrics, "serial": step, "files": {}, "measured_on": measured_on}
    folder.write_json(manifest, name, "manifest.json")
    return name


def launch(tmp_path: Path, *overrides: str) -> tuple[RunContext, RunLease]:
    """Return context and lease of a launch of the run `run`."""
    config = load_config(None, ["run.name=run", f"run.storage_path={tmp_path}", *overrides])
    context = RunContext(
        config, RunFolder(str(tmp_path), "run"), ProgressLine(1, Console(file=io.StringIO(), width=300))
    )
    return context, RunLease.acquire(context.folder, None, context.progress.notice)


def indexes_of(*ids: str) -> DatasetIndexes:
    index: Any = SimpleNamespace(fingerprint=DatasetFingerprint.of(ids))
    return DatasetIndexes({"": index}, {"heldout": index})


def test_find_resume_point_deletes_nothing_and_names_surplus(tmp_path: Path) -> None:
    context, lease = launch(tmp_path, "run.keep_checkpoints=1")
    names = [checkpoint_in(context.folder, step, value) for step, value in ((2, 0.7), (4, 0.9), (6, 0.2), (8, 0.4))]
    point = find_resume_point(context, indexes_of("a"))
    lease.release()
    assert point.checkpoint is not None and point.checkpoint.name == "checkpoint-000008"
    assert [each.name for each in list_checkpoints(context.folder)] == names
    assert "the next checkpoint will replace checkpoint-000002, checkpoint-000006: " in printed(context)


@pytest.mark.parametrize(("resume", "name"), [("latest", "checkpoint-000008"), ("best", "checkpoint-000004")])
def test_find_resume_point_best_is_the_one_that_the_workers_take(tmp_path: Path, resume: str, name: str) -> None:
    context, lease = launch(tmp_path, f"run.resume={resume}")
    for step, value in ((2, 0.7), (4, 0.9), (6, 0.2), (8, 0.4)):
        checkpoint_in(context.folder, step, value)
    point = find_resume_point(context, indexes_of("a"))
    lease.release()
    assert point.checkpoint is not None and point.checkpoint.name == name
    stored = list_checkpoints(context.folder)
    metric = context.config.ranking_metric
    assert resume_candidates(context.folder, resume, metric, after=stored[-1].serial)[0].name == name


@pytest.mark.parametrize(("metric", "announced"), [("heldout/accuracy", True), ("reward/mean", False)])
def test_find_resume_point_announces_checkpoints_measured_otherwise(
    tmp_path: Path, metric: str, announced: bool
) -> None:
    context, lease = launch(tmp_path, f"run.best_metric={metric}")
    indexes = indexes_of("a")
    same = measurement_conditions(indexes.heldout_fingerprints, context.config)
    longer = {"heldout": same["heldout"] | {"sampling": {"temperature": 0.0, "max_tokens": 7}}}
    for step, measured_on in ((2, longer), (4, same), (6, None)):
        checkpoint_in(context.folder, step, 0.5, measured_on)
    find_resume_point(context, indexes)
    lease.release()
    assert ("checkpoint-000002: measured on other problems, or with other sampling" in printed(context)) == announced
    assert "checkpoint-000004: measured" not in printed(context)


def test_begin_launch_starting_over_keeps_old_run_and_unverifiable_ids(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    name = checkpoint_in(folder, 2, 0.5)
    folder.write_text("old", "config.yaml")
    folder.write_text('["a"]', UNVERIFIABLE_FILE)
    context, lease = launch(tmp_path, "run.resume=never")
    with lease:
        assert find_resume_point(context, indexes_of("b")) == ResumePoint(None)
        assert list_checkpoints(folder)  # nothing happened before everything was accepted
        begin_launch(context, lease, indexes_of("b"))
        lease.confirm()  # the lease has moved with the name
    old = RunFolder(str(tmp_path), "run.1")
    assert [each.name for each in list_checkpoints(old)] == [name] and old.read_text("config.yaml") == "old"
    assert f"the old run is now {tmp_path}/run.1" in printed(context)
    assert list_checkpoints(folder) == [] and read_unverifiable(context.config, folder) == {"a"}
    assert not old.exists("driver")


def test_begin_launch_returns_whether_it_changes_the_config(tmp_path: Path) -> None:
    changed = []
    for overrides in ([], [], ["grpo.max_steps=7"], ["grpo.max_steps=7"]):
        context, lease = launch(tmp_path, *overrides)
        with lease:
            changed.append(begin_launch(context, lease, indexes_of("a")))
        assert yaml.safe_load(context.folder.read_text("config.yaml"))["grpo"]["max_steps"] == (7 if overrides else 200)
    assert changed == [True, False, True, False]


def test_find_resume_point_from_checkpoint_of_run_set_aside_raises(tmp_path: Path) -> None:
    path = tmp_path / "run" / checkpoint_in(RunFolder(str(tmp_path), "run"), 2, 0.5)
    context, lease = launch(tmp_path, "run.resume=never", f"run.from_checkpoint={path}")
    with lease, pytest.raises(ConfigError, match=r"is in the run that run\.resume=never sets aside"):
        find_resume_point(context, indexes_of("a"))


def printed(context: RunContext) -> str:
    file = context.progress.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()
