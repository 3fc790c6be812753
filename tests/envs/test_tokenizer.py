from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sao.envs.answers import ExactGrader
from sao.envs.chain import ChainConfig, ChainTasks
from sao.envs.demonstrations import ChainExpert, NoiseConfig, demonstrate
from sao.envs.math_python import MathPythonConfig, MathPythonEnvironment
from sao.envs.restricted import RestrictedTool
from sao.envs.tokenizer import UNKNOWN, build_tokenizer, demo_words, save_tokenizer

BUILT = build_tokenizer(demo_words())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_the_demos_texts_come_back(tokenizer: PreTrainedTokenizerBase) -> None:
    """Would catch a word outside the vocabulary: the model could neither read nor write it."""
    source = ChainTasks(ChainConfig(), stream="sft")
    traces = demonstrate(
        source,
        lambda clock: MathPythonEnvironment(RestrictedTool, ExactGrader(), clock, MathPythonConfig()),
        lambda task: ChainExpert(task, NoiseConfig()),
        count=60,
    )
    for trace in traces:
        for message in trace.messages:
            token_ids = tokenizer.encode(message.content, add_special_tokens=False)
            assert tokenizer.unk_token_id not in token_ids, message.content
            assert tokenizer.decode(token_ids) == message.content
            assert tokenizer.decode(token_ids, skip_special_tokens=True) == message.content


@settings(deadline=None)
@given(words=st.lists(st.sampled_from([*demo_words(), *"0123456789", "10", "744", "-3", "2.5", "007", "<python>"])))
def test_known_words_come_back(words: list[str]) -> None:
    """Would catch 10 and "1 0" read as the same tokens."""
    text = " ".join(words)
    encoded = BUILT.encode(text, add_special_tokens=False)
    assert BUILT.decode(encoded.ids, skip_special_tokens=False) == text
    assert UNKNOWN not in encoded.tokens


def test_numbers_are_read_digit_by_digit(tokenizer: PreTrainedTokenizerBase) -> None:
    """Would catch a number as one token, which no model learns from few examples."""
    assert tokenizer.tokenize("b = 744 + 3") == ["b", "=", "7", "##4", "##4", "+", "3"]


def test_unknown_words_are_unknown(tokenizer: PreTrainedTokenizerBase) -> None:
    """Would catch an exception on text from outside."""
    assert tokenizer.tokenize("zebra b") == [UNKNOWN, "b"]


def test_tags_and_roles_are_one_token_each(tokenizer: PreTrainedTokenizerBase) -> None:
    """Would catch a tag in pieces, so that a call is spelled instead of chosen, or tags lost in decoding."""
    text = "<|tool|><python>b</python><answer>5</answer><|end|>"
    assert tokenizer.tokenize(text) == [
        "<|tool|>", "<python>", "b", "</python>", "<answer>", "5", "</answer>", "<|end|>",
    ]  # fmt: skip
    decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=True)
    assert decoded == "<python> b </python> <answer> 5 </answer>"


def test_template_only_appends(tokenizer: PreTrainedTokenizerBase) -> None:
    """Would catch a template that rewrites earlier turns: sampled tokens would be rendered again."""
    messages = [
        {"role": role, "content": "b = 1"} for role in ("system", "user", "assistant", "tool", "assistant", "user")
    ]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    for count in range(1, len(messages)):
        part = tokenizer.apply_chat_template(messages[:count], tokenize=False)
        assert whole.startswith(part)
        token_ids = tokenizer.encode(part, add_special_tokens=False)
        rest = tokenizer.encode(whole[len(part) :], add_special_tokens=False)
        assert token_ids + rest == tokenizer.encode(whole, add_special_tokens=False)
    opened = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert whole.startswith(opened)
    assert tokenizer.encode(opened, add_special_tokens=False)[-1] == tokenizer.convert_tokens_to_ids("<|assistant|>")
    assert tokenizer.eos_token == "<|end|>"


def test_unknown_role_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    """Would catch a role that becomes an unknown word."""
    with pytest.raises(Exception, match="unknown role: bot"):
        tokenizer.apply_chat_template([{"role": "bot", "content": "b"}], tokenize=False)


def test_words_with_spaces_are_refused(tmp_path: Path) -> None:
    """Would catch a word that no text can ever match."""
    with pytest.raises(ValueError, match="'a b'"):
        save_tokenizer(tmp_path, ["a b"])
