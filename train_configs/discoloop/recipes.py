"""DiscoLoop (a decoded channel inside the loop), its baselines, and PonderLM.

    discoloop_symbolic    two hops over two graphs, as published: plain, DiscoLoop, untied copies
    discoloop_three_hop   three hops, likewise
    discoloop_language    two hops in English, direct and reverse, with the learned gate
    discoloop_440m        language models on 20B tokens: plain loop, PonderLM, DiscoLoop
    two_hop_small         two hops in miniature, for one core
    two_hop_strengths     its DiscoLoop with other α, and with other τ
    three_hop_small       three hops in miniature, likewise

For the tasks splits, R, gate, τ and epochs are published. Not published, hence ours: size,
optimiser, rate, batch and template of tokens, here two layers of D 768, AdamW at 1e-4 with a decay
of 0.1 and batches of 512 questions.

For the language models everything is published except the feed-forward width, where 2,816 gives
440M parameters, Adam's β and decay, and DiscoLoop's kind of gate and τ: here the fixed gate with
α = 1, and τ = 1. PonderLM's arm follows its own authors' scripts for 410M to 1.4B: embeddings
scaled by √D, R − 1 times larger in the first step, and a softmax over all tokens.

`discoloop_440m` reads two sources, tokenised with DeepSeek-V3-0324's tokenizer of 129,280 tokens:

    corpora/discoloop/fineweb-edu      HuggingFaceFW/fineweb-edu, sample-100BT   60 % of tokens
    corpora/discoloop/finemath-4plus   HuggingFaceTB/finemath, finemath-4plus    40 %

The results of the small one depend on φ, the number of trained chains per fact: it is
 `--dataloader.inferred-ratio`, 2 as published and 7.5 in the small one.

Source: Fu et al. 2026 (DiscoLoop), arXiv 2607.00341, §3.1, §5 and Appendices A and B.
"""

from copy import deepcopy
from dataclasses import replace
from typing import Any

from titan_loop.analysis.results import ResultTable
from titan_loop.data.load.loader import WindowLoader
from titan_loop.data.load.task_loader import TaskLoader
from titan_loop.distributed.activation_checkpointing import SelectiveAC
from titan_loop.families.discoloop.model import ChannelGate, DiscoLoopOptions
from titan_loop.families.discoloop.ponder import PonderOptions
from titan_loop.families.ouro.model import OuroOptions
from titan_loop.models.loop_options import LoopOptions
from titan_loop.recipes.recipe import Recipe, Stage
from titan_loop.training.evaluation_config import SuiteConfig
from titan_loop.training.optimizers.adamw import AdamWConfig
from titan_loop.training.optimizers.muon import MuonConfig
from titan_loop.training.schedule import Schedule
from titan_loop.training.trainer import LoopTrainer

from ..runs import at, by_steps, recipe_of, run
from .task import Form, TwoGraph

CORPUS = "corpora/discoloop"
WINDOW_440M, BATCH_440M = 8_192, 2**20
TOKENS_440M = 19_074 * BATCH_440M

PAPER_SIZE: dict[str, Any] = {"size": "134m", "n_layers": 2}

SMALL = TwoGraph(entities=40, relations=10, degree=10, inferred_ratio=7.5)
SMALL_SIZE: dict[str, Any] = {
    "size": "debugmodel",
    "norm_placement": "readout",
    "n_layers": 1,  # with two, a single step composes the chains that training composed
    "dim": 128,
    "hidden_dim": 256,
    # The second step then asks in the same form as the first; README.md measures each of these.
    "positions": "bias",
    "relative_window": 3,
    "scale_embeddings": True,
    "dropout": 0.2,
    "embedding_dropout": 0.2,
}
SMALL_BATCH, TWO_HOP_STEPS, THREE_HOP_STEPS, COPIES_STEPS = 256, 3_500, 5_000, 10_000
_THREE_HOPS = replace(SMALL, hops=3)
STRENGTHS: dict[str, tuple[str, list[float]]] = {
    "alpha": ("channel_strength", [0.25, 0.5, 2.0, 4.0]),
    "tau": ("temperature", [0.25, 0.5, 2.0, 4.0]),
}
"""Symbol in names of stages → option of the model, and its values beside 1."""
BOTH_ONE = "both_1"
"""Stage in which α and τ are 1, as in two_hop_small."""


