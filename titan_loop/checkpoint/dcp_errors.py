"""What DCP raises, in words that say what to look for."""

from torch.distributed.checkpoint.api import CheckpointException


def root_cause(error: BaseException) -> BaseException:
    """Return what DCP wrapped; its `CheckpointException` is not even an `Exception`.

    torch's writer swallows the system's error and complains about a file position: that becomes an
    `OSError` which says what it means.
    """
    while isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, RuntimeError) and "inline_container" in str(error):
        first_line = str(error).strip().splitlines()[0]
        return OSError(
            f"a file could not be written to its end: no space or a size limit? {first_line}"
        )
    return error
