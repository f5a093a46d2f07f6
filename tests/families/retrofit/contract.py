"""Cases of dense models made loops, with every part that they may get."""

from functools import partial

from tests.contracts.families import Compiled, Contract, Folder, Generated
from tests.distributed.test_parity import HELD, Case
from tests.models.dense_blocks import BLOCKS
from titan_loop.families.retrofit.model import RetrofitOptions
from titan_loop.inference.exit_policy import Confidence
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

SPLIT = {"n_layers": 4, "prelude_layers": 1, "coda_layers": 1}


def case(layouts: str, parts: dict, **fields) -> tuple[Case, str]:
    """Return a case of one looped layer."""
    options = tuple({**SPLIT, "n_layers": 3, **parts}.items())
    same = {"family": RetrofitOptions, "exit_gate": False, "steps": (3, 1), "options": options}
    return Case(**{**same, **fields}), layouts


def rehearsed(config: LoopTrainer.Config) -> None:
    """A bridge and adapters."""
    config.model = RetrofitOptions(
        n_layers=3, prelude_layers=1, coda_layers=1, bridge=True, adapter_rank=2, vocab_size=300
    )
    config.recurrence.steps = Schedule.constant(2)


LATE = {"bridge": True, "adapter_rank": 2, "adapter_first_step": 2}
looped = partial(dict, **SPLIT, recurrent_steps=3)
model = partial(RetrofitOptions, **SPLIT)

CONTRACT = Contract(
    parity={
        "bridge": case("cp2", {"bridge": True}, fsdp=HELD),
        "truncated": case(
            "dp2",
            {"bridge": True, "damping": 2},
            tie_weights=True,
            backward_steps=2,
            checkpointing="recurrent-step",
        ),
        "adapters": case(
            "tp2 tp2-no-sp",
            {"bridge": True, "adapter_rank": 3, "adapter_sets": 2},
            checkpointing="full",
        ),
        "mixer": case("tp2", {"mixer": True}, backward_steps=2),
        "new": case("dp2", {**LATE, "trained": "new"}, steps=(3, 2)),
    },
    compiled={
        "adapters": Compiled(RetrofitOptions(n_layers=1, adapter_rank=2, adapter_sets=3), graphs=3)
    },
    generated={
        "mixer": Generated(model(mixer=True), Confidence(0.05)),
        "adapters": Generated(model(adapter_rank=2, adapter_sets=2, bridge=True), Confidence(0.05)),
        "late adapters": Generated(model(**LATE, adapter_sets=2), Confidence(0.05)),
    },
    rehearsed={"bridge and adapters": rehearsed},
    folders={
        "retrofit": Folder(
            "retrofit",
            [
                looped(bridge=True, rope_theta=500.0),
                looped(damping=3),
                looped(bridge=True, damping=2),
                looped(mixer=True),
                looped(mixer=True, start_noise=0.5),
                *(looped(bridge=True, **block) for block in BLOCKS.values()),
            ],
            own_code=True,
            refused=[
                ({"damping": True}, "damping=True must be"),
                ({"bridge": None}, "bridge=None must be"),
                ({"start_noise": -1.0}, "start_noise=-1.0 must be"),
            ],
        ),
        "retrofit-unrolled": Folder(
            "retrofit",
            [looped(), *(looped(**block) for block in BLOCKS.values())],
            comes_back=False,
            unfit=[
                ({"bridge": True}, (), "model.bridge=True: the unrolled format has no"),
                ({"damping": 2}, (), "model.damping=2: the unrolled format has no"),
                ({"mixer": True}, (), "model.mixer=True: the unrolled format has no place"),
            ],
        ),
    },
    refused=[
        (model(adapter_rank=65), "model.adapter_rank=65 is more than the width, 64"),
        (model(adapter_sets=2), "no effect with model.adapter_rank=0"),
        (model(trained="new"), "there is neither bridge nor mixer nor adapter"),
        (model(new_rate_factor=10.0), "model.new_rate_factor=10.0 has no effect"),
        (model(mixer=True, bridge=True), "model.mixer=True, which reads the prelude at every step"),
        (model(injection="additive"), "reads its prelude through model.bridge"),
    ],
)
