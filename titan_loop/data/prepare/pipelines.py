"""The datatrove pipelines of a preparation, in their order, here or under SLURM.

    signatures ─► buckets ─► clusters        only with MinHash
    train:     reader ─► quality ─► MinHash ─► decontamination ─► held-out filter ─► tokenizer
    held_out:  documents that the filter set aside ─► tokenizer

Quality filters come before MinHash, so that a bad document never replaces its good duplicates.
datatrove marks every finished task in a pipeline's log folder; a rerun skips finished tasks.
"""

import inspect
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dill
from datatrove.executor.base import PipelineExecutor
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
)
from tqdm import tqdm

from titan_loop.data.prepare.config import Executor, quality_filter
from titan_loop.data.prepare.decontamination import build_ngram_index, ngram_filter
from titan_loop.data.prepare.preparation import Preparation
from titan_loop.data.prepare.readers import document_reader
from titan_loop.data.prepare.steps import (
    HeldOutFilter,
    HeldOutReader,
    ShortTextSignature,
    SourceTokenizer,
)
from titan_loop.errors import UserError, require_known
from titan_loop.text.tokenizer import TOKENIZER_NAME

logger = logging.getLogger(__name__)

READ, HOLD_OUT, TOKENIZE = "read", "hold_out", "tokenize"
"""Names of steps. A filter's name counts its drops on the card, unless it gives reasons itself."""
_JOBS_NAME = "slurm_jobs.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """One datatrove pipeline: datatrove's steps by our names, in order of execution."""

    name: str
    steps: Mapping[str, Any]
    tasks: int
    logs: Path

    def of_executor(self) -> dict[str, Any]:
        """Return the arguments of datatrove's executors."""
        steps = [*self.steps.values()]
        return {"pipeline": steps, "tasks": self.tasks, "logging_dir": str(self.logs)}

    def unfinished(self) -> list[int]:
        """Return the tasks without datatrove's mark of completion."""
        done = self.logs / "completions"
        return [task for task in range(self.tasks) if not (done / f"{task:05d}").exists()]

    def require_finished(self) -> None:
        """Refuse a pipeline with unfinished tasks."""
        if unfinished := self.unfinished():
            raise UserError(
                f"{self.name}: {len(unfinished)} of {self.tasks} tasks are unfinished, the first "
                f"is {unfinished[0]}: see {self.logs / 'logs'}; the same command continues"
            )


def build_pipelines(preparation: Preparation) -> list[Pipeline]:
    """Return the pipelines in their order, building the n-gram index on the way."""
    config, work = preparation.config, preparation.work

    def pipeline(name: str, steps: dict[str, Any], tasks: int = preparation.tasks) -> Pipeline:
        return Pipeline(name=name, steps=steps, tasks=tasks, logs=preparation.logs(name))

    pipelines: list[Pipeline] = []
    steps = _read_and_filter(preparation)
    if config.minhash is not None:
        signatures, pairs, duplicates = (
            str(work / name) for name in ("signatures", "pairs", "duplicates")
        )
        settings = MinhashConfig(
            n_grams=config.minhash.n_grams,
            num_buckets=config.minhash.num_buckets,
            hashes_per_bucket=config.minhash.hashes_per_bucket,
            seed=config.minhash.seed,
            **config.minhash.for_datatrove(),
        )
        sign = ShortTextSignature(signatures, settings, language=config.language)
        # A reader and filters of their own, for the statistics of steps are the steps'.
        own = {**_read_and_filter(preparation), "signatures": sign}
        match = {"buckets": MinhashDedupBuckets(signatures, pairs, config=settings)}
        cluster = {"clusters": MinhashDedupCluster(pairs, duplicates, config=settings)}
        pipelines.append(pipeline("signatures", own))
        pipelines.append(pipeline("buckets", match, settings.num_buckets))
        pipelines.append(pipeline("clusters", cluster, 1))
        steps["near_duplicate"] = MinhashDedupFilter(duplicates)
    if config.decontaminate is not None:
        index = work / "ngrams"
        if not index.exists():
            build_ngram_index(config.decontaminate, index, config.language)
        steps["contaminated"] = ngram_filter(config.decontaminate, index, config.language)
    if preparation.holds_out:
        files = [file.path for file in preparation.documents.held_out_files]
        steps[HOLD_OUT] = HeldOutFilter(files, preparation.held_out_fraction, work / "held_out")
    steps[TOKENIZE] = _tokenizer(preparation, "train")
    pipelines.append(pipeline("train", steps))
    if preparation.holds_out:
        aside = HeldOutReader(str(work / "held_out"))
        pipelines.append(
            pipeline("held_out", {READ: aside, TOKENIZE: _tokenizer(preparation, "held_out")})
        )
    return pipelines


def _read_and_filter(preparation: Preparation) -> dict[str, Any]:
    config = preparation.config
    reader = document_reader(
        preparation.documents.all_files(),
        paths_file=preparation.logs("inputs.txt"),
        text_key=preparation.text_key,
        chat=preparation.chat,
    )
    filters = {
        name: quality_filter(name)(language=config.language, **options)
        for name, options in config.quality.items()
    }
    return {READ: reader, **filters}


def _tokenizer(preparation: Preparation, split: str) -> SourceTokenizer:
    return SourceTokenizer(
        str(preparation.output / split),
        tokenizer_name_or_path=str(preparation.output / TOKENIZER_NAME),
        eos_token=preparation.eos_token,
        bos_token=preparation.bos_token,
        template=None if preparation.chat is None else preparation.chat.template,
        keep_bytes=split == "held_out",
        seed=0,
    )


