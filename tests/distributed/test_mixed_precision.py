"""bf16 mixed precision through FSDP, the default on CUDA, run here on gloo."""

import pytest
import torch
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig

from tests.distributed.parallel_model import parallel_model
from titan_loop.distributed.loop_fsdp import reshard_units
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.family import decoder_config
from titan_loop.objectives.expected_loss import ExpectedExitLoss

SEQ_LEN = 16
# bf16 keeps 8 bits; the loss is a mean of many tokens' cross entropies of about 5 nats.
BF16_TOLERANCE = 0.02


def loss_and_dtypes(dtype: str) -> tuple[float, set[torch.dtype], set[torch.dtype]]:
    """Return the loss, the dtypes of states and exit logits, and those of the gate's weights."""
    model, _ = parallel_model(
        decoder_config(OuroOptions(size="debugmodel"), max_seq_len=SEQ_LEN),
        ParallelismConfig(spmd_backend="partial_dtensor"),
        training=TrainingConfig(mixed_precision_param=dtype),
    )
    gate_dtypes: set[torch.dtype] = set()
    model.exit_gate.register_forward_hook(
        lambda module, inputs, output: gate_dtypes.update({module.weight.dtype, output.dtype})
    )
    loss_fn = ExpectedExitLoss.Config().build(compile_config=CompileConfig())
    loss_fn.set_lm_head(model.lm_head)
    tokens = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN)
    output = model(tokens)
    loss, _ = loss_fn(output, tokens + 1, float(tokens.numel()))
    loss.backward()
    reshard_units(model)  # brings the gradients of held layers
    assert all(torch.isfinite(p.grad.to_local()).all() for p in model.parameters())
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    return float(loss), {h.dtype for h in output.hidden_RBLD}, gate_dtypes


@pytest.mark.multiprocess
def test_bf16_keeps_the_gate_in_fp32_and_the_loss_close(gloo_pool):
    pool = gloo_pool(2)
    wide = pool.run(loss_and_dtypes, "float32")
    narrow = pool.run(loss_and_dtypes, "bfloat16")
    for (want, _, _), (loss, states, gate) in zip(wide, narrow, strict=True):
        assert loss == pytest.approx(want, abs=BF16_TOLERANCE)
        assert states == {torch.bfloat16}
        assert gate == {torch.float32}
