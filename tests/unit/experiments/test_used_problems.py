"""Tests of the problems that a policy was trained on: open and closed epochs, mixtures, damaged and hostile ledgers."""

import hashlib
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from page_samples import make_group

from grpo_ray.cli import FOUND, NOT_KNOWN, main
from grpo_ray.data.ledger import DatasetFingerprint, Ledger, ids_to_uint64
from grpo_ray.data.mixture import Draws
from grpo_ray.data.mixture_ledger import MixtureLedger
from grpo_ray.data.problem import parse_problem
from grpo_ray.errors import CheckpointError, ConfigError, DataError
from grpo_ray.experiments.used_problems import UsedProblems, find_used_problems
from grpo_ray.storage.checkpoints import RETURNS
from grpo_ray.storage.records.rollout_files import write_rollouts
from grpo_ray.storage.run_folder import RunFolder

ROWS = [{"prompt": f"What is {n} + 1?", "solution": str(n + 1)} for n in range(6)]
IDS = [parse_problem(row, where="").id for row in ROWS]
CHECKPOINT = "checkpoint-000002"


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]] = ROWS) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_checkpoint(folder: RunFolder, ledger: Ledger | MixtureLedger, name: str = CHECKPOINT, serial: int = 1) -> str:
    """Write a checkpoint that has a ledger only; return its path."""
    place = Path(folder.path(name))
    place.mkdir(parents=True)
    ledger.save(place)
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in place.iterdir()
    }
    folder.write_json({"metrics": {"step": 2}, "serial": serial, "files": files}, name, "manifest.json")
    return str(place)


def open_ledger(used: Sequence[str]) -> Ledger:
    ledger = Ledger(DatasetFingerprint.of(IDS[:4]))
    ledger.mark(0, used)
    return ledger


def closed_ledger() -> Ledger:
    """Return a ledger of four problems that has closed epoch 0, and used the second problem again."""
    ledger = open_ledger(IDS[:4])
    ledger.mark(1, IDS[1:2])
    assert ledger.closed_epochs == 1
    return ledger


def answers(found: UsedProblems) -> list[str]:
    return [each.answer for each in found.problems]


