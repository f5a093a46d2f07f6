"""The HTTP side: routes, keys, limits of a body, streams, and clients that leave.

No part of a request becomes a path. A thread and a tokenizer of their own encode texts, since
encoding a conversation changes the tokenizer for a moment.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette  # pyright: ignore[reportMissingImports]
from starlette.exceptions import HTTPException  # pyright: ignore[reportMissingImports]
from starlette.middleware import Middleware  # pyright: ignore[reportMissingImports]
from starlette.middleware.trustedhost import (  # pyright: ignore[reportMissingImports]
    TrustedHostMiddleware,
)
from starlette.requests import Request  # pyright: ignore[reportMissingImports]
from starlette.responses import (  # pyright: ignore[reportMissingImports]
    HTMLResponse,
    JSONResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route  # pyright: ignore[reportMissingImports]

from titan_loop import __version__
from titan_loop.errors import UserError
from titan_loop.inference.detokenizer import Detokenizer
from titan_loop.inference.exit_policy import exit_policies_of
from titan_loop.inference.rows import Request as RowRequest
from titan_loop.serve.answering import Answering, error_object, event_line
from titan_loop.serve.asking import Asking, Kind, read_asking, read_change, read_json
from titan_loop.serve.rows import Piece, RefusedError, RowSettings, ServedRow
from titan_loop.serve.scheduler import Scheduler
from titan_loop.text.conversation import Conversation
from titan_loop.text.tokenizer import encode_prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from titan_loop.inference.loading import TextEnds
    from titan_loop.text.chat_encoding import ChatEncoder

MOST_BODY_BYTES = 1 << 20
_PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
}


@dataclass(frozen=True, kw_only=True)
class Served:
    """What one server offers.

    Attributes:
        tokenizer: For the engine's thread and the answers; the encoder has another one.
        encoding_tokenizer: For prompts.
        encoder: For chats; None if the tokenizer lacks the template's control tokens.
        seconds: Most seconds from a request to the end of its answer.
        knows_chats: Whether the model was trained on conversations.
    """

    name: str
    scheduler: Scheduler
    tokenizer: "Tokenizer"
    encoding_tokenizer: "Tokenizer"
    encoder: "ChatEncoder | None"
    ends: "TextEnds"
    defaults: RowSettings
    most_tokens: int
    seconds: float
    knows_chats: bool


def application(
    served: Served, *, api_key: str | None = None, hosts: Sequence[str] = ("*",)
) -> Starlette:
    """Return the server's application.

    Args:
        api_key: Key that every request but the page's and `/health` must bear; None for none.
        hosts: Names under which the server may be addressed. A page elsewhere whose name resolves
            to this machine bears its own.
    """
    app = _Application(served, api_key)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(served.scheduler.join)

    routes = [
        Route("/", app.page),
        Route("/v1/completions", app.completions, methods=["POST"]),
        Route("/v1/chat/completions", app.chat, methods=["POST"]),
        Route("/v1/answers/{number}", app.change, methods=["PATCH"]),
        Route("/v1/models", app.models),
        Route("/v1/models/{name:path}", app.model),
        Route("/metrics", app.metrics),
        Route("/health", app.health),
    ]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[*hosts], www_redirect=False)],
        exception_handlers=dict.fromkeys((UserError, HTTPException), _refused),
    )


class _Application:
    def __init__(self, served: Served, api_key: str | None) -> None:
        self.served, self.engine = served, served.scheduler.engine
        self._api_key = api_key
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="texts")
        self._answers: dict[str, ServedRow] = {}
        self._page = Path(__file__).with_name("page.html").read_bytes()

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, "completion")

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, "chat")

    async def change(self, request: Request) -> Response:
        """Give a running answer another depth or exit policy, from its next token on."""
        body = await self._body(request)
        row = self._answers.get(request.path_params["number"])
        if row is None:
            raise RefusedError("no such answer is being written", status=404)
        settings = read_change(body, row.wanted)
        self.engine.check(settings, row.prompt)
        row.wanted = settings
        return Response(status_code=204)

    async def models(self, request: Request) -> Response:
        self._authorise(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._authorise(request)
        self._require_name(request.path_params["name"])
        return JSONResponse(self._model())

    async def metrics(self, request: Request) -> Response:
        self._authorise(request)
        text = self.served.scheduler.metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4")

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=_PAGE_HEADERS)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "version": __version__})

    def _model(self) -> dict[str, Any]:
        model = self.engine.stack.model
        lacks_gate = model.exit_gate is None
        return {
            "id": self.served.name,
            "object": "model",
            "created": 0,
            "owned_by": "titan_loop",
            "recurrent_steps": self.served.defaults.recurrent_steps,
            "most_recurrent_steps": self.engine.recurrent_steps,
            "exit_policies": sorted(
                name for name in exit_policies_of(model) if not (lacks_gate and name == "q")
            ),
            "context_tokens": self.engine.stack.context_tokens,
            "most_tokens": self.served.most_tokens,
            "knows_chats": self.served.knows_chats,
        }

    def _authorise(self, request: Request) -> None:
        if self._api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        # Headers arrive as Latin-1, whatever their bytes meant.
        if not hmac.compare_digest(given.encode("latin-1"), self._api_key.encode()):
            raise RefusedError("the API key is missing or wrong", status=401)

    async def _body(self, request: Request) -> Any:
        self._authorise(request)
        # A page elsewhere can send other types without asking first.
        if request.headers.get("content-type", "").split(";")[0].strip() != "application/json":
            raise RefusedError("the content type must be application/json", status=415)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BODY_BYTES:
                raise RefusedError(f"the body has over {MOST_BODY_BYTES} bytes", status=413)
        return read_json(body)

    def _require_name(self, name: object) -> None:
        if name != self.served.name:
            problem = f"model={name!r:.80} is not served here; it is {self.served.name!r}"
            raise RefusedError(problem, "model", 404)

    async def _answer(self, request: Request, kind: Kind) -> Response:
        body = await self._body(request)
        name = body.get("model") if isinstance(body, dict) else None
        if name is not None:
            self._require_name(name)
        served, loop = self.served, asyncio.get_running_loop()
        pieces: asyncio.Queue[Piece] = asyncio.Queue()

        def send(piece: Piece) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def read() -> tuple[Asking, ServedRow]:
            asking = read_asking(kind, body, served.defaults)
            return asking, self._row(asking, send)

        asking, row = await loop.run_in_executor(self._texts, read)
        answering = Answering(
            kind, row, model=served.name, tokenizer=served.tokenizer, engine=self.engine
        )
        served.scheduler.submit([row])
        self._answers[answering.number] = row

        def end() -> None:
            self._answers.pop(answering.number, None)
            served.scheduler.cancel([row])

        if asking.streams:
            return _Stream(_events(answering, asking, pieces), end)
        whole = asyncio.create_task(_collected(pieces))
        gone = asyncio.create_task(_left(request))
        try:
            await asyncio.wait({whole, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                return Response(status_code=499)  # nobody reads it
            status, content = answering.whole(whole.result())
            return JSONResponse(content, status)
        finally:
            whole.cancel()
            gone.cancel()
            end()

    def _row(self, asking: Asking, send: Callable[[Piece], None]) -> ServedRow:
        served, prompt = self.served, asking.prompt
        limit = served.most_tokens if asking.max_tokens is None else asking.max_tokens
        if limit > served.most_tokens:
            problem = f"max_tokens={limit} is above this server's limit of {served.most_tokens}"
            raise RefusedError(problem, "max_tokens")
        ids, prefix_tokens = self._ids(prompt)
        self.engine.check(asking.settings, ids)
        # What follows a text goes on from it; an answer in a chat begins a text.
        before = ids if isinstance(prompt, str) else ()
        return ServedRow(
            RowRequest(
                prompt=ids,
                max_new_tokens=limit,
                stop_tokens=served.ends.stop_tokens,
                text=Detokenizer(served.tokenizer, asking.stop, before),
                prefix_tokens=prefix_tokens,
            ),
            asking.settings,
            context_tokens=self.engine.stack.context_tokens,
            seed=asking.seed,
            send=send,
            flops=self.engine.flops,
            deadline=time.monotonic() + served.seconds,
        )

    def _ids(self, prompt: str | list[int] | Conversation) -> tuple[list[int], int | None]:
        """Return a prompt's ids, and how many are a prefix; None for all."""
        served, begin = self.served, self.served.ends.begin_of_text
        if isinstance(prompt, Conversation):
            if served.encoder is None:
                raise RefusedError("this model's tokenizer has no tokens for chats", "messages")
            return served.encoder.prompt(prompt)
        if isinstance(prompt, str) and prompt:
            return encode_prompt(served.encoding_tokenizer, prompt, begin), None
        if isinstance(prompt, str):  # documents that begin with no token begin after an end
            start = served.ends.end_of_text if begin is None else begin
            return [] if start is None else [start], None
        return prompt, None


