"""Running stages one after another on this machine, under SLURM or on Ray: datatrove's executors.

A stage is one datatrove pipeline of so many tasks. datatrove marks every finished task in the
stage's log folder, so that running the same stages again does only what is missing.
"""

import inspect
import json
import logging
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from datatrove.executor.base import PipelineExecutor

from titan_loop.errors import UserError, nearest

logger = logging.getLogger(__name__)

Executor = Literal["local", "slurm", "ray"]
EXECUTORS: tuple[str, ...] = get_args(Executor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One datatrove pipeline: its steps, how many tasks share the work, and its log folder."""

    name: str
    steps: Sequence[Any]
    tasks: int
    logs: Path

    def unfinished(self) -> list[int]:
        """Return the tasks without datatrove's mark of completion."""
        done = self.logs / "completions"
        return [task for task in range(self.tasks) if not (done / f"{task:05d}").exists()]


def run_stages(
    stages: Sequence[Stage], executor: Executor, workers: int, options: Mapping[str, Any]
) -> bool:
    """Run every stage to its end, or submit them all.

    Args:
        stages: In the order of their dependence.
        executor: Where.
        workers: Tasks of a stage that run at the same time.
        options: For datatrove's executor, from the config's table of the same name.

    Returns:
        Whether the stages are done; False if they were only submitted, as under SLURM.

    Raises:
        UserError: If the executor cannot be used here or does not know an option, or if tasks did
            not finish.
    """
    if executor == "slurm":
        if shutil.which("sbatch") is None:
            raise UserError("executor 'slurm' needs sbatch on the PATH: run it on a login node")
        slurm_chain(stages, workers, options)[-1].run()
        return False
    for stage in stages:
        if not stage.unfinished():
            logger.info("%s: finished before, %d tasks skipped", stage.name, stage.tasks)
            continue
        build = _ray if executor == "ray" else _local
        build(stage, workers, options).run()
        unfinished = stage.unfinished()
        if unfinished:  # Ray does not raise what its tasks raised
            raise UserError(
                f"{stage.name}: {len(unfinished)} of {stage.tasks} tasks failed, the first is "
                f"{unfinished[0]}: see {stage.logs / 'logs'}; the same command goes on from there"
            )
    return True


def slurm_chain(
    stages: Sequence[Stage], workers: int, options: Mapping[str, Any]
) -> list[PipelineExecutor]:
    """Return one executor a stage, each depending on the one before.

    Jobs start in this Python's virtual environment, unless the options say otherwise.

    Raises:
        UserError: If `partition` or `time` is missing from the options, or one is unknown.
    """
    from datatrove.executor.slurm import SlurmPipelineExecutor

    for name in ("partition", "time"):
        if name not in options:
            raise UserError(f"executor 'slurm' needs slurm.{name} in the config file")
    environment: dict[str, Any] = {}
    if sys.prefix != sys.base_prefix and not {"env_command", "condaenv"} & set(options):
        environment["venv_path"] = f"{sys.prefix}/bin/activate"
    chain: list[Any] = []
    for stage in stages:
        chain.append(
            _build(
                SlurmPipelineExecutor,
                "slurm",
                stage,
                {
                    "workers": workers,
                    "job_name": f"titan-loop-{stage.name}",
                    "qos": None,
                    "depends": chain[-1] if chain else None,
                    **environment,
                    **options,
                },
            )
        )
    return chain


def _local(stage: Stage, workers: int, options: Mapping[str, Any]) -> PipelineExecutor:
    from datatrove.executor.local import LocalPipelineExecutor

    assert not options
    return _build(LocalPipelineExecutor, "local", stage, {"workers": min(workers, stage.tasks)})


def _ray(stage: Stage, workers: int, options: Mapping[str, Any]) -> PipelineExecutor:
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise UserError("executor 'ray' needs Ray: pip install 'titan-loop[ray]'") from error
    from datatrove.executor.ray import RayPipelineExecutor

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    return _build(RayPipelineExecutor, "ray", stage, {"workers": workers, **options})


def _build(
    cls: type[PipelineExecutor], name: str, stage: Stage, options: Mapping[str, Any]
) -> PipelineExecutor:
    known = [key for key in inspect.signature(cls.__init__).parameters if key != "self"]
    ours = ("pipeline", "tasks", "logging_dir")
    for key in options:
        if key not in known or key in ours:
            raise UserError(
                f"executor {name!r} has no option {key!r}{nearest(key, set(known) - set(ours))}"
            )
    return cls(
        pipeline=list(stage.steps),
        tasks=stage.tasks,  # pyright: ignore[reportCallIssue]
        logging_dir=str(stage.logs),
        **options,
    )


def statistics(logs: Path) -> list[Counter[str]]:
    """Return the statistics of each step of a stage, summed over its finished tasks."""
    totals: list[Counter[str]] = []
    for path in sorted((logs / "stats").glob("*.json")):
        steps = json.loads(path.read_text())
        totals = totals or [Counter() for _ in steps]
        for total, step in zip(totals, steps, strict=True):
            for name, value in step["stats"].items():
                total[name] += int(value["total"] if isinstance(value, dict) else value)
    return totals
