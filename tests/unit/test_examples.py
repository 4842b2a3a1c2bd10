"""Tests of the examples of the package, and of the first files that `grpo-ray init` writes."""

import re
from pathlib import Path

import pytest

from grpo_ray.cli import main
from grpo_ray.config.loader import load_config
from grpo_ray.errors import ConfigError
from grpo_ray.examples import CONFIGS, describe_examples, example_names, example_path, write_first_files
from grpo_ray.rewards.registry import load_rewards

ROOT = Path(__file__).parents[2]


def test_example_names_begin_with_those_for_the_cpu() -> None:
    names = example_names()
    assert sorted(names) == sorted(path.stem for path in CONFIGS.iterdir())
    uses_gpu = [load_config(example_path(name)).cluster.use_gpu for name in names]
    assert uses_gpu == sorted(uses_gpu) and set(uses_gpu) == {False, True}


def test_example_misspelt_name_raises_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--example gues-game: .*, mbpp-code; did you mean guessing-game\?"):
        example_path("gues-game")


@pytest.mark.parametrize("name", ["../configs/gsm8k", "gsm8k.yaml", "", "/etc/passwd"])
def test_example_path_outside_the_folder_raises(name: str) -> None:
    with pytest.raises(ConfigError, match="no such example"):
        example_path(name)


def test_jobs_configs_are_the_examples() -> None:
    assert (ROOT / "jobs" / "configs").resolve() == CONFIGS.resolve()


def test_describe_examples_has_a_line_with_the_hardware_of_each() -> None:
    lines = describe_examples().splitlines()
    assert [line.split()[0] for line in lines] == example_names()
    assert lines[0].split(maxsplit=1)[1] == "Embedded policy on the embedded arithmetic task (4 CPU cores)"
    assert "not stated" not in describe_examples()


def test_example_help_lists_them_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("init", "train", "check", "chaos"):
        with pytest.raises(SystemExit) as ended:
            main([command, "--example", "help"])
        assert ended.value.code == 0 and capsys.readouterr().out == describe_examples() + "\n"


def test_example_with_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["train", "--example", "gsm8k", "a.yaml"], ["check", "a.yaml", "--example=gsm8k"]):
        assert main(words) == 2
        assert "--example gsm8k and 'a.yaml': give one config" in capsys.readouterr().err


def test_example_takes_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["train", "grpo.max_stepz=3", "--example", "arithmetic"],
        ["check", "--example", "arithmetic", "grpo.max_stepz=3"],
        ["check", "--example", "arithmetic", "--sample", "5", "--json", "x", "grpo.max_stepz=3"],
    ):
        assert main(words) == 2
        assert "did you mean grpo.max_steps" in capsys.readouterr().err


def test_check_without_config_and_example_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 2
    assert "there is no config" in capsys.readouterr().err


def test_init_folder_gets_config_and_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new folder" / "inner"
    assert main(["init", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["my_rewards.py", "my_run.yaml"]
    assert f"grpo-ray train '{folder / 'my_run.yaml'}'" in capsys.readouterr().out
    assert load_config(folder / "my_run.yaml").run.name == "my_run"


def test_init_default_is_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0 and (tmp_path / "my_run.yaml").exists()


def test_init_existing_file_raises_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"there is .*my_rewards\.py already"):
        write_first_files(tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_init_below_a_file_raises(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.yaml: cannot be written: "):
        write_first_files(tmp_path / "file" / "run.yaml")


def test_init_example_is_copied_with_its_own_command(tmp_path: Path) -> None:
    (path,) = write_first_files(tmp_path / "my game.yaml", "guessing-game")
    assert load_config(path) == load_config(example_path("guessing-game"))
    text = path.read_text()
    assert "--example" not in text and "#   grpo-ray train 'my game.yaml'\n" in text


def test_first_config_takes_the_reward_of_its_comment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = write_first_files(tmp_path)
    text = path.read_text()
    (line,) = re.findall(r"^ +# +(functions: .*my_rewards.*)$", text, re.MULTILINE)
    path.write_text(text.replace("  functions: [correctness]\n", f"  {line}\n", 1))
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(path)
    assert config.rewards.functions == ("correctness", "my_rewards:short_answer")
    reward = load_rewards(config.rewards)[1]
    messages = [{"role": "user", "content": "x" * 99}, {"role": "assistant", "content": "short"}]
    assert reward(completions=["x" * 60, "x" * 61, messages], solution=["1", "2", "3"]) == [1.0, 0.0, 1.0]


def test_first_config_comments_are_valid(tmp_path: Path) -> None:
    """The lines that a reader uncomments have names and values that the schema takes."""
    path, _ = write_first_files(tmp_path)
    commented = re.sub(r"^  # (use_gpu: true)$", r"  \1", path.read_text(), flags=re.MULTILINE)
    commented = re.sub(r"^  # (columns: .*)$", r"  \1", commented, flags=re.MULTILINE)
    commented = commented.replace("# reward_weights: [1.0, 0.1]", "reward_weights: [1.0]")
    path.write_text(commented)
    config = load_config(path, ["data.train=problems.jsonl"])
    assert config.cluster.use_gpu and config.data.columns == {"prompt": "question", "solution": "answer"}
