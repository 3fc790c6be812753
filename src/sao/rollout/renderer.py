"""The only place that knows a chat template: messages become tokens, appending only.

A new turn's tokens are added to what was sampled; sampled tokens are never decoded and encoded again. A template is
a Jinja text, read with `tokenizers` and `jinja2` alone, so that a rollout worker starts without torch.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import jinja2
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from sao.types import GenerationStop, Message

ToolRole = Literal["tool", "user"]

# An assistant message by which the tail after it is found. The second is for templates that open a thought themselves.
_REPLIES = ("\ue000reply\ue000", "thought\n</think>\n\n\ue000reply\ue000")
_REPLY_END = "reply\ue000"
_OBSERVATION = "\ue001seen\ue001"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class ChatRenderer:
    """A tokenizer and its chat template.

    The tail of a turn is rendered behind a short stand-in for the history, so a turn costs what its own messages cost.
    That is exact when the template is append-only, which is checked for each role that answers the policy.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        tool_role: ToolRole = "tool",
        name: str = "the tokenizer",
    ) -> None:
        """Check the template. Raises ValueError saying what it cannot do.

        special_tokens are the names a template may use (bos_token, eos_token); `tool_role` = "user" shows tool
        messages as user messages, for templates that know no tools; `name` is used in errors.
        """
        if tool_role not in ("tool", "user"):
            raise ValueError(f'tool_role is {tool_role!r}; use "tool" or "user"')
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special_tokens = dict(special_tokens or {})
        self._tool_role: ToolRole = tool_role
        self._name = name
        self._template = _compile(template, name)
        added = tokenizer.get_added_tokens_decoder().values()
        self._forgeable = tuple(token.content for token in added if token.special and len(token.content) > 1)
        self._reply = self._find_reply()
        self._close_id, self._close_text = self._find_close()
        eos_id = tokenizer.token_to_id(self._special_tokens.get("eos_token", ""))
        also = () if eos_id is None or eos_id == self._close_id else (eos_id,)
        self.stop_token_ids: tuple[int, ...] = (self._close_id, *also)
        self._checked_roles: set[str] = set()
        self._check_role(tool_role)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def open(self, messages: Sequence[Message]) -> list[int]:
        """Tokens (T,) of the opening messages, up to where the assistant's first token is to be sampled."""
        if not messages:
            raise ValueError("an episode opens with no message; the environment's reset must return at least one")
        return self._encode(self._render(messages))

    def extend(self, sampled: Sequence[int], stop: GenerationStop, messages: Sequence[Message]) -> list[int]:
        """Tokens that follow the sampled ones: the turn's close where it is missing, `messages`, the next opening."""
        if not messages:
            raise ValueError("a turn goes on without a message; an environment that is not done must return one")
        if stop is GenerationStop.STOP_TOKEN and (not sampled or sampled[-1] not in self.stop_token_ids):
            raise ValueError(f"the engine reports a stop token, but the turn ends with token {list(sampled[-1:])}")
        for message in messages:
            self._check_role(self._role(message))
        # The close is always encoded along, so that what follows it is split as it would be behind it.
        tail = self._encode(self._tail(messages))
        assert tail[0] == self._close_id
        closed = bool(sampled) and sampled[-1] == self._close_id
        return tail[1:] if closed else tail

    def text(self, sampled: Sequence[int]) -> str:
        """The sampled tokens as text, without the turn's closing token. Bytes that are no UTF-8 become U+FFFD."""
        kept = sampled[:-1] if sampled and sampled[-1] in self.stop_token_ids else sampled
        return self.decode(kept)

    def unknown(self, text: str) -> tuple[str, ...]:
        """What of the text becomes the tokenizer's unknown token, and is lost; each piece once, in order."""
        unknown_id = self._tokenizer.token_to_id(self._special_tokens.get("unk_token", ""))
        if unknown_id is None:
            return ()
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        lost = (
            text[slice(*place)]
            for token, place in zip(encoded.ids, encoded.offsets, strict=True)
            if token == unknown_id
        )
        return tuple(dict.fromkeys(lost))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Any tokens as text, special ones shown."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def read_back(self, token_ids: Sequence[int], *, opening: bool) -> tuple[Message, ...]:
        """The messages that `open` (`opening`) or `extend` turned into these tokens, for people and for traces.

        Openings are a question, with a system prompt or without; tails are one to four tool messages, or one of the
        user. Raises ValueError for anything else.
        """
        unclosed = not opening and list(token_ids[:1]) != [self._close_id]
        text = self.decode([self._close_id, *token_ids] if unclosed else token_ids)
        tails = (*(("tool",) * count for count in range(1, 5)), ("user",))
        for roles in (("user",), ("system", "user")) if opening else tails:
            try:
                frames = self._frames(roles, opening=opening)
            except ValueError:
                continue  # a role that the template does not know was not rendered by it either
            # Word-level tokenizers do not keep the spaces around special tokens, so the second reading ignores them.
            exact = [re.escape(frame) for frame in frames]
            loose = [rf"\s*{re.escape(frame.strip())}\s*" for frame in frames]
            for pattern in (exact, loose):
                found = re.fullmatch("(.*?)".join(pattern), text, re.DOTALL)
                if found:
                    return tuple(Message(role=role, content=found[i + 1]) for i, role in enumerate(roles))
        raise ValueError(f"these tokens are no {'opening' if opening else 'tail'} of {self._name}'s template: {text!r}")

    def encode_action(self, text: str) -> list[int]:
        """Tokens of an assistant message as the policy would sample them, the stop token included."""
        return [*self._encode(self._harmless(text)), self._close_id]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _role(self, message: Message) -> str:
        return self._tool_role if message.role == "tool" else message.role

    def _harmless(self, text: str) -> str:
        """Break up special tokens inside a message, so that no tool output can forge the end of a turn."""
        for special in self._forgeable:
            if special in text:
                text = text.replace(special, f"{special[0]} {special[1:]}")
        return text

    def _render(self, messages: Sequence[Message], *, opening: bool = True) -> str:
        turns = [{"role": self._role(message), "content": self._harmless(message.content)} for message in messages]
        try:
            return self._template.render(
                messages=turns, tools=None, documents=None, add_generation_prompt=opening, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, KeyError) as error:
            roles = [turn["role"] for turn in turns]
            hint = '; set tool_role = "user" if it is the role "tool" that it does not know' if "tool" in roles else ""
            raise ValueError(
                f"the chat template of {self._name} refuses messages of roles {roles}: {error}{hint}"
            ) from error

    def _tail(self, messages: Sequence[Message]) -> str:
        """What follows an assistant's text: its close, `messages`, the next opening."""
        text = self._render([*_STAND_IN, Message(role="assistant", content=self._reply), *messages])
        return text.split(_REPLY_END, 1)[1]

    def _frames(self, roles: Sequence[str], *, opening: bool) -> list[str]:
        """The template's own text before, between and after messages of these roles."""
        seen = [Message(role=role, content=_OBSERVATION) for role in roles]
        return (self._render(seen) if opening else self._tail(seen)).split(_OBSERVATION)

    def _find_reply(self) -> str:
        """The stand-in for an assistant's text that this template continues its own opening with."""
        for reply in _REPLIES:
            opening = self._render(_STAND_IN)
            answered = self._render([*_STAND_IN, Message(role="assistant", content=reply)], opening=False)
            if opening + reply == answered[: len(opening + reply)]:
                return reply
            seen = Message(role=self._tool_role, content=_OBSERVATION)
            answered = self._render([*_STAND_IN, Message(role="assistant", content=reply), seen])
            if opening + reply == answered[: len(opening + reply)]:
                return reply
        raise ValueError(
            f"the chat template of {self._name} is not append-only: an assistant's text does not follow directly where "
            "the template lets the assistant begin. Use a template that adds every message at the end (ChatML does)"
        )

    def _find_close(self) -> tuple[int, str]:
        """The token that closes an assistant's turn."""
        answered = self._render([*_STAND_IN, Message(role="assistant", content=self._reply)], opening=False)
        close = answered.split(_REPLY_END, 1)[1]
        ids = self._encode(close)
        first = self._tokenizer.id_to_token(ids[0]) if ids else None
        added = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        if first is None or first not in added or not close.lstrip().startswith(first):
            raise ValueError(
                f"the chat template of {self._name} closes an assistant's turn with {close!r}, which does not begin "
                "with one of the tokenizer's added tokens; then no token tells the end of a turn. Add one to both"
            )
        return ids[0], first

    def _check_role(self, role: str) -> None:
        """Refuse a template that drops this role, or does not render it the same behind every history."""
        if role in self._checked_roles:
            return
        seen = Message(role=role, content=_OBSERVATION)
        tail = self._tail([seen])
        if _OBSERVATION not in tail:
            raise ValueError(
                f"the chat template of {self._name} does not show messages of the role {role!r}"
                + ('; set tool_role = "user" to show tool output as a user message' if role == "tool" else "")
            )
        if not tail.lstrip().startswith(self._close_text):
            raise ValueError(f"the chat template of {self._name} closes a turn differently before the role {role!r}")
        reply = Message(role="assistant", content=self._reply)
        for history in ([*_STAND_IN], [*_STAND_IN, reply, seen], [*_STAND_IN, reply, seen, reply, seen]):
            expected = self._render(history) + self._reply + tail
            if self._render([*history, reply, seen]) != expected:
                raise ValueError(
                    f"the chat template of {self._name} is not append-only: a message of the role {role!r} changes how "
                    "earlier messages are rendered (stripping thoughts from the history does this). Use a template "
                    "that adds every message at the end" + (', or tool_role = "tool"' if role == "user" else "")
                )
        self._checked_roles.add(role)