def run_pipelines(
    pipelines: Sequence[Pipeline], executor: Executor, workers: int, options: Mapping[str, Any]
) -> bool:
    """Run every pipeline, each after the one before, or submit them all to SLURM.

    `options` is the config's table for datatrove's SLURM executor. Returns whether the pipelines
    are done; False if they were only submitted.
    """
    if executor == "slurm":
        if shutil.which("sbatch") is None:
            raise UserError("executor 'slurm' needs sbatch on the PATH: run it on a login node")
        try:
            slurm_chain(pipelines, workers, options)[-1].run()
        except subprocess.CalledProcessError as error:
            fix = "correct the table [slurm] of the config file"
            raise UserError(f"sbatch failed, see its message above: {fix}") from error
        return False
    for pipeline in pipelines:
        if not pipeline.unfinished():
            logger.info("%s: finished before, %d tasks skipped", pipeline.name, pipeline.tasks)
            continue
        _run_locally(pipeline, workers)
    return True


def _run_locally(pipeline: Pipeline, workers: int) -> None:
    executor = dill.dumps(LocalPipelineExecutor(**pipeline.of_executor()))
    tasks = pipeline.unfinished()
    if min(workers, pipeline.tasks) == 1:
        for task in tasks:
            _run_task(executor, task)
        return
    # datatrove's own pool waits for ever for the task of a worker that was killed.
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _end_with_parent, (receiver,))
    try:
        with receiver, sender, pool:
            try:
                for future in as_completed([pool.submit(_run_task, executor, t) for t in tasks]):
                    future.result()
            except BaseException:
                sender.close()  # ends the workers, for which the pool waits
                raise
    except BrokenProcessPool as error:
        logs = pipeline.logs / "logs"
        begun = [task for task in pipeline.unfinished() if (logs / f"task_{task:05d}.log").exists()]
        raise UserError(
            f"{pipeline.name}: a worker process was killed (out of memory?); begun and not "
            f"finished: {', '.join(map(str, begun)) or 'none'} of {pipeline.tasks} tasks; give "
            "fewer --workers or smaller files; the same command continues"
        ) from error


def _end_with_parent(receiver: Any) -> None:
    """End this process when the parent closes its side or dies, in the midst of any task."""

    def wait() -> None:
        with suppress(EOFError, OSError):
            receiver.recv_bytes()
        os._exit(1)

    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which Python warns of after a kill
    threading.Thread(target=wait, daemon=True).start()


def _run_task(executor: bytes, task: int) -> None:
    # Every task starts from steps without counts.
    dill.loads(executor)._run_for_rank(task)


def slurm_chain(
    pipelines: Sequence[Pipeline], workers: int, options: Mapping[str, Any]
) -> list[PipelineExecutor]:
    """Return one executor per pipeline, each depending on the one before.

    Jobs start in this Python's virtual environment, unless the options say otherwise. Their numbers
    are noted beside the pipelines' logs.
    """
    from datatrove.executor.slurm import SlurmPipelineExecutor

    known = {*inspect.signature(SlurmPipelineExecutor.__init__).parameters}
    known -= {"self", "pipeline", "tasks", "logging_dir"}
    for name in options:
        require_known("an option of slurm in the config file", name, known)
    for name in ("partition", "time"):
        if name not in options:
            raise UserError(f"executor 'slurm' needs slurm.{name} in the config file")
    given: dict[str, Any] = {**options}
    if sys.prefix != sys.base_prefix and not {"env_command", "condaenv"} & options.keys():
        given = {"venv_path": f"{sys.prefix}/bin/activate", **options}
    # Jobs behind one that failed would wait for ever, and keep a restart out.
    given["sbatch_args"] = {"kill-on-invalid-dep": "yes", **options.get("sbatch_args", {})}
    chain: list[Any] = []
    for pipeline in pipelines:
        jobs = pipeline.logs.parent / _JOBS_NAME
        settings = {
            "workers": workers,
            "job_name": f"titan-loop-{pipeline.name}",
            "qos": None,
            "depends": chain[-1] if chain else None,
            "job_id_retriever": partial(_note_job, jobs, options.get("job_id_position", -1)),
            **given,
        }
        chain.append(SlurmPipelineExecutor(**pipeline.of_executor(), **settings))
    return chain


def _note_job(jobs: Path, position: int, answer: str) -> str:
    """Append a job's number, the word at `position` of sbatch's answer, to a file; return it."""
    job = answer.split()[position]
    with jobs.open("a", encoding="utf-8") as file:
        file.write(f"{job}\n")
    return job


def refuse_submitted(logs: Path) -> None:
    """Raise `UserError` while a job that was submitted from these logs is queued or runs.

    A second submission would rewrite the list of tasks that the first one's jobs read.
    """
    jobs = logs / _JOBS_NAME
    if not jobs.exists():
        return
    noted = {*jobs.read_text(encoding="utf-8").split()}
    try:
        # Not `--jobs`: it fails on the number of a job that SLURM has forgotten.
        command = ["squeue", "--noheader", "--format=%F"]
        asked = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = " ".join(str(getattr(error, "stderr", None) or error).split())
        raise UserError(
            f"output {logs.parent} was submitted to SLURM, whose jobs may still run, and squeue "
            f"failed ({reason}): try where it works, or delete {jobs} if they are gone"
        ) from error
    if left := " ".join(sorted(noted & {*asked.stdout.split()})):
        fix = f"wait for them, or end them with scancel {left}"
        raise UserError(f"output {logs.parent} is being prepared by SLURM jobs {left}: {fix}")
    jobs.unlink()
