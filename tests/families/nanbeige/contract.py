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
        ),
    },
)
