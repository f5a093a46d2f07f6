"""Reads the bodies of requests: OpenAI's fields, and ours.

| field of ours | means |
|---|---|
| `exit` | exit policy, as `--exit` of `generate` reads it; `full` by default |
| `recurrent_steps` | R; the trained one by default |
| `top_k` | draw from the k likeliest tokens only |
| `trace` | tell the likeliest tokens and the exit probability of every step |

A field that has no effect here is refused, unless it asks for nothing.
"""

import json
import secrets
from dataclasses import dataclass, replace
from typing import Any, Literal

from titan_loop.errors import nearest
from titan_loop.inference.exit_policy import parse_exit_policy
from titan_loop.inference.sampling import Sampling
from titan_loop.serve.rows import RefusedError, RowSettings
from titan_loop.text.conversation import Conversation, parse_messages

Kind = Literal["completion", "chat"]
_MOST_STOPS = 16
_MOST_LOGPROBS = 20
_MAX_SEED = 2**63 - 1

# Fields without an effect, with the values that ask for nothing; None takes any value.
_IDLE: dict[str, tuple[Any, ...] | None] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "metadata": None,
    "n": (1,),
    "parallel_tool_calls": None,
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "user": None,
}


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What one request asks for.

    Attributes:
        prompt: Text or token ids to go on from, or a conversation.
        includes_usage: Whether a stream ends with the counts of its tokens.
        repeats_usage: Whether each chunk has the counts so far, an addition of vLLM's.
    """

    kind: Kind
    prompt: str | list[int] | Conversation
    settings: RowSettings
    max_tokens: int | None
    seed: int
    stop: tuple[str, ...]
    streams: bool
    includes_usage: bool
    repeats_usage: bool


class _Fields:
    """The fields of a body, which are taken one by one; null counts as absent."""

    def __init__(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise RefusedError("the body is not a JSON object")
        self._left = {name: value for name, value in body.items() if value is not None}
        self._known: list[str] = []

    def take(self, name: str, kind: type[Any] | tuple[type[Any], ...], default: Any = None) -> Any:
        self._known.append(name)
        value = self._left.pop(name, default)
        # Python counts True among the integers.
        wrong = isinstance(value, bool) and kind is not bool
        if value is not default and (wrong or not isinstance(value, kind)):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            names = " or ".join(_JSON_NAMES[each] for each in kinds)
            raise RefusedError(f"{name}={json.dumps(value):.40} must be {names}", name)
        if isinstance(value, str):
            _require_text(name, value)
        return value

    def whole(self, name: str, least: int, most: int, default: int | None = None) -> Any:
        value = self.take(name, int, default)
        if value is not None and not least <= value <= most:
            raise RefusedError(f"{name}={value} must be between {least} and {most}", name)
        return value

    def number(self, name: str, default: float) -> float:
        try:
            return float(self.take(name, (int, float), default))
        except OverflowError as error:
            raise RefusedError(f"{name} is too large", name) from error

    def end(self) -> None:
        """Refuse what is left."""
        for name, value in self._left.items():
            if name not in _IDLE:
                known = nearest(name, [*self._known, *_IDLE])
                raise RefusedError(f"{name:.40} is not a field of this request{known}", name)
            idle = _IDLE[name]
            if idle is not None and value not in idle:
                shown = f"{name}={json.dumps(value):.40}"
                raise RefusedError(f"{shown} is not supported here; leave it out", name)


_JSON_NAMES = {
    bool: "true or false",
    dict: "an object",
    float: "a number",
    int: "a whole number",
    list: "a list",
    str: "a string",
}


def read_json(body: bytes) -> Any:
    """Return the value of a JSON text; raise `RefusedError` if it is not one."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"the body is not JSON: {error}") from error


def read_asking(kind: Kind, body: Any, defaults: RowSettings) -> Asking:
    """Return what a body asks for; raise `UserError` if it cannot be read."""
    fields = _Fields(body)
    fields.take("model", str)  # checked by the application, which knows the only one
    prompt: str | list[int] | Conversation
    if kind == "chat":
        prompt = _conversation(fields.take("messages", list))
        wants = fields.take("logprobs", bool, False)
        logprobs = fields.whole("top_logprobs", 0, _MOST_LOGPROBS)
        if logprobs is not None and not wants:
            raise RefusedError("top_logprobs needs logprobs=true", "top_logprobs")
        logprobs = (logprobs or 0) if wants else None
        # The newer name of the same limit.
        max_tokens = fields.whole("max_completion_tokens", 1, _MAX_SEED)
    else:
        prompt = _prompt(fields.take("prompt", (str, list), ""))
        logprobs = fields.whole("logprobs", 0, _MOST_LOGPROBS)
        max_tokens = None
    limit = fields.whole("max_tokens", 1, _MAX_SEED, None if kind == "chat" else 16)
    max_tokens = limit if max_tokens is None else max_tokens
    stop = fields.take("stop", (str, list), [])
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > _MOST_STOPS or not all(isinstance(each, str) and each for each in stop):
        raise RefusedError(f"stop must be at most {_MOST_STOPS} texts, none of them empty", "stop")
    for each in stop:
        _require_text("stop", each)
    sampling = Sampling(
        temperature=fields.number("temperature", 1.0),
        top_p=fields.number("top_p", 1.0),
        top_k=fields.whole("top_k", 1, _MAX_SEED),
    )
    settings = replace(
        _depth(fields, defaults),
        sampling=sampling,
        logprobs=logprobs,
        traced=fields.take("trace", bool, False),
    )
    streams = fields.take("stream", bool, False)
    streamed = _Fields(fields.take("stream_options", dict, {}))
    includes_usage = streamed.take("include_usage", bool, False)
    repeats_usage = streamed.take("continuous_usage_stats", bool, False)
    streamed.take("include_obfuscation", bool)  # of OpenAI: padding, which nothing here needs
    streamed.end()
    seed = fields.whole("seed", -_MAX_SEED - 1, _MAX_SEED)
    fields.end()
    return Asking(
        kind=kind,
        prompt=prompt,
        settings=settings,
        max_tokens=max_tokens,
        seed=secrets.randbits(62) if seed is None else seed,
        stop=tuple(stop),
        streams=streams,
        includes_usage=includes_usage,
        repeats_usage=repeats_usage,
    )


def read_change(body: Any, before: RowSettings) -> RowSettings:
    """Return the settings of a row after a change of `exit`, `recurrent_steps` or both."""
    fields = _Fields(body)
    settings = _depth(fields, before)
    fields.end()
    return settings


def _depth(fields: _Fields, before: RowSettings) -> RowSettings:
    steps = fields.whole("recurrent_steps", 1, 1 << 16, before.recurrent_steps)
    text = fields.take("exit", str)
    policy = before.exit_policy if text is None else parse_exit_policy(text)
    return replace(before, recurrent_steps=steps, exit_policy=policy)


def _prompt(given: str | list[Any]) -> str | list[int]:
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]  # clients that batch send lists
    if isinstance(given, list) and not (given and all(type(token) is int for token in given)):
        raise RefusedError("prompt must be one text, or one list of token ids", "prompt")
    return given


def _conversation(messages: list[Any] | None) -> Conversation:
    if not messages:
        raise RefusedError("messages must be at least one message", "messages")
    try:
        turns = tuple(parse_messages(messages))
        return Conversation(turns).mapped(lambda text: _require_text("messages", text))
    except TypeError as error:
        raise RefusedError(f"messages: {error}", "messages") from error


def _require_text(field: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RefusedError(f"{field} holds half of a surrogate pair", field) from error
    return text
