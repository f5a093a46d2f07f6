"""Real jobs on a real SLURM: what the manual promises of each event in a job's life.

All runs of `one_run` must log bitwise the same losses, whatever happened to them on the way.
"""

import os
import re
import subprocess
from pathlib import Path
from shutil import which

import pytest

from tests.launch.conftest import ROOT, Cluster, losses, wait_for
from tests.launch.recipes import STEPS
from tests.support.tiny import tiny_config, train_run
from titan_loop.checkpoint.folders import committed_steps
from titan_loop.cli.main import main
from titan_loop.launch.record import read_restarts
from titan_loop.launch.slurm import host_names, show, slurm
from titan_loop.runs.run_directory import RunDirectory
from titan_loop.runs.status import read_status
from titan_loop.storage.json_files import read_jsonl

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


Submitted = tuple[str, Path]
"""A job and its folder."""

BAD_NODE = "n3"


@pytest.fixture(scope="module", autouse=True)
def time_limited(slurm_environment, tmp_path_factory) -> Submitted:
    """A job that trains until its time is nearly up, while the other tests run on other nodes."""
    folder = tmp_path_factory.mktemp("time-limited")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("TEST_HELD_STARTS", "1")
        flags = ("--time=3", "--signal=B:USR1@70", "--exclude=n1,n2,n3")
        job = Cluster(slurm_environment).batch("one_run", folder, *flags, nodes=2)
    return job, folder


