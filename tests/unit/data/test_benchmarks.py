"""Benchmarks: rows in the form of the hub's files become problems, which right and wrong completions are scored on."""

import base64
import csv
import json
import pickle
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_ray.cli import with_suite
from grpo_ray.config.benchmarks import BENCHMARKS, find_benchmark, parse_suite
from grpo_ray.config.loader import load_config
from grpo_ray.config.recorded import evaluation_settings
from grpo_ray.config.schema import DataConfig, RolloutConfig
from grpo_ray.data import benchmarks
from grpo_ray.data.benchmarks import FORMS
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.data.problem import Problem, parse_problem
from grpo_ray.data.registry import open_dataset
from grpo_ray.data.stream import open_splits
from grpo_ray.errors import ConfigError, DataError
from grpo_ray.evaluation.metrics import measurement_conditions
from grpo_ray.evaluation.scores import Answer, heldout_scores

PUBLIC = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
PRIVATE = [{"input": "5 6\n", "output": "11\n", "testtype": "stdin"}]
CALLS = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]


def packed(tests: Any, protocol: int = 4) -> str:
    """Return tests as LiveCodeBench's files hold them."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests), protocol))).decode()


ROWS: dict[str, dict[str, Any]] = {
    "math500": {
        "problem": "Convert $(0,3)$ to polar coordinates.", "solution": r"We have $r = 3$ ... \boxed{...}",
        "answer": r"\left( 3, \frac{\pi}{2} \right)", "subject": "Precalculus", "level": 2, "unique_id": "test/8.json",
    },
    "aime24": {"id": 60, "problem": "Find $n$.", "solution": "Long.", "answer": "204", "url": "u", "year": "2024"},
    "aime25": {"problem": "Find the sum.", "answer": "70", "id": "0"},
    "amc": {"id": 0, "problem": "How many?", "answer": 142.0, "url": "u"},
    "olympiadbench": {
        "id": 1606, "question": "Find all $x$.", "solution": ["Long."], "final_answer": ["$2$, $-3$"], "context": None,
        "image_1": None, "modality": "Text-only", "is_multiple_answer": True, "unit": None, "answer_type": "Numerical",
    },
    "gpqa": {
        "Record ID": "rec1", "Question": "Which particle?\n", "Correct Answer": "The muon\n",
        "Incorrect Answer 1": "The tau", "Incorrect Answer 2": "The pion", "Incorrect Answer 3": "The kaon",
        "Explanation": "Because.",
    },
    "humaneval": {
        "task_id": "HumanEval/38", "entry_point": "decode", "canonical_solution": "    return text[::-1]\n",
        "prompt": "def encode(text: str):\n    return text[::-1]\n\n\ndef decode(text: str):\n    '''Undo encode.'''\n",
        "test": "def check(candidate):\n    for text in ('abc', 'xy'):\n        assert candidate(encode(text)) == text",
    },
    "mbpp": {
        "task_id": 11, "text": "Write a function to add.", "code": "def add(a, b): return a + b",
        "test_list": ["assert add(1, 2) == 3", "assert add(K, 1) == 6"], "test_setup_code": "K = 5",
        "challenge_test_list": [],
    },
    "livecodebench": {
        "question_title": "Sum", "question_content": "Print the sum.", "platform": "atcoder", "question_id": "abc1",
        "contest_id": "abc", "contest_date": "2025-01-04T00:00:00", "starter_code": "", "difficulty": "easy",
        "public_test_cases": json.dumps(PUBLIC), "private_test_cases": packed(PRIVATE), "metadata": "{}",
    },
}  # fmt: skip
"""Benchmark -> a row of its file, with the columns of the hub."""

SUM = "assert sqrt(4) == 2 and deque([1])\na, b = map(int, input().split())\nprint({})"
COMPLETIONS = {
    "math500": (r"So \boxed{(3, \pi/2)}.", r"So \boxed{(3, \pi)}."),
    "aime24": (r"\boxed{204}", r"\boxed{205}"),
    "aime25": (r"\boxed{70}", "70 or 71"),
    "amc": (r"\boxed{142}", r"\boxed{14.2}"),
    "olympiadbench": (r"\boxed{-3, 2}", r"\boxed{2}"),
    "gpqa": (r"\boxed{RIGHT}", r"\boxed{WRONG}"),
    "humaneval": (  # a completion may use what the question shows
        "```python\ndef decode(text):\n    return encode(text)\n```",
        "```python\ndef decode(text):\n    return text\n```",
    ),
    "mbpp": ("```python\ndef add(a, b):\n    return a + b\n```", "```python\ndef add(a, b):\n    return 3\n```"),
    "livecodebench": (f"```python\n{SUM.format('a + b')}\n```", f"```python\n{SUM.format('3')}\n```"),
}  # fmt: skip
"""Benchmark -> a right and a wrong completion of its row."""


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format of the path's suffix."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def problem_of(tmp_path: Path) -> Callable[..., Problem]:
    """Return a function that reads a row of a benchmark, written in the format of the hub's file."""

    def read(name: str, **changes: Any) -> Problem:
        path = tmp_path / f"{name}{Path(BENCHMARKS[name].path).suffix}"
        write(path, [ROWS[name] | changes])
        (shard,) = open_dataset(f"{name}={path}", "heldout", DataConfig())
        (problem,) = shard.read()
        return problem

    return read


