"""One law each, for every family: ranks, compilation, generation, records, resuming, rehearsal."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tests.contracts.families import as_json, cases, contracts, random_model
from tests.contracts.runs import KILLED_AT, records, train, whole_run
from tests.distributed.test_compile import (
    COMPILED_TOLERANCE,
    DYNAMO_WARNS,
    SEQ_LEN,
    compare_gradients,
    model_of,
    parallelized,
)
from tests.distributed.test_parity import check_parity, runnable
from tests.inference.generation import check_generation
from tests.inference.reference import CONTEXT
from tests.planning.test_rehearsal import (  # noqa: F401
    as_before,
    assert_every_weight_is_reduced_once,
    stage,
)
from tests.support.multiprocess import RankError
from titan_loop.checkpoint.model import check_architecture
from titan_loop.checkpoint.tensors import CheckpointReader
from titan_loop.errors import UserError
from titan_loop.inference.hooks import Hooks, hook_names
from titan_loop.interactive import LoopModel
from titan_loop.models.family import build_decoder, decoder_config, get_family, read_options
from titan_loop.plugins import names
from titan_loop.runs.saved_run import SavedRun

# fp32 sums in another order, through some updates of AdamW
RELATIVE_TOLERANCE = 1e-4
PARITY, COMPILED, RUNS = cases("parity"), cases("compiled"), cases("runs")
LAYOUTS = [(layout, name) for name, (_, layouts) in PARITY.items() for layout in layouts.split()]
OPTIONS = {name: [*contract.options()] for name, contract in contracts().items()}
WINDOW = 16
"""No longer than any case's learned positions."""


def test_every_family_has_a_contract():
    told = {options.family for found in OPTIONS.values() for options in found}
    told |= {options.family for each in contracts().values() for options, _ in each.refused}
    ours = [
        name
        for name in names("families")
        if get_family(name).options.__module__.startswith("titan_loop")
    ]
    assert told >= {*ours}


@pytest.mark.multiprocess
@pytest.mark.parametrize(("layout", "name"), runnable(LAYOUTS))
def test_several_ranks_equal_one_process(gloo_pool, layout, name):
    check_parity(gloo_pool, layout, PARITY[name][0])


@DYNAMO_WARNS
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_layers_equal_eager_ones(name):
    """With a back end that leaves kernels alone: what is around and between graphs is the same."""
    options, steps, graphs = COMPILED[name]
    torch._dynamo.reset()
    counters.clear()
    tokens = torch.randint(128, (2, SEQ_LEN))
    positions = (torch.arange(SEQ_LEN) % 9).expand(2, -1).contiguous()
    eager = model_of(options)
    with torch._dynamo.config.patch(recompile_limit=2):  # layers may take more
        compiled = parallelized(model_of(options), enable=True, backend="aot_eager")
        want, got = (
            model(tokens, positions, recurrent_steps=steps).hidden_RBLD[-1]
            for model in (eager, compiled)
        )
        torch.testing.assert_close(got, want, atol=COMPILED_TOLERANCE, rtol=0)
        compare_gradients(compiled, got, eager, want)
        if graphs is not None:
            compiled(tokens, positions, recurrent_steps=steps - 1).hidden_RBLD[-1].mean().backward()
            with torch.no_grad():
                compiled(tokens, positions, recurrent_steps=steps)
            assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("name", cases("generated"))
def test_cached_generation_equals_full_passes(name):
    options, leaves, steps = cases("generated")[name]
    check_generation(random_model(options, CONTEXT), steps=steps, leaves=leaves)


# One case of every fourth folder.
@pytest.mark.parametrize(
    "name", [*{name.split("/")[0]: name for name in cases("generated")}.values()][::4]
)
def test_generation_with_hooks_equals_full_passes_with_them(name):
    """Rows at other steps of one call of the stack are left alone, drafts are changed, too."""
    options, leaves, steps = cases("generated")[name]
    model = random_model(options, CONTEXT)
    sites = [("loop.2.blocks.*.hook_resid_post", lambda state, hook: state + state.roll(1, -1) / 9)]
    with Hooks(model, sites):
        check_generation(model, steps=steps, leaves=leaves)


