# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Inside a loop
#
# A looped model reads the same token again and again. This notebook opens up the quick start's
# model, one layer that is visited four times: what it would say after each step, which step holds
# what, and what becomes of a text when one step is changed. It is Python in Jupytext's form: run it
# cell by cell, or as a script, `RUN=runs/quickstart-short python tools/demo/loops.py`. Another run
# does, too. `titan_loop/inference/LOOK_INSIDE.md` says all that it uses.

# %%
import os
from itertools import combinations
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import titan_loop

RUN = Path(os.environ.get("RUN", "runs/quickstart"))
RUN = RUN if RUN.exists() else Path("../..") / RUN  # Jupyter starts in this file's folder
model = titan_loop.load(RUN)
R = model.recurrent_steps
LAST = model.model.config.looped[-1]
AFTER = f"blocks.{LAST}.hook_resid_post"
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
CODE = "def value(self):\n    return self._value\n\n    def name(self):\n        return self."
MATH = "len_2 - 3 + 4 5 = 17\nlen_1 + 8 9 = 17\nlen_2 * 2 - 7 3 = 8\n"
PROSE = "The function returns a list of the names that are defined in the module."


def pieces(tokens: Tensor) -> list[str]:
    """Return the text of each token, with white space to be seen."""
    texts = (model.tokenizer.decode([token]) for token in tokens.tolist())
    return [text.replace("\n", "↵").replace(" ", "·") for text in texts]


# %% [markdown]
# ## More steps, fewer bits
#
# R may be any number when a model is used. Bits per byte of three short texts:

# %%
depths = range(1, R + 3)
bits = {
    name: [model.bits_per_byte(text, recurrent_steps=steps) for steps in depths]
    for name, text in {"code": CODE, "math": MATH, "prose": PROSE}.items()
}
for name, values in bits.items():
    print(
        f"{name:6}",
        *(f"R={steps}: {value:.2f}" for steps, value in zip(depths, values, strict=True)),
    )

# %% [markdown]
# ## The logit lens, over steps
#
# `states` holds the logits of every step. Below each token: the next one that each step would say.

# %%
states = model.states(CODE)
tokens_L = states.tokens_BL[0]
lens_RL = states.logits_RBLV[:, 0].argmax(-1)
shown = range(len(tokens_L) - 12, len(tokens_L))
print("token   ", *(f"{pieces(tokens_L)[at]:>9}" for at in shown))
for step, said_L in enumerate(lens_RL, start=1):
    print(f"step {step}  ", *(f"{pieces(said_L)[at]:>9}" for at in shown))
# The probability of the token that follows, after each step:
right_RL = states.logits_RBLV[:, 0, :-1].softmax(-1)
right_RL = right_RL.gather(-1, tokens_L[1:].expand(len(right_RL), -1).unsqueeze(-1))[..., 0]

# %% [markdown]
# ## Patching one step
#
# Two texts that differ in one word. The state of one step, at one token, is taken from the first
# text into the second: how much of the difference in the next token's logits comes with it? In a
# loop later steps read what earlier ones wrote, at every token.

# %%
words = ("name", "self", "value", "key", "line", "path", "data", "file", "index", "item")
texts = [f"for {word} in names:\n    print(" for word in words]
pairs = combinations(map(model.states, texts), 2)
clean, other = next((a, b) for a, b in pairs if a.tokens_BL.shape == b.tokens_BL.shape)
change_V = clean.logits_RBLV[-1, 0, -1] - other.logits_RBLV[-1, 0, -1]
likelier, unlikelier = int(change_V.argmax()), int(change_V.argmin())


def difference(logits_V: Tensor) -> float:
    """Return the lead of the token that the first text makes likelier over the other one."""
    return float(logits_V[likelier] - logits_V[unlikelier])


