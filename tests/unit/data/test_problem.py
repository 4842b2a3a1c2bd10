"""Tests of problems: parsing of dataset rows, error messages, and ids that depend on the content only."""

import json
import pickle
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, example, given, settings

from grpo_ray.data.problem import RESERVED_COLUMNS, ROLES, Problem, parse_problem, problem_id, reward_columns
from grpo_ray.errors import DataError, GrpoRayError

SOLUTION = "'solution' must be text, a number or a list of these"

ROW = {"prompt": "What is 2 + 3?", "solution": "$5$"}


def parse(system_prompt: str | None = None, **row: Any) -> Problem:
    return parse_problem(ROW | row, where="train.jsonl, row 17", system_prompt=system_prompt)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def examples(count: int) -> settings:
    """Return settings of a hypothesis test: this number of examples, the same ones in each run."""
    return settings(max_examples=count, deadline=None, derandomize=True)


TEXTS = st.text(min_size=1, max_size=20).filter(str.strip)
TURNS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(ROLES), "content": st.text(max_size=10)}), max_size=3)
PROMPTS = st.builds(lambda turns, last: [*turns, user(last)], TURNS, TEXTS)
"""Valid chat messages."""
COLUMNS = st.dictionaries(
    (st.text(max_size=8) | st.sampled_from(["id", "epoch", "index"])).filter(
        lambda name: name not in ("prompt", "solution", *RESERVED_COLUMNS)
    ),
    st.integers() | st.text(),
    max_size=3,
)
"""Further columns of a row."""


def test_parse_problem_plain_text_becomes_user_message() -> None:
    problem = parse()
    assert problem.prompt == [user("What is 2 + 3?")]
    assert problem.solution == "$5$" and problem.columns == {}


def test_parse_problem_chat_messages_lose_only_other_keys() -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("1 + 1?") | {"name": "kim"}]
    assert parse(prompt=messages).prompt == [{"role": "system", "content": "Be brief."}, user("1 + 1?")]


def test_parse_problem_keeps_earlier_assistant_turns() -> None:
    turns = [user("1 + 1?"), {"role": "assistant", "content": "2"}, user("And 2 + 2?")]
    assert parse(prompt=turns).prompt == turns


def test_parse_problem_takes_numpy_array_of_messages() -> None:
    assert parse(prompt=np.array([user("1 + 1?")], dtype=object)).prompt == [user("1 + 1?")]


def test_parse_problem_adds_missing_system_prompt() -> None:
    assert parse("Be brief.").prompt == [{"role": "system", "content": "Be brief."}, user("What is 2 + 3?")]


def test_parse_problem_keeps_own_system_prompt() -> None:
    own = [{"role": "system", "content": "Think."}, user("1 + 1?")]
    assert parse("Be brief.", prompt=own).prompt == own


def test_parse_problem_keeps_columns_and_the_files_id() -> None:
    columns: dict[str, Any] = {"id": "row-7", "topic": "sums", "difficulty": 3.5, "tags": ["a"]}
    assert parse(**columns).columns == columns


def test_parse_problem_other_columns_are_another_problem_of_one_question() -> None:
    easy, hard = parse(level=1), parse(level=2)
    assert len({parse().id, easy.id, hard.id}) == 3
    assert easy.question_id == hard.question_id == parse().id


def test_parse_problem_missing_column_is_none_and_order_does_not_count() -> None:
    assert parse(topic=None).id == parse().id
    assert parse(topic="sums", level=1).id == parse(level=1, topic="sums", unit=None).id


def test_parse_problem_of_an_environment_has_its_columns_in_the_question() -> None:
    rows = [ROW | {"seed": seed} for seed in (1, 2)]
    options: dict[str, Any] = {"needs_solution": False, "columns_decide": True}
    one, two = (parse_problem(row, where="a.jsonl, row 1", **options) for row in rows)
    assert one.question_id == one.id != two.id == two.question_id


def test_parse_problem_system_prompt_changes_no_id() -> None:
    problem = parse("Be brief.", level=1)
    assert (problem.id, problem.question_id) == (parse(level=1).id, parse().id)


