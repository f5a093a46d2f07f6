"""Cases of xLLM's loops with experts."""

from functools import partial

from tests.contracts.families import Contract, Generated
from titan_loop.families.xllm_moe.model import XllmMoEOptions
from titan_loop.inference.exit_policy import Confidence

options = partial(XllmMoEOptions, experts=4, dim=32)

CONTRACT = Contract(generated={"split": Generated(options(states="split"), Confidence(0.08))})
