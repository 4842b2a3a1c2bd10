import json

import pytest
import torch

from grpo_ray import tiny
from grpo_ray.arguments import load_tokenizer, tokenize_prompts
from grpo_ray.data.arithmetic import tasks
from grpo_ray.tiny import ASSISTANT, END, PAD, SYSTEM, USER, build_tokenizer, tiny_policy, warm_up


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture
def short(monkeypatch):
    """A warm-up of three steps on small batches."""
    monkeypatch.setitem(tiny.RECIPE, "steps", 3)
    monkeypatch.setitem(tiny.RECIPE, "batch_size", 8)


def weights(tokenizer, seed: int = 0) -> dict[str, torch.Tensor]:
    return warm_up(tokenizer, seed, lambda step, steps: None).state_dict()


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The tokenizer


@pytest.mark.parametrize("number", ["7", "42", "198", "1234567890", "007"])
def test_every_digit_is_a_token_of_its_own(tokenizer, number):
    assert tokenizer.tokenize(number) == list(number)


def test_digits_stay_single_inside_words_and_formulas(tokenizer):
    tokens = tokenizer.tokenize("What is 47 + 35? 7+5=12 \\boxed{82}x3y")
    # Whatever is longer than one character holds no digit.
    assert not [token for token in tokens if len(token) > 1 and any(c.isdigit() for c in token)]


@pytest.mark.parametrize(
    "text",
    [
        "What is 47 + 35?",
        "7+5=12, 4+3+1=8 \\boxed{82}",
        "  two  spaces \t and\n\nlines\r\n ",
        "🧮 é ñ 数学の問題 \u2028",
        "$\\frac{1}{2} \\le x^{2}$ & \\boxed{\\text{Yes}}",
        "\\boxed{",
        "a\\boxed{ b\\boxed{",
        "don't . , ! ?",
        "\x00\x7f",
        "",
    ],
)
def test_any_text_comes_back_as_it_was(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_byte_can_be_encoded(tokenizer):
    text = "".join(map(chr, range(0x250)))  # all one-byte and many two-byte characters of UTF-8
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_working_fits_into_the_completion_that_the_job_allows(tokenizer):
    # jobs/configs/arithmetic.yaml cuts completions at 40 tokens, the end among them.
    for task in tasks("heldout"):
        for text in (task.worked(), task.mistaken()):
            ids = tokenizer(text)["input_ids"]
            assert len(ids) < 40 and tokenizer.decode(ids) == text


def test_a_conversation_reads_exactly_so(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Be brief.<|end|><|user|>What is 1 + 1?<|end|><|assistant|>"
    whole = [*messages, {"role": "assistant", "content": "2"}]
    assert tokenizer.apply_chat_template(whole, tokenize=False) == f"{text}2<|end|>"


def test_the_marks_of_a_conversation_are_single_tokens_that_decoding_can_skip(tokenizer):
    for mark in (PAD, END, SYSTEM, USER, ASSISTANT):
        (token,) = tokenizer(mark)["input_ids"]
        assert tokenizer.decode([token]) == mark
        assert tokenizer.decode([token], skip_special_tokens=True) == ""
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, END)


def test_two_tokenizers_are_the_same(tokenizer):
    assert build_tokenizer().get_vocab() == tokenizer.get_vocab()


# The warm-up


def test_the_same_seed_gives_the_same_weights(tokenizer, short):
    assert equal(weights(tokenizer), weights(tokenizer))


def test_another_seed_gives_other_weights(tokenizer, short):
    assert not equal(weights(tokenizer), weights(tokenizer, seed=1))


def test_the_weights_do_not_depend_on_what_was_drawn_or_how_many_threads_there_were_before(
    tokenizer, short, monkeypatch
):
    monkeypatch.setitem(tiny.RECIPE, "batch_size", 96)  # large enough that threads share the work out
    threads = torch.get_num_threads()
    once = weights(tokenizer)
    try:
        torch.manual_seed(123)
        torch.rand(7)
        torch.set_num_threads(1)
        assert equal(weights(tokenizer), once)
    finally:
        torch.set_num_threads(threads)


def test_the_warm_up_leaves_random_numbers_and_threads_as_they_were(tokenizer, short):
    threads = torch.get_num_threads()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    weights(tokenizer)
    assert torch.equal(torch.rand(3), expected) and torch.get_num_threads() == threads


def test_the_warm_up_counts_its_steps(tokenizer, short):
    told = []
    warm_up(tokenizer, 0, lambda step, steps: told.append((step, steps)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_three_steps_change_the_weights_and_keep_them_finite(tokenizer, monkeypatch, short):
    monkeypatch.setitem(tiny.RECIPE, "steps", 12)
    longer = weights(tokenizer)
    monkeypatch.setitem(tiny.RECIPE, "steps", 3)
    assert not equal(longer, weights(tokenizer))
    assert all(torch.isfinite(weight).all() for weight in longer.values())


def test_only_the_completion_is_learned():
    tokenizer = build_tokenizer()
    ids, labels = tiny._batch(tokenizer, [("What is 1 + 1?", "2"), ("What is 10 + 10?", "0+0=0, 1+1=2 \\boxed{20}")])
    for row, learned in zip(ids, labels, strict=True):
        text = tokenizer.decode(row[learned != -100])
        assert text in ("2<|end|>", "0+0=0, 1+1=2 \\boxed{20}<|end|>")
        assert torch.equal(row[learned != -100], learned[learned != -100])


# The folder


def test_the_policy_is_built_once_and_loads_as_a_plain_hugging_face_folder(tmp_path, short):
    from transformers import AutoModelForCausalLM

    told = []
    folder = tiny_policy(0, tmp_path, lambda step, steps: told.append(step))
    assert tiny_policy(0, tmp_path, lambda step, steps: told.append(step)) == folder and told == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), load_tokenizer(str(folder))
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(END)
    assert equal(model.state_dict(), weights(build_tokenizer()))


def test_the_tokenizer_that_is_loaded_reads_as_the_one_that_was_built(tmp_path, short, tokenizer):
    # transformers may put another class in its place, by the model's type.
    loaded = load_tokenizer(str(tiny_policy(0, tmp_path)))
    texts = ["What is 47 + 35? 🧮", "\\boxed{82}", "4711 words don't\n\n matter", "  x ", "日本語", f"{USER}q{END}"]
    for text in (*texts, *(task.worked() for task in tasks("heldout")[:100])):
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "What is 1 + 1?"}]
    assert tokenize_prompts(loaded, [messages]) == tokenize_prompts(tokenizer, [messages])