def test_open_epoch_lists_its_problems(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(RunFolder(str(tmp_path), "run"), open_ledger([IDS[2], IDS[0]]))
    found = find_used_problems(checkpoint, write_rows(tmp_path / "p.jsonl"))
    assert answers(found) == ["used", "not used", "used", "not used", "not used", "not used"]
    assert found.problems[0].epochs == (0,) and found.problems[0].id == IDS[0]
    assert found.problems[0].where.endswith("p.jsonl, row 1") and found.problems[0].prompt == "What is 0 + 1?"
    assert (found.step, found.begun_with, found.closed_epochs) == (2, None, {"": 0})


def test_repeated_row_is_answered_once(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(RunFolder(str(tmp_path), "run"), open_ledger(IDS[:1]))
    assert answers(find_used_problems(checkpoint, write_rows(tmp_path / "p.jsonl", ROWS[:1] * 3))) == ["used"]


def test_used_problem_that_left_the_dataset_is_used(tmp_path: Path) -> None:
    ledger = open_ledger(IDS[:2])
    left = [IDS[1], IDS[2], IDS[3]]
    ledger.set_dataset(np.sort(ids_to_uint64(left)), DatasetFingerprint.of(left))
    assert len(ledger.used(0)) == 1
    checkpoint = write_checkpoint(RunFolder(str(tmp_path), "run"), ledger)
    assert answers(find_used_problems(checkpoint, write_rows(tmp_path / "p.jsonl")))[:3] == ["used", "used", "not used"]


def test_closed_epoch_without_rollouts_is_unknown(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(RunFolder(str(tmp_path), "run"), closed_ledger())
    found = find_used_problems(checkpoint, write_rows(tmp_path / "p.jsonl"))
    assert answers(found) == ["unknown", "used", *["unknown"] * 4] and found.problems[1].epochs == (1,)
    assert found.notes == ["a whole epoch was used, and its rollouts are missing or incomplete"]


def test_rollouts_of_a_closed_epoch_that_match_the_fingerprint_answer_all(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    checkpoint = write_checkpoint(folder, closed_ledger())
    # Step 3 was taken after the checkpoint.
    drawn = [(1, 0), (1, 1), (2, 2), (2, 3), (3, 5)]
    write_rollouts(folder, [make_group(step, IDS[number], (1.0,)) for step, number in drawn])
    found = find_used_problems(checkpoint, write_rows(tmp_path / "p.jsonl"))
    assert answers(found) == [*["used"] * 4, "not used", "not used"]
    assert found.problems[1].epochs == (0, 1) and found.problems[0].epochs == (0,)


def test_incomplete_rollouts_leave_the_others_unknown(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    checkpoint = write_checkpoint(folder, closed_ledger())
    write_rollouts(folder, [make_group(1, IDS[0], (1.0,))])
    (tmp_path / "run/rollouts/steps-00000002-00000002.parquet").write_bytes(b"no parquet")
    found = find_used_problems(checkpoint, write_rows(tmp_path / "p.jsonl"))
    assert answers(found) == ["used", "used", *["unknown"] * 4]
    assert len(found.notes) == 2 and "steps-00000002-00000002.parquet: cannot be read" in found.notes[0]


def test_rollouts_of_another_branch_are_not_taken(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    checkpoint = write_checkpoint(folder, closed_ledger(), serial=2)
    write_rollouts(folder, [make_group(1, each, (1.0,)) for each in IDS[:4]])
    folder.write_json([[1, 3]], RETURNS)  # run.resume=best has gone back to the checkpoint with serial number 1
    found = find_used_problems(checkpoint, write_rows(tmp_path / "p.jsonl"))
    assert answers(found)[:2] == ["unknown", "used"] and "was discarded by run.resume=best" in found.notes[0]


def test_columns_of_the_run_are_taken_unless_others_are_given(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    checkpoint = write_checkpoint(folder, open_ledger(IDS[:1]))
    folder.write_text(yaml.safe_dump({"data": {"columns": {"prompt": "q", "solution": "a"}}}), "config.yaml")
    renamed = write_rows(tmp_path / "p.jsonl", [{"q": row["prompt"], "a": row["solution"]} for row in ROWS])
    assert answers(find_used_problems(checkpoint, renamed))[:2] == ["used", "not used"]
    same = write_rows(tmp_path / "same.jsonl")
    assert answers(find_used_problems(checkpoint, same, {}))[:2] == ["used", "not used"]
    with pytest.raises(DataError, match="no column"):
        find_used_problems(checkpoint, same)


def test_further_columns_of_the_file_do_not_hide_a_problem(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(RunFolder(str(tmp_path), "run"), open_ledger(IDS[:1]))
    rows = [row | {"topic": "sums"} for row in ROWS]
    assert answers(find_used_problems(checkpoint, write_rows(tmp_path / "p.jsonl", rows)))[:2] == ["used", "not used"]


def test_other_text_is_another_problem(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(RunFolder(str(tmp_path), "run"), open_ledger(IDS[:1]))
    rows = [ROWS[0] | {"prompt": "What is  0 + 1?"}, ROWS[0] | {"solution": "1.0"}]
    assert answers(find_used_problems(checkpoint, write_rows(tmp_path / "p.jsonl", rows))) == ["not used", "not used"]


def test_mixture_names_the_source_of_a_used_problem(tmp_path: Path) -> None:
    from fractions import Fraction

    of_source = [parse_problem(row, where="").of_source("sums").id for row in ROWS]
    sums, other = Ledger(DatasetFingerprint.of(of_source)), Ledger(DatasetFingerprint.of(IDS))
    sums.mark(0, of_source[:1])
    shares = {"other": Fraction(1, 2), "sums": Fraction(1, 2)}
    checkpoint = write_checkpoint(
        RunFolder(str(tmp_path), "run"), MixtureLedger({"other": other, "sums": sums}, Draws(shares))
    )
    found = find_used_problems(checkpoint, write_rows(tmp_path / "p.jsonl"))
    assert answers(found)[:2] == ["used", "not used"] and found.problems[0].source == "sums"
    assert found.closed_epochs == {"other": 0, "sums": 0}


def test_source_whose_columns_the_file_lacks_does_not_hide_the_others(tmp_path: Path) -> None:
    from fractions import Fraction

    ids = {name: [parse_problem(row, where="").of_source(name).id for row in ROWS] for name in ("a", "b")}
    ledgers = {name: Ledger(DatasetFingerprint.of(own)) for name, own in ids.items()}
    ledgers["a"].mark(0, ids["a"][1:2])
    ledgers["b"].mark(0, ids["b"][:1])
    folder = RunFolder(str(tmp_path), "run")
    checkpoint = write_checkpoint(folder, MixtureLedger(ledgers, Draws(dict.fromkeys(ids, Fraction(1, 2)))))
    sources = {"a": {"path": "a.jsonl", "columns": {"prompt": "q", "solution": "r"}}, "b": {"path": "b.jsonl"}}
    folder.write_text(yaml.safe_dump({"data": {"train": sources}}), "config.yaml")
    found = find_used_problems(checkpoint, write_rows(tmp_path / "p.jsonl"))
    assert answers(found) == ["used", "used", *["not used"] * 4]
    assert [each.source for each in found.problems[:2]] == ["b", "a"]
    assert len(found.notes) == 1 and found.notes[0].startswith("the columns of the source a do not fit, those of b")
    others = write_rows(tmp_path / "others.jsonl", [{"x": row["prompt"], "y": row["solution"]} for row in ROWS])
    with pytest.raises(DataError, match="no column"):
        find_used_problems(checkpoint, others)


DEMONSTRATIONS = [row | {"completion": f"It is {row['solution']}."} for row in ROWS]


def tuned_run(tmp_path: Path, **data: Any) -> str:
    """Write a run of kind `sft` that has used the first demonstration; return its checkpoint."""
    ids = [parse_problem(row, where="", is_demonstration=True).id for row in DEMONSTRATIONS]
    ledger = Ledger(DatasetFingerprint.of(ids))
    ledger.mark(0, ids[:1])
    folder = RunFolder(str(tmp_path), "run")
    folder.write_text(yaml.safe_dump({"run": {"kind": "sft"}, "data": data}), "config.yaml")
    return write_checkpoint(folder, ledger)


def test_demonstrations_are_found_with_their_completions(tmp_path: Path) -> None:
    checkpoint = tuned_run(tmp_path)
    found = find_used_problems(checkpoint, write_rows(tmp_path / "p.jsonl", DEMONSTRATIONS))
    assert answers(found)[:2] == ["used", "not used"] and found.notes == []
    further = write_rows(tmp_path / "further.jsonl", [row | {"topic": "sums"} for row in DEMONSTRATIONS])
    assert answers(find_used_problems(checkpoint, further))[:2] == ["used", "not used"]
    damaged = write_rows(tmp_path / "damaged.jsonl", [row | {"completion": ""} for row in DEMONSTRATIONS])
    with pytest.raises(DataError, match="must be a text that is not empty"):
        find_used_problems(checkpoint, damaged)


@pytest.mark.parametrize("columns", [{}, {"completion": "answer"}])
def test_rows_without_completion_are_unknown_to_a_run_on_demonstrations(
    tmp_path: Path, columns: dict[str, str]
) -> None:
    checkpoint, problems = tuned_run(tmp_path, columns=columns), write_rows(tmp_path / "p.jsonl")
    found = find_used_problems(checkpoint, problems)
    assert set(answers(found)) == {"unknown"} and "has no column completion" in found.notes[0]
    assert main(["contains", checkpoint, problems]) == NOT_KNOWN
    assert set(answers(find_used_problems(checkpoint, "arithmetic"))) == {"unknown"}


@pytest.mark.parametrize(
    ("path", "is_other_run"),
    [
        ("/runs/math/01-warm/checkpoint-000020", True),
        ("s3://bucket/runs/01-warm/checkpoint-000020.1?region=x", True),
        ("/runs/math/policies/01-warm", True),
        ("tiny-arithmetic", False),
        ("owner/name", False),
    ],
)
def test_policy_of_an_earlier_run_leaves_the_others_unknown(tmp_path: Path, path: str, is_other_run: bool) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.write_text(yaml.safe_dump({"model": {"path": path}}), "config.yaml")
    checkpoint = write_checkpoint(folder, open_ledger(IDS[:1]))
    found = find_used_problems(checkpoint, write_rows(tmp_path / "p.jsonl"))
    assert answers(found)[:2] == ["used", "unknown" if is_other_run else "not used"]
    assert found.notes == (
        [f"the run began with {path}, a policy that was trained before: ask its checkpoint, too"]
        if is_other_run
        else []
    )


def two_epochs(first: Sequence[str], second: Sequence[str]) -> Ledger:
    """Return a ledger that has closed epoch 0 on one dataset, and epoch 1 on another one."""
    ledger = Ledger(DatasetFingerprint.of(first))
    ledger.mark(0, first)
    ledger.set_dataset(np.sort(ids_to_uint64(second)), DatasetFingerprint.of(second))
    ledger.mark(1, second)
    assert ledger.closed_epochs == 2
    return ledger


@pytest.mark.parametrize("evidence", ["accept_changes", "from_checkpoint", "number"])
def test_changed_problems_need_the_rollouts_of_each_closed_epoch(tmp_path: Path, evidence: str) -> None:
    folder = RunFolder(str(tmp_path), "run")
    before, now = IDS[:2], IDS[2:4]
    ledger = two_epochs(before, now)
    if evidence == "number":  # the open epoch has used a problem that has left
        for dataset in (IDS[2:5], now):
            ledger.set_dataset(np.sort(ids_to_uint64(dataset)), DatasetFingerprint.of(dataset))
            ledger.mark(2, IDS[4:5] if len(dataset) == 3 else [])
    if evidence == "accept_changes":
        folder.write_text(yaml.safe_dump({"data": {"accept_changes": True}}), "config.yaml")
    if evidence == "from_checkpoint":
        folder.write_text("/runs/first/checkpoint-000040 0123", "begun_with")
    checkpoint, problems = write_checkpoint(folder, ledger), write_rows(tmp_path / "p.jsonl")
    write_rollouts(folder, [make_group(2, each, (1.0,), epoch=1) for each in now])
    found = find_used_problems(checkpoint, problems)
    fifth = "used" if evidence == "number" else None
    assert answers(found) == ["unknown", "unknown", "used", "used", fifth or "unknown", "unknown"]
    write_rollouts(folder, [make_group(1, each, (1.0,)) for each in before])
    # The run of `from_checkpoint` may have used others of epoch 0, on problems that have left.
    last = "unknown" if evidence == "from_checkpoint" else "not used"
    assert answers(find_used_problems(checkpoint, problems)) == [*["used"] * 4, fifth or last, last]


@pytest.mark.parametrize(("drawn", "others"), [(IDS[2:4], "unknown"), (IDS[:4], "not used")])
def test_epoch_that_another_run_began_is_known_if_this_one_used_all_of_it(
    tmp_path: Path, drawn: Sequence[str], others: str
) -> None:
    folder = RunFolder(str(tmp_path), "run")
    checkpoint = write_checkpoint(folder, closed_ledger())
    folder.write_text("/runs/first/checkpoint-000040 0123", "begun_with")
    write_rollouts(folder, [make_group(1, each, (1.0,)) for each in drawn])
    found = find_used_problems(checkpoint, write_rows(tmp_path / "p.jsonl"))
    # The other run has used the first two problems of epoch 0, if this one has not; the second is used in epoch 1 too.
    assert answers(found) == ["used" if IDS[0] in drawn else "unknown", "used", "used", "used", others, others]


def test_run_folder_stands_for_its_best_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    write_checkpoint(folder, open_ledger(IDS[:1]))
    folder.write_text("/runs/first/checkpoint-000040 0123", "begun_with")
    found = find_used_problems(str(folder.local), write_rows(tmp_path / "p.jsonl"))
    assert found.checkpoint.endswith(CHECKPOINT) and found.begun_with == "/runs/first/checkpoint-000040 0123"


def test_checkpoint_without_ledger_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.write_json({"metrics": {"step": 2}, "serial": 1, "files": {}}, CHECKPOINT, "manifest.json")
    with pytest.raises(CheckpointError, match="has no ledger"):
        find_used_problems(str(folder.local), write_rows(tmp_path / "p.jsonl"))


def rewrite(place: Path, **options: Any) -> None:
    """Write the arrays of a ledger again, in a form that grpo_ray does not write, and list it in the manifest."""
    path = place / "ledger.npz"
    with np.load(path) as file:
        arrays: dict[str, Any] = {name: file[name] for name in file.files}
    arrays |= {name: value for name, value in options.items() if name in arrays}
    (np.savez_compressed if options.get("compressed") else np.savez)(path, allow_pickle=False, **arrays)
    manifest = json.loads((place / "manifest.json").read_text())
    content = path.read_bytes()
    manifest["files"]["ledger.npz"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (place / "manifest.json").write_text(json.dumps(manifest))


def huge_shape(place: Path) -> None:
    """Let the header of the used problems declare 2^45 of them."""
    rewrite(place)
    path = place / "ledger.npz"
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    header = b"\x93NUMPY\x01\x00"
    text = f"{{'descr': '<u8', 'fortran_order': False, 'shape': ({2**45},), }}".encode().ljust(117) + b"\n"
    parts["used-0.npy"] = header + len(text).to_bytes(2, "little") + text + bytes(16)
    with zipfile.ZipFile(path, "w") as file:
        for name, data in parts.items():
            file.writestr(name, data)
    content = path.read_bytes()
    manifest = json.loads((place / "manifest.json").read_text())
    manifest["files"]["ledger.npz"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (place / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lambda place: (place / "ledger.npz").write_bytes(b"x"), "it is not the file that the manifest names"),
        (lambda place: rewrite(place, compressed=True), "it is compressed"),
        (lambda place: rewrite(place, **{"used-0": np.array([1.5])}), "are no ids"),
        (lambda place: rewrite(place, header=np.frombuffer(b"{}", np.uint8)), "cannot be read as a ledger"),
        (huge_shape, "cannot be read as a ledger"),
    ],
    ids=["altered", "compressed", "floats", "header", "shape"],
)
def test_damaged_and_hostile_ledgers_are_refused(tmp_path: Path, plant: Any, message: str) -> None:
    checkpoint = write_checkpoint(RunFolder(str(tmp_path), "run"), open_ledger(IDS[:1]))
    plant(Path(checkpoint))
    with pytest.raises(CheckpointError, match=message):
        find_used_problems(checkpoint, write_rows(tmp_path / "p.jsonl"))


def test_contains_command_has_an_exit_status_for_each_outcome(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems, written = write_rows(tmp_path / "p.jsonl"), tmp_path / "out.json"
    checkpoint = write_checkpoint(RunFolder(str(tmp_path), "run"), open_ledger(IDS[:1]))
    assert main(["contains", checkpoint, problems, "--json", str(written)]) == FOUND
    assert "1 of 6 problems were used for training up to step 2" in capsys.readouterr().out
    result = json.loads(written.read_text())
    assert (result["problems"][0]["answer"], result["totals"]) == ("used", {"problems": 6, "used": 1, "unknown": 0})
    assert main(["contains", checkpoint, write_rows(tmp_path / "others.jsonl", ROWS[1:])]) == 0
    assert "0 of 5 problems" in capsys.readouterr().out
    unknown = write_checkpoint(RunFolder(str(tmp_path), "long"), closed_ledger())
    assert main(["contains", unknown, write_rows(tmp_path / "first.jsonl", ROWS[:1])]) == NOT_KNOWN
    assert "of 1 it is not known" in capsys.readouterr().out
    assert main(["contains", checkpoint, problems, "--json", str(tmp_path / "missing" / "out.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["contains", checkpoint, problems, "--columns", "prompt"]) == 2
    assert "--columns prompt: write pairs of names" in capsys.readouterr().err


def test_columns_are_checked(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(RunFolder(str(tmp_path), "run"), open_ledger(IDS[:1]))
    with pytest.raises((ConfigError, DataError)):
        find_used_problems(checkpoint, write_rows(tmp_path / "p.jsonl"), {"prompt": "no such column"})
