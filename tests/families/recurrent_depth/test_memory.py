"""GPT-2's blocks on several ranks: numbers equal to one process, and the memory of a step."""

from tests.distributed.test_memory import LONG, check_peak
from titan_loop.families.recurrent_depth.model import RecurrentDepthOptions


def test_the_meter_s_peak_is_near_the_allocator_s(gloo_pool):
    settings = {"policy": "per_step", "checkpointing": "none", "dtype": "float32", "steps": 2}
    model = RecurrentDepthOptions(size="small")
    check_peak(gloo_pool, "other-blocks", {**LONG, **settings, "model": model})
