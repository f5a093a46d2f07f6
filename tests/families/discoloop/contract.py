"""Cases of the families with a decoded channel, DiscoLoop and PonderLM."""

from functools import partial

from tests.contracts.families import Compiled, Contract, Generated
from tests.distributed.test_parity import HELD, Case
from titan_loop.families.discoloop.model import DecodingOptions, DiscoLoopOptions
from titan_loop.families.discoloop.ponder import PonderOptions
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

# Micro-batches with two channels between steps, and with none. One layer, but two in a case.
STEPS = (3, 1)
ONE_LAYER = (("n_layers", 1),)
LEARNED = (*ONE_LAYER, ("channel_gate", "learned"))
disco = partial(Case, steps=STEPS, family=DiscoLoopOptions, tie_weights=True, options=ONE_LAYER)
ponder = partial(Case, steps=STEPS, family=PonderOptions)

MODELS: dict[str, DecodingOptions] = {
    "discoloop": DiscoLoopOptions(exit_gate=True, channel_strength=0.7, temperature=0.5),
    "discoloop-learned": DiscoLoopOptions(exit_gate=True, channel_gate="learned", top_k=5),
    "ponder": PonderOptions(exit_gate=True),
    "ponder-untied": PonderOptions(exit_gate=True, tie_weights=False, top_k=100),
    "ponder-published": PonderOptions(exit_gate=True, scale_embeddings=True, start_factor=3.0),
}


def rehearsed(options: type[DecodingOptions], config: LoopTrainer.Config) -> None:
    """One layer, twice."""
    config.model = options(vocab_size=512, n_layers=1)
    config.recurrence.steps = Schedule.constant(2)


CONTRACT = Contract(
    parity={
        "disco-learned-full": (
            disco(options=(*LEARNED, ("top_k", 5), ("temperature", 0.5)), checkpointing="full"),
            "tp2-no-sp cp2",
        ),
        "disco-held-by-step": (
            disco(exit_gate=False, options=LEARNED, checkpointing="recurrent-step+full", fsdp=HELD),
            "dp2-tp2",
        ),
        "disco-always-truncated": (
            disco(
                options=(*ONE_LAYER, ("top_k", 5)),
                reshard="always",
                backward_steps=2,
                checkpointing="selective",
            ),
            "dp2",
        ),
        "ponder-always": (
            ponder(options=(*ONE_LAYER, ("top_k", 9)), reshard="always", checkpointing="selective"),
            "cp2",
        ),
        "ponder-never": (
            ponder(
                reshard="never",
                options=(*ONE_LAYER, ("scale_embeddings", True), ("start_factor", 3.0)),
            ),
            "tp2-no-sp",
        ),
        "ponder-held": (ponder(tie_weights=True, fsdp=HELD), "dp2"),
    },
    compiled={
        f"top-k {top_k}": Compiled(
            DiscoLoopOptions(n_layers=1, channel_gate="learned", top_k=top_k)
        )
        for top_k in (None, 8)
    },
    generated={name: Generated(options) for name, options in MODELS.items()},
    rehearsed={
        each.__name__: partial(rehearsed, each) for each in (DiscoLoopOptions, PonderOptions)
    },
    refused=[
        (PonderOptions(top_k=129), "model.top_k=129 is more than the 128 tokens"),
        (DiscoLoopOptions(tie_weights=False), "model.tie_weights=False does not fit: DiscoLoop"),
        (
            DiscoLoopOptions(channel_gate="learned", channel_strength=0.5),
            "model.channel_strength=0.5 has no effect",
        ),
        (PonderOptions(injection="additive"), "model.injection=additive"),
        (PonderOptions(coda_layers=1), "model.coda_layers=1"),
        (PonderOptions(norm_placement="readout"), "model.norm_placement=readout has no effect"),
        (
            DiscoLoopOptions(top_k=1, temperature=0.5),
            "model.temperature=0.5 has no effect with model.top_k=1",
        ),
    ],
)