def test_no_text_has_a_token_that_the_policy_has_no_row_for(tmp_path, short):
    folder = tiny_policy(0, tmp_path)
    loaded = load_tokenizer(str(folder))
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert max(loaded("What is 1 + 1?<|endoftext|><|im_end|><s></s>")["input_ids"]) < rows
    assert len(loaded) <= rows


def test_another_seed_and_another_recipe_have_folders_of_their_own(tmp_path, short, monkeypatch):
    folders = [tiny_policy(0, tmp_path), tiny_policy(1, tmp_path)]
    monkeypatch.setitem(tiny.RECIPE, "steps", 4)
    folders.append(tiny_policy(0, tmp_path))
    assert len(set(folders)) == 3


def test_the_cache_of_the_environment_is_used(tmp_path, short, monkeypatch):
    monkeypatch.setenv("GRPO_RAY_CACHE", str(tmp_path / "cache"))
    assert tiny_policy().parent == tmp_path / "cache"


class Interrupted(Exception):
    """Someone stopped the warm-up."""


def test_a_warm_up_that_is_stopped_leaves_no_half_built_folder(tmp_path, short):
    def stop(step: int, steps: int) -> None:
        if step == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        tiny_policy(0, tmp_path, stop)
    assert list(tmp_path.iterdir()) == []
    assert tiny_policy(0, tmp_path).is_dir()


def test_of_two_processes_that_build_at_once_the_later_keeps_the_earlier_ones_folder(tmp_path, short):
    def overtake(step: int, steps: int) -> None:
        if step == 1:
            tiny_policy(0, tmp_path)
            (next(tmp_path.glob("*/config.json")).parent / "mark").touch()

    folder = tiny_policy(0, tmp_path, overtake)
    assert (folder / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
