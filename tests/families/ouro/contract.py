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
            refused=[
                ({"model_type": "bert"}, "model_type='bert' cannot be imported; known: "),
                ({"hidden_act": "gelu"}, "only 'silu' can be imported"),
                ({"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
                ({"use_sliding_window": True}, "use_sliding_window=True"),
                ({"early_exit_threshold": 0.3}, "early_exit_threshold=0.3"),
                ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
                ({"total_ut_steps": 0}, "total_ut_steps=0 must be a positive integer"),
                ({"hidden_size": "64"}, "hidden_size='64' must be a positive integer"),
                (
                    {"num_hidden_layers": 3, "layer_types": None},
                    "does not have the 38 tensors of its config.json: 11 missing",
                ),
                ({"tie_word_embeddings": True}, "tie_word_embeddings=true, but lm_head.weight and"),
                ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not"),
                ({"rope_theta": float("nan")}, "rope_theta=nan must be a positive number"),
                ({"num_hidden_layers": 200_000_000}, "=200000000 must be at most 10000"),
                ({"rope_theta": 10**400}, "must be a positive number"),
                ({"bos_token_id": "0"}, "bos_token_id='0' is not a token of the folder's"),
            ],
        )
    },
    refused=[
        (OuroOptions(readout_rank=64), "model.readout_rank=64 must be below"),
        (
            OuroOptions(positions="none", rope_theta=500.0),
            "model.rope_theta=500 has no effect with model.positions=none",
        ),
    ],
)
