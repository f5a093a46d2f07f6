"""Every torchtitan and torch seam this package stands on.

An upgrade fails here first, with the name of the seam, instead of somewhere inside a run.
"""

import importlib
import inspect
import re
import subprocess
import sys
from importlib import metadata

import pytest
import titan_loop.compat as compat
import torch
import torch.distributed as dist
import torchtitan.trainer
import tyro
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import DeviceMemoryMonitor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.rope import CosSinRoPE
from torchtitan.protocols.module import Module
from torchtitan.tools import utils as titan_utils
from torchtitan.trainer import Trainer

import titan_loop.light_imports as light_imports


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(function) -> str:
    return inspect.getsource(function)


def test_versions_are_within_the_tested_bounds():
    assert metadata.version("torchtitan") == "0.3.0"
    assert (2, 13) <= tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 16)


def test_trainer_hands_over_what_we_rely_on():
    body = source(Trainer.__init__)
    for seam in (
        "isinstance(self.loss_fn, ChunkedLossWrapper)",
        "self.loss_fn.set_lm_head(lm_head)",
        'states={"train_state": self}',
        "config.lr_scheduler.build(",
        "model_config.update_from_config(",
        "model_config.get_nparams_and_flops(model, config.training.seq_len)",
    ):
        assert seam in body, seam
    loop = source(Trainer.train)
    order = [
        "self.checkpointer.load(",
        "self.batch_generator(self.dataloader)",
        "self.train_step(data_iterator)",
        "self.checkpointer.save(",
    ]
    positions = [loop.index(seam) for seam in order]
    assert positions == sorted(positions)
    assert "last_step=(self.step == config.training.steps)" in loop


def test_trainer_closes_what_ours_closes():
    closed = re.findall(r"self\.(\w+)\.close\(\)", source(Trainer.close))
    assert closed == ["checkpointer", "metrics_processor"]
    assert "if not self.config.training.disable_cuda_graphs" in source(Trainer.close)


@pytest.mark.parametrize(
    ("function", "seam"),
    [
        (CheckpointManager._save, "self._purge_stale_checkpoints()"),
        (DeviceMemoryMonitor.get_peak_stats, "device_module"),
        (Trainer.post_dataloading_process, "model.get_attention_masks("),
        (CosSinRoPE._init_self_buffers, "self._precompute_cache()"),
        (Module.parallelize, "self._redistribute_inputs("),
        (ActivationCheckpointing.apply, 'get_submodule("layers")'),
        (OptimizersContainer._build_param_groups, "name not in claimed and pattern.search(name)"),
    ],
)
def test_upstream_calls_what_we_replace(function, seam):
    """Names and arguments are the type checker's affair."""
    assert seam in source(function)


def test_upstream_still_drops_the_loss_metrics():
    """The reason for `training/gradients.py`; use upstream's body when this fails."""
    assert "loss, _ = self.loss_fn(" in source(Trainer._forward_backward_body)


def test_tyro_returns_unknown_words_as_they_were_written():
    def verb(path: tyro.conf.Positional[str], *, stage: str = "") -> tuple[str, str]:
        return path, stage

    words = ["--stages.mid_training.total_tokens=5", "--mixture", "a_b=1", "kind:full", "-3"]
    answer = tyro.cli(
        verb, args=["x", *words, "--stage", "b"], return_unknown_args=True, add_help=False
    )
    assert answer == (("x", "b"), words)


def test_the_trainer_s_clock_has_only_what_the_one_without_a_pause_has():
    body = inspect.getsource(torchtitan.trainer)
    assert set(re.findall(r"\btime\.(\w+)", body)) <= {"perf_counter", "sleep"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the shims for machines without CUDA")
def test_cpu_shims_are_in_place_before_torchtitan_copies_them():
    assert titan_utils.device_type == "cpu"
    assert isinstance(titan_utils.device_module, compat.CpuDevice)
    assert torchtitan.distributed.parallel_dims.device_type == "cpu"
    assert dist_utils.device_type == "cpu"
    assert dist_utils.get_local_device() == torch.device("cpu")
    assert callable(dist.set_timeout)
    stats = titan_utils.device_module.memory_stats()
    assert stats["active_bytes.all.peak"] > 1e7


def test_unused_parts_of_torchtitan_are_imported_on_demand():
    """`datasets` with pandas, TensorBoard with S3's client and, without a GPU, the compiler."""
    unused = ["datasets", "pandas", "tensorboard", "boto3", "wandb"]
    if not torch.cuda.is_available():
        unused.append("torch._inductor.compile_fx")
    code = (
        "import sys, titan_loop.training.trainer\n"
        f"print([name for name in {unused!r} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_what_is_imported_on_demand_works(tmp_path):
    text_datasets = importlib.import_module("torchtitan.hf_datasets.text_datasets")
    imported = re.findall(r"^from datasets.*", inspect.getsource(text_datasets), re.MULTILINE)
    assert imported == [
        "from datasets import Dataset, load_dataset",
        "from datasets.distributed import split_dataset_by_node",
    ]
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    loaded = text_datasets.load_dataset(
        "json", data_files=str(tmp_path / "a.jsonl"), split="train", cache_dir=str(tmp_path)
    )
    assert isinstance(loaded, text_datasets.Dataset)
    assert not isinstance([], text_datasets.Dataset)
    assert text_datasets.split_dataset_by_node(loaded, 1, 2)["text"][0] == "b"


def test_tensorboard_imported_on_demand_works(tmp_path):
    metrics = importlib.import_module("torchtitan.components.metrics")
    imported = re.findall(r"^from torch.utils.tens.*", inspect.getsource(metrics), re.MULTILINE)
    assert imported == ["from torch.utils.tensorboard import SummaryWriter"]
    logger = metrics.TensorBoardLogger(str(tmp_path / "tb"))
    logger.log({"loss": 1.0}, 1)
    logger.close()
    assert list((tmp_path / "tb").glob("events.out.*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="functions are compiled at once beside a GPU")
def test_functions_compiled_on_demand_are_part_of_a_larger_graph():
    assert "torch.compile(" in inspect.getsource(FlexAttention)
    assert FlexAttention._compiled_flex_attn.__qualname__ == "flex_attention"
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    double = light_imports.compile_on_demand(lambda x: 2 * x, backend=backend)
    one = torch.ones(2)
    assert torch.equal(double(one), 2 * one)
    assert len(graphs) == 1
    whole = torch.compile(lambda x: double(x) + 1, backend=backend, fullgraph=True)
    assert torch.equal(whole(one), 2 * one + 1)
    assert len(graphs) == 2


def test_a_group_of_fsdp_modules_counts_as_visited_once():
    """`compat.gather_at_every_visit` takes the group's hooks off and these methods instead."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    body = source(FSDPState.init)
    assert "self._pre_forward_hook_handle = hook_handle" in body
    assert "self._post_forward_hook_handle = hook_handle" in body
    assert parameters(FSDPState._pre_forward) == ["self", "module", "args", "kwargs"]
    assert parameters(FSDPState._post_forward) == ["self", "module", "input", "output"]
