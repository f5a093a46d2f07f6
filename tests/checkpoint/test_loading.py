"""A checkpoint is loaded whole or refused in one line, by one process and by all ranks together."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.checkpoint.small_checkpoint import assert_one_line, rewrite, state, write, zeros
from titan_loop.checkpoint.loading import KeyPolicy, load_checkpoint
from titan_loop.checkpoint.manifest import DamagedCheckpointError
from titan_loop.checkpoint.tensor_table import TableWriter
from titan_loop.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "step-1")


def test_whatever_dcp_writes_is_read_back(checkpoint):
    loaded = zeros()
    load_checkpoint(loaded, checkpoint, group=None)
    expected = state()
    for key in ("weight", "half", "last", "scalar"):
        assert torch.equal(loaded.pop(key), expected.pop(key)), key
    assert loaded == expected


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_bytes(b"\0" * path.stat().st_size),
    ],
    ids=["missing", "truncated", "zeroed"],
)
def test_a_damaged_shard_is_named(checkpoint, harm):
    harm(checkpoint / "__0_0.distcp")
    with pytest.raises(DamagedCheckpointError) as caught:
        load_checkpoint({"weight": torch.zeros(6, 4)}, checkpoint, group=None, policy=ANY_SAVED)
    assert_one_line(caught.value, "__0_0.distcp")


ANY_SAVED = KeyPolicy(ignore_saved=("*",))


def test_all_differences_of_keys_are_listed(checkpoint):
    wanted = zeros()
    del wanted["text"]
    wanted |= {"weight": torch.zeros(6, 5), **{f"new{i:02}": torch.zeros(1) for i in range(12)}}
    with pytest.raises(UserError) as caught:
        load_checkpoint(wanted, checkpoint, group=None)
    names = ", ".join(f"new{i:02}" for i in range(10))
    assert_one_line(
        caught.value,
        f"12 entries are missing: {names}, …;",
        "1 entries are not wanted: text",
        "1 tensors have another shape: weight is [6, 4] and should be [6, 5]",
        "or set checkpoint.carry",
    )
    moments = {"optimizer.state.weight.momentum_buffer": torch.zeros(6, 4)}
    with pytest.raises(UserError, match=r"without its moments \(--checkpoint\.carry\.no-optimizer"):
        load_checkpoint(zeros() | moments, checkpoint, group=None)


def test_a_policy_allows_what_it_names_and_says_so(checkpoint, caplog):
    caplog.set_level("INFO")
    wanted = {"weight": torch.zeros(6, 4), "exit_gate.bias": torch.ones(1)}
    policy = KeyPolicy(ignore_saved=("optimizer.*", "text", "[hls]*"), keep_initial=("exit_*",))
    load_checkpoint(wanted, checkpoint, group=None, policy=policy)
    assert torch.equal(wanted["weight"], state()["weight"])
    assert torch.equal(wanted["exit_gate.bias"], torch.ones(1))
    assert "1 entries are not in" in caplog.text
    assert "exit_gate.bias" in caplog.text
    with pytest.raises(UserError, match="1 entries are not wanted: text"):
        load_checkpoint(
            wanted,
            checkpoint,
            group=None,
            policy=replace(policy, ignore_saved=("optimizer.*", "[hls]*")),
        )


def sharded_state() -> dict[str, Any]:
    """Return model and optimiser under FSDP 2 and tensor parallelism 2, after one step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    model.set_gradient_divide_factor(1.0)  # pyright: ignore
    model.set_force_sum_reduction_for_comms(True)  # pyright: ignore
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    return {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def full(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def save_sharded(checkpoint: Path) -> dict[str, Any]:
    content = sharded_state()
    save(content, storage_writer=TableWriter(checkpoint))
    return full(content)


def load_on_all_ranks(checkpoint: Path) -> tuple[str, str]:
    group = dist.new_group(backend="gloo")
    wanted = sharded_state()
    try:
        load_checkpoint(wanted, checkpoint, group=group)
    except UserError as error:
        return type(error).__name__, str(error)
    return "loaded", ""


def test_all_ranks_refuse_together(gloo_pool, tmp_path):
    pool, checkpoint = gloo_pool(4), tmp_path / "step-1"
    expected = pool.run(save_sharded, checkpoint)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = {
            key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
            for key, value in expected.items()
            if key != "optimizer"
        }
        load_checkpoint(loaded, checkpoint, group=None, policy=KeyPolicy(("optimizer.*",)))
    expected.pop("optimizer")
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)
    assert pool.run(load_on_all_ranks, checkpoint) == [("loaded", "")] * 4

    # Only the ranks that read rank 3's file would notice by themselves.
    shard = checkpoint / "__3_0.distcp"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100])
    kinds = pool.run(load_on_all_ranks, checkpoint)
    assert {kind for kind, _ in kinds} == {"DamagedCheckpointError"}
    assert all("__3_0.distcp" in text for _, text in kinds), kinds
    shard.write_bytes(whole)

    rewrite(checkpoint, lambda entries: entries["0.weight"]["chunks"].pop())
    kinds = pool.run(load_on_all_ranks, checkpoint)
    assert {kind for kind, _ in kinds} == {"DamagedCheckpointError"}
    assert all("0.weight is incomplete" in text for _, text in kinds), kinds
