"""One thread that owns the engine: rows join and leave between applications of the stack.

A prompt runs in one go when its row joins, and the other rows wait for it. Rows that cannot join
wait in a queue of bounded length, in order.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import cast

import torch

from titan_loop.errors import require_at_least
from titan_loop.serve.metrics import Metrics
from titan_loop.serve.rows import Problem, RefusedError, ServedRow, ServingEngine

logger = logging.getLogger(__name__)


class Scheduler:
    """Runs `ServedRow`s; every method may be called from any thread.

    Args:
        rows: Number of rows that run at once; their memory is allocated here.
        queue: Number of rows that may wait.
    """

    def __init__(self, engine: ServingEngine, *, rows: int, queue: int) -> None:
        require_at_least(0, queue=queue)
        self.engine, self.metrics = engine, Metrics()
        self.places, self.queue = rows, queue
        self._batch = engine.batch(rows)
        self._active: Sequence[ServedRow] = ()  # in the engine's hands
        self._waiting: deque[ServedRow] = deque()
        self._changed = threading.Condition()
        self._closed = False  # to new rows
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, rows: Sequence[ServedRow]) -> None:
        """Let rows run or wait; raise `RefusedError` if they cannot."""
        with self._changed:
            if self._closed:
                raise RefusedError("the server is stopping", status=503)
            running = self._running
            if len(rows) > self.places + self.queue - running - len(self._waiting):
                self.metrics.answers.labels("refused").inc(len(rows))
                problem = f"{running} answers are being written and {len(self._waiting)} wait: "
                problem += f"there is no room for {len(rows)} more; try again"
                raise RefusedError(problem, status=429)
            self._waiting.extend(rows)
            self._tell()

    def cancel(self, rows: Sequence[ServedRow]) -> None:
        """Free the places of rows whose answers nobody reads any more; others are left alone."""
        with self._changed:
            for row in rows:
                row.cancelled = True
                if row in self._waiting:
                    self._waiting.remove(row)
                    self.metrics.answers.labels("gone").inc()
            self._tell()

    def close(self) -> None:
        """Refuse new rows and end those that wait; running ones go on to their ends."""
        with self._changed:
            self._closed = True
            for row in self._waiting:
                self._end(row, "stopping")
            self._waiting.clear()
            self._tell()

    def join(self) -> None:
        """Close, and wait until the last row has ended."""
        self.close()
        with self._changed:
            self._ended = True
            self._tell()
        self._thread.join()

    @property
    def _running(self) -> int:
        # A client that has its last token may ask again before its row is dropped.
        return sum(row.finish is None for row in self._active)

    def _tell(self) -> None:
        self.metrics.queue.set(len(self._waiting))
        self.metrics.rows.set(self._running)
        self._changed.notify_all()

    def _end(self, row: ServedRow, problem: Problem) -> None:
        self.metrics.answers.labels(problem).inc()
        row.end(problem)

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            with self._changed:
                self._active = cast(list[ServedRow], self._batch.rows)
                self._tell()
                while not (self._waiting or self._active or self._ended):
                    self._changed.wait()
                if not (self._waiting or self._active):
                    return
                joining = self._next_rows()
                self._active = [*self._active, *joining]
                self._tell()
            try:
                self._advance(joining)
            except Exception:  # one request's fault must not end the server
                logger.exception("the engine failed; its rows are given up")
                for row in self._active:
                    if row.finish is None:
                        self._end(row, "failure")
                self._batch = self.engine.batch(self.places, self._batch.cache)

    def _next_rows(self) -> list[ServedRow]:
        """Take the rows that join: the first that waits, and the next ones of its depth."""
        for row in [row for row in self._waiting if time.monotonic() > row.deadline]:
            self._waiting.remove(row)
            self._end(row, "time")
        free = self.places - len(self._batch.rows)
        taken: list[ServedRow] = []
        while self._waiting and len(taken) < free:
            row = self._waiting[0]
            row.settings = row.wanted
            if taken and taken[0].settings.deepest_step != row.settings.deepest_step:
                break  # a shallow prompt must not see a deeper step's keys
            taken.append(self._waiting.popleft())
        return taken

    def _advance(self, joining: Sequence[ServedRow]) -> None:
        batch = self._batch
        if joining:
            self.metrics.prompt_tokens.inc(sum(len(row.prompt) for row in joining))
        for event in self.engine.join(batch, joining) if joining else batch.advance():
            self.metrics.add_token(event.step)
        now = time.monotonic()
        for row in cast(list[ServedRow], batch.rows):
            if row.finish is not None:
                ended = "length" if row.finish in ("limit", "context") else "stop"
                self.metrics.answers.labels(ended).inc()
            elif row.cancelled:
                self._end(row, "gone")
            elif now > row.deadline:
                self._end(row, "time")
        batch.drop_finished()
