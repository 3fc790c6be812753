"""A word-level tokenizer for small models trained from scratch: a few hundred words, numbers digit by digit.

Words are what stands between spaces. A number is its first digit and then `##` digits, so that 10 is `1 ##0` and not
"1 0": texts of known words with single spaces come back exactly. An unknown word becomes `<unk>`, and is lost.
"""

import json
import string
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sao.envs.chain import chain_words
from sao.envs.math_python import math_python_words

PAD, UNKNOWN, END = "<pad>", "<unk>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TAGS = ("<python>", "</python>", "<answer>", "</answer>")
CONTINUATION = "##"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role: ' + message.role) }}"
    "{% endif %}"
    "<|{{ message.role }}|> {{ message.content }} <|end|> "
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
"""Appending only: the text of more messages starts with the text of fewer."""


def demo_words() -> tuple[str, ...]:
    """Words of the chains, of math_python and of the guessing game, in a fixed order."""
    guessing = ["guess", "a", "number", "from", "to", "higher", "lower", "no", "the", "answer", "is"]
    return tuple(dict.fromkeys((*chain_words(), *math_python_words(), *guessing)))


def build_tokenizer(words: Iterable[str]) -> Tokenizer:
    """A tokenizer of `words`, the digits, the roles and the tags. Raises ValueError for a word with a space in it."""
    vocabulary: dict[str, int] = {}
    continued = [CONTINUATION + character for character in string.digits + "."]
    for word in (PAD, UNKNOWN, END, *ROLES, *TAGS, *string.digits, *continued, "-", *words):
        if not word or word.split() != [word]:
            raise ValueError(f"the word {word!r} is empty or has a space in it; words are what stands between spaces")
        vocabulary.setdefault(word, len(vocabulary))
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN, continuing_subword_prefix=CONTINUATION))  # pyright: ignore[reportCallIssue]
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUATION, cleanup=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, UNKNOWN, END, *ROLES)])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in TAGS])
    return tokenizer


def save_tokenizer(folder: Path, words: Iterable[str] | None = None) -> Path:
    """Write a folder that `AutoTokenizer.from_pretrained` loads without a network; `demo_words` unless told otherwise.

    Returns the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(demo_words() if words is None else words).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder
