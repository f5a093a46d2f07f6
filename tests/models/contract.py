"""Cases of Llama's blocks, looped."""

from functools import partial
from typing import Any

from tests.contracts.families import Compiled, Contract, Folder, Generated
from tests.distributed.test_parity import HELD, Case
from tests.models.dense_blocks import BLOCKS
from titan_loop.inference.exit_policy import Confidence
from titan_loop.models.dense import DenseOptions

LAYOUTS = {
    "qwen3": "tp2",
    "olmo2": "tp2 tp2-no-sp",
    "gemma2": "cp2",
    "gemma3": "tp2",
    "smollm3": "tp2-no-sp",
}
SPLIT: dict[str, Any] = {"n_layers": 3, "prelude_layers": 1, "coda_layers": 1}
# Of Gemma 2, which has the other parts of Gemma 3.
SOFTCAPS = {name: BLOCKS["gemma2"][name] for name in ("attention_softcap", "logit_softcap")}
case = partial(Case, family=DenseOptions, steps=(2, 1))

CONTRACT = Contract(
    parity={
        "normed-tied": (
            case(
                tie_weights=True,
                exit_gate=False,
                options=(("norm_placement", "every_step"),),
                checkpointing="selective",
            ),
            "tp2",
        ),
        "scaled": (
            case(
                checkpointing="full",
                fsdp=HELD,
                options=tuple((BLOCKS["granite"] | BLOCKS["phi3"] | SOFTCAPS).items()),
            ),
            "tp2",
        ),
        "split": (
            case(exit_gate=False, steps=(3, 1), options=tuple(SPLIT.items()), backward_steps=2),
            "dp2",
        ),
        **{
            name: (case(exit_gate=False, options=tuple(BLOCKS[name].items())), layouts)
            for name, layouts in LAYOUTS.items()
        },
    },
    compiled={"gemma3": Compiled(DenseOptions(**BLOCKS["gemma3"]))},
    generated={
        "loop": Generated(DenseOptions(), Confidence(0.05)),
        "norm between": Generated(DenseOptions(norm_placement="every_step"), Confidence(0.05)),
        "prelude and coda": Generated(DenseOptions(**SPLIT), Confidence(0.05)),
        **{
            name: Generated(DenseOptions(**BLOCKS[name]), Confidence(share))
            for name, share in {"mistral": 0.05, "gemma2": 0.025, "gemma3": 0.05}.items()
        },
    },
    folders={
        "llama-unrolled": Folder(
            "nanbeige",
            [
                {"recurrent_steps": 1},
                {"recurrent_steps": 1, "tie_weights": True, "rope_theta": 500.0},
            ],
            refused=[
                ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type='dynamic' is not"),
                ({"rope_scaling": {"rope_type": "llama3", "factor": 32.0}}, "original_max_positio"),
                (
                    {"rope_scaling": {"rope_type": "yarn", "factor": 2, "mscale": 1}},
                    "rope_scaling.mscale=1",
                ),
                ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
                ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported by titan_loop; only"),
                ({"num_experts": 8}, "num_experts=8 is unknown to titan_loop, and may change"),
                ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not"),
                ({"model_type": "qwen3_moe"}, "='qwen3_moe' cannot be imported: its layers are m"),
                (
                    {"model_type": "gemma2", "hidden_activation": "silu"},
                    "hidden_activation='silu' is not supported by titan_loop; only 'gelu_pytorch_",
                ),
                (
                    {"model_type": "qwen3", "layer_types": ["full_attention"]},
                    "layer_types=['full_attention']",
                ),
                ({"model_type": "smollm3", "no_rope_layers": [1, 2]}, "no_rope_layers=[1, 2] is n"),
            ],
            unfit=[
                (
                    {"recurrent_steps": 2, "norm_placement": "every_step"},
                    (),
                    "model.norm_placement=every_step: the unrolled format has no norm",
                )
            ],
        )
    },
)
