"""Checks that `torch.compile` can run, and keeps its results for later starts.

Inductor calls a C++ compiler, Triton on CUDA a C compiler. Compiled graphs and kernels are keyed by
their content, so one folder serves the ranks of a node and all stages of a recipe.
"""

import os
import shutil
import sys
from pathlib import Path


def missing_compiler(device_type: str) -> str | None:
    """Return the compiler that `torch.compile` lacks, as the end of a message; None if it is here.

    Inductor (`config.cpp.cxx`) and Triton (`triton.runtime.build`) try no other compiler than the
    one named in the environment, if there is one.
    """
    if device_type == "cpu":
        variable, language = "CXX", "C++"
        names = ("clang++",) if sys.platform == "darwin" else ("g++",)
    else:
        variable, language = "CC", "C"
        names = ("gcc", "clang")
    wanted = os.environ.get(variable)
    if any(shutil.which(name) for name in ((wanted,) if wanted is not None else names)):
        return None
    source = f"{variable}={wanted}" if wanted is not None else " or ".join(names)
    return f"no {language} compiler ({source})"


def keep_compiled_code(folder: Path) -> None:
    """Let a later start reuse compiled code.

    torch keeps it in the machine's temporary folder, which a reboot empties. A run on several nodes
    leaves it there: hundreds of ranks that write thousands of small files would be slow on a shared
    disk. TORCHINDUCTOR_CACHE_DIR, if set, decides.
    """
    ranks = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if next(ranks) == next(ranks):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder.absolute()))


def forget_compiled_stage() -> None:
    """Let the next stage compile as if in a new process; the folder of compiled code stays.

    Dynamo counts the recompilations of a layer's code over the whole process and fails at the
    eighth (`recompile_limit`); stages that differ in window, width or trained weights reach it.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:  # importing it takes seconds, and only compilation needs it
        dynamo.reset()