class _Stream(StreamingResponse):
    """A stream of events; its rows end with it, even if its client leaves before the first one."""

    def __init__(self, events: AsyncIterator[str], end: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._end = end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def _read(pieces: asyncio.Queue[Piece]) -> AsyncIterator[Piece]:
    while True:
        piece = await pieces.get()
        yield piece
        if piece.is_last:
            return


async def _collected(pieces: asyncio.Queue[Piece]) -> list[Piece]:
    return [piece async for piece in _read(pieces)]


async def _events(
    answering: Answering, asking: Asking, pieces: asyncio.Queue[Piece]
) -> AsyncIterator[str]:
    started = False
    async for piece in _read(pieces):
        if problem := answering.problem(piece, started=started):
            yield event_line(problem[1])
            return
        started = True
        yield event_line(answering.chunk(piece, has_usage=asking.repeats_usage))
    if asking.includes_usage:
        yield event_line(answering.last_chunk())
    yield event_line("[DONE]")


async def _left(request: Request) -> None:
    """Wait until the client is gone; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}


async def _refused(request: Request, error: Any) -> Response:
    field, status, message = None, 400, str(error)
    if isinstance(error, RefusedError):
        field, status = error.field, error.status
    elif isinstance(error, HTTPException):
        status, message = error.status_code, f"{request.method} {request.url.path}: {error.detail}"
    return JSONResponse(error_object(message, status, field), status, _HEADERS.get(status))
