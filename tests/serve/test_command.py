"""`titan-loop serve`: its flags, and how a signal ends it."""

import contextlib
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import openai
import pytest

from tests.serve.conftest import until
from tests.support.multiprocess import preloaded_context
from titan_loop.cli.main import main
from titan_loop.errors import EXIT_USER_ERROR


def serve_until_stopped(run: Path, log: Path, *flags: str) -> None:
    """Serve; after an answer's first token the engine waits for the stop."""
    from titan_loop.serve.rows import ServedBatch
    from titan_loop.serve.scheduler import Scheduler

    stopping = threading.Event()
    close, advance = Scheduler.close, ServedBatch.advance
    Scheduler.close = lambda self: (close(self), stopping.set())
    ServedBatch.advance = lambda self: stopping.wait() and advance(self)
    with log.open("w") as stream, contextlib.redirect_stdout(stream):
        code = main(["serve", str(run), "--port", "0", *flags])
    sys.exit(code)


def test_sigterm_finishes_what_is_written_and_refuses_what_waits(trained_run, tmp_path):
    log = tmp_path / "log"
    child = preloaded_context().Process(
        target=serve_until_stopped, args=(trained_run, log, "--rows", "1")
    )
    child.start()
    until(lambda: log.exists() and log.read_text().endswith("\n"))
    name, url = log.read_text().strip().split(": ")
    assert name == "run"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        # Greedy, since a drawn token may end the text.
        ask = {"model": "run", "prompt": "a", "stream": True, "temperature": 0}
        running = client.completions.create(max_tokens=30, **ask)
        chunks = [next(iter(running))]
        waiting = client.completions.create(max_tokens=1, **ask)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(waiting)
        chunks += running
    assert sum(len(chunk.choices[0].exit_steps) for chunk in chunks) == 30
    child.join()
    assert child.exitcode == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--rows", "0"), "rows=0 must be at least 1"),
        (("--queue", "-1"), "queue=-1 must be at least 0"),
        (("--port", "65536"), "port=65536 must be between 0 and 65535"),
        (("--host", "192.0.2.1"), "host=192.0.2.1 port=8000: Cannot assign requested address"),
        (("--kv-cache", "lats", "--port", "0"), "kv_cache=lats is unknown; nearest: last"),
    ],
)
def test_mistakes_are_one_line(capsys, trained_run, flags, words):
    assert main(["serve", str(trained_run), *flags]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


def test_a_port_in_use_and_a_missing_extra_are_one_line(capsys, trained_run, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(trained_run), "--port", str(port)]) == EXIT_USER_ERROR
    assert f"port={port}: Address already in use; choose another" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(trained_run)]) == EXIT_USER_ERROR
    assert "serve lacks uvicorn: pip install 'titan-loop[serve]'" in capsys.readouterr().err
