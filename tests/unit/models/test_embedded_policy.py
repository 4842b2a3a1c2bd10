"""Tests of the embedded policies' files: complete, small, of today's recipes, and identified by their contents."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from grpo_ray.config.sources import EMBEDDED_POLICIES
from grpo_ray.models import embedded_policy as module
from grpo_ray.models.demonstrations import END, POLICIES, USER
from grpo_ray.models.embedded_policy import FOLDER, embedded_policy, embedded_policy_digest
from grpo_ray.models.tokenizer import load_tokenizer, tokenize_prompts
from grpo_ray.models.warm_up import SHAPE, build_tokenizer

FILES = {
    "config.json", "generation_config.json", "model.safetensors",
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
}  # fmt: skip


@pytest.fixture(params=EMBEDDED_POLICIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def settings_of(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((embedded_policy(name) / "config.json").read_text())
    return settings


def test_embedded_policies_are_whole_folders_under_1_mb() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(EMBEDDED_POLICIES)
    for name in EMBEDDED_POLICIES:
        assert {path.name for path in embedded_policy(name).iterdir()} == FILES
    paths = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in paths) < 1_000_000
    assert all(path.stat().st_mode & 0o444 == 0o444 for path in paths)  # an installed package may be shared


def test_embedded_policy_is_stored_in_16_bits_and_read_in_32(name: str) -> None:
    with safe_open(embedded_policy(name) / "model.safetensors", "numpy") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"F16"}  # noqa: SIM118 - no mapping
    assert settings_of(name)["dtype"] == "float32"


def test_embedded_policy_has_the_shape_of_its_recipe(name: str) -> None:
    settings = settings_of(name)
    assert {key: settings[key] for key in SHAPE} == {key: POLICIES[name].recipe[key] for key in SHAPE}


def test_embedded_policy_has_the_tokenizer_of_its_texts(name: str, tmp_path: Path) -> None:
    """A change of the demonstrations' texts, of a template or of a dataset needs new policies."""
    build_tokenizer(name).save_pretrained(tmp_path)
    for path in tmp_path.iterdir():
        assert (embedded_policy(name) / path.name).read_text() == path.read_text()


def test_embedded_policy_loaded_tokenizer_equals_the_built_one(name: str) -> None:
    # transformers may load another tokenizer class, selected by the model type.
    built, loaded = build_tokenizer(name), load_tokenizer(str(embedded_policy(name)))
    assert loaded.chat_template == built.chat_template == POLICIES[name].chat_template
    assert loaded.special_tokens_map == built.special_tokens_map
    assert getattr(loaded, "response_template", None) == POLICIES[name].response_template
    texts = ["What is 47 + 35? 🧮", "\\boxed{82}", "4711 words don't\n\n matter", "  x ", "日本語", f"{USER}q{END}"]
    for text in (*texts, *POLICIES[name].texts()[:100]):
        assert loaded(text)["input_ids"] == built(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "What is 1 + 1?"}]
    assert tokenize_prompts(loaded, [messages], {}) == tokenize_prompts(built, [messages], {})


def test_embedded_policy_every_token_has_an_embedding_row(name: str) -> None:
    loaded, rows = load_tokenizer(str(embedded_policy(name))), settings_of(name)["vocab_size"]
    assert max(loaded("What is 1 + 1?<|endoftext|><|im_end|><s></s>")["input_ids"]) < rows
    assert len(loaded) <= rows


def test_embedded_policy_digest_depends_on_names_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    shipped = {name: embedded_policy_digest(name) for name in EMBEDDED_POLICIES}
    assert len(set(shipped.values())) == len(shipped)
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    assert {name: embedded_policy_digest(name) for name in EMBEDDED_POLICIES} == shipped  # wherever they are installed
    folder = tmp_path / "tiny-tools"
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    (tmp_path / "tiny-guess" / "config.json").rename(tmp_path / "tiny-guess" / "config")
    changed = {name for name in EMBEDDED_POLICIES if embedded_policy_digest(name) != shipped[name]}
    assert changed == {"tiny-tools", "tiny-guess"}