low, high = (difference(each.logits_RBLV[-1, 0, -1]) for each in (other, clean))
layer = list(model.model.config.looped).index(LAST)
restored_RL = torch.zeros(R, clean.tokens_BL.shape[1])
for step in range(1, R + 1):
    for place in range(restored_RL.shape[1]):

        def patch(state_BLD: Tensor, hook: object, step: int = step, place: int = place) -> Tensor:
            """Take one token's state from the first text."""
            patched_BLD = state_BLD.clone()
            patched_BLD[:, place] = clean.resid_RNBLD[step - 1, layer, :, place]
            return patched_BLD

        with model.hooks([(f"loop.{step}.{AFTER}", patch)]):
            logits_BLV, _ = model.run_with_cache(other.tokens_BL, "hook_embed")
        restored_RL[step - 1, place] = (difference(logits_BLV[0, -1]) - low) / (high - low)
print(f"lead of {pieces(torch.tensor([likelier, unlikelier]))}: {high:.2f} and {low:.2f}")
print(restored_RL.round(decimals=2))
assert abs(restored_RL[-1, -1] - 1) < 1e-3, "behind the last step, the last token's state is all"

# %% [markdown]
# ## Steering at one step
#
# A direction from prose to mathematics, taken and added at one step; generation keeps its cache.

# %%
steered = 2 if R > 1 else 1
direction_D = model.states(MATH).resid_RNBLD[steered - 1, layer, 0].mean(0)
direction_D = direction_D - model.states(PROSE).resid_RNBLD[steered - 1, layer, 0].mean(0)
for strength in (0.0, 1.0, 2.0):
    with model.hooks([(f"loop.{steered}.{AFTER}", lambda x, _, by=strength: x + by * direction_D)]):
        text = model.generate("The ", max_new_tokens=24, temperature=0.7, seed=1).text
        measured = [model.bits_per_byte(each) for each in (MATH, PROSE)]
    print(f"{strength}: bits {measured[0]:.2f} math, {measured[1]:.2f} prose: {text!r}")

# %% [markdown]
# ## Exits
#
# A token may leave as soon as its steps hardly change any more; the step is its subscript. The page
# `titan_loop/inference/README.md` lists the policies; `q:0.8` asks the gate of a model with one.

# %%
for policy in ("full", "margin:0.3", "fixed_point:0.5"):
    line, steps = "", []
    for event in model.generate(
        "The function ", exit=policy, stream=True, max_new_tokens=20, temperature=0.7, seed=2
    ):
        line += event.text.replace("\n", "↵") + str(event.step).translate(SUBSCRIPTS)
        steps.append(event.step)
    print(f"{policy:15} {sum(steps) / len(steps):.2f} steps a token: {line}")

# %% [markdown]
# ## Gradients
#
# Which states does the last prediction depend on? The slope of its logit, by step and token.

# %%
logits_BLV, cache = model.run_with_cache(clean.tokens_BL, f"loop.*.{AFTER}", gradient=True)
slopes = torch.autograd.grad(logits_BLV[0, -1].max(), [*cache.values()])
slope_RL = torch.stack([slope[0].norm(dim=-1) for slope in slopes])
print(slope_RL.round(decimals=2))

# %% [markdown]
# ## All of it in one picture

# %%
figure, axes = plt.subplots(2, 2, figsize=(13, 7), layout="constrained")
for name, values in bits.items():
    axes[0, 0].plot(depths, values, marker="o", label=name)
axes[0, 0].set(title="bits per byte", xlabel="recurrent steps")
axes[0, 0].legend()
for place, title, values_RL, names in (
    (axes[0, 1], "probability of the next token", right_RL, pieces(tokens_L[:-1])),
    (axes[1, 0], "share restored by one patched state", restored_RL, pieces(other.tokens_BL[0])),
    (axes[1, 1], "slope of the last prediction", slope_RL, pieces(clean.tokens_BL[0])),
):
    image = place.imshow(values_RL, aspect="auto", origin="lower", cmap="viridis")
    figure.colorbar(image, ax=place)
    place.set(title=title, ylabel="step", yticks=range(R), yticklabels=range(1, R + 1))
    place.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
figure.savefig(RUN / "loops.png", dpi=120)
print(RUN / "loops.png")
