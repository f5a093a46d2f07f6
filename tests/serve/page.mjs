// A person at the page, in a real Chromium: test_page.py starts and kills the server when asked.
//
//   node page.mjs URL CHROMIUM [FOLDER OF SCREENSHOTS]
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [url, executablePath, screenshots] = process.argv.slice(2);
const require = createRequire(process.env.TITAN_LOOP_NODE_MODULES + "/");
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core"), "utf8");
const answers = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const context = await browser.newContext({ viewport: { width: 1280, height: 900 } });
const page = await context.newPage();
page.setDefaultTimeout(0); // a slow machine is no fault of the page; the test's own limit ends a hang
const errors = [];
const origins = new Set();
page.on("pageerror", (error) => errors.push(String(error)));
page.on("console", (message) => message.text().includes("Content Security Policy") && errors.push(message.text()));
page.on("request", (request) => origins.add(new URL(request.url()).origin));

const ask = async (what) => { console.log(what); await answers.next(); };
const state = (text) => page.waitForFunction((text) => document.getElementById("state").textContent.includes(text), text);
const steps = (column = 0) => page.locator(".text").nth(column).evaluate((text) => [...text.querySelectorAll(".token")].map((each) => Number(each.dataset.step)));
const until = async (condition) => { while (!condition(await steps())) await page.waitForTimeout(20); };
const counts = (column) => page.locator(".counts").nth(column).evaluate((list) =>
  Object.fromEntries([...list.children].map((pair) => [pair.children[0].textContent, pair.children[1].textContent])));
const shot = (name) => screenshots && page.screenshot({ path: `${screenshots}/${name}.png`, fullPage: true });
const accessible = async (where) => {
  const { violations } = await page.evaluate(() => axe.run({ runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"] }));
  assert.deepEqual(violations.map(({ id, nodes }) => [id, nodes.map((node) => node.html)]), [], where);
  const [wide, width] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  assert.ok(wide <= width, `${where}: ${wide} pixels wide on ${width}`);
};

await page.goto(url);
await state("ready: R = 2");
await page.evaluate((source) => { const script = document.createElement("script"); script.textContent = source; document.head.append(script); }, axe);

// Type, stream, and move the sliders while it writes.
await page.getByLabel("Tokens").fill("3900");
await page.getByLabel("Prompt").fill("");
await page.getByLabel("Prompt").pressSequentially("def f(");
await page.keyboard.press("Control+Enter");
await until((seen) => seen.length > 20);
assert.ok((await steps()).every((step) => step <= 2));
const slider = page.getByLabel("Steps R");
await page.getByLabel("Exit policy").selectOption("full");
await slider.focus();
await page.keyboard.press("End");
await until((seen) => seen.at(-1) === 4);
await page.keyboard.press("Home");
await until((seen) => seen.slice(-10).every((step) => step === 1));
await page.keyboard.press("End");
await page.getByLabel("Exit policy").selectOption("q");
await page.getByLabel("Leave once").fill("0.5");
await until((seen) => new Set(seen.slice(-40)).size > 1);
const colours = await page.locator(".token").evaluateAll((all) => new Set(all.map((each) => each.dataset.step + getComputedStyle(each).backgroundColor)).size);
assert.equal(colours, new Set(await steps()).size);

// Stop: nothing more arrives, and the server's row is free.
await page.keyboard.press("Escape");
await state("stopped");
const written = (await steps()).length;
const rows = async () => /^titan_loop_rows (.*)$/m.exec(await (await fetch(url + "/metrics")).text())[1];
while (await rows() !== "0.0") await page.waitForTimeout(20);
assert.equal((await steps()).length, written);

// Readings by pointer and by keyboard.
const token = page.locator(".token").nth(3);
await token.hover();
const heads = page.locator("#reading th");
assert.deepEqual(await heads.allTextContents(), [...Array((await steps())[3])].map((_, at) => `step ${at + 1}`).concat("later"));
assert.equal(await page.locator("#reading tr").first().locator("code").count(), 5);
const exits = (await page.locator("#reading").innerText()).match(/exit ([\d.]+) %/g).map((text) => parseFloat(text.slice(5)));
assert.ok(Math.abs(exits.reduce((sum, share) => sum + share) - 100) < 2, `exits ${exits}`);
await page.locator(".text").focus();
await page.keyboard.press("ArrowRight");
assert.equal(await page.locator(".token").evaluateAll((all) => all.findIndex((each) => each.classList.contains("chosen"))), 4);

// Two settings on one prompt.
await page.getByLabel("compare").check();
await page.getByLabel("Tokens").fill("40");
await page.getByLabel("Temperature").fill("0");
await page.getByRole("button", { name: "Write" }).click();
await state("done");
const [early, full] = [await counts(0), await counts(1)];
assert.deepEqual([early.tokens, full.tokens, full["mean steps"]], ["40", "40", "2.00"]);
assert.ok(Number(early["tokens a second"]) > 0 && early["FLOPs a token"] !== full["FLOPs a token"] && early.cache.endsWith("B"));
await page.locator(".token").nth(5).hover();
await page.getByLabel("step numbers").check();
await accessible("light");
await shot("light");
await page.emulateMedia({ colorScheme: "dark" });
await accessible("dark");
await shot("dark");
await page.setViewportSize({ width: 360, height: 740 });
await accessible("phone");
await shot("phone");

// Lose the server while it writes, and see it come back.
await page.getByLabel("Tokens").fill("3900");
await page.getByRole("button", { name: "Write" }).click();
await until((seen) => seen.length > 20 && seen.length !== 40);
await ask("lose");
await state("again");
assert.ok((await steps()).length > 20);
assert.ok(await page.locator("#state").evaluate((each) => each.className === "lost"));
await accessible("lost");
await shot("lost");
await ask("back");
await state("ready");
await page.getByLabel("Tokens").fill("5");
await page.getByRole("button", { name: "Write" }).click();
await state("done");
assert.equal((await steps()).length, 5);

assert.deepEqual(errors, []);
assert.deepEqual([...origins], [new URL(url).origin]);
await browser.close();
console.log("done");
process.exit();
