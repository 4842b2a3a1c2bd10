"""Tests of the sweep file's schema: each mistake is one line that names the file, the key and the mend."""

from pathlib import Path
from typing import Any

import pytest

from grpo_ray.config.sweep_file import load_sweep
from grpo_ray.errors import ConfigError


def write(folder: Path, text: str) -> str:
    path = folder / "rates.yaml"
    path.write_text(text)
    return str(path)


def test_sweep_is_named_after_its_file_unless_it_has_a_name(tmp_path: Path) -> None:
    text = "vary: {grpo.learning_rate: [1e-4, 3e-4]}\n"
    sweep = load_sweep(write(tmp_path, text))
    assert (sweep.name, sweep.keys) == ("rates", ("grpo.learning_rate",))
    assert sweep.vary == {"grpo.learning_rate": (1e-4, 3e-4)}
    assert load_sweep(write(tmp_path, text + "name: other")).name == "other"


MISTAKES: dict[str, tuple[str, str]] = {
    "no-trials": ("base: a.yaml", "one of vary, trials and draw must be given; got none"),
    "two-kinds": (
        "{vary: {run.seed: [1]}, trials: [{run.seed: 1}]}",
        "one of vary, trials and draw must be given; got vary and trials",
    ),
    "no-values": ("vary: {run.seed: []}", "vary: run.seed has no values; add one, or remove the key"),
    "no-section": (
        "vary: {seed: [1, 2]}",
        "seed is no key of the config; write section.field, as in grpo.learning_rate",
    ),
    "own-key": ("trials: [{run.pause_at: 3}]", "trials cannot vary run.pause_at; it is set by `rungs` or `turns`"),
    "falling-rungs": (
        "{vary: {run.seed: [1]}, rungs: {steps: [4, 2]}}",
        "rungs.steps=[4, 2] must rise; write each step once, in order",
    ),
    "bounds": (
        "draw: {n: 2, space: {grpo.learning_rate: {log_uniform: [0, 1]}}}",
        "draw.space: grpo.learning_rate: log_uniform=[0, 1] must have bounds above 0",
    ),
    "no-space": (
        "draw: {n: 2}",
        "draw.space is missing; it must be a mapping from keys of the config to one of {uniform: [low, high]}",
    ),
    "order": (
        "draw: {n: 2, space: {run.seed: {int: [3, 3]}}}",
        "draw.space: run.seed: int=[3, 3] must be two whole numbers, the smaller one first",
    ),
    "infinite": (
        "draw: {n: 2, space: {grpo.learning_rate: {uniform: [0, .inf]}}}",
        "draw.space: grpo.learning_rate: uniform=[0, inf] must be two numbers, the smaller one first",
    ),
    "fraction-of-int": (
        "draw: {n: 2, space: {run.seed: {int: [1, 2.5]}}}",
        "draw.space: run.seed: int=[1, 2.5] must be two whole numbers, the smaller one first",
    ),
    "unknown-distribution": (
        "draw: {n: 2, space: {run.seed: {gauss: [1, 2]}}}",
        "must be a mapping from keys of the config to one of {uniform: [low, high]}",
    ),
    "unknown-key": ("{vary: {run.seed: [1]}, rung: {steps: [1]}}", "unknown key rung; did you mean rungs?"),
    "keep": (
        "{vary: {run.seed: [1]}, rungs: {steps: [1], keep: 1.0}}",
        "rungs.keep=1.0 must be a number above 0 and below 1",
    ),
    "parallel": ("{vary: {run.seed: [1]}, parallel: 0}", "parallel=0 must be a whole number of at least 1"),
    "not-a-mapping": ("[1, 2]", "must be a mapping with base and vary, trials or draw"),
    "repeated": ("vary: {run.seed: [1]}\nvary: {run.seed: [2]}", "repeats the key 'vary' of line 1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_in_a_sweep_file_is_named_with_its_mend(name: str, tmp_path: Path) -> None:
    text, message = MISTAKES[name]
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        load_sweep(path)
    assert str(error.value).startswith(path)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["vary: {run.seed: [1]}", "{vary: {run.seed: [1]}, name: null}"])
def test_name_of_a_file_that_cannot_be_that_of_a_folder_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "my rates.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_sweep(str(path))
    assert str(error.value).startswith(f"{path}: name='my rates' must be letters, digits, '.', '_' and '-'")
    assert len(str(error.value).splitlines()) == 1


def test_missing_sweep_file_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^nowhere\.yaml: cannot be read: "):
        load_sweep("nowhere.yaml")


@pytest.mark.parametrize(("kept", "given"), [(0.5, {}), (0.25, {"keep": 0.25})])
def test_share_that_stays_is_half_by_default(kept: float, given: dict[str, Any], tmp_path: Path) -> None:
    rungs = {"steps": [2], **given}
    sweep = load_sweep(write(tmp_path, f"{{vary: {{run.seed: [1]}}, rungs: {rungs}}}".replace("'", "")))
    assert sweep.rungs is not None and sweep.rungs.keep == kept
