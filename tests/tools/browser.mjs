// Fills in the form of tools/demo/browser for each case, and prints a JSON line of what it wrote.
//
//   node browser.mjs URL CHROMIUM CASES; a case is {prompt, steps, threshold, tokens}
import { createRequire } from "node:module";
const require = createRequire(`${process.env.TITAN_LOOP_NODE_MODULES}/`);
const { chromium } = require("playwright-core");
const [url, executablePath, cases] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
try {
  const page = await browser.newPage();
  page.setDefaultTimeout(0); // a slow machine is no fault of the page
  await page.goto(url);
  const said = () => page.textContent("#status");
  await page.waitForFunction(() => document.getElementById("status").textContent !== "loading");
  if ((await said()) !== "ready") throw new Error(await said());
  for (const values of JSON.parse(cases)) {
    for (const [id, value] of Object.entries(values)) await page.fill(`#${id}`, String(value));
    await page.click("#generate");
    await page.waitForSelector("#stop:disabled", { state: "attached" });
    const tokens = await page.$$eval("#text span", (spans) => spans.map((span) => ({ ...span.dataset })));
    console.log(JSON.stringify({ tokens, text: await page.textContent("#text") }));
  }
} finally {
  await browser.close();
}
