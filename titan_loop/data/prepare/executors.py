"""Runs pipelines one after another on this machine, under SLURM or on Ray: datatrove's executors.

datatrove marks every finished task in a pipeline's log folder; a rerun skips finished tasks.
"""

import inspect
import logging
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datatrove.executor.base import PipelineExecutor
from datatrove.executor.local import LocalPipelineExecutor

from titan_loop.data.prepare.config import Executor
from titan_loop.errors import UserError, nearest
from titan_loop.storage.json_files import read_json
from titan_loop.storage.regular_file import DamagedFileError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """One datatrove pipeline: datatrove's steps by our names, in order of execution."""

    name: str
    steps: Mapping[str, Any]
    tasks: int
    logs: Path

    def unfinished(self) -> list[int]:
        """Return the tasks without datatrove's mark of completion."""
        done = self.logs / "completions"
        return [task for task in range(self.tasks) if not (done / f"{task:05d}").exists()]


def run_pipelines(
    pipelines: Sequence[Pipeline], executor: Executor, workers: int, options: Mapping[str, Any]
) -> bool:
    """Run every pipeline, each after the one before, or submit them all to SLURM.

    Args:
        options: Options of datatrove's executor, from the config's table of the same name.

    Returns:
        Whether the pipelines are done; False if they were only submitted, as under SLURM.
    """
    if executor == "slurm":
        if shutil.which("sbatch") is None:
            raise UserError("executor 'slurm' needs sbatch on the PATH: run it on a login node")
        slurm_chain(pipelines, workers, options)[-1].run()
        return False
    for pipeline in pipelines:
        if not pipeline.unfinished():
            logger.info("%s: finished before, %d tasks skipped", pipeline.name, pipeline.tasks)
            continue
        if executor == "ray":
            _ray(pipeline, workers, options).run()
        else:
            local = {"workers": min(workers, pipeline.tasks)}
            _build(LocalPipelineExecutor, executor, pipeline, local).run()
        if unfinished := pipeline.unfinished():  # Ray does not raise its tasks' errors
            raise UserError(
                f"{pipeline.name}: {len(unfinished)} of {pipeline.tasks} tasks failed, the first "
                f"is {unfinished[0]}: see {pipeline.logs / 'logs'}; the same command continues"
            )
    return True


def slurm_chain(
    pipelines: Sequence[Pipeline], workers: int, options: Mapping[str, Any]
) -> list[PipelineExecutor]:
    """Return one executor per pipeline, each depending on the one before.

    Jobs start in this Python's virtual environment, unless the options say otherwise.
    """
    from datatrove.executor.slurm import SlurmPipelineExecutor

    for name in ("partition", "time"):
        if name not in options:
            raise UserError(f"executor 'slurm' needs slurm.{name} in the config file")
    environment: dict[str, Any] = {}
    if sys.prefix != sys.base_prefix and not {"env_command", "condaenv"} & set(options):
        environment["venv_path"] = f"{sys.prefix}/bin/activate"
    chain: list[Any] = []
    for pipeline in pipelines:
        settings = {
            "workers": workers,
            "job_name": f"titan-loop-{pipeline.name}",
            "qos": None,
            "depends": chain[-1] if chain else None,
            **environment,
            **options,
        }
        chain.append(_build(SlurmPipelineExecutor, "slurm", pipeline, settings))
    return chain


def _ray(pipeline: Pipeline, workers: int, options: Mapping[str, Any]) -> PipelineExecutor:
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise UserError("executor 'ray' needs Ray: pip install 'titan-loop[ray]'") from error
    from datatrove.executor.ray import RayPipelineExecutor

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    return _build(RayPipelineExecutor, "ray", pipeline, {"workers": workers, **options})


def _build(
    cls: type[PipelineExecutor], name: str, pipeline: Pipeline, options: Mapping[str, Any]
) -> PipelineExecutor:
    known = set(inspect.signature(cls.__init__).parameters)
    known -= {"self", "pipeline", "tasks", "logging_dir"}
    for key in options:
        if key not in known:
            raise UserError(f"executor {name!r} has no option {key!r}{nearest(key, known)}")
    return cls(
        pipeline=list(pipeline.steps.values()),
        tasks=pipeline.tasks,  # pyright: ignore[reportCallIssue]
        logging_dir=str(pipeline.logs),
        **options,
    )


def statistics(logs: Path, steps: Sequence[str]) -> dict[str, Counter[str]]:
    """Return the counts of each step of a pipeline, summed over its finished tasks."""
    totals: dict[str, Counter[str]] = {name: Counter() for name in steps}
    for path in sorted((logs / "stats").glob("*.json")):
        fix = "pass --overwrite to start over"
        counted = read_json(path, fix=fix)
        try:
            for name, step in zip(steps, counted, strict=True):
                for statistic, value in step["stats"].items():
                    total = value["total"] if isinstance(value, dict) else value
                    totals[name][statistic] += int(total)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            problem = f"not the statistics of {len(steps)} steps"
            raise DamagedFileError(path, problem, fix) from error
    return totals
