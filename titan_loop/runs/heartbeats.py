"""A file a rank that says when it last made progress: `RUN/heartbeats/rank-N.json`.

Each rank writes its own from a thread, so a rank that hangs still writes, with an old `progress`;
one that died, or whose node did, has an old file.
"""

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_loop.errors import UserError
from titan_loop.storage.json_files import count, number, read_json_object, write_json

FOLDER = "heartbeats"


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """What a rank says of itself; times are seconds since the epoch.

    Attributes:
        rank: Its number.
        host: Name of its node.
        pid: Its process there.
        step: Training step that it is in.
        progress: When that step began.
        written: When this was written.
        seconds: Time between two writings.
    """

    rank: int
    host: str
    pid: int
    step: int
    progress: float
    written: float
    seconds: float


def heartbeat_file(run: Path, rank: int) -> Path:
    """Return where a rank's heartbeat is."""
    return run / FOLDER / f"rank-{rank}.json"


def write_heartbeat(run: Path, heartbeat: Heartbeat) -> None:
    """Replace a rank's heartbeat.

    Raises:
        OSError: The folder cannot be written.
    """
    write_json(heartbeat_file(run, heartbeat.rank), asdict(heartbeat))


def read_heartbeats(run: Path) -> list[Heartbeat]:
    """Return the heartbeats that can be read, by rank."""
    found: list[Heartbeat] = []
    for path in (run / FOLDER).glob("rank-*.json"):
        with suppress(OSError, UserError, TypeError):
            beat = Heartbeat(**read_json_object(path, fix="delete it"))
            for whole in (beat.rank, beat.pid, beat.step):
                count(whole)
            for seconds in (beat.progress, beat.written, beat.seconds):
                number(seconds)
            found.append(beat)
    return sorted(found, key=lambda heartbeat: heartbeat.rank)


def silent_ranks(heartbeats: list[Heartbeat], now: float | None = None) -> list[str]:
    """Return a line for every rank that is dead, or in an older step than the others.

    Args:
        heartbeats: Heartbeats of one run.
        now: Time of the look; None for this moment.
    """
    now = time.time() if now is None else now
    newest = max((heartbeat.step for heartbeat in heartbeats), default=0)
    lines: list[str] = []
    for beat in heartbeats:
        who = f"rank {beat.rank} on {beat.host} (process {beat.pid})"
        if now - beat.written > 4 * beat.seconds:  # a network disk may delay a writing or two
            since = now - beat.written
            lines.append(f"{who} has been silent for {since:.0f} s, in step {beat.step}")
        elif beat.step < newest:
            since = now - beat.progress
            lines.append(f"{who} is still in step {beat.step} of {newest}, for {since:.0f} s")
    return lines