def discoloop_symbolic() -> Recipe:
    """Two hops over two graphs, as published: plain loop, DiscoLoop, untied copies."""
    return Recipe(name="discoloop_symbolic", stages=_published(TwoGraph(), epochs=3_000))


def discoloop_three_hop() -> Recipe:
    """Two and three hops with R = 3, as published."""
    return Recipe(name="discoloop_three_hop", stages=_published(TwoGraph(hops=3), epochs=3_000))


def discoloop_language() -> Recipe:
    """Two hops in English with the learned gate, as published, in direct and in reverse order."""
    forms: tuple[Form, ...] = ("direct", "reverse")
    return Recipe(
        name="discoloop_language",
        stages=[
            Stage(name=f"{form}_{stage.name}", config=stage.config)
            for form in forms
            for stage in _published(TwoGraph(form=form), epochs=5_000, channel_gate="learned")
        ],
    )


def discoloop_440m() -> Recipe:
    """Language models of 440M parameters on 20B tokens, R = 4: plain loop, PonderLM, DiscoLoop."""
    steps = 4
    shared: dict[str, Any] = {
        "size": "374m",
        "rope_theta": 1e6,
        "exit_gate": False,
        "tie_weights": True,
    }
    models = {
        "plain": OuroOptions(**shared),
        "ponder": PonderOptions(**shared, scale_embeddings=True, start_factor=steps - 1.0),
        "discoloop": DiscoLoopOptions(**shared, top_k=128),
    }
    return recipe_of(
        "discoloop_440m", {name: _language(model, steps) for name, model in models.items()}
    )


def two_hop_small() -> Recipe:
    """Two hops over two graphs of 40 entities, on one core: plain loop, DiscoLoop, copies."""
    return Recipe(name="two_hop_small", stages=_small(SMALL, TWO_HOP_STEPS))


def two_hop_strengths() -> Recipe:
    """DiscoLoop of two_hop_small, whose α and τ are 1, and with one of them changed."""
    changes: dict[str, dict[str, float]] = {BOTH_ONE: {}}
    for symbol, (option, values) in STRENGTHS.items():
        changes |= {f"{symbol}_{value:g}": {option: value} for value in values}
    stages = []
    for name, change in changes.items():
        (stage,) = (stage for stage in _small(SMALL, TWO_HOP_STEPS) if stage.name == "discoloop")
        stage.config.model = replace(stage.config.model, **change)
        stages.append(Stage(name=name, config=stage.config))
    return Recipe(name="two_hop_strengths", stages=stages)


def three_hop_small() -> Recipe:
    """Three hops over graphs of 40 entities, on one core: loops learn two hops first.

    With R = 3 from the start, facts of B are found in two steps, since nothing asks for them
    sooner, and then a third hop does not fit; README.md lists the attempts. In `discoloop_gate` the
    loss of every step asks for them, weighted by a gate of high entropy: it gives all steps that
    can answer a question equal shares.
    """
    *loops, _ = _small(_THREE_HOPS, THREE_HOP_STEPS)
    *_, copies = _small(_THREE_HOPS, COPIES_STEPS)  # as many as hops, so they begin anew
    stages = []
    for first, then in zip(_small(SMALL, TWO_HOP_STEPS), loops, strict=False):
        first.name = then.parent = f"{then.name}_two_hops"
        stages += [first, then]
    gated = deepcopy(stages[-2:])
    for stage in gated:
        stage.name = stage.name.replace("discoloop", "discoloop_gate")
        stage.config.model = replace(stage.config.model, exit_gate=True)
    gated[1].parent, gated[1].config.entropy_weight = gated[0].name, Schedule.constant(1.0)
    return Recipe(name="three_hop_small", stages=[*stages, *gated, copies])


def _models(
    steps: int, size: dict[str, Any], channel_gate: ChannelGate
) -> dict[str, tuple[LoopOptions, int]]:
    """Return model and R of every arm; the copies have a layer for each visit of the loops.

    Args:
        size: Options of the layers that all arms share.
    """
    shared = {**size, "exit_gate": False, "tie_weights": True}
    copies = {**shared, "n_layers": steps * size["n_layers"]}
    return {
        "plain": (OuroOptions(**shared), steps),
        "discoloop": (DiscoLoopOptions(**shared, channel_gate=channel_gate), steps),
        "untied": (OuroOptions(**copies), 1),
    }


