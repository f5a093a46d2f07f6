"""Copies of a run's checkpoints in an object store: `checkpoint.remote`.

    REMOTE/STAGE/owner.json            the run that writes here
    REMOTE/STAGE/rewinds.json          its rewinds
    REMOTE/STAGE/step-N/…              files and tags, and manifest.json last: the commit record

A thread of rank 0 copies every checkpoint after its local commit, then applies the keep policy
there. A start without a whole local checkpoint fetches the newest whole remote one. The
remains of an interrupted upload have no manifest and do not count.
"""

import json
import logging
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_loop.checkpoint.choosing import newest_good
from titan_loop.checkpoint.folders import (
    CHECKPOINTS,
    STEP_NAME,
    TAGS,
    committed_steps,
    is_committed,
    read_tags,
    set_aside,
    step_folder,
)
from titan_loop.checkpoint.keep_policy import KeepPolicy
from titan_loop.checkpoint.manifest import MANIFEST, find_damage, read_manifest
from titan_loop.checkpoint.saving import RetryPolicy
from titan_loop.errors import RunFailedError, UserError
from titan_loop.storage.json_files import read_json_object, write_json
from titan_loop.storage.remote_folder import RemoteFolder, check_address

logger = logging.getLogger(__name__)

FIELD = "checkpoint.remote"
OWNER = "owner.json"
OWN_RECORD = "remote.json"
"""File in the run directory with the identity that `OWNER` records."""


class RemoteCheckpoints:
    """The checkpoints of one run in a remote folder; use it on rank 0 only.

    A recipe's stages share `url`. A folder of another run is refused. A reader of the copies makes
    no `claim`.
    """

    def __init__(self, url: str, *, stage: str, run: Path, claim: bool = True) -> None:
        check_address(url, FIELD)
        self._folder = RemoteFolder(f"{url.rstrip('/')}/{stage}" if stage else url, FIELD)
        self._checkpoints = run / CHECKPOINTS
        if claim:
            self._claim(run)

    def steps(self) -> list[int]:
        """Return the steps of all committed remote checkpoints, in increasing order."""
        return sorted(step for step in self._all_steps() if MANIFEST in self._names(step))

    def upload(self, checkpoint: Path) -> None:
        """Copy a committed checkpoint: its files, then its manifest, the commit record."""
        manifest, name = read_manifest(checkpoint), checkpoint.name
        self._delete(name)  # an older attempt at this step may have left files
        beside = [TAGS] if read_tags(checkpoint) else []
        for file in [*manifest["files"], *beside]:
            self._folder.upload(checkpoint / file, f"{name}/{file}")
        self._folder.upload(checkpoint / MANIFEST, f"{name}/{MANIFEST}")

    def delete_stale(self, policy: KeepPolicy) -> None:
        """Apply the keep policy to the copies, and delete the remains of interrupted uploads."""
        manifests = {step: self._manifest(step) for step in self.steps()}
        stale = [step for step in policy.stale(manifests, {}) if not self._is_tagged(step)]
        older = (step for step in self._all_steps() if step < max(manifests, default=0))
        for step in [*stale, *(step for step in older if step not in manifests)]:
            self._delete(f"step-{step}")

    def withdraw(self, unwanted: Callable[[Mapping[str, Any]], bool]) -> None:
        """Delete the committed checkpoints whose manifests are `unwanted`."""
        for step in self.steps():
            if unwanted(self._manifest(step)):
                self._delete(f"step-{step}")
                logger.warning("Deleted %s/step-%d", self._folder.url, step)

    def read(self, name: str) -> dict[str, Any]:
        """Return the record with this name beside the checkpoints; empty if there is none."""
        with suppress(FileNotFoundError):
            return self._parsed(name, self._folder.read(name))
        return {}

    def write(self, name: str, record: Mapping[str, Any]) -> None:
        """Write a record beside the checkpoints."""
        self._folder.write(name, json.dumps(record).encode())

    def fetch_newest(self) -> int | None:
        """Copy the newest whole remote checkpoint here; return its step, None if there is none."""
        steps = self.steps()
        for step in reversed(steps):
            arriving = self._checkpoints / f".fetching-step-{step}"
            if arriving.exists():
                shutil.rmtree(arriving)
            arriving.mkdir(parents=True)
            try:
                reason = self._fetch(step, arriving)
            except (OSError, UserError) as error:
                reason = str(error)
            if not reason:
                target = step_folder(self._checkpoints, step)
                if target.exists():
                    set_aside(target, "damaged")
                arriving.rename(target)
                logger.info("Fetched %s from %s", target, self._folder.url)
                return step
            shutil.rmtree(arriving)
            logger.warning("Skipping %s/step-%d: %s", self._folder.url, step, reason)
        if steps:
            raise RunFailedError(f"no checkpoint in {self._folder.url} arrived whole; start again")
        return None

    def _fetch(self, step: int, arriving: Path) -> str:
        """Copy one checkpoint; return its faults, empty if it is whole."""
        self._folder.download(f"step-{step}/{MANIFEST}", arriving / MANIFEST)
        files = read_manifest(arriving)["files"]
        for file in [*files, *({TAGS} & set(self._names(step)))]:
            self._folder.download(f"step-{step}/{file}", arriving / file)
        return "; ".join(find_damage(arriving, files).values())

    def _is_tagged(self, step: int) -> bool:
        """Return whether the local checkpoint has a name, or the copy if there is no local one."""
        local = step_folder(self._checkpoints, step)
        if not is_committed(local):
            return TAGS in self._names(step)
        tagged = bool(read_tags(local))
        if tagged:  # the tag may be newer than the copy
            self._folder.upload(local / TAGS, f"step-{step}/{TAGS}")
        return tagged

    def _claim(self, run: Path) -> None:
        """Write the identity of this run, unless another run has: two would mix their steps."""
        record = run / OWN_RECORD
        try:
            own: str | None = read_json_object(record, fix="delete it")["run"]
        except FileNotFoundError:
            own = None
        owner = self.read(OWNER).get("run")
        if owner is None:
            # The local record first: a start that is killed in between must know its own claim.
            owner = own = own or secrets.token_hex(8)
            write_json(record, {"run": own})
            self.write(OWNER, {"run": own})
        if owner != own:
            raise UserError(
                f"{FIELD}={self._folder.url} holds the checkpoints of another run; choose another "
                f"folder, or, to go on with that run in {run}, copy its {OWNER} to {record}"
            )

    def _all_steps(self) -> list[int]:
        matches = (re.fullmatch(STEP_NAME, name) for name in self._folder.names())
        return [int(match[1]) for match in matches if match]

    def _delete(self, name: str) -> None:
        self._folder.delete(f"{name}/{MANIFEST}")  # first: without it the rest does not count
        self._folder.delete(name)

    def _names(self, step: int) -> list[str]:
        return self._folder.names(f"step-{step}")

    def _manifest(self, step: int) -> dict[str, Any]:
        return self._parsed(name := f"step-{step}/{MANIFEST}", self._folder.read(name))

    def _parsed(self, name: str, content: bytes) -> dict[str, Any]:
        try:
            record = json.loads(content)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise UserError(
                f"{self._folder.url}/{name} is damaged: it is not a JSON object; delete it, or "
                f"choose another {FIELD}"
            )
        return record


