// The table of episodes: filters, search, sorting. What is chosen stands in the address, so it can be shared.

const PAGE_SIZE = 50;
const SORTS = {
  first: ["first step first", (a, b) => a - b],
  last: ["last step first", byColumn("step", -1)],
  worst: ["worst score first", byColumn("score", 1)],
  best: ["best score first", byColumn("score", -1)],
  deep: ["most searches first", byColumn("depth", -1)],
};
let searchRun = 0; // the search that is going on; a newer one ends it

function byColumn(name, sign) {
  return (a, b) => sign * ((data.episodes[name][a] ?? Infinity * sign) - (data.episodes[name][b] ?? Infinity * sign)) || a - b;
}

function matcher(filter) {
  const columns = data.episodes;
  const tests = [];
  const equals = (name, column, value) => filter.has(name) && tests.push((n) => columns[column][n] === value);
  const number = (name) => (filter.has(name) && filter.get(name) !== "" ? Number(filter.get(name)) : null);
  equals("run", "run", Number(filter.get("run")));
  equals("split", "split", ["train", "val", "test"].indexOf(filter.get("split")));
  equals("source", "source", data.sources.indexOf(filter.get("source")));
  equals("finish", "finish", data.finishes.indexOf(filter.get("finish")));
  equals("depth", "depth", Number(filter.get("depth")));
  for (const [name, column, sign] of [["from", "step", 1], ["to", "step", -1], ["min", "score", 1], ["max", "score", -1]]) {
    const bound = number(name);
    if (bound !== null) tests.push((n) => columns[column][n] !== null && sign * columns[column][n] >= sign * bound);
  }
  const alert = filter.get("alert");
  if (alert === "none") tests.push((n) => !data.alertsOf.has(n));
  else if (alert === "any") tests.push((n) => data.alertsOf.has(n));
  else if (alert) tests.push((n) => data.alertsOf.get(n)?.has(alert));
  return (n) => tests.every((test) => test(n));
}

// Everything an episode says, for searching.
function textOf(body) {
  const parts = [body.error];
  for (const turn of body.turns) parts.push(turn.think, turn.text, turn.answer, turn.reason, turn.observation, ...turn.asked || []);
  return parts.filter(Boolean).join("\n").toLowerCase();
}

// Those of the episodes that hold the words; blocks are opened one after the other, so results come in as they go.
async function* search(numbers, words) {
  const wanted = words.toLowerCase().trim();
  const fits = data.questions.map((one) => [one.text, ...one.golds].join("\n").toLowerCase().includes(wanted));
  let found = [];
  let at = 0;
  while (at < numbers.length) {
    const block = blockOf(numbers[at]);
    const end = data.firstOf[block] + data.blockSizes[block];
    let bodies = null;
    for (; at < numbers.length && numbers[at] < end; at++) {
      const number = numbers[at];
      if (!fits[data.episodes.question[number]]) {
        bodies ??= await openBlock(block);
        if (!textOf(bodies[number - data.firstOf[block]]).includes(wanted)) continue;
      }
      found.push(number);
    }
    yield [found, at / numbers.length];
  }
  yield [found, 1];
}

function filterBar(filter, apply) {
  const set = (name) => (value) => {
    if (value === "") filter.delete(name);
    else filter.set(name, value);
    filter.delete("page");
    apply();
  };
  const choice = (label, name, options, all) => options.length < 2 && !filter.has(name) ? null
    : h("label", null, label, select([["", all], ...options], filter.get(name) ?? "", set(name), { name }));
  const bound = (name, label, step) => h("input", {
    type: "number", name, step, "aria-label": label, placeholder: label.split(" ").at(-1), value: filter.get(name) ?? "",
    onchange: (event) => set(name)(event.target.value),
  });
  const range = (label, low, high, step) => h("label", null, label,
    h("span", { class: "range" }, bound(low, `${label} from`, step), bound(high, `${label} to`, step)));
  const same = (values) => values.map((value) => [String(value), String(value)]);
  const depths = [...new Set(data.episodes.depth)].sort((a, b) => a - b);
  const alerts = [...new Set(data.alerts.map((alert) => alert.metric))];
  let timer;
  const more = h("div", { class: "more" },
    choice("Run", "run", data.runs.map((run, number) => [String(number), run.name]), "all"),
    choice("Set", "split", ["train", "val", "test"].map((key, split) => [key, SPLITS[split]]), "all"),
    range("Step", "from", "to", 1),
    choice("Source", "source", same(data.sources), "all"),
    choice("Finish", "finish", same(data.finishes), "all"),
    choice("Searches", "depth", same(depths), "all"),
    range("Score", "min", "max", "any"),
    alerts.length ? choice("Alert", "alert", [["any", "any alert"], ["none", "no alert"], ...same(alerts)], "–") : null,
    h("label", null, "Order", select(Object.entries(SORTS).map(([key, [label]]) => [key, label]), filter.get("sort") ?? "first", set("sort"), { name: "sort" })),
    h("button", { class: "button", type: "button", onclick: () => { location.hash = "#/episodes"; } }, "Clear"));
  const wide = matchMedia("(min-width: 721px)").matches;
  return h("form", { class: "card filters", onsubmit: (event) => event.preventDefault() },
    h("label", { class: "search" }, "Search", h("input", {
      type: "search", name: "text", placeholder: "question, thought, query, result, answer", value: filter.get("text") ?? "",
      oninput: (event) => { clearTimeout(timer); timer = setTimeout(() => set("text")(event.target.value), 300); },
    })),
    wide ? more : h("details", { open: filter.size > 0 }, h("summary", null, "Filter and sort"), more));
}