def _published(task: TwoGraph, *, epochs: int, channel_gate: ChannelGate = "fixed") -> list[Stage]:
    facts = task.entities * task.degree
    examples = round(facts * (2 + task.inferred_ratio))
    stages = []
    for arm, (model, steps) in _models(task.hops, PAPER_SIZE, channel_gate).items():
        config = _two_graph(task, model, steps, batch=512, examples=epochs * examples)
        config.learning_rate = Schedule.warmup_constant(
            1e-4, warmup_tokens=2_000 * 512 * config.training.seq_len
        )
        config.suite = SuiteConfig(
            interval=5_000, tasks=[task.name], depths=sorted({1, steps}), questions=2_000
        )
        config.checkpoint.interval = 5_000
        stages.append(Stage(name=arm, config=config))
    return stages


def _small(task: TwoGraph, training_steps: int) -> list[Stage]:
    stages = []
    for arm, (model, steps) in _models(task.hops, SMALL_SIZE, "fixed").items():
        config = _two_graph(
            task, model, steps, batch=SMALL_BATCH, examples=training_steps * SMALL_BATCH
        )
        warmup, last = config.total_tokens // 35, config.total_tokens
        config.learning_rate = Schedule.parse(f"0:0 linear {warmup}:1e-2 linear {last}:1e-4")
        config.optimizer.name = "muon"
        config.adamw.beta2, config.adamw.weight_decay = 0.98, 0.2
        longer = [2 * steps] if steps == 3 else []  # three hops out of distribution take more
        config.suite = SuiteConfig(
            interval=500, tasks=[task.name], depths=[*sorted({1, steps}), *longer], questions=500
        )
        config.checkpoint.interval = 2_000
        config.checkpoint.keep_latest_k = 2
        config.metrics.log_freq = 100
        stages.append(Stage(name=arm, config=config))
    return stages


def _two_graph(
    task: TwoGraph, model: LoopOptions, steps: int, *, batch: int, examples: int
) -> LoopTrainer.Config:
    """Return a run on `examples` questions, each in a window of its own, `batch` at a time."""
    window = task.longest_example - 1
    return run(
        model,
        TaskLoader.Config(task=task, window="example"),
        tokens=examples * window,
        window=window,
        windows=batch,
        rate=Schedule.constant(0.0),  # a recipe sets its own
        steps=steps,
        adamw=AdamWConfig(weight_decay=0.1),
        save_every=0,
    )


def _language(model: LoopOptions, steps: int) -> LoopTrainer.Config:
    warmup = 1_000 * BATCH_440M
    config = run(
        model,
        WindowLoader.Config(mixture=[f"{CORPUS}/fineweb-edu=60", f"{CORPUS}/finemath-4plus=40"]),
        tokens=TOKENS_440M,
        window=WINDOW_440M,
        windows=BATCH_440M // WINDOW_440M,
        at_once=1,
        rate=Schedule.parse(f"0:0 linear {warmup}:3e-3 linear {TOKENS_440M}:1e-5"),
        steps=steps,
        optimizer="muon",
        adamw=AdamWConfig(eps=1e-15),
        muon=MuonConfig(momentum=0.95),
        activation_checkpoint=SelectiveAC.Config(),
        save_every=1_000,
    )
    config.model.vocab_size = 129_280
    config.training.max_norm = 1.0
    return config


_ARMS = {
    "plain loop": at("plain", 2),
    "DiscoLoop": at("discoloop", 2),
    "untied copies": at("untied", 1),
}
_GATE = "DiscoLoop, loss of every step"
_THREE_HOP_ARMS = {**_ARMS, _GATE: at("discoloop_gate", 2)}
_SPLITS = {
    "facts": {"task": "two_graph/atomic"},
    "trained": {"task": "two_graph/train_2"},
    "in distribution": {"task": "two_graph/id_2"},
    "OOD": {"task": "two_graph/ood_2"},
}
_TESTS = {split: _SPLITS[split] for split in ("in distribution", "OOD")}

