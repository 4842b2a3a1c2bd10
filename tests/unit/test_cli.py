"""The command line's own parsing."""

from pathlib import Path

from grpo_ray.cli import _load, build_parser


def test_load_first_override_without_a_file_is_kept() -> None:
    chosen = build_parser().parse_args(["train", "grpo.max_steps=7", "run.seed=3"])
    config = _load(chosen)
    assert (config.grpo.max_steps, config.run.seed) == (7, 3)


def test_load_file_with_overrides_reads_both(tmp_path: Path) -> None:
    path = tmp_path / "some=name.yaml"
    path.write_text("grpo: {max_steps: 5}\nrun: {seed: 1}\n")
    config = _load(build_parser().parse_args(["train", str(path), "run.seed=3"]))
    assert (config.grpo.max_steps, config.run.seed) == (5, 3)
