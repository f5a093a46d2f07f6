"""Cases of Inkling's passes."""

from functools import partial
from typing import Any

from tests.contracts.families import Compiled, Contract, Folder, Generated
from tests.distributed.test_parity import HELD, Case
from titan_loop.families.inkling.model import InklingOptions
from titan_loop.inference.exit_policy import Confidence

SMALL: dict[str, Any] = {
    "full_layers": (1, 3, 5),
    "window": 5, "bias_extent": 7, "bias_width": 4, "far_floor": 6, "message_rank": 4,
    "qk_clip": 2.0, "bias_clip": 1.0,
}  # fmt: skip
OTHER: dict[str, Any] = {
    **SMALL,
    "recurrent_steps": 2,
    "n_layers": 7,
    "prelude_layers": 3,
    "coda_layers": 1,
    "block_layers": 3,
    "full_layers": (0, 4),
    "taps": 3, "top_k": 3, "n_kv_heads": 4, "head_dim": 24, "embedding_rows": 312,
    "score_scale": 2.0, "far_alpha": 0.5, "norm_eps": 1e-5, "gate_softcap": 3.0,
    "up_softcap": 10.0, "logit_softcap": 20.0,
}  # fmt: skip
case = partial(Case, family=InklingOptions, steps=(2, 1), options=tuple(SMALL.items()))


CONTRACT = Contract(
    parity={
        "truncated": (
            case(exit_gate=False, backward_steps=1, checkpointing="recurrent-step"),
            "dp2",
        ),
        "held-gated": (case(fsdp=HELD, checkpointing="full"), "ep2"),
    },
    compiled={"passes": Compiled(InklingOptions(**SMALL), steps=2)},
    generated={"passes": Generated(InklingOptions(**SMALL), Confidence(0.05))},
    folders={
        "inkling": Folder(
            "inkling",
            [SMALL, OTHER],
            ties=False,
            transformers=5,
            refused=[
                ({"swa_head_dim": 8}, "swa_head_dim=8 is not supported by titan_loop; only 16"),
                ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
                ({"quantization_config": {"quant_method": "nvfp4"}}, "quantization_config={"),
                ({"layer_types": ["hybrid"]}, "layer_types=['hybrid'] must be 6 times hybrid or"),
                ({"loop_layer_index_end": 9}, "loop_layer_index_end=9 must lie within the layers"),
                ({"sliding_window": 9}, "sliding_window is another name of sliding_window_size"),
                ({"loop_config": {"core_end": 3}}, "model.coda_layers=3 ends at layer 3, which"),
                ({"loop_num_passes": 0}, "loop_num_passes=0 must be a positive integer"),
                ({"num_hidden_layers": 7, "layer_types": None}, "missing"),
            ],
            unfit=[({"exit_gate": True}, (), "model.exit_gate=True: the Inkling format has no")],
        )
    },
    refused=[
        (InklingOptions(prelude_layers=1), "model.prelude_layers=1 ends at layer 1, which"),
        (InklingOptions(coda_layers=1), "model.coda_layers=1 ends at layer 5, which"),
        (InklingOptions(coda_layers=4), "model.coda_layers=4 leaves no loop"),
        (InklingOptions(full_layers=(6,)), "model.full_layers=(6,) must be below"),
        (InklingOptions(hidden_dim=46), "model.hidden_dim=46 must be a multiple of 8"),
        (InklingOptions(top_k=9), "model.top_k=9 is above model.experts=8"),
        (InklingOptions(tie_weights=True), "model.tie_weights=True is not in Inkling"),
        (InklingOptions(embedding_rows=9), "model.embedding_rows=9 is below the head's 128"),
        (InklingOptions(attention="flex"), "model.attention=flex cannot do a relative bias"),
    ],
)
