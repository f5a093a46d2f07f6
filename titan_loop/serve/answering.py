"""Writes an answer as OpenAI's objects: whole, or as the chunks of a stream.

Fields of ours stand beside OpenAI's, whose clients ignore them: in a choice `exit_steps`, one for
each token, and `trace`; in the usage `mean_exit_step`, `flops` (of the forward pass over generated
tokens) and `cache_bytes` (of an answer's keys and values at its end).
"""

import codecs
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from titan_loop.serve.asking import Kind
from titan_loop.serve.rows import Piece, ServedRow, ServingEngine, StepReading
from titan_loop.text.tokenizer import bytes_of_token

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FINISH = {"stop_token": "stop", "stop_string": "stop", "limit": "length", "context": "length"}
_TIME = "time"
PROBLEMS = {
    "stopping": (503, "the server is stopping; ask again once it is back"),
    "failure": (500, "the engine failed; the server's log has the reason"),
    _TIME: (503, "no place became free within the time of an answer; try again later"),
}
"""Status and message of an answer that ended before its first token."""


def error_object(message: str, status: int, field: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}


def event_line(value: Mapping[str, Any] | str) -> str:
    """Return a server-sent event."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"data: {text}\n\n"


class Answering:
    """Writes the answer to one request; `number` is its id, `row` writes it."""

    def __init__(
        self,
        kind: Kind,
        row: ServedRow,
        *,
        model: str,
        tokenizer: "Tokenizer",
        engine: ServingEngine,
    ) -> None:
        self.kind: Kind = kind
        prefix = "chatcmpl-" if kind == "chat" else "cmpl-"
        self.number = prefix + secrets.token_hex(16)
        self._model, self._tokenizer, self._engine, self._row = model, tokenizer, engine, row
        self._created = int(time.time())
        # So far: tokens, their characters, sums of their exit steps and FLOPs.
        self._tokens = self._characters = self._steps = 0
        self._flops = 0.0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._role = {"role": "assistant"}  # once: OpenAI's client joins the texts of all chunks

    def whole(self, pieces: Sequence[Piece]) -> tuple[int, dict[str, Any]]:
        """Return status and body of a response that is not streamed."""
        if problem := self.problem(pieces[-1], started=len(pieces) > 1):
            return problem
        choice = self._choice(pieces, streamed=False)
        return 200, self._object("", [choice]) | {"usage": self.usage()}

    def chunk(self, piece: Piece, *, has_usage: bool) -> dict[str, Any]:
        """Return one chunk of a stream."""
        chunk = self._object(".chunk", [self._choice([piece], streamed=True)])
        return chunk | ({"usage": self.usage()} if has_usage else {})

    def last_chunk(self) -> dict[str, Any]:
        """Return the chunk with the usage, which has no choice."""
        return self._object(".chunk", []) | {"usage": self.usage()}

    def problem(self, piece: Piece, *, started: bool) -> tuple[int, dict[str, Any]] | None:
        """Return status and body of the error that a piece stands for; None if it is none.

        A limit of time that strikes within an answer is a finish reason, as the length's.
        """
        if piece.problem is None or (started and piece.problem == _TIME):
            return None
        status, message = PROBLEMS[piece.problem]
        return status, error_object(message, status)

    def usage(self) -> dict[str, Any]:
        """Return the counts so far."""
        before, after = len(self._row.prompt), self._tokens
        return {
            "prompt_tokens": before,
            "completion_tokens": after,
            "total_tokens": before + after,
            "mean_exit_step": self._steps / after if after else None,
            "flops": self._flops,
            "cache_bytes": self._engine.cache_bytes(self._row.settings, before + after),
        }

    def _object(self, suffix: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        # Chunks of texts, unlike those of chats, have the name of the whole.
        kind = f"chat.completion{suffix}" if self.kind == "chat" else "text_completion"
        return {
            "id": self.number,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _choice(self, pieces: Sequence[Piece], *, streamed: bool) -> dict[str, Any]:
        text = "".join(piece.text if piece.event is None else piece.event.text for piece in pieces)
        # The stop token is no part of an answer.
        spoken = [p for p in pieces if p.event is not None and p.event.finish != "stop_token"]
        steps = [piece.event.step for piece in spoken if piece.event is not None]
        self._tokens += len(steps)
        self._steps += sum(steps)
        self._flops += sum(piece.flops for piece in spoken)
        last = pieces[-1]
        finish = None if last.event is None else last.event.finish
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "length" if last.problem else finish and _FINISH[finish],
            "exit_steps": steps,
            "logprobs": self._logprobs(spoken),
        }
        if any(piece.trace for piece in spoken):
            choice["trace"] = [[self._reading(each) for each in piece.trace] for piece in spoken]
        if self.kind == "completion":
            return choice | {"text": text}
        part = {**self._role, "content": text}
        self._role = {}
        return choice | ({"delta": part} if streamed else {"message": part | {"refusal": None}})

    def _reading(self, reading: StepReading) -> dict[str, Any]:
        likely = [[self._text(token), round(share, 5)] for token, share in reading.likely]
        return {"likely": likely, "exit": reading.exit_probability}

    def _logprobs(self, spoken: Sequence[Piece]) -> dict[str, Any] | None:
        told = [(p.event.token, p.logprobs) for p in spoken if p.event and p.logprobs]
        if not told:
            return None
        if self.kind == "chat":
            return {
                "content": [
                    self._token(token, logprobs.own)
                    | {"top_logprobs": [self._token(*each) for each in logprobs.likely]}
                    for token, logprobs in told
                ]
            }
        offsets = []
        for token, _ in told:
            offsets.append(self._characters)
            if self._tokenizer.decode([token] * 2):  # the text has no special tokens
                found = bytes_of_token(self._tokenizer, token)
                self._characters += len(self._decoder.decode(found))
        return {
            "tokens": [self._name(token) for token, _ in told],
            "token_logprobs": [logprobs.own for _, logprobs in told],
            "top_logprobs": [
                {
                    self._name(each): value
                    for each, value in (*logprobs.likely, (token, logprobs.own))
                }
                for token, logprobs in told
            ],
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        found = bytes_of_token(self._tokenizer, token)
        return {"token": self._text(token), "logprob": logprob, "bytes": [*found]}

    def _text(self, token: int) -> str:
        return bytes_of_token(self._tokenizer, token).decode(errors="replace")

    def _name(self, token: int) -> str:
        """Return a token's text, or as OpenAI does its bytes, so that no two share a name."""
        found = bytes_of_token(self._tokenizer, token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
