"""Two tensor-parallel ranks generate what one process generates."""

import pytest
import torch

from tests.inference.reference import make_model, prompts
from tests.models.test_decoded_channel import make_model as decoding_model
from titan_loop.errors import UserError
from titan_loop.inference.engine import Engine
from titan_loop.inference.exit_policy import KLAndEntropy, QExit
from titan_loop.inference.rows import Completion, Request
from titan_loop.inference.sampling import Sampling
from titan_loop.inference.speculative import SelfSpeculation
from titan_loop.models.families.discoloop import DiscoLoopOptions

pytestmark = pytest.mark.multiprocess

SETTINGS = {
    "full": {},
    "last-q": {"kv_cache": "last", "exit_policy": QExit(0.7)},
    "averaged-kl": {"kv_cache": "averaged", "exit_policy": KLAndEntropy(0.2, 4.5)},
    "first": {"kv_cache": "first"},
    "speculation": {"speculation": SelfSpeculation(1, 3)},
}


DISCO = DiscoLoopOptions(n_kv_heads=2, exit_gate=True, channel_gate="learned", top_k=9)
MODELS = {
    "ouro": lambda: make_model(n_kv_heads=2).double(),
    "disco": lambda: decoding_model(DISCO),
}


def generate_all(
    ranks: int, name: str = "ouro"
) -> dict[str, tuple[list[Completion], list[Completion], int]]:
    model = MODELS[name]()
    if ranks > 1:
        from torchtitan.config import ParallelismConfig
        from torchtitan.distributed import ParallelDims

        from titan_loop.inference.tensor_parallel import spread_over_ranks

        parallelism = ParallelismConfig(
            tensor_parallel_degree=ranks, spmd_backend="partial_dtensor"
        )
        model = spread_over_ranks(model, ParallelDims.from_config(parallelism, ranks))
    asked = [Request(prompt=prompt, max_new_tokens=7) for prompt in prompts(5, 2, 8)]
    results = {}
    for name, options in SETTINGS.items():
        engine = Engine(model, **options)
        greedy = engine.complete(asked)
        sampled = engine.complete(
            asked,
            sampling=Sampling(temperature=1.0, top_p=0.9),
            generator=torch.Generator().manual_seed(3),
        )
        results[name] = (greedy, sampled, engine.work.cache_bytes)
    return results


@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallel_generation_equals_one_process(gloo_pool, name):
    alone = generate_all(1, name)
    for rank in gloo_pool(2).run(generate_all, 2, name):
        for name, (greedy, sampled, cache_bytes) in alone.items():
            assert rank[name][0] == greedy, name
            assert rank[name][1] == sampled, name
            assert rank[name][2] * 2 == cache_bytes


def refuse_other_layouts() -> str:
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims

    from titan_loop.inference.tensor_parallel import spread_over_ranks

    dims = ParallelDims.from_config(ParallelismConfig(spmd_backend="partial_dtensor"), 2)
    with pytest.raises(UserError, match="tensor-parallel ranks alone") as raised:
        spread_over_ranks(make_model(), dims)
    return str(raised.value)


def test_other_layouts_are_refused(gloo_pool):
    assert all("\n" not in message for message in gloo_pool(2).run(refuse_other_layouts))
