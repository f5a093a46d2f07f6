"""Greedy text of the model in this folder, with nothing but onnxruntime and tokenizers.

python generate.py "Once upon a time" [TOKENS [STEPS [THRESHOLD]]]
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer

folder = Path(__file__).parent
config = json.loads((folder / "config.json").read_text())
session = onnxruntime.InferenceSession(folder / "model.onnx")
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
prompt, tokens, steps, threshold = [*sys.argv[1:], *["32", "", "1"][len(sys.argv) - 2 :]]

slots = config["slots_outside"] + config["slots_per_step"]
empty = np.zeros((slots, 1, config["num_key_value_heads"], 0, config["head_dim"]), np.float32)
feeds = {"past_keys": empty, "past_values": empty}
feeds["steps"] = np.array(int(steps or config["recurrent_steps"]))
if config["exit_gate"]:
    feeds["threshold"] = np.array(float(threshold), np.float32)
ids, exits = [], []
new = tokenizer.encode(prompt).ids
while len(ids) < int(tokens):
    feeds["input_ids"] = np.array([new])
    logits, feeds["past_keys"], feeds["past_values"], exit_step = session.run(None, feeds)
    new = [int(logits.argmax())]
    if new[0] in config["eos_token_ids"]:
        break
    ids, exits = ids + new, [*exits, int(exit_step)]
print(json.dumps({"text": tokenizer.decode(ids), "ids": ids, "exit_steps": exits}))