@pytest.mark.parametrize("name", RESERVED_COLUMNS)
def test_parse_problem_reserved_column_raises(name: str) -> None:
    with pytest.raises(DataError, match=rf"^train\.jsonl, row 17: column '{name}' .*data\.columns={{source_{name}: "):
        parse(**{name: None})


def test_reserved_columns_are_all_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    assert [name for name in RESERVED_COLUMNS if f"`{name}`" not in page] == []


def test_problem_with_columns_fills_missing_ones() -> None:
    problem = parse(topic="sums")
    assert problem.with_columns(["level", "topic"]).columns == {"level": None, "topic": "sums"}
    assert problem.with_columns(["topic"]) is problem


def test_problem_as_row_learners_items_win_over_columns() -> None:
    problem = parse(id="row-7", index=[1], topic="t")
    row = problem.as_row(epoch=3, index=1)
    assert (row["id"], row["epoch"], row["index"]) == (problem.id, 3, 1)
    texts = {"prompt": problem.prompt, "solution": "$5$"}
    # The file has no column `epoch`, so rewards get the row's.
    assert reward_columns(row) == {"id": "row-7", "epoch": 3, "index": [1], "topic": "t"} | texts


def test_parse_problem_without_solution_has_its_columns_in_the_id() -> None:
    rows = [{"prompt": "Play.", "level": level} for level in (1, 2)]
    problems = [parse_problem(row, where="a.jsonl, row 1", needs_solution=False) for row in rows]
    assert [problem.solution for problem in problems] == ["", ""]
    assert problems[0].id != problems[1].id
    reordered = {"level": 1, "prompt": "Play.", "solution": None}
    assert parse_problem(reordered, where="a.jsonl, row 1", needs_solution=False).id == problems[0].id
    with pytest.raises(DataError, match=r"a.jsonl, row 1: no column 'solution'"):
        parse_problem(rows[0], where="a.jsonl, row 1")


def test_parse_problem_with_a_solution_keeps_its_id_where_none_is_needed() -> None:
    row = {"prompt": "What is 2 + 3?", "solution": "$5$", "level": 1}
    problem = parse_problem(row, where="a.jsonl, row 1", needs_solution=False)
    assert problem == parse_problem(row, where="a.jsonl, row 1")
    with pytest.raises(DataError, match="'solution' is empty"):
        parse_problem(row | {"solution": " "}, where="a.jsonl, row 1", needs_solution=False)


@pytest.mark.parametrize(
    ("solution", "text"),
    [
        (5, "5"), (-3, "-3"), (0, "0"), (True, "True"), (10**400, f"1{'0' * 400}"),
        (2.0, "2"), (-0.5, "-0.5"), (1e22, f"1{'0' * 22}"),
        (["5"], "5"), ([1, 2.5], "1, 2.5"), (["$x$", "Yes"], "$x$, Yes"),
        (np.array(["5", "6"]), "5, 6"), (np.array([1, 2]), "1, 2"), (np.int64(7), "7"), (np.float64(7.0), "7"),
    ],
    ids=str,
)  # fmt: skip
def test_parse_problem_takes_numbers_and_lists_as_solutions(solution: Any, text: str) -> None:
    problem = parse_problem({"prompt": "q", "solution": solution}, where="a.parquet, row 1")
    assert problem == parse_problem({"prompt": "q", "solution": text}, where="a.jsonl, row 1")


def test_problem_without_a_solution_passes_none_to_rewards() -> None:
    problem = parse_problem({"prompt": "Write a haiku."}, where="a.jsonl, row 1", needs_solution=False)
    assert reward_columns(problem.as_row(epoch=0, index=0))["solution"] is None


def test_equal_prompts_without_solutions_are_one_question_unless_columns_decide_the_task() -> None:
    rows = [{"prompt": "Play.", "level": 1}, {"prompt": "Play.", "level": 2}]

    def questions(columns_decide: bool) -> set[str]:
        options: dict[str, Any] = {"needs_solution": False, "columns_decide": columns_decide}
        return {parse_problem(row, where="here", **options).question_id for row in rows}

    assert len(questions(False)) == 1 and len(questions(True)) == 2


