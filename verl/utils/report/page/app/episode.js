// One episode as a person reads it.

async function episodePage(number) {
  if (!(number >= 0 && number < data.count)) return h("p", { class: "note" }, "There is no such episode.");
  const episode = await openEpisode(number);
  const place = sequence ? sequence.indexOf(number) : -1;
  const list = place < 0 ? null : sequence;
  const step = (by) => {
    const other = list ? list[place + by] : number + by;
    const there = other !== undefined && other >= 0 && other < data.count;
    return h("a", there ? { class: "button", href: `#/episode/${other}`, rel: by < 0 ? "prev" : "next" } : { class: "button", disabled: true, "aria-disabled": "true" },
      by < 0 ? "← Previous" : "Next →");
  };
  const others = episodesWith("question", episode.questionId).filter((other) => data.episodes.group[other] !== episode.group);
  const hasTokens = episode.turns.some((turn) => turn.tokens);
  const body = h("div");
  const read = () => body.replaceChildren(...turnsOf(episode));
  const modes = hasTokens ? h("div", { class: "chips", role: "group", "aria-label": "View" },
    ["Reading", "Tokens"].map((name) => h("button", {
      class: "button", type: "button", "aria-pressed": String(name === "Reading"),
      onclick: (event) => {
        for (const button of event.target.parentElement.children) button.setAttribute("aria-pressed", String(button === event.target));
        if (name === "Tokens") body.replaceChildren(tokenView(episode));
        else read();
      },
    }, name))) : h("span", { class: "faint" }, whyNoTokens(episode));
  read();
  return h("article", null,
    h("div", { class: "crumbs" }, h("a", { href: listAddress }, "← All episodes"), h("span", { class: "chips" }, step(-1), step(1))),
    headCard(episode, others),
    h("div", { class: "crumbs", style: { margin: "18px 0 0" } }, modes, groupChips(episode)),
    body);
}

function headCard(episode, others) {
  const compare = others.length ? h("a", { href: `#/compare/${pairWith(episode.number, others).join("/")}` }, `Compare with another step (${others.length})`) : null;
  return h("div", { class: "card head-card" },
    h("h1", null, episode.question || "(no question)"),
    h("div", null, h("span", { class: "faint" }, "gold  "), episode.golds.length ? episode.golds.join("  /  ") : "none"),
    h("div", { class: "chips" },
      data.runs.length > 1 ? h("span", { class: "chip" }, runDot(episode.run), data.runs[episode.run].name) : null,
      h("span", { class: "chip" }, whenOf(episode)),
      h("span", { class: "chip" }, episode.source),
      finishChip(episode.finish),
      h("span", { class: "chip num" }, plural(episode.depth, "search").replace("searchs", "searches")),
      episode.f1 === null ? null : h("span", { class: "chip num" }, `F1 ${fixed(episode.f1)}`),
      h("span", { class: "faint" }, "score"), scoreChip(episode.score),
      episode.filtered ? h("span", { class: "chip warn" }, "not trained on: its group taught nothing") : null,
      episode.alerts.map((metric) => h("span", { class: "chip bad" }, `▲ ${metric}`)),
      compare),
    episode.error ? h("p", { class: "bad prose" }, episode.error) : null,
    rewardTotals(episode));
}

function whyNoTokens(episode) {
  if (episode.split !== TRAIN) return `no token view: tokens are recorded for training, and ${SPLITS[episode.split]} episodes aren't trained on`;
  if (episode.filtered) return "no token view: tokens are recorded for training, and this episode wasn't trained on";
  if (data.notes.some((note) => note.startsWith("token views"))) return "no token view: left out so that this file stays small";
  return "no token view: its rollout file holds no tokens";
}

function rewardTotals(episode) {
  const { reward } = episode;
  const names = Object.keys(reward).filter((name) => !["score", "f1", "em", "return", "valid"].includes(name) && !name.endsWith("_raw"));
  if (!names.length) return null;
  const line = (name) => {
    const raw = reward[`${name}_raw`];
    return [h("dt", null, name), h("dd", null, fixed(reward[name]), raw === undefined || raw === reward[name] ? "" : h("span", { class: "faint" }, ` (raw ${fixed(raw)})`))];
  };
  return h("details", null, h("summary", null, "Reward components"),
    h("dl", { class: "values", style: { maxWidth: "340px", marginTop: "8px" } }, names.map(line),
      h("dt", { class: "sum" }, "score"), h("dd", { class: "sum" }, fixed(episode.score))));
}

