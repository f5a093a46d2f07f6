"""The commit record of a checkpoint: a small JSON file, written last, by rank 0.

Format version 2:

    step, created      training steps done, UTC time
    trainer            what `LoopTrainer.state_dict` returns: tokens, R, the model's architecture
    data               what the loader's `state_dict` returns: windows consumed, and of what
    lineage            parent checkpoint, recipe hash, stage, library versions; after upcycling
                       `upcycled`: which layer came from which (`upcycling.upcycle_checkpoint`)
    stage_end          whether the stage ended here; such a checkpoint is kept for ever
    files              name -> {"bytes", "sha256"} of every file the ranks wrote
    sha256             of all of the above

The hashes find damage. They do not protect from an attacker, who can write a manifest, too.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, TypedDict

from titan_loop.checkpoint.damage import DamagedCheckpointError
from titan_loop.errors import UserError
from titan_loop.storage.json_files import finite_or_null, write_json

MANIFEST = "manifest.json"
FORMAT_VERSION = 2


class Reference(TypedDict):
    """What lineage says of a checkpoint: where it was, and which it was."""

    path: str
    manifest_sha256: str


def write_manifest(checkpoint: Path, content: dict[str, Any]) -> Reference:
    """Commit the checkpoint in folder `checkpoint`: temporary file, fsync, rename.

    Args:
        checkpoint: The folder, with all other files in it.
        content: Everything but version and hash; of a manifest that was read they are replaced.
    """
    record = {**content, "format_version": FORMAT_VERSION}
    record.pop("sha256", None)
    digest = _digest(record)
    write_json(checkpoint / MANIFEST, {**record, "sha256": digest})
    return {"path": str(checkpoint.resolve()), "manifest_sha256": digest}


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the commit record of the checkpoint in folder `checkpoint`.

    Raises:
        DamagedCheckpointError: It is not what was written.
        UserError: There is none, it cannot be read, or another version of titan_loop wrote it.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        version = manifest["format_version"]
    except FileNotFoundError as error:
        raise UserError(
            f"{checkpoint} has no {MANIFEST}: it is not a checkpoint, or its save never finished; "
            "choose another step"
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check its disk") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(path, f"not a manifest ({error})") from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path} has format version {version}, this titan_loop reads {FORMAT_VERSION}; use the "
            "version that wrote it"
        )
    if manifest.get("sha256") != _digest({k: v for k, v in manifest.items() if k != "sha256"}):
        raise DamagedCheckpointError(path, "it has another SHA-256 than when it was written")
    return manifest


def reference(checkpoint: Path) -> Reference:
    """Return what a descendant's lineage says of the checkpoint in a folder."""
    digest = read_manifest(checkpoint)["sha256"]
    return {"path": str(checkpoint.resolve()), "manifest_sha256": digest}


def _digest(record: dict[str, Any]) -> str:
    canonical = json.dumps(finite_or_null(record), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
