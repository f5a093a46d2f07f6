// Greedy text of an exported ONNX folder (`model/`), token by token: each has the colour of the
// recurrent step that it was read from. R and the threshold are read anew before every token.
import { Tokenizer } from "./packages/tokenizers.min.mjs";
import * as ort from "./packages/ort.wasm.bundle.min.mjs";

ort.env.wasm.numThreads = 1; // more need headers that make the page cross-origin isolated
const wasm = "./packages/ort-wasm-simd-threaded.wasm"; // the rest of it is in the bundle
ort.env.wasm.wasmPaths = { wasm: new URL(wasm, import.meta.url).href };

const $ = (id) => document.getElementById(id);
const readJson = async (path) => (await fetch(path)).json();
const int64 = (values, dims) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), dims);

class Model {
  static async load(folder) {
    const model = new Model();
    const names = ["config.json", "tokenizer.json", "tokenizer_config.json"];
    const files = await Promise.all(names.map((name) => readJson(`${folder}/${name}`)));
    model.config = files[0];
    model.tokenizer = new Tokenizer(files[1], files[2]);
    model.session = await ort.InferenceSession.create(`${folder}/model.onnx`);
    return model;
  }

  // Yield {id, step, ms} of each token; `depth()` is asked for {steps, threshold} before each.
  async *generate(prompt, tokens, depth) {
    const config = this.config;
    const slots = config.slots_outside + config.slots_per_step;
    const dims = [slots, 1, config.num_key_value_heads, 0, config.head_dim];
    let keys = new ort.Tensor("float32", new Float32Array(), dims);
    let values = keys;
    let ids = this.tokenizer.encode(prompt).ids;
    let room = config.max_position_embeddings - ids.length;
    for (; tokens > 0 && room >= 0; tokens--, room--) {
      const { steps, threshold } = depth();
      const feeds = {
        input_ids: int64(ids, [1, ids.length]),
        past_keys: keys,
        past_values: values,
        steps: int64([steps], []),
      };
      if (config.exit_gate) feeds.threshold = new ort.Tensor("float32", [threshold], []);
      const began = performance.now();
      const out = await this.session.run(feeds);
      const ms = performance.now() - began;
      [keys, values] = [out.present_keys, out.present_values];
      const logits = out.logits.data;
      const id = logits.reduce((best, logit, index) => (logit > logits[best] ? index : best), 0);
      if (config.eos_token_ids.includes(id)) return;
      yield { id, step: Number(out.exit_step.data[0]), ms };
      ids = [id];
    }
  }
}

const colour = (step, steps) => `hsl(${200 - (160 * (step - 1)) / Math.max(1, steps - 1)} 85% 80%)`;
const depth = () => ({ steps: Number($("steps").value), threshold: Number($("threshold").value) });

function showLegend() {
  const { steps } = depth();
  $("legend").replaceChildren(
    "read after step ",
    ...Array.from({ length: steps }, (_, index) => {
      const span = document.createElement("span");
      span.textContent = index + 1;
      span.style.background = colour(index + 1, steps);
      return span;
    }),
  );
}

async function show(model) {
  const text = $("text");
  const ids = [];
  let shown = "";
  let [sum, total, began] = [0, 0, performance.now()];
  text.replaceChildren($("prompt").value);
  stopped = false;
  for await (const { id, step, ms } of model.generate($("prompt").value, Number($("tokens").value), depth)) {
    ids.push(id);
    const whole = model.tokenizer.decode(ids, { skip_special_tokens: false });
    const span = document.createElement("span");
    // A character's first bytes wait for its last ones.
    if (!whole.endsWith("\uFFFD")) {
      span.textContent = whole.slice(shown.length);
      shown = whole;
    }
    Object.assign(span.dataset, { id, step, ms });
    span.title = `step ${step}, ${ms.toFixed(1)} ms`;
    span.style.background = colour(step, depth().steps);
    text.append(span);
    [sum, total] = [sum + step, total + ms];
    const seconds = (performance.now() - began) / 1000;
    $("status").textContent =
      `${ids.length} tokens, ${(ids.length / seconds).toFixed(1)} a second, ` +
      `mean step ${(sum / ids.length).toFixed(2)}, ${(total / ids.length).toFixed(1)} ms in the model`;
    await new Promise((resume) => setTimeout(resume)); // the page is drawn, and Stop is heard
    if (stopped) break;
  }
}

let stopped = false;
for (const input of document.querySelectorAll("input")) {
  const say = () => (input.nextElementSibling.value = input.value);
  input.addEventListener("input", () => (say(), showLegend()));
}
$("stop").addEventListener("click", () => (stopped = true));
try {
  const model = await Model.load("model");
  $("steps").value = model.config.recurrent_steps;
  $("threshold").disabled = !model.config.exit_gate;
  for (const input of document.querySelectorAll("input")) input.dispatchEvent(new Event("input"));
  $("generate").addEventListener("click", async () => {
    [$("generate").disabled, $("stop").disabled] = [true, false];
    try {
      await show(model);
    } catch (error) {
      $("status").textContent = String(error);
    }
    [$("generate").disabled, $("stop").disabled] = [false, true];
  });
  $("generate").disabled = false;
  $("status").textContent = "ready";
} catch (error) {
  $("status").textContent = String(error);
}