// The group: all samples of this question at this step.
function groupChips(episode) {
  const siblings = episodesWith("group", episode.group);
  if (siblings.length < 2) return null;
  return h("div", { class: "chips group" }, h("span", { class: "faint" }, `its group of ${siblings.length}`),
    siblings.map((other) => h("a", { href: `#/episode/${other}`, title: `sample ${data.episodes.sample[other]}` },
      scoreChip(data.episodes.score[other], other === episode.number ? "here" : ""))));
}

function turnsOf(episode) {
  if (!episode.turns.length) return [h("p", { class: "note" }, "It has no turns.")];
  return episode.turns.map((turn, place) => h("section", { class: "card turn" },
    h("div", { class: "said" }, turnHead(turn, place), turnBody(turn, episode)), earned(turn)));
}

function turnHead(turn, place) {
  const what = { tool_call: turn.tool || "search", answer: "answer", malformed: "malformed" }[turn.kind] || turn.kind;
  const seconds = [turn.generate_s ? `thought ${turn.generate_s.toFixed(2)} s` : "", turn.latency_s ? `${turn.tool || "search"} ${turn.latency_s.toFixed(2)} s` : ""];
  return h("h3", null, `Turn ${place + 1} · ${what.replaceAll("_", " ")}`, seconds.filter(Boolean).map((text) => h("span", { class: "faint num" }, text)));
}

function turnBody(turn, episode) {
  return [
    turn.think ? h("div", { class: "prose think" }, turn.think) : null,
    (turn.asked || []).map((query) => h("div", { class: "query" }, query)),
    turn.observation ? resultsBox(turn, episode.golds) : null,
    turn.kind === "tool_call" && !turn.observation ? h("p", { class: "faint" }, "nothing came back") : null,
    turn.kind === "answer" ? h("div", { class: "prose answer" }, turn.answer || "(blank)") : null,
    turn.kind === "malformed" ? h("div", { class: "bad prose" }, turn.reason || "malformed") : null,
    turn.text ? h("details", null, h("summary", null, "As it was written"), h("pre", null, turn.text)) : null,
  ];
}

function resultsBox(turn, golds) {
  const parsed = turn.ok === false ? null : parseResults(turn.observation);
  const size = turn.observation_tokens ? `, ${turn.observation_tokens} tokens` : "";
  if (!parsed) {
    return h("details", { class: "results" }, h("summary", null, turn.ok === false ? `The tool failed${size}` : `What came back${size}`),
      h("div", null, h("pre", null, turn.observation)));
  }
  const count = parsed.reduce((sum, one) => sum + one.results.length, 0);
  const text = (value) => (typeof value === "string" ? value : value === undefined || value === null ? "" : JSON.stringify(value));
  const gold = parsed.some((one) => one.results.some((hit) => withGolds(`${text(hit.title)} ${text(hit.text)}`, golds).length > 1));
  return h("details", { class: "results" },
    h("summary", null, `${plural(count, "result")}${size}`, gold ? h("span", { class: "chip good", style: { marginLeft: "8px" } }, "gold is in it") : null),
    h("div", null, parsed.map((one) => [
      parsed.length > 1 ? h("div", { class: "faint" }, one.query) : null,
      one.results.map((hit) => h("div", { class: "hit" }, h("b", null, withGolds(text(hit.title), golds)), " ",
        hit.url ? safeLink(text(hit.url)) : null, h("div", { class: "prose" }, withGolds(text(hit.text), golds)))),
    ])));
}

// Beside a turn: what it earned, its advantage, and how far the evidence has come.
function earned(turn) {
  const lines = [];
  const add = (label, value, attributes) => lines.push(h("dt", attributes, label), h("dd", attributes, value));
  const tone = (value) => (value > 0 ? "good" : value < 0 ? "bad" : "");
  for (const [name, value] of Object.entries(turn.parts || {})) {
    if (value) add(name.replaceAll("_", " "), h("span", { class: tone(value) }, signed(value)));
  }
  if (turn.reward !== undefined) add("reward", signed(turn.reward), lines.length ? { class: "sum" } : {});
  if (turn.advantage !== undefined) add("advantage", h("span", { class: tone(turn.advantage) }, signed(turn.advantage)));
  if (turn.phi) {
    const [before, after] = turn.phi;
    const wide = (value) => ({ width: `${100 * Math.min(1, Math.max(0, value))}%` });
    add("potential Φ", before === after ? fixed(after) : `${fixed(before)} → ${fixed(after)}`);
    if (after > 0) lines.push(h("dd", { class: "phi", "aria-hidden": "true" }, h("b", { style: wide(after) }), h("i", { style: wide(before) })));
  }
  return h("aside", { class: "earned" }, lines.length ? h("dl", { class: "values" }, lines) : h("span", { class: "faint" }, "no rewards recorded"));
}