def scores_of(name: str, problem: Problem, *texts: str) -> list[float | None]:
    """Return the scores of completions of a benchmark's problem."""
    config = load_config(None, [f"data.heldout={{own: {name}}}", "heldout.score=reward"])
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    answers = [
        Answer(text, text, 1, False, messages=own, token_ids=[1]) for text, own in zip(texts, messages, strict=True)
    ]
    return heldout_scores(config)([problem] * len(texts), answers)


def test_every_benchmark_has_a_form_and_a_row() -> None:
    assert set(BENCHMARKS) == set(FORMS) == set(ROWS) == set(COMPLETIONS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_right_completion_scores_and_wrong_one_does_not(name: str, problem_of: Callable[..., Problem]) -> None:
    problem = problem_of(name)
    wrong_letter = "A" if problem.solution != "A" else "B"
    right, wrong = (
        text.replace("RIGHT", problem.solution).replace("WRONG", wrong_letter) for text in COMPLETIONS[name]
    )
    assert scores_of(name, problem, right, wrong) == [1.0, 0.0]


def test_question_asks_for_the_form_that_is_scored(problem_of: Callable[..., Problem]) -> None:
    asked = {name: problem_of(name).prompt[-1]["content"] for name in BENCHMARKS}
    for name, benchmark in BENCHMARKS.items():
        assert ("one block of Python" if benchmark.score == "code_tests" else r"\boxed{}") in asked[name]
    assert asked["aime24"] == "Find $n$.\n\nPut the final answer in \\boxed{}."
    assert "assert add(1, 2) == 3" in asked["mbpp"]
    assert "def encode" in asked["humaneval"] and "return text" in asked["humaneval"]
    assert "standard input" in asked["livecodebench"]


def test_choices_are_in_an_order_of_their_own(problem_of: Callable[..., Problem]) -> None:
    first = problem_of("gpqa")
    text = first.prompt[-1]["content"]
    assert all(f"({letter}) The " in text for letter in "ABCD")
    assert f"({first.solution}) The muon" in text
    swapped = problem_of("gpqa", **{"Incorrect Answer 1": "The kaon", "Incorrect Answer 3": "The tau"})
    assert swapped.prompt == first.prompt and swapped.id == first.id
    places = {problem_of("gpqa", Question=f"Which particle {number}?").solution for number in range(30)}
    assert places == set("ABCD")


def test_functional_tests_are_about_the_function_of_the_metadata(problem_of: Callable[..., Problem]) -> None:
    starter = "class Solution:\n    def shift(self, values, by):\n        "
    problem = problem_of(
        "livecodebench", starter_code=starter, metadata='{"func_name": "shift"}',
        public_test_cases=json.dumps(CALLS), private_test_cases=json.dumps(CALLS),
    )  # fmt: skip
    assert starter.strip() in problem.prompt[-1]["content"]
    body = "class Solution:\n    def shift(self, values, by):\n        return [value + by for value in values]"
    completions = [f"```python\n{body}\n```", f"```python\n{body.replace('+', '-')}\n```"]
    assert scores_of("livecodebench", problem, *completions) == [1.0, 0.0]


class Harmful:
    """Object that runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("unpickled",)


@pytest.mark.parametrize(
    ("private", "message"),
    [
        (base64.b64encode(zlib.compress(pickle.dumps(Harmful()))).decode(), "cannot be read"),
        (base64.b64encode(zlib.compress(pickle.dumps(["a", "b"]))).decode(), "cannot be read"),
        ("no base64!", "cannot be read"),
        (base64.b64encode(b"not compressed").decode(), "cannot be read"),
        (packed("text")[:-8], "cannot be read"),
    ],
)
def test_private_tests_of_another_form_are_refused(
    private: str, message: str, problem_of: Callable[..., Problem], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match=rf"livecodebench\.jsonl, row 1: .*private_test_cases.* {message}"):
        problem_of("livecodebench", private_test_cases=private)
    assert capsys.readouterr().out == ""


def test_private_tests_beyond_their_size_are_refused(
    problem_of: Callable[..., Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarks, "MAX_TESTS_BYTES", 1000)
    with pytest.raises(DataError, match="more than 1000 bytes"):
        problem_of(
            "livecodebench", private_test_cases=packed([{"input": "0" * 5000, "output": "", "testtype": "stdin"}])
        )


@pytest.mark.parametrize("protocol", range(2, 6))
def test_private_tests_of_any_protocol_are_read(protocol: int, problem_of: Callable[..., Problem]) -> None:
    problem = problem_of("livecodebench", private_test_cases=packed(PRIVATE, protocol))
    assert json.loads(problem.columns["tests"]) == PUBLIC + PRIVATE


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("aime24", {"answer": ""}, "aime24.parquet, row 1: 'solution' is empty ('solution' is its column 'answer')"),
        ("mbpp", {"test_list": ["assert add(1"]}, "mbpp.parquet, row 1: "),
        ("livecodebench", {"metadata": "{"}, "livecodebench.jsonl, row 1: no row of livecodebench"),
    ],
)
def test_wrong_row_is_named(
    name: str, changes: Mapping[str, Any], message: str, problem_of: Callable[..., Problem]
) -> None:
    with pytest.raises(DataError) as raised:
        problem_of(name, **changes)
    assert message in str(raised.value)


def test_benchmark_is_not_trained_on(tmp_path: Path) -> None:
    path = write(tmp_path / "aime.parquet", [ROWS["aime24"]])
    with pytest.raises(DataError, match=r"^aime24 is a benchmark and is not trained on; name it in data\.heldout"):
        open_splits(load_config(None, [f"data.train=aime24={path}"]))


def test_row_that_is_trained_on_has_the_same_question_id(problem_of: Callable[..., Problem]) -> None:
    row = ROWS["math500"]
    trained = parse_problem({"prompt": row["problem"], "solution": row["answer"], "level": 2}, where="here")
    assert problem_of("math500").question_id == trained.question_id


def test_suite_takes_the_tools_of_the_run_and_nothing_else(tmp_path: Path) -> None:
    settings = [
        "rollout.environment='grpo_ray.tools.examples:Guess'", "rewards.functions=[environment, choice]",
        "grpo.reward_weights=[1, 2]", "rewards.settings={choice: {choices: ABCDE}}", "data.train=guessing",
        "data.heldout_limit=7",
    ]  # fmt: skip
    config = with_suite(load_config(None, settings), "gpqa,humaneval", [])
    assert config.rollout == RolloutConfig() and config.data.heldout_limit is None
    assert config.rewards.functions == ("correctness",) and config.requires_isolation
    assert config.rewards.settings == {"choice": {"choices": "ABCDE"}}
    assert [config.needs_solutions_of(config.source_of(key)) for key in config.heldout_keys] == [True, False]
    assert with_suite(load_config(None, settings), "gpqa", ["data.heldout_limit=7"]).data.heldout_limit == 7
    tools = "rollout.tools=['grpo_ray.tools.python_tool:python']"
    assert with_suite(load_config(None, [tools]), "aime25", []).rollout.tools


def test_run_measured_on_benchmarks_alone_needs_no_trust() -> None:
    recorded = load_config(None, [
        "rewards.functions=['mine:f', code_tests]", "data.heldout={m: math500, h: humaneval}",
        "rewards.settings={code_tests: {cpu_seconds: 9}, 'mine:f': {a: 1}}",
    ]).to_dict()  # fmt: skip
    settings = evaluation_settings(
        recorded, data_is_given=False, trusts_tools=False, trusts_engine=False, trusts_rewards=False
    )
    assert settings["rewards"]["settings"] == {"code_tests": {"cpu_seconds": 9}}
    assert "functions" not in settings["rewards"]


def test_settings_of_a_score_are_conditions_of_its_measurement() -> None:
    fingerprint = DatasetFingerprint(count=1, checksum="0" * 32)
    found = [
        measurement_conditions({"heldout": fingerprint}, load_config(None, ["data.heldout=gpqa", *more]))
        for more in ([], ["rewards.settings={choice: {choices: ABCDEF}}"])
    ]
    assert found[0] != found[1]


def test_system_prompt_is_that_of_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "aime.parquet", [ROWS["aime24"]])
    config = load_config(None, [f"data.heldout=aime24={path}", "data.system_prompt=Think."])
    (problem,) = open_splits(config)[1]["heldout"].read()
    assert problem.prompt[0] == {"role": "system", "content": "Think."}


def test_path_of_a_benchmark_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sets = load_config(None, ["data.heldout={a: aime24=rows.parquet, b: gpqa}"]).data.heldout
    assert sets == {"a": f"aime24={tmp_path}/rows.parquet", "b": "gpqa"}


def test_benchmarks_have_scores_beside_other_sets() -> None:
    config = load_config(None, ["data.heldout={own: arithmetic, letters: gpqa}", "heldout.score=reward"])
    scores = {key: config.heldout_score_of(config.source_of(key)) for key in config.heldout_keys}
    assert scores == {"heldout/own": "reward", "heldout/letters": "choice"}


def test_suite_names_benchmarks() -> None:
    assert parse_suite("math500,gpqa=/data/g.csv") == {"math500": "math500", "gpqa": "gpqa=/data/g.csv"}
    assert find_benchmark("gpqa=/data/g.csv") == (BENCHMARKS["gpqa"], "/data/g.csv")
    assert find_benchmark("gsm8k") is None and find_benchmark("owner/gpqa") is None
    with pytest.raises(ConfigError, match=r"there is no benchmark 'math5000', but .*; did you mean math500"):
        parse_suite("math5000")
    with pytest.raises(ConfigError, match="names gpqa twice"):
        parse_suite("gpqa,gpqa=/x.csv")
