"""A file per rank with the time of its last progress: `RUN/heartbeats/rank-N.json`.

A thread writes it. So a rank that hangs still writes, with an old `progress` and the collective
operation that it waits in; the file of a rank that died is old.
"""

import json
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_loop.errors import UserError
from titan_loop.storage.json_files import read_json_object

FOLDER = "heartbeats"
MOST_LINES = 10
_FILES = "rank-*.json"
_PATIENCE = 4
"""Missing reports that make a rank silent; a network disk may delay one or two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """A rank's report of itself, with times in seconds since the epoch.

    Attributes:
        collective: Oldest collective operation that has not ended; empty if there is none.
        seconds: Time between two reports.
    """

    rank: int
    host: str
    pid: int
    step: int
    phase: str
    progress: float
    collective: str
    written: float
    seconds: float

    @property
    def who(self) -> str:
        """Name of the rank in messages."""
        return f"rank {self.rank} on {self.host} (process {self.pid})"

    def where(self, now: float) -> str:
        """Return the place of the rank in its step, as a phrase."""
        collective = f"in {self.collective}" if self.collective else "in no collective"
        since = now - self.progress
        return f"{collective}, in {self.phase} of step {self.step}, for {since:.0f} s"


def heartbeat_file(run: Path, rank: int) -> Path:
    """Return the path of a rank's heartbeat."""
    return run / FOLDER / f"rank-{rank}.json"


def write_heartbeat(run: Path, heartbeat: Heartbeat) -> None:
    """Replace a rank's heartbeat, without an fsync: nobody reads it after a crash of the host."""
    path = heartbeat_file(run, heartbeat.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(asdict(heartbeat)), encoding="utf-8")
    temporary.replace(path)


def read_heartbeats(run: Path) -> list[Heartbeat]:
    """Return the heartbeats that can be read, by rank."""
    found: list[Heartbeat] = []
    for path in (run / FOLDER).glob(_FILES):
        with suppress(OSError, UserError, TypeError):
            found.append(Heartbeat(**read_json_object(path, fix="delete it")))
    return sorted(found, key=lambda heartbeat: heartbeat.rank)


def forget_heartbeats(run: Path) -> None:
    """Delete the heartbeats of an earlier start, which may have had more ranks."""
    for path in (run / FOLDER).glob(_FILES):
        with suppress(OSError):
            path.unlink()


def silent_ranks(
    heartbeats: list[Heartbeat], now: float | None = None, *, hung: bool = False
) -> list[str]:
    """Return at most `MOST_LINES` lines on the ranks that the others wait for.

    These are dead ranks and ranks in an older step than the others. If all ranks are in one step
    and make no progress, or are known to have `hung`, they are the ranks outside of every
    collective, or in another collective than most.
    """
    now = time.time() if now is None else now
    newest = max((beat.step for beat in heartbeats), default=0)
    lines: list[str] = []
    for beat in heartbeats:
        silent, stuck = now - beat.written, now - beat.progress
        if silent > _PATIENCE * beat.seconds:
            lines.append(f"{beat.who} has been silent for {silent:.0f} s, in step {beat.step}")
        elif beat.step < newest:
            lines.append(f"{beat.who} is still in step {beat.step} of {newest}, for {stuck:.0f} s")
    hung = hung or all(now - beat.progress > _PATIENCE * beat.seconds for beat in heartbeats)
    if not lines and hung:
        lines = _stuck_ranks(heartbeats, now)
    if len(lines) > MOST_LINES:
        lines[MOST_LINES - 1 :] = [f"{len(lines) - MOST_LINES + 1} more ranks, too"]
    return lines


def _stuck_ranks(heartbeats: list[Heartbeat], now: float) -> list[str]:
    ranks_in = Counter(beat.collective for beat in heartbeats)
    if len(ranks_in) < 2:  # no rank differs: all wait for the network or a disk
        return [f"all {len(heartbeats)} ranks are {beat.where(now)}" for beat in heartbeats[:1]]
    waited_for = "" if "" in ranks_in else min(ranks_in, key=lambda name: ranks_in[name])
    del ranks_in[waited_for]
    [(usual, count)] = ranks_in.most_common(1)
    others = f"{count} other ranks wait in {usual}"
    return [
        f"{beat.who} is {beat.where(now)}; {others}"
        for beat in heartbeats
        if beat.collective == waited_for
    ]