@pytest.fixture(scope="module", autouse=True)
def on_a_bad_node(slurm_environment, tmp_path_factory) -> Submitted:
    """A job that gets a node without the network interface; its check ends after a minute."""
    faults = Path(os.environ["SLURM_CONF"]).parent / "faults"
    (faults / BAD_NODE).write_text("export GLOO_SOCKET_IFNAME=missing0\n")
    folder = tmp_path_factory.mktemp("bad-node")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        flags = ("--exclude=n1,n2",)
        job = Cluster(slurm_environment).batch("done_at_once", folder, *flags, nodes=2, run=())
    return job, folder


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def whole(slurm_environment, tmp_path_factory) -> list[float]:
    """The losses of an uninterrupted job on two nodes, submitted and checked as users do.

    It is submitted from inside a requeued job, at a site whose jobs get no environment and whose
    sbatch is a wrapper that prints; its folder has a name that is a pattern of sbatch's.
    """
    cluster, folder = Cluster(slurm_environment), tmp_path_factory.mktemp("whole") / "50%j"
    wrapper = tmp_path_factory.mktemp("bin") / "sbatch"
    wrapper.write_text(f'#!/bin/sh\necho "17 node-hours left"\nexec {which("sbatch")} "$@"\n')
    wrapper.chmod(0o755)
    outer = {"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": "3", "SLURM_NTASKS_PER_NODE": "4"}
    outer |= {"SLURM_CPUS_PER_TASK": "3"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setenv("PATH", f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}")
        for name, value in {**outer, "SBATCH_EXPORT": "NONE"}.items():
            patch.setenv(name, value)
        (job,) = cluster.submit("one_run", folder).values()
    assert cluster.wait_until_it_ends(job, cluster.log(folder, "one_run")) == "COMPLETED"
    return losses(folder)


def test_a_job_on_two_nodes_trains(whole):
    assert len(whole) == STEPS
    assert len(set(whole)) == STEPS


def test_the_template_works_by_itself(cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "site.sh").write_text(cluster.site.read_text())
    resources = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--time=10")
    run = ("--total-tokens=2048", "--batch.global-batch-tokens=1024")
    run = (*run, "--training.local-batch-size=8")
    template = str(ROOT / "slurm" / "pretrain.sbatch")
    job = slurm("sbatch", "--parsable", *resources, template, *run).strip()
    log = tmp_path / f"pretrain-{job}.log"
    assert cluster.wait_until_it_ends(job, log) == "COMPLETED"
    stages = read_status(tmp_path / "runs" / "depth_demo")
    assert [stage.complete for stage in stages] == [True, True]


def test_a_chain_of_two_stages(cluster, tmp_path, capsys):
    jobs = cluster.submit("two_stages", tmp_path, "--no-node-check", nodes=1)
    assert list(jobs) == ["first", "second"]
    assert f"afterok:{jobs['first']}" in show("job", jobs["second"])["Dependency"]
    assert main(["slurm", "submit", "tests.launch.recipes:two_stages", "--nodes=1",
                 "--gpus-per-node=0", "--ranks-per-node=1", "--time=10:00",
                 f"--dump-folder={tmp_path}"]) == 2  # fmt: skip
    assert "has jobs already" in capsys.readouterr().err
    for stage, job in jobs.items():
        assert cluster.wait_until_it_ends(job, cluster.log(tmp_path, stage)) == "COMPLETED"
    (first,) = read_status(tmp_path)
    assert first.complete
    assert first.children[0].complete
    assert main(["slurm", "status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"second +{jobs['second']} +COMPLETED +0 ", shown)
    assert "everything is trained" in shown


def test_requeued_by_hand_and_by_a_node_that_fails(cluster, tmp_path, monkeypatch, whole):
    monkeypatch.setenv("TEST_HELD_STARTS", "2")
    job = cluster.batch("one_run", tmp_path, nodes=2)
    log = cluster.log(tmp_path, "job")
    cluster.wait_for_step(tmp_path, 3, job)
    slurm("scontrol", "requeue", job)
    cluster.wait_for_step(tmp_path, 6, job)
    # What the ranks saved before SLURM ended them.
    assert committed_steps(RunDirectory(tmp_path).checkpoints) == [4]
    node = host_names(show("job", job)["NodeList"])[-1]
    slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    try:
        wait_for(lambda: show("job", job)["Restarts"] == "2", "the job is not requeued")
    finally:
        slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
    assert cluster.wait_until_it_ends(job, log) == "COMPLETED"
    assert losses(tmp_path) == whole
    assert log.read_text().count("start 3, on") == 1  # one log for all starts


def test_a_cancelled_job_saves_and_takes_its_dependents_along(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_HELD_STARTS", "1")
    job = cluster.batch("one_run", tmp_path)
    dependent = cluster.batch("one_run", tmp_path / "dependent", f"--dependency=afterok:{job}")
    cluster.wait_for_step(tmp_path, 3, job)
    slurm("scancel", job)
    assert cluster.wait_until_it_ends(job, cluster.log(tmp_path, "job")) == "CANCELLED"
    assert cluster.wait_until_it_ends(dependent) == "CANCELLED"
    assert committed_steps(RunDirectory(tmp_path).checkpoints) == [4]
    assert show("job", job)["Restarts"] == "0"


def test_a_hung_rank_is_ended_and_the_job_goes_on(cluster, tmp_path, monkeypatch, whole):
    monkeypatch.setenv("TEST_HANG", "1")
    job = cluster.batch("one_run", tmp_path, nodes=2, run=("--no-node-check", "--hang-seconds=20"))
    log = cluster.log(tmp_path, "job")
    assert cluster.wait_until_it_ends(job, log) == "COMPLETED"
    assert "no progress for 20 s (hang_seconds); ended without a new checkpoint" in log.read_text()
    assert "in on_step_end" in log.read_text()  # the stack says where
    assert list((tmp_path / "comm_traces").iterdir())
    assert show("job", job)["Restarts"] == "1"
    assert losses(tmp_path) == whole


def test_a_rank_that_aborts_or_fails_alone_ends_the_job_and_it_goes_on(
    cluster, tmp_path, monkeypatch, whole
):
    """Rank 0 waits in something that never returns, as in a collective of NCCL."""
    monkeypatch.setenv("TEST_FAILS", "abort raise")
    job = cluster.batch("one_run", tmp_path, nodes=2)
    log = cluster.log(tmp_path, "job")
    assert cluster.wait_until_it_ends(job, log) == "COMPLETED"
    assert show("job", job)["Restarts"] == "2"
    said = log.read_text()
    assert "of 2 ranks, 2 without a report" in said  # srun killed rank 0
    assert "of 2 ranks, 1 with code 1, 1 without a report" in said
    assert "RuntimeError: rank 1's own" in said
    assert losses(tmp_path) == whole


@pytest.mark.usefixtures("alone")
def test_an_array_evaluates_every_checkpoint_once(cluster, source, tmp_path, monkeypatch):
    train_run(tiny_config(source, tmp_path / "run", steps=4))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "site.sh").write_text(cluster.site.read_text())
    flags = ("--array=0-1", "--gpus-per-node=0", "--time=10")
    template = str(ROOT / "slurm" / "eval.sbatch")
    job = slurm("sbatch", "--parsable", *flags, template, "run", "--windows=2").strip()
    for task in ("0", "1"):
        log = tmp_path / f"eval-{job}-{task}.log"
        assert cluster.wait_until_it_ends(f"{job}_{task}", log) == "COMPLETED"
    evaluated = read_jsonl(RunDirectory(tmp_path / "run").evals_jsonl)
    assert sorted(record["step"] for record in evaluated) == [2, 4]


def test_at_the_time_limit_a_job_saves_and_goes_on_bitwise(cluster, time_limited, whole):
    job, folder = time_limited
    log = cluster.log(folder, "job")
    assert cluster.wait_until_it_ends(job, log) == "COMPLETED"
    assert show("job", job)["Restarts"] == "1"
    assert "told to end: the ranks save now" in log.read_text()
    assert committed_steps(RunDirectory(folder).checkpoints) == [4, STEPS]
    assert losses(folder) == whole


def test_a_bad_node_is_named_and_excluded(cluster, on_a_bad_node):
    job, folder = on_a_bad_node
    log = cluster.log(folder, "job")
    assert cluster.wait_until_it_ends(job, log) == "COMPLETED"
    reason = f"bad node {BAD_NODE}: rank 0 failed at the all-reduce on its node: RuntimeError: "
    assert reason in log.read_text()
    fields = show("job", job)
    assert fields["Restarts"] == "1"
    assert host_names(fields["ExcNodeList"]) == ["n1", "n2", "n3"]
    assert host_names(fields["NodeList"]) == ["n4", "n5"]
    assert list(read_restarts(folder, "job").bad_nodes) == [BAD_NODE]


def test_the_acceptance_of_two_nodes(cluster, tmp_path):
    """Its folder may not be there, and its flags are those of `submit`."""
    folder, flags = tmp_path / "acceptance", ("--gpus-per-node", "0", "--ranks-per-node", "1")
    done = subprocess.run(
        ["bash", "tools/acceptance.sh", *flags, "--site", str(cluster.site)],
        env={**os.environ, "ACCEPTANCE_FOLDER": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(" ")[0] for line in done.stdout.splitlines()] == [
        *("1/5", "2/5", "3/5", "4/5", "5/5", "accepted:")
    ]
