"""Importing this module switches off datatrove's log, which has a banner and a drawing per task.

Modules with readers and executors import it, so that processes that run their tasks do, too.
"""

from loguru import logger

logger.disable("datatrove")
