"""For every family: ranks equal one process, and a run that broke off goes on with other ranks."""

from pathlib import Path

import pytest
import torch

from tests.contracts.families import cases
from tests.contracts.runs import BREAKS_AT, records, train, whole_run
from tests.distributed.test_parity import check_parity, runnable
from tests.support.multiprocess import RankError
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.models.family import build_decoder
from titan_loop.runs.saved_run import SavedRun

pytestmark = pytest.mark.multiprocess

# fp32 sums in another order, through some updates of AdamW
RELATIVE_TOLERANCE = 1e-4
PARITY, RUNS = cases("parity"), cases("runs")
LAYOUTS = [(layout, name) for name, (_, layouts) in PARITY.items() for layout in layouts.split()]


@pytest.mark.parametrize(("layout", "name"), runnable(LAYOUTS))
def test_several_ranks_equal_one_process(gloo_pool, layout, name):
    check_parity(gloo_pool, layout, PARITY[name][0])


@pytest.mark.parametrize(
    ("name", "ranks"), [(name, ranks) for name, run in RUNS.items() for ranks in run.ranks]
)
def test_a_run_that_broke_off_goes_on_with_other_ranks(
    gloo_pool, alone, tmp_path_factory, tmp_path: Path, name, ranks
):
    case, broken = RUNS[name], tmp_path / "broken"
    whole = whole_run(name, tmp_path_factory)
    with pytest.raises(RankError, match="broken off"):
        gloo_pool(ranks[0]).run(train, name, broken, ranks[0], True)
    assert SavedRun(broken).steps() == [BREAKS_AT - 1]
    gloo_pool(ranks[1]).run(train, name, broken, ranks[1])
    expected, found = records(whole), records(broken)
    assert [*found] == [*expected]
    for step, record in found.items():
        for key in ("data_hash", "recurrent_steps", *case.equal):
            assert record[key] == expected[step][key], (step, key)
        for key in ("loss", "grad_norm", *case.close):
            want = pytest.approx(expected[step][key], rel=RELATIVE_TOLERANCE)
            assert record[key] == want, (step, key)
    readers = [CheckpointReader(SavedRun(run).checkpoint().path) for run in (whole, broken)]
    model = build_decoder(SavedRun.open(whole).model_options, max_seq_len=8, device="meta")
    for key in model.state_dict():
        first, second = (reader.read(key) for reader in readers)
        torch.testing.assert_close(first, second, atol=RELATIVE_TOLERANCE, rtol=0)
