import json
import pickle

import numpy as np
import pytest

from grpo_ray.errors import DataError, GrpoRayError
from grpo_ray.problem import Problem, parse_problem, problem_id

ROW = {"prompt": "What is 2 + 3?", "solution": "$5$"}


def parse(system_prompt: str | None = None, **row) -> Problem:
    return parse_problem(ROW | row, where="train.jsonl, row 17", system_prompt=system_prompt)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_plain_text_becomes_a_message_of_the_user():
    problem = parse()
    assert problem.prompt == [user("What is 2 + 3?")]
    assert problem.solution == "$5$" and problem.columns == {}


def test_chat_messages_stay_as_they_are_without_what_is_not_theirs():
    messages = [{"role": "system", "content": "Be brief."}, user("1 + 1?") | {"name": "kim"}]
    assert parse(prompt=messages).prompt == [{"role": "system", "content": "Be brief."}, user("1 + 1?")]


def test_a_conversation_may_hold_the_assistants_words_before_the_end():
    turns = [user("1 + 1?"), {"role": "assistant", "content": "2"}, user("And 2 + 2?")]
    assert parse(prompt=turns).prompt == turns


def test_messages_in_a_numpy_array_are_taken():
    assert parse(prompt=np.array([user("1 + 1?")], dtype=object)).prompt == [user("1 + 1?")]


def test_a_system_prompt_is_put_before_a_prompt_that_has_none():
    assert parse("Be brief.").prompt == [{"role": "system", "content": "Be brief."}, user("What is 2 + 3?")]


def test_a_system_prompt_is_not_added_to_one_that_is_there():
    own = [{"role": "system", "content": "Think."}, user("1 + 1?")]
    assert parse("Be brief.", prompt=own).prompt == own


def test_further_columns_are_kept_and_an_id_of_the_file_is_not():
    problem = parse(id="row-7", topic="sums", difficulty=3.5, tags=["a"])
    assert problem.columns == {"topic": "sums", "difficulty": 3.5, "tags": ["a"]}
    assert problem.id != "row-7"


def test_a_row_of_a_problem_has_its_columns_and_its_own_fields_win():
    row = Problem(id="1", prompt=[user("q")], solution="s", columns={"topic": "t", "solution": "other"}).row()
    assert row == {"topic": "t", "id": "1", "prompt": [user("q")], "solution": "s"}


def test_reading_a_row_does_not_change_it():
    row = {"prompt": [user("q")], "solution": "s", "topic": "t"}
    before = json.dumps(row)
    parse_problem(row, where="here", system_prompt="Be brief.")
    assert json.dumps(row) == before


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "q", "answer": "5"}, "no column 'solution'; the row has answer, prompt"),
        ({"question": "q", "solution": "5"}, "no column 'prompt'; the row has question, solution"),
        ({}, "no column 'prompt'; the row has no columns"),
        ({"prompt": "q", "solution": 5}, "'solution' must be text, not int (5)"),
        ({"prompt": "q", "solution": None}, "'solution' must be text, not NoneType (None)"),
        ({"prompt": "q", "solution": ["5"]}, "'solution' must be text, not list (['5'])"),
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
            "'prompt' ends with the assistant's words; nothing is left to complete",
        ),
    ],
)
def test_a_bad_row_is_refused_with_its_place_and_its_fault(row, said):
    with pytest.raises(DataError) as caught:
        parse_problem(row, where="train.jsonl, row 17")
    assert str(caught.value) == f"train.jsonl, row 17: {said}"


def test_a_long_wrong_value_does_not_fill_the_screen():
    with pytest.raises(DataError) as caught:
        parse(solution=["x" * 10_000])
    assert len(str(caught.value)) < 200


def test_the_error_is_of_our_tree_and_a_value_error_and_survives_pickling():
    with pytest.raises(DataError) as caught:
        parse(solution="")
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, GrpoRayError) and isinstance(again, ValueError)
    assert str(again) == str(caught.value)


# The id


def test_an_id_is_sixteen_hex_digits_and_stays_the_same_for_ever():
    # A run's ledger and its held-out cut rest on ids, so they must not change between versions:
    # `sha256sum` of the text [[["user", "What is 2 + 3?"]], "$5$"] begins with these digits.
    assert parse().id == problem_id([user("What is 2 + 3?")], "$5$") == "ec45827914e419a0"


def test_an_id_does_not_depend_on_the_order_of_columns_or_on_further_ones():
    reordered = parse_problem(
        {"difficulty": 3, "solution": "$5$", "prompt": [{"content": "What is 2 + 3?", "role": "user"}]}, where="here"
    )
    assert reordered.id == parse().id


def test_an_id_does_not_depend_on_where_the_problem_stands():
    assert parse_problem(ROW, where="other.csv, row 1").id == parse().id


def test_other_words_another_answer_or_another_role_give_another_id():
    ids = {
        parse().id,
        parse(solution="$6$").id,
        parse(prompt="What is 2 + 3? ").id,
        parse(prompt=[{"role": "system", "content": "What is 2 + 3?"}]).id,
        parse(prompt=[user("What is"), user(" 2 + 3?")]).id,
    }
    assert len(ids) == 5


def test_words_cannot_wander_from_prompt_to_solution_without_another_id():
    assert problem_id([user("a")], "b c") != problem_id([user("a b")], "c")


# Unicode


@pytest.mark.parametrize("text", ["où est π?", "数学の問題", "🧮 1️⃣+1️⃣", "a\u0000b", "a\u2028b", "\U0010ffff"])
def test_any_unicode_text_is_a_prompt_and_a_solution(text):
    problem = parse(prompt=text, solution=text)
    assert problem.prompt == [user(text)] and problem.solution == text and len(problem.id) == 16


def test_text_that_looks_alike_is_not_the_same_problem():
    assert parse(prompt="caf\u00e9").id != parse(prompt="cafe\u0301").id


def test_half_a_surrogate_pair_has_no_id():
    with pytest.raises(UnicodeEncodeError):
        problem_id([user("\ud83d")], "$1$")


@pytest.mark.parametrize("column", ["prompt", "solution"])
def test_half_a_surrogate_pair_is_refused_by_name_or_mended(column):
    # Valid JSON can hold one ("\ud83d"), but neither Arrow nor a tokenizer takes it: it must not get past here.
    row = ROW | {column: json.loads('"half \\ud83d a pair"')}
    try:
        problem = parse_problem(row, where="train.jsonl, row 17")
    except DataError as error:
        assert str(error).startswith("train.jsonl, row 17: ") and f"'{column}'" in str(error)
    else:
        (problem.prompt[0]["content"] + problem.solution).encode("utf-8")
