"""A server of the run that other tests read, in a thread of this process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import uvicorn

import titan_loop
from tests.inference.conftest import ended_run, own_run, trained_run
from titan_loop.cli.serve import Serving, serve
from titan_loop.serve.application import Served, application
from titan_loop.serve.rows import Piece, RowSettings, ServedRow, ServingEngine

__all__ = ["ended_run", "own_run", "trained_run"]

CONTEXT = 512


class Running(NamedTuple):
    """A running server: its URL and the objects behind it."""

    url: str
    served: Served


@contextmanager
def running(run: Path, *, api_key: str | None = None, **options) -> Iterator[Running]:
    """Serve a run in float64, so that its answers equal another engine's to the last token."""
    loaded = titan_loop.load(run, context=CONTEXT, dtype=torch.float64)
    served = serve(loaded, Serving(**{"recurrent_steps": 4, **options}), name="run")
    app = application(served, api_key=api_key, hosts=("127.0.0.1",))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Running(f"http://127.0.0.1:{port}", served)
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="session")
def server(trained_run: Path) -> Iterator[Running]:
    """A server whose trained R is 2, with memory for R = 4."""
    with running(trained_run) as started:
        yield started


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the session's time limit ends a wait that is never over."""
    while not condition():
        time.sleep(0.005)


class Answer:
    """A row and the pieces that it has sent."""

    def __init__(
        self,
        engine: ServingEngine,
        request,
        settings: RowSettings,
        *,
        seed: int = 0,
        seconds: float = 1e9,
        on_token: Callable[["Answer"], None] = lambda answer: None,
    ) -> None:
        self.pieces: list[Piece] = []
        self._on_token = on_token
        engine.check(settings, request.prompt)
        self.row = ServedRow(
            request,
            settings,
            context_tokens=engine.stack.context_tokens,
            seed=seed,
            send=self._receive,
            flops=engine.flops,
            deadline=time.monotonic() + seconds,
        )

    def _receive(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self._on_token(self)

    @property
    def tokens(self) -> list[int]:
        return [piece.event.token for piece in self.pieces if piece.event]

    @property
    def steps(self) -> list[int]:
        return [piece.event.step for piece in self.pieces if piece.event]

    @property
    def is_done(self) -> bool:
        return bool(self.pieces) and self.pieces[-1].is_last
