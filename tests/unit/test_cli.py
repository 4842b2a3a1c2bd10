"""Tests of the command line: its own parsing of files and overrides."""

from pathlib import Path

from grpo_ray.cli import build_parser, load_run_config


def test_load_run_config_first_override_without_a_file_is_kept() -> None:
    arguments = build_parser().parse_args(["train", "grpo.max_steps=7", "run.seed=3"])
    config = load_run_config(arguments)
    assert (config.grpo.max_steps, config.run.seed) == (7, 3)


def test_load_run_config_file_with_overrides_reads_both(tmp_path: Path) -> None:
    path = tmp_path / "some=name.yaml"
    path.write_text("grpo: {max_steps: 5}\nrun: {seed: 1}\n")
    config = load_run_config(build_parser().parse_args(["train", str(path), "run.seed=3"]))
    assert (config.grpo.max_steps, config.run.seed) == (5, 3)