function episodeLine(number) {
  const row = rowOf(number);
  const golds = row.golds.join(" / ");
  return h("a", { class: "row", href: `#/episode/${number}`, "data-episode": String(number) },
    h("span", { class: "faint num" }, data.runs.length > 1 ? runDot(row.run) : null, ["step ", "val ", "test"][row.split], row.split === TEST ? null : String(row.step)),
    h("span", { class: "main" },
      h("div", { class: "q" }, row.question),
      h("div", { class: "a" }, row.answer === null ? "no answer" : `“${row.answer}”`, golds ? ` · gold ${golds}` : "")),
    h("span", { class: "faint" }, row.source),
    h("span", null, finishChip(row.finish)),
    h("span", { class: "soft num" }, String(row.depth), h("span", { class: "unit" }, row.depth === 1 ? " search" : " searches")),
    h("span", null, scoreChip(row.score), row.alerts.length ? h("span", { class: "bad", title: row.alerts.join(", ") }, " ▲") : null));
}

function episodesPage(query) {
  if (!data.count) return h("p", { class: "note" }, "This run has no rollout files, so there are no episodes to read.");
  const filter = new URLSearchParams(query);
  const count = h("p", { class: "soft", role: "status" });
  const rows = h("div", { class: "card rows" });
  const pager = h("div", { class: "pager" });

  const show = (found, progress) => {
    const ordered = filter.has("sort") ? [...found].sort(SORTS[filter.get("sort")]?.[1] ?? SORTS.first[1]) : found;
    const pages = Math.max(1, Math.ceil(ordered.length / PAGE_SIZE));
    const page = Math.min(pages, Math.max(1, Number(filter.get("page")) || 1));
    const busy = progress < 1 ? ` · searching, ${Math.round(100 * progress)} %` : "";
    count.textContent = `${found.length.toLocaleString("en")} of ${plural(data.count, "episode")}${busy}`;
    rows.replaceChildren(
      h("div", { class: "row head" }, ["When", "Question and answer", "Source", "Finish", "Searches", "Score"].map((name) => h("span", null, name))),
      ...ordered.slice((page - 1) * PAGE_SIZE, page * PAGE_SIZE).map(episodeLine));
    if (!ordered.length && progress >= 1) rows.append(h("div", { class: "row" }, h("span"), h("span", { class: "soft main" }, "No episode fits these filters.")));
    const go = (to) => () => { filter.set("page", to); apply(); scrollTo(0, 0); };
    pager.hidden = pages < 2;
    pager.replaceChildren(
      h("button", { class: "button", type: "button", disabled: page <= 1, onclick: go(page - 1) }, "← Previous"),
      `${page} of ${pages}`,
      h("button", { class: "button", type: "button", disabled: page >= pages, onclick: go(page + 1) }, "Next →"));
    sequence = ordered;
  };
  const apply = async () => {
    const mine = ++searchRun;
    const text = filter.toString();
    listAddress = `#/episodes${text ? `?${text}` : ""}`;
    history.replaceState(null, "", listAddress);
    const fits = matcher(filter);
    const numbers = [];
    for (let number = 0; number < data.count; number++) if (fits(number)) numbers.push(number);
    if (!filter.get("text")?.trim()) return show(numbers, 1);
    let shown = 0;
    for await (const [found, progress] of search(numbers, filter.get("text"))) {
      if (mine !== searchRun) return;
      if (progress === 1 || performance.now() - shown > 400) {
        show(found, progress);
        shown = performance.now();
      }
    }
  };
  apply();
  return h("div", null, h("h1", null, "Episodes"), filterBar(filter, apply), count, rows, pager);
}
// The list as last shown, to go back to and on from.
let sequence = null;
let listAddress = "#/episodes";