class Uploader:
    """Copies checkpoints in a thread; failures are logged and tried again, and training goes on."""

    def __init__(self, remote: RemoteCheckpoints, policy: KeepPolicy, retry: RetryPolicy) -> None:
        self.remote = remote
        self._policy, self._retry = policy, retry
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._pending: dict[str, Future[None]] = {}

    def submit(self, checkpoint: Path) -> None:
        """Copy a committed checkpoint, after those submitted before it."""
        self._pending[checkpoint.name] = self._thread.submit(self._upload, checkpoint)

    def catch_up(self, checkpoints: Path) -> None:
        """Copy the newest checkpoint of a run if a start that ended early did not."""
        newest = max(committed_steps(checkpoints), default=None)
        if newest is not None and newest not in self.remote.steps():
            self.submit(step_folder(checkpoints, newest))

    def is_uploading(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint still has to be copied, and must not be deleted yet."""
        future = self._pending.get(checkpoint.name)
        return future is not None and not future.done()

    def close(self) -> None:
        """Wait for the copies that are pending."""
        self._thread.shutdown(wait=True)

    def _upload(self, checkpoint: Path) -> None:
        for attempt in self._retry.each():
            try:
                self.remote.upload(checkpoint)
                logger.info("Copied %s", checkpoint)
                self.remote.delete_stale(self._policy)
                return
            except Exception as error:  # every store has errors of its own
                reason = f"{type(error).__name__}: {error}"
                logger.error("Copying %s failed (%s): %s", checkpoint, attempt, reason)


def fetch_if_needed(remote: RemoteCheckpoints, run: Path) -> None:
    """Fetch the newest whole remote checkpoint into a run that has no whole one; on rank 0."""
    try:
        if newest_good(run / CHECKPOINTS, look_at="sizes") is None:
            remote.fetch_newest()
    except UserError as error:
        logger.warning("%s", error)
        if remote.fetch_newest() is None:
            raise
