"""Tests of the records that all trackers receive."""

from grpo_ray.observers.trackers.tracker import CompletionSample, as_code, flatten, format_samples, numbers_of
from grpo_ray.telemetry.measures import heldout_part


def test_flatten_nested_settings_by_dotted_name() -> None:
    settings = {"run": {"seed": 0, "trackers": ["a"], "none": None}, "share": 0.5, "nan": float("nan"), "empty": {}}
    assert dict(flatten(settings)) == {
        "run.seed": 0, "run.trackers": "['a']", "run.none": "None", "share": 0.5, "nan": "nan", "empty": "{}",
    }  # fmt: skip
    (long,) = dict(flatten({"text": "x" * 10_000})).values()
    assert len(long) < 600


def test_numbers_of_row_keeps_finite_metrics_only() -> None:
    row = {"step": 3, "checkpoint": "checkpoint-3", "a": 1, "b": float("inf"), "c": True, "heldout/accuracy": 0.5}
    assert numbers_of(row) == {"a": 1.0, "heldout/accuracy": 0.5}
    assert heldout_part(numbers_of(row)) == {"heldout/accuracy": 0.5}


def test_as_code_has_no_line_outside_of_the_block() -> None:
    assert as_code("<b>\n\n# title\n\tx") == "    <b>\n    \n    # title\n        x"


def test_format_samples_has_prompt_and_completion() -> None:
    sample = CompletionSample(step=2, problem="p", reward=0.5, correct=None, tokens=3, prompt="1+1", completion="is\n2")
    assert format_samples([sample]) == (
        "step 2  problem p  reward 0.500  3 tokens\n--- prompt\n1+1\n--- completion\nis\n2"
    )
