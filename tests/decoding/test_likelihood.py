"""Multiple choice: the likelihood of a choice is the loss of its tokens, in every layout."""

import dataclasses
import json

import numpy as np
import pytest

from jaxscale.config.model import ModelConfig
from jaxscale.data.text.dialogue import Question, read_questions
from jaxscale.decoding import likelihood
from jaxscale.decoding.sampling import sample
from tests.decoding.test_sampling import (
    BOUNDARY,
    GPT,
    LLAMA,
    SIZES,
    TOKENIZER,
    check_likeliest,
    encode,
    full_logits,
    make,
)

PAIRS = [("abc", "d"), ("abc", "hgfed"), ("", "abcabc"), ("hgfedcbahgfe", "a"), ("c", "ab")]


def plainly(config, first: str, second: str) -> float:
    ids = np.concatenate([[BOUNDARY], *encode([first, second])]).astype(np.int32)
    logits_TV = full_logits(config, ids[None, :-1])[0]
    log_p_TV = logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))
    return sum(log_p_TV[i, ids[i + 1]] for i in range(len(first), len(ids) - 1))


@pytest.mark.proof(but=("gpt",))
@pytest.mark.parametrize(
    ("config", "layout"),
    [
        pytest.param(GPT, {}, id="gpt"),
        (LLAMA, {"data": 2, "fsdp": 2, "tensor": 2, "zero_stage": 3}),
        (
            LLAMA,
            {"pipeline": 2, "context": 2, "fsdp": 2, "context_method": "gather"},
        ),
    ],
    ids=str,
)
def test_log_likelihoods_are_those_of_the_forward_pass(config, layout, monkeypatch):
    monkeypatch.setattr(likelihood, "ROWS", 4)  # two batches, the last not full
    engine, params = make(config, **layout)
    found = likelihood.log_likelihoods(engine, params, TOKENIZER, PAIRS)
    expected = [plainly(config, *pair) for pair in PAIRS]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


LENGTHS = {"rope_original_context": 16, "rope_factor": 3.0}
BY_LENGTH = {
    "longrope": {"rope_short_factors": (1, 1.1, 1.5, 2), "rope_long_factors": (1, 2, 3.5, 6)},
    "dynamic": {"rope_theta": 100.0},
}


@pytest.mark.proof
@pytest.mark.parametrize("scaling", BY_LENGTH)
def test_positions_by_length_are_those_of_each_text_alone(scaling):
    """Scored and generated: a text within the original context, and one beyond it."""
    config = ModelConfig(
        **SIZES, vocab_size=20, rope_scaling=scaling, **LENGTHS, **BY_LENGTH[scaling]
    )
    engine, params = make(config)
    prompts, num_tokens = ["abc", "abcdefgh" * 2], 4
    pairs = [(prompt, "hgfed") for prompt in prompts]  # as long as a prompt with its new tokens
    found = likelihood.log_likelihoods(engine, params, TOKENIZER, pairs)
    texts = sample(engine, params, TOKENIZER, prompts, num_tokens=num_tokens, temperature=0)
    for prompt, score, text in zip(prompts, found, texts):
        length = 1 + len(prompt) + num_tokens
        alone = dataclasses.replace(config, rope_length=max(length, 16))
        np.testing.assert_allclose(score, plainly(alone, prompt, "hgfed"), rtol=0, atol=1e-10)
        check_likeliest(alone, prompt, text, num_tokens)


def test_accuracy_is_plain_and_by_length(monkeypatch):
    scores = {"a": -1.0, "bcd": -2.0, "d": -4.0, "éé": -4.0, "x": -1.0, "y": -1.0}
    monkeypatch.setattr(
        likelihood,
        "log_likelihoods",
        lambda e, p, t, pairs: np.array([scores[c] for _, c in pairs]),
    )
    questions = [
        Question("", ("a", "bcd"), 1),  # -1 against -2/3
        Question("", ("d", "éé", "bcd"), 1),  # -4, -1 by its four bytes, -2/3
        Question("", ("y", "x"), 0),  # the first of equals
        Question("", ("d", "a"), 1),
    ]
    found = likelihood.score_choices(None, None, None, questions)  # pyright: ignore
    assert (found.num_questions, found.accuracy, found.accuracy_by_length) == (4, 0.5, 0.75)
    assert found.standard_error(0.5) == pytest.approx(np.std([1, 1, 0, 0], ddof=1) / 2)
    one = likelihood.score_choices(None, None, None, questions[:1])  # pyright: ignore
    assert one.standard_error(one.accuracy) is None


def test_a_text_beyond_the_learned_positions_is_refused():
    engine, params = make(GPT)
    with pytest.raises(ValueError, match=r"choice of 31 tokens .*model.max_seq_len = 30; shorten"):
        likelihood.log_likelihoods(engine, params, TOKENIZER, [("a" * 30, "b")])


GOOD = {"prompt": "a", "choices": ["b", "c"], "answer": 1}
BAD = [
    ("{", "line 2 is not JSON"),
    ("[]", "line 2 is a list; expected an object"),
    ({"prompt": "a", "choices": ["b", "c"]}, "line 2 has no 'answer'; it has prompt, choices, and"),
    (GOOD | {"prompt": None}, "line 2: prompt is null; expected text"),
    (GOOD | {"choices": ["b", "\ud800"]}, r"line 2 has half of a surrogate pair, '\\ud800'"),
    (GOOD | {"choices": ["b"]}, r"line 2: choices = \['b'\]; expected a list of at least two"),
    (GOOD | {"choices": ["b", ""]}, "line 2: choices = .*at least two texts"),
    (GOOD | {"answer": 2}, "line 2: answer = 2; expected the index of a choice, from 0 to 1"),
    (GOOD | {"answer": "c"}, "line 2: answer = 'c'; expected the index"),
]


@pytest.mark.parametrize(("line", "match"), BAD)
def test_a_bad_question_is_named(tmp_path, line, match):
    file = tmp_path / "q.jsonl"
    text = line if isinstance(line, str) else json.dumps(line)
    file.write_text(f"{json.dumps(GOOD)}\n{text}\n")
    with pytest.raises(ValueError, match=rf"--choices .*q.jsonl, {match}"):
        read_questions(file)
    line = json.dumps(GOOD | {"prompt": "a\u2028"}, ensure_ascii=False)
    file.write_text(f"\ufeff{line}\n\n")  # a byte order mark is no text
    assert read_questions(file) == [Question("a\u2028", ("b", "c"), 1)]
    file.write_text("\n")
    with pytest.raises(ValueError, match=r"q.jsonl is empty; give one question per line"):
        read_questions(file)