def test_parse_problem_leaves_the_row_unchanged() -> None:
    row = {"prompt": [user("q")], "solution": "s", "topic": "t"}
    before = json.dumps(row)
    parse_problem(row, where="here", system_prompt="Be brief.")
    assert json.dumps(row) == before


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "q", "answer": "5"},
            "no column 'solution', which a reward or heldout.score reads; the row has answer, prompt",
        ),
        ({"question": "q", "solution": "5"}, "no column 'prompt'; the row has question, solution"),
        ({}, "no column 'prompt'; the row has no columns"),
        ({"prompt": "q", "solution": {"x": 5}}, f"{SOLUTION}, not dict ({{'x': 5}})"),
        ({"prompt": "q", "solution": None}, f"{SOLUTION}, not NoneType (None)"),
        ({"prompt": "q", "solution": []}, f"{SOLUTION}, not an empty list"),
        ({"prompt": "q", "solution": [["5"]]}, f"{SOLUTION}, not list ([['5']])"),
        ({"prompt": "q", "solution": ["5", None]}, f"{SOLUTION}, not NoneType (None)"),
        ({"prompt": "q", "solution": float("nan")}, f"{SOLUTION}, not float (nan)"),
        ({"prompt": "q", "solution": ["5", " "]}, "'solution' is empty"),
        ({"prompt": "q", "solution": ""}, "'solution' is empty"),
        ({"prompt": "q", "solution": " \n"}, "'solution' is empty"),
        ({"prompt": "", "solution": "5"}, "'prompt' is empty"),
        ({"prompt": " \n\t", "solution": "5"}, "'prompt' is empty"),
        ({"prompt": [user("q"), user("")], "solution": "5"}, "'prompt' is empty"),
        ({"prompt": [], "solution": "5"}, "'prompt' must be text or a list of chat messages, not an empty list"),
        ({"prompt": None, "solution": "5"}, "'prompt' must be text or a list of chat messages, not NoneType"),
        ({"prompt": 5, "solution": "5"}, "'prompt' must be text or a list of chat messages, not int"),
        ({"prompt": user("q"), "solution": "5"}, "'prompt' must be text or a list of chat messages, not dict"),
        ({"prompt": ["q"], "solution": "5"}, "'prompt' message 0 must have 'role' and 'content', got 'q'"),
        ({"prompt": [None], "solution": "5"}, "'prompt' message 0 must have 'role' and 'content', got None"),
        (
            {"prompt": [user("a"), {"role": "user"}], "solution": "5"},
            "'prompt' message 1 must have 'role' and 'content', got {'role': 'user'}",
        ),
        (
            {"prompt": [{"role": "human", "content": "q"}], "solution": "5"},
            "'prompt' message 0 has role 'human', not one of system, user, assistant",
        ),
        (
            {"prompt": [{"role": ["user"], "content": "q"}], "solution": "5"},
            "'prompt' message 0 has role ['user'], not one of system, user, assistant",
        ),
        (
            {"prompt": [{"role": "user", "content": None}], "solution": "5"},
            "'prompt' message 0 must have text as 'content', not NoneType",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "q"}]}], "solution": "5"},
            "'prompt' message 0 must have text as 'content', not list",
        ),
        (
            {"prompt": [user("q"), {"role": "assistant", "content": "5"}], "solution": "5"},
            "'prompt' ends with a message of the assistant; end it with a message of the user",
        ),
    ],
)
def test_parse_problem_bad_row_names_place_and_fault(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_problem(row, where="train.jsonl, row 17")
    assert str(caught.value) == f"train.jsonl, row 17: {message}"


def test_parse_problem_long_bad_value_is_shortened() -> None:
    with pytest.raises(DataError) as caught:
        parse(solution={"x": "x" * 10_000})
    assert len(str(caught.value)) < 200


def test_data_error_is_value_error_after_pickling() -> None:
    with pytest.raises(DataError) as caught:
        parse(solution="")
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, GrpoRayError) and isinstance(again, ValueError)
    assert str(again) == str(caught.value)


# The id


