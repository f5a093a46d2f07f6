"""Whether `torch.compile` can run: inductor calls a C++ compiler, on CUDA Triton a C compiler."""

import os
import shutil
import sys


def missing_compiler(device_type: str) -> str | None:
    """Return what `torch.compile` looks for and does not find here, or None.

    Looks where inductor (`config.cpp.cxx`) and Triton (`triton.runtime.build`) look: a compiler
    named in the environment is the only one they try.

    Args:
        device_type: "cpu" or "cuda".
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