_STAND_IN = (Message(role="user", content="question"),)


class _GenerationBlock(Extension):
    """Accepts the tag by which templates mark the assistant's text for `transformers`; renders what it encloses."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        """Read up to the end tag."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_enclosed"), [], [], body).set_lineno(line)

    def _enclosed(self, caller: Any) -> str:
        return caller()


def _compile(template: str, name: str) -> jinja2.Template:
    """A template in the environment that `transformers` gives it: sandboxed, blocks trimmed."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    functions: dict[str, Any] = {"raise_exception": refuse, "strftime_now": datetime.now().strftime}
    environment.globals.update(functions)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template of {name} cannot be read, line {error.lineno}: {error}") from error


def load_renderer(path: str, *, tool_role: ToolRole = "tool") -> ChatRenderer:
    """A renderer from a tokenizer's folder or hub name. Raises ValueError naming the file that is missing or broken."""
    folder = Path(path) if Path(path).is_dir() else _from_hub(path)
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ValueError(
            f"{path} has no tokenizer.json; load the tokenizer once with transformers' AutoTokenizer, call "
            "save_pretrained(folder), and give that folder"
        )
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{tokenizer_file} is not a tokenizer: {error}") from error
    settings = _read_json(folder / "tokenizer_config.json")
    template = _template_of(folder, settings)
    if template is None:
        raise ValueError(
            f"the tokenizer of {path} has no chat template, so messages cannot be turned into tokens; put one into "
            f'{folder / "chat_template.jinja"}, or under "chat_template" in tokenizer_config.json (ChatML will do)'
        )
    named = {**_read_json(folder / "special_tokens_map.json"), **settings}
    special = {key: _content(named[key]) for key in named if key.endswith("_token") and _content(named[key])}
    return ChatRenderer(tokenizer, template, special_tokens=special, tool_role=tool_role, name=path)


def _template_of(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error


def _content(token: Any) -> str:
    """A special token's text; files hold it bare or within a record."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _from_hub(name: str) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_TOKENIZER_FILES)))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ValueError(f"{name!r} is neither a folder nor a tokenizer that the hub gives: {error}") from error
