"""Cases of the Nanbeige format."""

from tests.contracts.families import Contract, Folder

CONTRACT = Contract(
    folders={
        "nanbeige": Folder(
            "nanbeige",
            [
                {"recurrent_steps": 2, "norm_placement": "every_step"},
                {"recurrent_steps": 4, "norm_eps": 1e-6, "rope_theta": 500.0},
            ],
            own_code=True,
            refused=[
                ({"qk_layernorm": True}, "qk_layernorm=True"),
                ({"loop_share_kv": True}, "loop_share_kv=True"),
                ({"enable_mhc": True}, "enable_mhc=True"),
                ({"loop_loss_weights": [0.1, 0.2, 0.3]}, "loop_loss_weights=[0.1, 0.2, 0.3]"),
                ({"loop_loss_weights": 3}, "loop_loss_weights=3"),
            ],
        )
    }
)
