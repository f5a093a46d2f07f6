"""Parameters that leave no task are refused in one line."""

from functools import partial
from typing import Any

import pytest

from titan_loop.errors import UserError
from train_configs.discoloop.task import TwoGraph
from train_configs.latent.task import DagArithmetic, DagChainOfThought
from train_configs.physics.capo import Capo
from train_configs.physics.layered_paths import LayeredPaths
from train_configs.physics.layered_qa import LayeredQA
from train_configs.recurrent_depth.permutation_hops import PermutationHops
from train_configs.recurrent_depth.two_hop_systematic import TwoHopSystematic
from train_configs.rewards.written_arithmetic import WrittenArithmetic

GRAPHS: Any = partial(DagArithmetic, modulus=7, nodes=12, leaves=3, names=40, test_nodes=(4, 20))


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (Capo, {"people": 0}, "Capo people 0 must be at least 1"),
        (
            Capo,
            {"people": 5, "first_names": 1, "middle_names": 2, "last_names": 2},
            "Capo people 5 must be at most 4, the number of names",
        ),
        (GRAPHS, {"test_nodes": (2, 20)}, "graphs of 2 nodes are smaller than their leaves 3"),
        (GRAPHS, {"fewest_nodes": 13}, "fewest_nodes 13 must be at most its nodes 12"),
        (DagChainOfThought, {"thought": "none"}, "thought 'none' must be one of values, bare_eq"),
        (LayeredPaths, {"tuning_questions": 0}, "tuning_questions 0 must be at least 1"),
        (LayeredPaths, {"tuning_questions": 800_000}, "leave no path for an exam"),
        (LayeredQA, {"hops": 5}, "hops 5 must be at least 2 and below its 5 layers"),
        (LayeredQA, {"trained_questions": 800_000}, "trained_questions 800000 must be below"),
        (PermutationHops, {"hops": 1}, "hops 1 must be at least 2 and at most its asked_hops 40"),
        (PermutationHops, {"entities": 4, "relations": 5}, "holds out 6.25 questions of two hops"),
        (TwoGraph, {"relations": 9}, "relations 9 must be at least its degree 10"),
        (TwoGraph, {"form": "prose"}, "form 'prose' must be symbolic"),
        (TwoGraph, {"inferred_ratio": 9.5}, "inferred_ratio 9.5 must be at least 0.002 and at"),
        (TwoGraph, {"inferred_ratio": 0.001}, "inferred_ratio 0.001 must be at least 0.002 and"),
        (TwoHopSystematic, {"relations": 19}, "relations 19 must be at least its degree 20"),
        (TwoHopSystematic, {"ood_share": 0.0}, "ood_share 0.0 must lie between 0 and 1"),
        (TwoHopSystematic, {"inferred_ratio": 19.0}, "inferred_ratio 19 must be above 0 and at"),
        (TwoHopSystematic, {"entities": 5, "ood_share": 0.001}, "has no question for ood"),
        (WrittenArithmetic, {"fewest_operations": 11}, "max_operations 10 must be at least 11"),
    ],
)
def test_parameters_that_leave_no_task_are_refused(make: Any, change: dict, message: str):
    with pytest.raises(UserError, match=message):
        make(**change)
