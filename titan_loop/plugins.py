"""Modules of the user that add families or tasks, named in the environment.

    TITAN_LOOP_PLUGINS=my_package.my_family,my_package.my_task titan-loop eval runs/mine

A recipe imports what it uses. The other commands read runs, which name a family or a task but no
module: what is imported is for the user to say, not for a downloaded run.
"""

import importlib
import os
import sys
from pathlib import Path

from titan_loop.errors import UserError

PLUGINS = "TITAN_LOOP_PLUGINS"


def import_plugins() -> None:
    """Import the modules that the environment names; each registers what it adds.

    Raises:
        UserError: There is no such module.
    """
    for name in filter(None, os.environ.get(PLUGINS, "").split(",")):
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))  # as for recipes, in the folder the user works in
        try:
            importlib.import_module(name.strip())
        except ModuleNotFoundError as error:
            # Another missing name is a defect inside the module and keeps its traceback.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise UserError(
                f"{PLUGINS}={name}: no module {error.name!r}; name modules importable from the "
                "current folder"
            ) from error