def test_problem_id_is_the_same_in_every_version() -> None:
    # A run's ledger and its held-out split are made of ids, so they must not change between versions:
    # `sha256sum` of the text [[["user", "What is 2 + 3?"]], "$5$"] begins with these digits.
    assert parse().id == problem_id([user("What is 2 + 3?")], "$5$") == "ec45827914e419a0"


@given(prompt=PROMPTS, solution=TEXTS, columns=COLUMNS, system_prompt=st.none() | TEXTS, data=st.data())
@examples(60)
def test_problem_id_depends_on_content_only(
    prompt: list[dict[str, str]], solution: str, columns: dict[str, Any], system_prompt: str | None, data: st.DataObject
) -> None:
    row = {"id": "row-7"} | columns | {"solution": solution, "prompt": [dict(reversed(m.items())) for m in prompt]}
    reordered = dict(data.draw(st.permutations(list(row.items()))))
    problem = parse_problem(reordered, where="other.csv, row 1", system_prompt=system_prompt)
    assert problem.id == problem_id(prompt, solution, {"id": "row-7"} | columns) and len(problem.id) == 16
    assert problem.question_id == problem_id(prompt, solution)


@given(one=st.tuples(PROMPTS, TEXTS), other=st.tuples(PROMPTS, TEXTS))
@examples(60)
def test_problem_id_of_other_content_differs(one: tuple[Any, str], other: tuple[Any, str]) -> None:
    assume(one != other)
    assert problem_id(*one) != problem_id(*other)


def test_problem_id_other_words_answer_or_role_differs() -> None:
    ids = {
        parse().id,
        parse(solution="$6$").id,
        parse(prompt="What is 2 + 3? ").id,
        parse(prompt=[{"role": "system", "content": "What is 2 + 3?"}]).id,
        parse(prompt=[user("What is"), user(" 2 + 3?")]).id,
    }
    assert len(ids) == 5


def test_problem_id_text_moved_to_solution_differs() -> None:
    assert problem_id([user("a")], "b c") != problem_id([user("a b")], "c")


# Unicode


@given(text=TEXTS)
@example(text="où est π?")
@example(text="数学の問題")
@example(text="🧮 1️⃣+1️⃣")
@example(text="a\u0000b")
@example(text="a\u2028b")
@example(text="\U0010ffff")
@examples(40)
def test_parse_problem_any_unicode_text_is_kept(text: str) -> None:
    problem = parse(prompt=text, solution=text)
    assert problem.prompt == [user(text)] and problem.solution == text and len(problem.id) == 16


@given(prompt=PROMPTS, solution=TEXTS, columns=COLUMNS, system_prompt=st.none() | TEXTS)
@examples(40)
def test_problem_parsed_again_is_the_same(
    prompt: list[dict[str, str]], solution: str, columns: dict[str, Any], system_prompt: str | None
) -> None:
    problem = parse_problem({**columns, "prompt": prompt, "solution": solution}, where="here")
    assert (problem.prompt, problem.solution, problem.columns) == (prompt, solution, columns)
    row = {**problem.columns, "prompt": problem.prompt, "solution": problem.solution}
    assert parse_problem(row, where="there") == problem
    # The system prompt is no part of the id, so the parsed id is that of the prompt without it.
    instructed = parse_problem(row, where="there", system_prompt=system_prompt)
    assert instructed.id == problem.id and instructed.prompt[-len(prompt) :] == prompt


def test_problem_id_lookalike_unicode_differs() -> None:
    assert parse(prompt="caf\u00e9").id != parse(prompt="cafe\u0301").id


def test_problem_id_half_surrogate_pair_raises() -> None:
    with pytest.raises(UnicodeEncodeError):
        problem_id([user("\ud83d")], "$1$")


@pytest.mark.parametrize("column", ["prompt", "solution"])
def test_parse_problem_half_surrogate_pair_raises(column: str) -> None:
    # Valid JSON can hold one ("\ud83d"), but neither Arrow nor a tokenizer accepts it.
    row = ROW | {column: json.loads('"half \\ud83d a pair"')}
    with pytest.raises(DataError, match=rf"^train\.jsonl, row 17: .*'{column}'"):
        parse_problem(row, where="train.jsonl, row 17")
