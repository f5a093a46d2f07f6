"""Clusters that can exist, and ones that cannot."""

import pytest

from titan_loop.distributed.devices import DEVICES
from titan_loop.errors import UserError
from titan_loop.planning.cluster import Cluster


def cluster(nodes: int = 3, gpus: int = 8, mfu: float = 0.4) -> Cluster:
    return Cluster(nodes=nodes, gpus_per_node=gpus, gpu=DEVICES["h100-80gb"], mfu=mfu)


def test_every_gpu_is_a_rank():
    assert cluster().ranks == 24


@pytest.mark.parametrize("values", [{"nodes": 1}, {"gpus": 1}, {"mfu": 1.0}, {"mfu": 1e-3}])
def test_the_smallest_and_the_fastest_cluster_are_accepted(values):
    cluster(**values).check()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nodes": 0}, "--nodes=0 must be at least 1"),
        ({"gpus": 0}, "--gpus-per-node=0 must be at least 1"),
        ({"mfu": 0.0}, "--mfu 0.0 must be above 0 and at most 1, such as 0.4"),
        ({"mfu": 1.1}, "--mfu 1.1 must be above 0 and at most 1"),
        ({"mfu": 40.0}, "--mfu 40.0 must be above 0"),
    ],
)
def test_a_cluster_that_cannot_exist_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        cluster(**values).check()
