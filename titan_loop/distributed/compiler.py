"""Checks that `torch.compile` can run, and keeps its results for later starts."""

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.config import CompileConfig

_EMULATES = os.environ.get("TORCHINDUCTOR_EMULATE_PRECISION_CASTS") == "1"  # torch's own default
_SET_BY_A_STAGE = (
    ("torch._functorch.config", "activation_memory_budget", 1.0),
    ("torch._functorch.config", "visualize_memory_budget_pareto", False),
    ("torch._inductor.config", "_micro_pipeline_tp", False),
    ("torch._inductor.config", "emulate_precision_casts", _EMULATES),
)


@dataclass(kw_only=True, slots=True)
class LoopCompileConfig(CompileConfig):
    """torchtitan's settings of compilation, and CUDA graphs."""

    graphs: bool = False
    """Replay visits of the stack as CUDA graphs, forward and backward: on one GPU, where the host
    takes longer than small layers do. Not yet run on a GPU."""

    # Not settable: the streamed loss runs eagerly.
    components: list[str] = field(default_factory=lambda: ["model"], init=False)


def missing_compiler(device_type: str) -> str | None:
    """Return the compiler that `torch.compile` lacks, as the end of a message; None if it is found.

    Inductor (`config.cpp.cxx`) needs a C++ compiler, Triton (`triton.runtime.build`) a C compiler;
    the variables CXX and CC override the usual ones.
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
    """Keep compiled code in `folder` for later starts, unless TORCHINDUCTOR_CACHE_DIR is set.

    torch's default is the temporary folder, which a reboot empties. A run on several nodes stays
    with it, because thousands of small files from hundreds of ranks would slow down a shared disk.
    """
    if os.environ.get("WORLD_SIZE", "1") == os.environ.get("LOCAL_WORLD_SIZE", "1"):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder.absolute()))


def forget_compiled_stage() -> None:
    """Let the next stage compile as if in a new process; the folder of compiled code stays.

    Dynamo counts recompilations over the whole process and fails at the eighth (`recompile_limit`).
    Policy `memory-budget` and float8 set options of the compiler for the whole process.
    """
    for module, name, value in _SET_BY_A_STAGE:
        if module in sys.modules:
            setattr(sys.modules[module], name, value)
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:  # importing it takes seconds, and only compilation needs it
        dynamo.reset()
