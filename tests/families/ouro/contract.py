"""Cases of Ouro beyond those of the core's own tests, which train it."""

from tests.contracts.families import Contract, Folder, Generated
from titan_loop.families.ouro.model import OuroOptions

CONTRACT = Contract(
    generated={"readouts by step": Generated(OuroOptions(readout_rank=2))},
    folders={
        "transformers": Folder(
            "ouro",
            [
                {"recurrent_steps": 2},
                {"n_kv_heads": 2, "tie_weights": True, "rope_theta": 500.0, "recurrent_steps": 4},
            ],
            own_code=True,
        )
    },
    refused=[
        (OuroOptions(readout_rank=64), "model.readout_rank=64 must be below"),
    ],
)
