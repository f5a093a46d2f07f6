"""`full-offload` in eager form on CPU: only layers' inputs are moved, and no bit changes."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torchtitan.config import CompileConfig, ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile

from tests.support.tiny import tiny_config
from titan_loop.distributed.activation_checkpointing import FullOffloadAC, check_recomputation
from titan_loop.errors import UserError
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.decoder import LoopDecoder
from titan_loop.models.family import build_decoder
from titan_loop.objectives.expected_loss import ExpectedExitLoss
from titan_loop.training.resolved_run import resolve

STEPS, WINDOWS, SEQ_LEN = 3, 2, 16


class CountedOffload(save_on_cpu):
    """Records every tensor that is moved."""

    moved: list[Tensor]

    def __init__(self, pin_memory: bool) -> None:
        super().__init__(pin_memory)
        pack = self.pack_hook

        def counted(tensor: Tensor) -> object:
            self.moved.append(tensor)
            return pack(tensor)

        self.pack_hook = counted


@pytest.fixture
def moved(monkeypatch) -> list[Tensor]:
    tensors: list[Tensor] = []
    monkeypatch.setattr(CountedOffload, "moved", tensors, raising=False)
    monkeypatch.setattr(checkpoint_wrapper, "save_on_cpu", CountedOffload)
    return tensors


def build() -> LoopDecoder:
    torch.manual_seed(0)
    return build_decoder(OuroOptions(size="debugmodel"), max_seq_len=SEQ_LEN)


def gradients(model: LoopDecoder) -> dict[str, Tensor]:
    tokens = torch.randint(128, (WINDOWS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    loss_fn = ExpectedExitLoss.Config().build(compile_config=CompileConfig())
    loss_fn.set_lm_head(model.lm_head)
    output = model(tokens[:, :-1], recurrent_steps=STEPS)
    loss_fn(output, tokens[:, 1:], torch.tensor(float(WINDOWS * SEQ_LEN)))[0].backward()
    return {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def test_the_inputs_of_all_visits_are_moved_and_no_bit_changes(moved):
    want = gradients(build())
    model = build()
    FullOffloadAC.Config().build().apply(model)
    got = gradients(model)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name
    states = [tensor for tensor in moved if tensor.numel()]
    config = model.config
    assert isinstance(config, LoopDecoder.Config)
    assert [state.shape for state in states] == [(WINDOWS, SEQ_LEN, config.dim)] * (
        STEPS * len(config.layers)
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own
def test_under_compilation_nothing_else_is_moved(moved):
    want = gradients(build())
    model = build()
    FullOffloadAC.Config().build().apply(model)
    apply_compile(
        model,
        compile_config=CompileConfig(enable=True, components=["model"], backend="eager"),
        parallel_dims=ParallelDims.from_config(ParallelismConfig(), 1),
    )
    torch._dynamo.reset()
    got = {name.replace("_orig_mod.", ""): value for name, value in gradients(model).items()}
    for name, gradient in want.items():
        assert torch.equal(got[name], gradient), name
    assert sum(tensor.numel() > 0 for tensor in moved) == STEPS * len(model.layers)


def test_it_is_refused_without_a_gpu_and_with_tensor_parallelism(source, tmp_path):
    config = tiny_config(source, tmp_path)
    config.activation_checkpoint = FullOffloadAC.Config()
    with pytest.raises(
        UserError, match=r"full-offload moves states off a GPU, and there is none; use"
    ):
        resolve(config, 1)
    with pytest.raises(
        UserError, match=r"_degree=2 splits the states that .*full-offload moves; use"
    ):
        check_recomputation(
            FullOffloadAC.Config(), ParallelismConfig(tensor_parallel_degree=2), linears={}
        )
