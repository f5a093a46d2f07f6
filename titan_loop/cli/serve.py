"""`titan-loop serve RUN`: answer OpenAI's requests, and show the steps on a page."""

import logging
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titan_loop.cli.arguments import command
from titan_loop.errors import UserError, require_at_least

if TYPE_CHECKING:
    from titan_loop.interactive import LoopModel
    from titan_loop.serve.application import Served

API_KEY = "TITAN_LOOP_API_KEY"
_LOCAL = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Address, limits and model of a server.

    Attributes:
        host: Address to listen at; other machines reach 0.0.0.0.
        port: Port to listen at; 0 takes a free one.
        api_key: Key that clients must send; by default $TITAN_LOOP_API_KEY, which `ps` hides.
        rows: Number of answers that are written at once; each has memory for the whole context.
        queue: Number of answers that may wait; further ones are refused with status 429.
        max_tokens: Most tokens of an answer.
        seconds: Most seconds of an answer, with the time that it waits.
        recurrent_steps: Deepest R that a request may ask for; by default the trained one.
        kv_cache: Key-value cache: full, last, first, averaged, or
            the family's own.
        context: Maximum tokens of prompt and completion; by default the trained window.
        compile: Compile the visits of generated tokens, on a CPU. The first answers wait for it, up
            to a minute; later starts find the code. It pays for small models.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    rows: int = 8
    queue: int = 64
    max_tokens: int = 1024
    seconds: float = 300.0
    recurrent_steps: int | None = None
    kv_cache: str = "full"
    context: int | None = None
    compile: bool = False

    def check(self) -> None:
        """Raise `UserError` for settings that cannot work, before loading."""
        require_at_least(1, rows=self.rows, max_tokens=self.max_tokens, seconds=self.seconds)
        require_at_least(1, recurrent_steps=self.recurrent_steps)
        require_at_least(0, queue=self.queue)
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"port={self.port} must be between 0 and {(1 << 16) - 1}")


@command("serve")
def run(model: Path, serving: Serving, *, stage: str | None = None) -> None:
    """Serve a model: OpenAI's /v1/completions and /v1/chat/completions, and a page at /.

    SIGTERM ends it once the answers that are being written have ended.

    Args:
        model: A checkpoint, a run (its newest checkpoint is taken), a recipe's folder (its newest
            stage is taken), or a folder that `titan-loop convert import` reads.
        serving: Address, limits and model.
        stage: Stage to take instead, if a recipe's folder is given.
    """
    serving.check()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        import uvicorn  # pyright: ignore[reportMissingImports]

        from titan_loop.serve.application import application
    except ImportError as error:
        if error.name not in ("uvicorn", "starlette", "prometheus_client"):
            raise
        raise UserError(f"serve lacks {error.name}: pip install 'titan-loop[serve]'") from error

    import titan_loop

    with _listen(serving.host, serving.port) as listener:
        loaded = titan_loop.load(model, stage=stage, context=serving.context)
        served = serve(loaded, serving, name=model.resolve().name)
        key = serving.api_key or os.environ.get(API_KEY) or None
        address, port, *_ = listener.getsockname()
        is_local = address in ("127.0.0.1", "::1")
        if not is_local and key is None:
            logging.warning("anybody who reaches %s can ask: set $%s", serving.host, API_KEY)

        shown = f"[{address}]" if ":" in address else address

        class Server(uvicorn.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if self.started:  # from here on a connection is taken and SIGTERM is heard
                    print(f"{served.name}: http://{shown}:{port}", flush=True)

            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                served.scheduler.close()  # what waits ends now, what is being written goes on
                await super().shutdown(sockets)

        config = uvicorn.Config(
            application(served, api_key=key, hosts=_LOCAL if is_local else ("*",)),
            log_level="warning",
            access_log=False,
            server_header=False,
            http="h11",
            ws="none",
        )
        # uvicorn raises the signal again once it is done: a stop that was asked for ends with 0.
        signal.signal(signal.SIGTERM, lambda *_: None)
        Server(config).run([listener])


def serve(loaded: "LoopModel", serving: Serving, *, name: str) -> "Served":
    """Start the engine of a loaded model."""
    from titan_loop.inference.loading import ends_of
    from titan_loop.models.family import get_family
    from titan_loop.serve.application import Served
    from titan_loop.serve.rows import RowSettings, ServingEngine
    from titan_loop.serve.scheduler import Scheduler
    from titan_loop.text.chat_encoding import ChatEncoder

    get_family(loaded.model.config.family).require("generate")
    (tokenizer, text), (for_prompts, _) = loaded.read_text(), loaded.read_text()
    try:
        encoder = ChatEncoder(for_prompts, text.template)
    except UserError:  # its control tokens are missing
        encoder = None
    trained = loaded.recurrent_steps
    deepest = serving.recurrent_steps or trained
    engine = ServingEngine(
        loaded.model,
        recurrent_steps=deepest,
        kv_cache=serving.kv_cache,
        compile=serving.compile,
    )
    return Served(
        name=name,
        scheduler=Scheduler(engine, rows=serving.rows, queue=serving.queue),
        tokenizer=tokenizer,
        encoding_tokenizer=for_prompts,
        encoder=encoder,
        ends=ends_of(text, tokenizer),
        defaults=RowSettings(recurrent_steps=min(trained, deepest)),
        most_tokens=serving.max_tokens,
        seconds=serving.seconds,
        knows_chats=text.knows_chats,
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(f"host={host} port={port}: {error.strerror}; choose another") from error
    return listener
