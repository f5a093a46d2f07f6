"""Exit codes of a job's ranks: written by each, counted by the job."""

from titan_loop.runs.exit_reports import (
    REPORTS_VARIABLE,
    RankExit,
    describe_exits,
    read_exits,
    report_exit,
)


def environment(folder, rank: int) -> dict[str, str]:
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURMD_NODENAME": f"n{rank}"}
    return {**job, "SLURM_PROCID": str(rank), REPORTS_VARIABLE: str(folder)}


def test_a_job_counts_its_ranks_by_code_and_names_the_silent_ones(tmp_path):
    for rank, code in ((2, 0), (0, 75)):
        report_exit(code, environment(tmp_path, rank))
    exits = read_exits(tmp_path)
    assert exits == [RankExit(0, "n0", 75), RankExit(2, "n2", 0)]
    said = describe_exits(exits, 3)
    assert said == "of 3 ranks, 1 with code 0, 1 with code 75, 1 without a report"
    assert describe_exits(exits, 2) == "of 2 ranks, 1 with code 0, 1 with code 75"
