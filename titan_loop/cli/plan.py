"""`titan-loop plan …`: needs of a recipe's stages, or models for a budget or of equal cost."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

from titan_loop.cli.arguments import command, recipe_first
from titan_loop.cli.stage_flags import resolve_recipe
from titan_loop.errors import UserError, nearest
from titan_loop.plugins import find, names

if TYPE_CHECKING:
    from titan_loop.planning.cluster import Cluster
    from titan_loop.planning.rehearsal import Rehearsed
    from titan_loop.planning.stage_needs import StageNeeds


def _known_gpus(default: str) -> str:
    from titan_loop.distributed.devices import DEVICES

    return f"(one of {', '.join(DEVICES)}; default: {default})"


@recipe_first
def plan(
    recipe: str,
    flags: Sequence[str],
    *,
    nodes: int = 1,
    gpus_per_node: int = 8,
    gpu: Annotated[str, tyro.conf.arg(help_behavior_hint=_known_gpus)] = "h100-80gb",
    mfu: float = 0.4,
    stage: str | None = None,
    law: str | None = None,
    memory: bool = True,
    rehearse: bool = False,
) -> None:
    """Print the needs of every stage of a recipe on a cluster, without a GPU and without the data.

    For every stage: parameters, FLOPs, steps, batches, bytes of weights, gradients and moments, and
    GPU-days. Then the real trainer runs every stage on fake tensors as one rank of the cluster, to
    measure the peak memory of a GPU and the communication of a step. That takes up to half a minute
    per stage, and is repeated only when the stage's assembly or the software changes. Exits with
    code 2 if a stage does not fit, and suggests a fix. Other flags are flags of titan-loop train.
    With --budget FLOPS and no recipe: the best models by a scaling law (plan --budget 1e21 --help).
    With --match COST: mixtures of experts at the cost of a model (plan --match flops --help).

    For example:
      titan-loop plan ouro_1_4b --nodes 64
      titan-loop plan ouro_1_4b --stage 1b --nodes 8 --gpu h200-141gb --fsdp.policy per_visit

    Args:
        recipe: Name that `titan-loop recipes` lists, or PACKAGE.MODULE:FUNCTION.
        nodes: Number of hosts.
        gpus_per_node: Number of GPUs per host.
        gpu: GPU model.
        mfu: Assumed share of a GPU's peak FLOPs, for the GPU-days.
        stage: Plan this stage alone.
        law: Published scaling law, or a scaling.json of titan-loop scaling; adds the gain of the
            recurrent steps in nats and GPU-days over the same model without loops and over an
            unrolled one.
        memory: Measure peak memory and communication; --no-memory prints the arithmetic alone.
        rehearse: Assemble every stage anew, list the facts that only a GPU can show, and exit with
            code 2 if a stage cannot be assembled.
    """
    import titan_loop.compat as compat

    with compat.assuming("cuda"):
        resolved = resolve_recipe(recipe, flags, verb="plan", only=stage)

    from titan_loop.analysis.scaling.published import read_law
    from titan_loop.distributed.devices import get_device
    from titan_loop.planning.cluster import Cluster
    from titan_loop.planning.loop_worth import worth_lines
    from titan_loop.planning.plan_table import plan_lines
    from titan_loop.planning.stage_needs import recipe_needs

    cluster = Cluster(nodes=nodes, gpus_per_node=gpus_per_node, gpu=get_device(gpu), mfu=mfu)
    cluster.check()
    worth = None if law is None else read_law(law)
    needs = recipe_needs(resolved, cluster, only=stage)
    print("\n".join(plan_lines(recipe, gpu, cluster, needs)))
    if worth is not None:
        print("\n".join(worth_lines(worth, needs, cluster)))
    _refuse([(need.name, refusal) for need in needs for refusal in need.refusals], len(needs))
    if memory or rehearse:
        _rehearse(cluster, needs, anew=rehearse)


def _rehearse(cluster: "Cluster", planned: "Sequence[StageNeeds]", *, anew: bool) -> None:
    import titan_loop.compat as compat

    from titan_loop.planning.plan_table import NOT_REHEARSED, rehearsal_lines
    from titan_loop.planning.rehearsal import gpu_peak_bytes, rehearse
    from titan_loop.planning.stage_needs import memory_refusal

    compat.quiet_upstream()
    found: list[Rehearsed] = []
    for one in rehearse(planned, cluster, anew=anew):
        found.append(one)
        if one.cpu_seconds:
            said = one.fault or "assembled"
            print(f"titan-loop: {one.needs.name}: {said}, {one.cpu_seconds:.0f} s", file=sys.stderr)
    print("\n" + "\n".join(rehearsal_lines(found, cluster)))
    if anew:
        print("\n".join(f"not rehearsed: {what}" for what in NOT_REHEARSED))
    peaks = [(one.needs, gpu_peak_bytes(one.needs, one.measured)) for one in found if one.measured]
    reasons = [(need.name, memory_refusal(need, peak, cluster.gpu)) for need, peak in peaks]
    _refuse([(name, reason) for name, reason in reasons if reason], len(planned))
    faults = [f"{one.needs.name}: {one.fault}" for one in found if one.fault]
    if anew and faults:
        raise UserError(
            f"plan: {len(faults)} of {len(found)} stages were not assembled; {faults[0]}"
        )


def _refuse(refused: Sequence[tuple[str, str]], stages: int) -> None:
    for name, refusal in refused:
        print(f"refused: {name}: {refusal}")
    if refused:
        names = {name for name, _ in refused}
        name, refusal = refused[0]
        raise UserError(f"plan: {len(names)} of {stages} stages do not fit; {name}: {refusal}")


def best(
    flags: Sequence[str],
    *,
    budget: float,
    law: str = "loop-moe",
    memory: str | None = None,
    tokens: float | None = None,
    unique_tokens: float | None = None,
    inference_tokens: float = 0.0,
    weight_bits: float = 4.0,
    context_tokens: int = 0,
    vocabulary: int = 128_256,
    most_experts: int = 1024,
) -> None:
    """Print the best models for a budget by a scaling law, then the plan of the best one.

    For example:
      titan-loop plan --budget 5e21 --memory 3GB
      titan-loop plan --budget 5e21 --law scaling/scaling.json --inference-tokens 1e12 --nodes 16

    Args:
        flags: Flags of `titan-loop plan RECIPE`, such as --nodes.
        budget: FLOPs of training and serving together.
        law: Published law (loop-moe), or FILE[:FORM] of a scaling.json.
        memory: Maximum bytes of weights and cache when serving, such as 3GB.
        tokens: Number of training tokens; left out, the budget pays for as many as it can.
        unique_tokens: Number of tokens of text; training on more repeats them. Needs a law that was
            fitted to repeated text.
        inference_tokens: Number of tokens served over the model's life.
        weight_bits: Bits of a weight when serving.
        context_tokens: Number of tokens in the cache of keys and values when serving.
        vocabulary: Number of tokens in the vocabulary, rows of the embedding.
        most_experts: Largest number of experts in a layer; 1 for dense models.
    """
    from titan_loop.analysis.scaling.published import read_law
    from titan_loop.recipes.registry import recipe_summaries

    for before, word in zip(["", *flags], flags, strict=False):
        is_flag_or_value = word.startswith("-") or before.startswith("-")
        if not is_flag_or_value and (not before or word in recipe_summaries()):
            raise UserError(
                f"plan: --budget chooses the model, so recipe {word} has no effect: leave it out, "
                "or leave --budget out to plan it"
            )
    rank = find("rankings", "budget")
    if rank is None:
        raise UserError(f"--budget {budget:g}: no family or plug-in here ranks models")
    limits = {
        "flops": budget,
        "memory": memory,
        "tokens": tokens,
        "unique_tokens": unique_tokens,
        "inference_tokens": inference_tokens,
        "weight_bits": weight_bits,
        "context_tokens": context_tokens,
        "vocabulary": vocabulary,
        "most_experts": most_experts,
    }
    lines, words = rank(read_law(law), limits)
    if not words:
        print("\n".join(lines))
        return
    words = [*words, *flags]
    print("\n".join(lines), f"titan-loop plan {' '.join(words)}\n", flush=True)
    command("plan")(plan)(words)


@recipe_first
def matching(
    recipe: str, flags: Sequence[str], *, match: str, stage: str | None = None
) -> list[str]:
    """Print looped mixtures of experts that cost as much as a stage's dense model, within 1 %.

    All other flags are flags of titan-loop train.

    For example:
      titan-loop plan --match flops looped_moe_small --stage dense

    Args:
        recipe: Name that `titan-loop recipes` lists, or PACKAGE.MODULE:FUNCTION.
        match: Cost that must be equal: flops (per trained token), parameters, or kv (bytes per
            token in the cache).
        stage: The stage, if the recipe has several.
    """
    import titan_loop.compat as compat

    table = find("matches", match)
    if table is None:
        raise UserError(f"--match {match} is unknown{nearest(match, names('matches'))}")
    with compat.assuming("cuda"):
        resolved = resolve_recipe(recipe, flags, verb="plan", only=stage)
    if stage is None and len(resolved.stages) > 1:
        stages = ", ".join(each.name for each in resolved.stages)
        raise UserError(
            f"--match {match} needs one stage of {recipe}: --stage with one of {stages}"
        )
    return table((resolved.stages[0] if stage is None else resolved.stage(stage)).config, match)


def run(words: Sequence[str]) -> int:
    """Run `plan --budget …` (without a recipe), `plan --match … RECIPE`, or `plan RECIPE …`."""
    if words and words[0].split("=")[0] == "--match":  # the recipe comes first
        first = 1 if "=" in words[0] else 2
        words = [*words[first:], *words[:first]]
    given = {word.split("=")[0] for word in words}
    function = best if "--budget" in given else matching if "--match" in given else plan
    return command("plan")(function)(words)
