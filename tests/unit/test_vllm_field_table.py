"""Tests of the generator of vllm_fields.json on small sources in the shape of a release's."""

import json
from pathlib import Path

import pytest
from vllm_field_table import main, read_release, render

from grpo_ray.config.vllm_fields import VllmField

CONFIG = 'CacheDType = Literal["auto", "fp8"]\nOther: TypeAlias = Literal["a", "b"]\nRunner = str | int\n'

ARGUMENTS = '''
class EngineArgs:
    """Arguments."""

    block_size: int | None = None
    kv_cache_dtype: CacheDType = CacheConfig.cache_dtype
    other: "Other | None" = None
    open_text: Literal["x"] | str = "x"
    level: Literal[1, 2] = 1
    names: list[str] | None = None
    extra: dict[str, Any] = get_field(A, "extra")
    compilation_config: CompilationConfig = None
    backend: type[Executor] | None = None
    anything: Any = None
    _private: int = 0

    def method(self): ...
'''


@pytest.fixture
def release(tmp_path: Path) -> Path:
    source = tmp_path / "vllm"
    for file, text in {
        "config/cache.py": CONFIG,
        "engine/arg_utils.py": ARGUMENTS,
        "model_executor/layers/quantization/__init__.py": "",
        "../vllm-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 1.2\n",
    }.items():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_text(text)
    return tmp_path


def test_read_release_gives_types_and_values(release: Path) -> None:
    assert read_release(release / "vllm") == {
        "block_size": VllmField(("integer", "null")),
        "kv_cache_dtype": VllmField(("string",), ("auto", "fp8")),
        "other": VllmField(("null", "string"), ("a", "b")),
        "open_text": VllmField(("string",)),
        "level": VllmField(("integer",)),
        "names": VllmField(("array", "null")),
        "extra": VllmField(("object",)),
        "compilation_config": VllmField(("object",)),
        "backend": VllmField(),
        "anything": VllmField(),
    }


def test_render_unites_releases() -> None:
    old = {"a": VllmField(("string",), ("x",)), "b": VllmField(("integer",)), "c": VllmField(("integer",))}
    new = {"a": VllmField(("null", "string"), ("x", "y")), "b": VllmField()}
    assert json.loads(render({"1.0": old, "2.0": new})) == {
        "releases": ["1.0", "2.0"],
        "fields": {
            "a": {"types": ["null", "string"], "values": ["x", "y"]},
            "b": {},
            "c": {"types": ["integer"], "only": ["1.0"]},
        },
    }


def test_main_writes_the_release_of_a_folder(release: Path) -> None:
    assert main([str(release), "--output", str(release / "fields.json")]) == 0
    written = json.loads((release / "fields.json").read_text())
    assert written["releases"] == ["1.2"] and written["fields"]["block_size"] == {"types": ["integer", "null"]}
