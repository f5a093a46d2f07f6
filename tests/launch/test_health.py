"""The verdict of a node check from the reports of ranks."""

import json
from pathlib import Path

import pytest

from titan_loop.launch.health import bad_nodes
from titan_loop.launch.scheduler import Allocation

ALLOCATION = Allocation(
    job="123", restarts=1, nodes=("n1", "n2", "n3"), ranks_per_node=2, gpus_per_node=0
)


def report(folder: Path, node: str, rank: int, **changes: object) -> None:
    content = {
        "node": node, "rank": rank, "phase": "all", "problems": [], "failure": "", "clock": 100.0,
        **changes,
    }  # fmt: skip
    (folder / f"rank-{rank}.json").write_text(json.dumps(content))


def all_good(folder: Path) -> None:
    for number, node in enumerate(ALLOCATION.nodes):
        for local in range(2):
            report(folder, node, 2 * number + local)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"problems": ["1 of 8 GPUs are there"]}, "1 of 8 GPUs are there"),
        ({"phase": "start"}, "rank 3 hung in its own checks"),
        ({"phase": "node", "failure": "E: x"}, "rank 3 failed at the all-reduce on its node: E: x"),
        ({"phase": "meet"}, "rank 3 did not reach rank 0: it hung"),
        ({"clock": 107.5}, None),  # the other rank of the node disagrees
    ],
)
def test_one_bad_rank_makes_its_node_bad(tmp_path, changes, reason):
    all_good(tmp_path)
    # The others miss it, which says nothing about them.
    report(tmp_path, "n1", 0, failure="E: connection closed")
    report(tmp_path, "n2", 3, **changes)
    bad, others = bad_nodes(tmp_path, ALLOCATION)
    assert bad == ({} if reason is None else {"n2": reason})
    assert others == (["E: connection closed"] if reason is None else [])


def test_what_no_node_is_to_blame_for(tmp_path):
    all_good(tmp_path)
    report(tmp_path, "n2", 3, clock=None)
    report(tmp_path, "n3", 4, failure="RuntimeError: an all-reduce returned a wrong sum")
    assert bad_nodes(tmp_path, ALLOCATION) == (
        {},
        ["RuntimeError: an all-reduce returned a wrong sum", "the all-reduce of all nodes hung"],
    )


def test_a_node_without_reports_and_one_with_another_clock(tmp_path):
    all_good(tmp_path)
    report(tmp_path, "n3", 4, clock=93.0)
    report(tmp_path, "n3", 5, clock=93.1)
    assert bad_nodes(tmp_path, ALLOCATION)[0] == {"n3": "its clock is -7.0 s off"}
    (tmp_path / "rank-3.json").unlink()
    assert bad_nodes(tmp_path, ALLOCATION)[0] == {"n2": "1 of 2 ranks started"}


@pytest.mark.parametrize(
    ("clocks", "bad"),
    [
        ({"n1": 100.0, "n2": 105.0, "n3": 95.0}, {}),  # at the limit of 5 s
        ({"n1": 107.0, "n2": 100.0, "n3": 100.0}, {"n1": "its clock is +7.0 s off"}),
        ({"n1": 107.0, "n2": 100.0}, {"n2": "its clock is -7.0 s off"}),  # the second of two
    ],
)
def test_a_clock_is_compared_with_the_median(tmp_path, clocks, bad):
    nodes = tuple(clocks)
    for rank, node in enumerate(nodes):
        report(tmp_path, node, rank, clock=clocks[node])
    job = Allocation(job="1", restarts=0, nodes=nodes, ranks_per_node=1, gpus_per_node=0)
    assert bad_nodes(tmp_path, job) == (bad, [])