TABLES = {
    "two_hop_small": [
        ResultTable(
            name="two_hops",
            title="% right after both steps",
            rows=_ARMS,
            columns=_SPLITS,
            everywhere={"metric": "acc,none"},
            paper={
                "plain loop": {"facts": 100, "trained": 100, "in distribution": 71.1, "OOD": 8.3},
                "DiscoLoop": {"in distribution": 100, "OOD": 100},
                "untied copies": {"in distribution": 20, "OOD": 0},
            },
        ),
        ResultTable(
            name="stage_1",
            title="% right after the first step",
            rows={"plain loop": {"stage": "plain"}, "DiscoLoop": {"stage": "discoloop"}},
            columns=_SPLITS,
            everywhere={"metric": "acc,none", "reading": "static:1"},
            paper={
                "plain loop": {"facts": 100, "trained": 8.8, "in distribution": 0.9, "OOD": 0.0}
            },
        ),
        ResultTable(
            name="intervention",
            title="% right, plain loop with the embedding put in",
            rows=_TESTS,
            columns={
                f"{share:g}": {"reading": f"alpha:{share:g}"}
                for share in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
            },
            everywhere={"stage": "plain", "metric": "intervention"},
            paper={
                "in distribution": {"0": 71.1, "0.5": 100},
                "OOD": {"0": 8.3, "0.1": 25.9, "0.5": 100},
            },
            columns_are="share of the embedding",
        ),
        ResultTable(
            name="bridge",
            title="step 1",
            rows={
                f"{arm}, {split}": {"stage": _ARMS[arm]["stage"], **where}
                for arm in ("plain loop", "DiscoLoop")
                for split, where in _TESTS.items()
            },
            columns={
                "P(bridge)": {"metric": "bridge_probability"},
                "cosine of state and bridge": {"metric": "bridge_cosine"},
                "cosine of next input and bridge": {"metric": "bridge_entering"},
            },
            everywhere={"reading": "static:1"},
            paper={
                "plain loop, in distribution": {
                    "P(bridge)": 1.0,
                    "cosine of state and bridge": 0.327,
                },
                "plain loop, OOD": {"P(bridge)": 1.0, "cosine of state and bridge": 0.266},
            },
            factor=1.0,
            digits=3,
            message="OOD, the plain loop says the bridge with P = {plain loop, OOD|P(bridge)}, and "
            "hands on a state at a cosine of {plain loop, OOD|cosine of next input and bridge}; "
            "DiscoLoop at {DiscoLoop, OOD|cosine of next input and bridge}",
        ),
    ],
    "two_hop_strengths": [
        ResultTable(
            name=symbol,
            title="% right after both steps",
            rows=_TESTS,
            columns={
                f"{value:g}": {"stage": BOTH_ONE if value == 1 else f"{symbol}_{value:g}"}
                for value in sorted([*values, 1.0])
            },
            everywhere={"metric": "acc,none", "reading": "static:2"},
            columns_are=letter,
        )
        for (symbol, (_, values)), letter in zip(STRENGTHS.items(), "ατ", strict=True)
    ],
    "three_hop_small": [
        ResultTable(
            name="three_hops",
            title="% right after all steps",
            rows={
                arm: {**where, "reading": where["reading"].replace("2", "3")}
                for arm, where in _THREE_HOP_ARMS.items()
            },
            columns={
                f"{words} hops, {short}": {"task": f"two_graph/{kind}_{hops}"}
                for hops, words in ((2, "two"), (3, "three"))
                for kind, short in (("id", "in distribution"), ("ood", "OOD"))
            },
            everywhere={"metric": "acc,none"},
            paper={
                "plain loop": {
                    "two hops, in distribution": 40,
                    "two hops, OOD": 5,
                    "three hops, OOD": 0,
                },
                "DiscoLoop": {
                    "two hops, in distribution": 100,
                    "two hops, OOD": 90,
                    "three hops, in distribution": 100,
                    "three hops, OOD": 65,
                },
                "untied copies": {"three hops, OOD": 0},
            },
        ),
        ResultTable(
            name="more_steps",
            title="% right, OOD, after R steps",
            rows={
                f"{arm}, {words} hops": {
                    "stage": _THREE_HOP_ARMS[arm]["stage"],
                    "task": f"two_graph/ood_{hops}",
                }
                for arm in ("plain loop", "DiscoLoop", _GATE)
                for hops, words in ((2, "two"), (3, "three"))
            },
            columns=by_steps((3, 6)),
            everywhere={"metric": "acc,none"},
        ),
    ],
}
