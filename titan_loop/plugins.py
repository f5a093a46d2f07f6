"""Modules of the user that add families or tasks, named in the environment.

    TITAN_LOOP_PLUGINS=my_package.my_family,my_package.my_task titan-loop eval runs/mine

A recipe imports what it uses. The other commands read runs, which name a family or a task but no
module: what is imported is for the user to say, not for a downloaded run.
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from titan_loop.errors import UserError

PLUGINS = "TITAN_LOOP_PLUGINS"


def import_plugins() -> None:
    """Import the modules that the environment names; each registers what it adds.

    Raises:
        UserError: There is no such module.
    """
    names = (name.strip() for name in os.environ.get(PLUGINS, "").split(","))
    for name in filter(None, names):
        import_user_module(
            name,
            lambda missing, name=name: (
                f"{PLUGINS}={name}: no module {missing!r}; name modules importable from the "
                "current folder"
            ),
        )


def import_user_module(name: str, refusal: Callable[[str], str]) -> ModuleType:
    """Import a module that the user named, also from the current folder.

    Args:
        name: Dotted name of the module.
        refusal: Maps the name that was not found to the message of the error.

    Raises:
        UserError: There is no such module.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # users write modules in the folder they work in
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Another missing name is a defect inside the module and keeps its traceback.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UserError(refusal(error.name)) from error
