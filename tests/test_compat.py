"""The runtime shims: launcher variables, threads, logs."""

import importlib
import inspect
import logging
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import titan_loop.compat as compat
import torch

from titan_loop.errors import UserError


@pytest.fixture(autouse=True)
def keep_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_started_by_hand_it_is_a_world_of_one():
    environment: dict[str, str] = {}
    assert compat.start_runtime(environment) == (0, 1)
    assert environment["LOCAL_RANK"] == "0"
    assert environment["MASTER_ADDR"] == "127.0.0.1"


def test_under_torchrun_nothing_changes():
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    before = dict(environment)
    assert compat.start_runtime(environment) == (3, 4)
    assert environment == before


@pytest.mark.parametrize("tasks_per_node", ["4", "4(x2)", "4,3"])
def test_slurm_variables_are_translated(tasks_per_node):
    environment = {
        "SLURM_STEP_ID": "0",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29500",
        "SLURM_NTASKS": "8",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_TASKS_PER_NODE": tasks_per_node,
    }
    assert compat.start_runtime(environment) == (5, 8)
    assert environment["LOCAL_RANK"] == "1"
    assert environment["LOCAL_WORLD_SIZE"] == "4"


def test_an_allocation_without_srun_is_a_world_of_one():
    assert compat.start_runtime({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) == (0, 1)


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "1"}, "MASTER_ADDR"),
        ({"RANK": "1", "LOCAL_RANK": "1"}, "WORLD_SIZE"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "LOCAL_RANK"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set but RANK is not"),
        ({"RANK": "abc", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='abc' is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=2 is not below WORLD_SIZE=2"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "99999"},
            "MASTER_PORT='99999'",
        ),
    ],
)
def test_a_variable_the_launcher_forgot_is_named(environment, missing):
    with pytest.raises(UserError, match=missing):
        compat.start_runtime(environment)


def test_ranks_that_share_cores_get_their_share_of_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert compat.threads_per_rank(1) == cores
    assert compat.threads_per_rank(2 * cores) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert compat.threads_per_rank(4) == 3
    torch.set_num_threads(1)
    compat.start_runtime({})
    assert torch.get_num_threads() == (1 if torch.cuda.is_available() else 3)


@pytest.mark.skipif(sys.platform != "linux", reason="the policy is Linux's")
def test_ranks_that_share_a_host_run_in_batches(monkeypatch):
    def policy(*, ranks: int, before: int) -> int:
        """Return the policy of a thread that has started the runtime."""
        launch = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}

        def start() -> int:
            os.sched_setscheduler(0, before, os.sched_param(0))
            compat.start_runtime(launch)
            return os.sched_getscheduler(0)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(start).result()

    assert policy(ranks=2, before=os.SCHED_OTHER) == os.SCHED_BATCH
    assert policy(ranks=1, before=os.SCHED_OTHER) == os.SCHED_OTHER
    assert policy(ranks=2, before=os.SCHED_IDLE) == os.SCHED_IDLE  # as the user asked

    def refuse(*args: object) -> None:
        raise PermissionError("as in a sandbox")

    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    compat.use_batch_scheduling()


def test_the_flight_recorder_leaves_what_torchs_analyser_reads(tmp_path):
    compat.dump_flight_recorder(tmp_path / "comm_traces" / "rank_0")
    trace = pickle.loads((tmp_path / "comm_traces" / "rank_0").read_bytes())
    assert {"version", "pg_config"} <= set(trace)


@pytest.fixture
def root_logger(monkeypatch) -> logging.Logger:
    root = logging.getLogger()
    for name in ("handlers", "filters"):
        monkeypatch.setattr(root, name, [])
    monkeypatch.setattr(root, "level", root.level)
    return root


def test_lines_of_torchtitan_that_mislead_are_dropped_or_corrected(root_logger, capsys):
    compat.start_logging(0)
    logging.getLogger("torchtitan.observability").info("Structured logging disabled via %s", "x")
    root_logger.info("ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING] = 3")
    root_logger.info("[GC] Initial GC collection took 0.00 seconds")
    root_logger.info("Optimizer AdamW: 9 params [*] {'lr': 0.0, 'betas': (0.9, 0.95)}")
    *variables, line = capsys.readouterr().out.splitlines()
    assert bool(variables) == torch.cuda.is_available()  # gloo does not read NCCL's
    assert line.endswith("Optimizer AdamW: 9 params [*] {'betas': (0.9, 0.95)}")


def test_other_ranks_than_0_print_warnings_alone(root_logger, capsys):
    compat.start_logging(3)
    root_logger.info("Training starts at step 1")
    root_logger.warning("a step was skipped")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("a step was skipped")


def test_torch_says_nothing_of_the_norm_that_clips():
    torchs = importlib.import_module("torch.distributed.tensor._redistribute").logger
    compat.quiet_upstream()
    text = "While redistributing from (_NormPartial(2.0)"
    assert not torchs.filter(torchs.makeRecord("x", logging.WARNING, "f.py", 1, text, (), None))
    assert "While redistributing from" in inspect.getsource(sys.modules[torchs.name])
