"""Tests of the contents by which a run recognises its policy."""

from pathlib import Path

import huggingface_hub.constants
import pytest
from failing_storage import free_port

from grpo_ray.models.policy_digest import BLOCK_BYTES, BLOCKS, changed_on_hub, changed_parts, part_of, policy_contents

COMMIT = "c" * 40


def write_policy(folder: Path, **files: bytes) -> str:
    """Write the files of a policy; `model` has its weights, and `readme` is no part of it."""
    names = dict(config="config.json", tokenizer="tokenizer.json", model="model.safetensors", readme="README.md")
    folder.mkdir(parents=True)
    for name, content in ({"config": b"{}", "tokenizer": b"[]", "model": b"abc"} | files).items():
        (folder / names[name]).write_bytes(content)
    return str(folder)


def test_policy_contents_are_those_of_the_files_wherever_they_lie(tmp_path: Path) -> None:
    first = policy_contents(write_policy(tmp_path / "a"))
    assert list(first) == ["config", "tokenizer", "weights"] and len(set(first.values())) == 3
    second = write_policy(tmp_path / "elsewhere" / "b", readme=b"new")
    assert policy_contents(second) == policy_contents(f"file://{second}") == first


@pytest.mark.parametrize(
    ("file", "part"), [("config", "config"), ("tokenizer", "tokenizer"), ("model", "weights"), ("readme", None)]
)
def test_policy_contents_differ_in_the_part_that_changed(tmp_path: Path, file: str, part: str | None) -> None:
    first, second = (policy_contents(write_policy(tmp_path / text.decode(), **{file: text})) for text in (b"a", b"b"))
    assert changed_parts(first, second) == ((part,) if part else ())


@pytest.mark.parametrize("place", [0, BLOCK_BYTES // 2, -1])
def test_policy_contents_of_large_weights_sample_both_ends(tmp_path: Path, place: int) -> None:
    size = 3 * BLOCKS * BLOCK_BYTES
    changed = bytearray(size)
    changed[place] = 1
    first = policy_contents(write_policy(tmp_path / "a", model=bytes(size)))
    assert changed_parts(first, policy_contents(write_policy(tmp_path / "b", model=bytes(changed)))) == ("weights",)
    assert changed_parts(first, policy_contents(write_policy(tmp_path / "c", model=bytes(size - 1)))) == ("weights",)


def test_policy_contents_without_weights_or_folder_are_empty(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert policy_contents(str(tmp_path)) == policy_contents(f"file://{tmp_path}") == {}
    assert policy_contents(str(tmp_path / "none")) == policy_contents(f"file://{tmp_path}/none") == {}


def test_policy_contents_of_a_revision_in_the_cache_have_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--policy" / "snapshots" / COMMIT
    write_policy(folder)
    (tmp_path / "models--org--policy" / "refs").mkdir()
    (tmp_path / "models--org--policy" / "refs" / "main").write_text(COMMIT)
    assert policy_contents("org/policy") == {"commit": COMMIT}
    both = policy_contents(str(folder))
    assert both == policy_contents(write_policy(tmp_path / "copy")) | {"commit": COMMIT}
    assert policy_contents("org/other") == {}


def test_changed_parts_compare_what_both_have() -> None:
    parts = {"config": "1", "tokenizer": "2", "weights": "3"}
    assert changed_parts({"commit": "a"}, {"commit": "a"} | parts) == ()
    assert changed_parts({"commit": "a"} | parts, {"commit": "b"} | parts | {"config": "4"}) == ("config",)
    assert changed_parts({"commit": "a"}, {"commit": "b"}) is None
    assert changed_parts({"commit": "a"}, parts) is None
    assert changed_parts(parts, {}) is None and changed_parts({}, {}) is None


def test_changed_on_hub_unreachable_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert changed_on_hub("org/policy", "a" * 40, "b" * 40) is None


def test_part_of_files_that_training_writes_beside_a_policy_is_none() -> None:
    others = ("README.md", "manifest.json", "trainer_state.json", "measured.json")
    assert [part_of(name) for name in others] == [None] * 4
    assert part_of("modeling_custom.py") == "config" and part_of("vocab.json") == "tokenizer"