@torch.no_grad()
@pytest.mark.parametrize("name", contracts())
def test_hooks_reach_every_site_and_idle_ones_change_no_bit(name):
    tokens = torch.arange(20).view(2, 10)
    for options in OPTIONS[name]:
        model = random_model(options, WINDOW)
        steps, seen = model.config.most_steps or 3, {}

        def keep(value, hook, seen=seen):
            seen[hook.name] = value
            return value.clone()

        want = model(tokens, recurrent_steps=steps)
        with Hooks(model, [("*", keep)]):
            got = model(tokens, recurrent_steps=steps)
        assert all(map(torch.equal, want.hidden_RBLD, got.hidden_RBLD))
        assert {*seen} == {*hook_names(model, steps)}
        states = LoopModel(model, steps, read_text=lambda: pytest.fail("no text")).states(tokens)
        assert torch.equal(states.hidden_RBLD, torch.stack(want.hidden_RBLD))
        last = f"loop.{steps}.blocks.{model.config.looped[-1]}.hook_resid_post"
        assert torch.equal(states.resid_RNBLD[-1, -1], seen[last])
        for site in {name for name in seen if name.startswith("loop.1.")}:
            with Hooks(model, [(site, lambda value, hook: value + value.roll(1, -1) / 9 + 0.1)]):
                got = model(tokens, recurrent_steps=steps)
            outputs = zip(
                want.hidden_RBLD + want.exit_logit_RBL,
                got.hidden_RBLD + got.exit_logit_RBL,
                strict=True,
            )
            assert not all(torch.equal(*pair) for pair in outputs), (options, site)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "ranks"), [(name, ranks) for name, run in RUNS.items() for ranks in run.ranks]
)
def test_a_killed_run_goes_on_with_other_ranks(
    gloo_pool, alone, tmp_path_factory, tmp_path: Path, name, ranks
):
    case, killed = RUNS[name], tmp_path / "killed"
    whole = whole_run(name, tmp_path_factory)
    with pytest.raises(RankError):
        gloo_pool(ranks[0]).run(train, name, killed, ranks[0], True)
    assert SavedRun(killed).steps() == [KILLED_AT - 1]
    gloo_pool(ranks[1]).run(train, name, killed, ranks[1])
    expected, found = records(whole), records(killed)
    assert [*found] == [*expected]
    for step, record in found.items():
        for key in ("data_hash", "recurrent_steps", *case.equal):
            assert record[key] == expected[step][key], (step, key)
        for key in ("loss", "grad_norm", *case.close):
            want = pytest.approx(expected[step][key], rel=RELATIVE_TOLERANCE)
            assert record[key] == want, (step, key)
    readers = [CheckpointReader(SavedRun(run).checkpoint().path) for run in (whole, killed)]
    model = build_decoder(SavedRun.open(whole).model_options, max_seq_len=8, device="meta")
    for key in model.state_dict():
        first, second = (reader.read(key) for reader in readers)
        torch.testing.assert_close(first, second, atol=RELATIVE_TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", cases("rehearsed"))
def test_a_rehearsed_stage_reduces_every_weight_once(name):
    config = stage()
    cases("rehearsed")[name](config)
    assert_every_weight_is_reduced_once(config)


@pytest.mark.parametrize("name", contracts())
def test_a_record_is_the_model_again(name):
    """Options and record as a checkpoint's files keep them."""
    for options in OPTIONS[name]:
        record = decoder_config(options, max_seq_len=WINDOW).architecture
        again = read_options(as_json(asdict(options)))
        same = decoder_config(again, max_seq_len=WINDOW).architecture
        assert as_json(same) == as_json(record)
        check_architecture(as_json(record), record)


@pytest.mark.parametrize(
    "options",
    [each for contract in contracts().values() for each in contract.refused],
    ids=lambda refused: refused[1],
)
def test_options_that_make_no_model_are_one_line(options):
    refused, message = options
    with pytest.raises(UserError) as found:
        decoder_config(refused, max_seq_len=64)
    assert message in str(found.value)
    assert "\n" not in str(found.value)
