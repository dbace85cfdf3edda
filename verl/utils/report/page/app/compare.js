// One question at two steps, side by side.

// Questions that were asked at more than one step or by more than one run, with their episodes.
function repeatedQuestions() {
  const byQuestion = new Map();
  data.episodes.question?.forEach((question, number) => {
    if (!byQuestion.has(question)) byQuestion.set(question, []);
    byQuestion.get(question).push(number);
  });
  const when = (number) => ["run", "step", "split"].map((column) => data.episodes[column][number]).join(" ");
  return new Map([...byQuestion].filter(([, numbers]) => new Set(numbers.map(when)).size > 1));
}

// The earliest and the latest of a question's episodes within a run; of several such pairs the one furthest apart. A
// test roll-out has no step, so it counts only where there is nothing else.
function widestPair(numbers) {
  const { run, step, split } = data.episodes;
  const series = new Map();
  for (const number of numbers.filter((one) => split[one] !== TEST)) {
    const key = `${run[number]} ${split[number]}`;
    if (!series.has(key)) series.set(key, []);
    series.get(key).push(number);
  }
  const pairs = [...series.values()].map((some) => {
    const sorted = some.sort((a, b) => step[a] - step[b] || a - b);
    return [sorted[0], sorted.find((one) => step[one] === step[sorted.at(-1)])];
  });
  return pairs.filter((pair) => span(pair) > 0).sort((a, b) => span(b) - span(a))[0] ?? [numbers[0], numbers.at(-1)];
}
const span = ([left, right]) => data.episodes.step[right] - data.episodes.step[left];

// An episode and the one of the question that is furthest from it in steps, the earlier one on the left.
function pairWith(number, others) {
  const { run, step, split } = data.episodes;
  const like = others.filter((other) => run[other] === run[number] && split[other] === split[number]);
  const [other] = (like.length ? like : others).toSorted((a, b) => Math.abs(step[b] - step[number]) - Math.abs(step[a] - step[number]) || a - b);
  return [number, other].sort((a, b) => step[a] - step[b] || a - b);
}

// What to open with: of the questions that stand furthest apart, the first whose episodes differ.
function openingPair(repeated) {
  const pairs = [...repeated.values()].map(widestPair);
  const most = pairs.reduce((widest, pair) => Math.max(widest, span(pair)), 0);
  const widest = pairs.filter((pair) => span(pair) === most);
  const differs = ([left, right]) => ["score", "depth", "answer"].some((name) => data.episodes[name][left] !== data.episodes[name][right]);
  return widest.find(differs) ?? widest[0];
}

async function comparePage(left, right) {
  const repeated = repeatedQuestions();
  if (!repeated.size) {
    return h("p", { class: "note" }, "No question was asked at two steps yet. Validation asks the same ones each time: trainer.test_freq.");
  }
  if (!(left >= 0 && left < data.count)) {
    [left, right] = openingPair(repeated);
  }
  const question = data.episodes.question[left];
  const numbers = repeated.get(question) ?? episodesWith("question", question);
  const rest = numbers.filter((number) => number !== left);
  if (!(right >= 0 && data.episodes.question[right] === question)) [left, right] = rest.length ? pairWith(left, rest) : [left, left];
  const go = (one, other) => { location.hash = `#/compare/${one}/${other}`; };
  const label = (number) => {
    const row = rowOf(number);
    return `${data.runs.length > 1 ? `${data.runs[row.run].name} · ` : ""}${whenOf(row)} · #${row.sample} · score ${fixed(row.score)}`;
  };
  const options = numbers.map((number) => [String(number), label(number)]);
  const [one, other] = await Promise.all([openEpisode(left), openEpisode(right)]);
  const column = (episode, onchange, name) => h("div", { "data-side": name },
    select(options, String(episode.number), onchange, { "aria-label": name }),
    h("div", { class: "chips", style: { margin: "10px 0" } }, finishChip(episode.finish), scoreChip(episode.score),
      h("a", { href: `#/episode/${episode.number}` }, "open")),
    turnsOf(episode));
  return h("div", null, questionChoice(repeated, question, go),
    h("div", { class: "card head-card", style: { margin: "14px 0" } }, h("h1", null, one.question),
      h("div", null, h("span", { class: "faint" }, "gold  "), one.golds.join("  /  ") || "none"), changes(one, other)),
    h("div", { class: "pair" }, column(one, (to) => go(to, right), "left"), column(other, (to) => go(left, to), "right")));
}

function questionChoice(repeated, chosen, go) {
  const place = h("span", { style: { display: "contents" } });
  const list = (words) => {
    const fits = [...repeated.keys()].filter((id) => data.questions[id].text.toLowerCase().includes(words));
    const shown = fits.slice(0, 300);
    if (!shown.includes(chosen)) shown.unshift(chosen);
    place.replaceChildren(select(shown.map((id) => [String(id), data.questions[id].text.slice(0, 140)]), String(chosen), (id) => {
      go(...widestPair(repeated.get(Number(id))));
    }, { "aria-label": "Question", style: { flex: "3 1 300px" } }));
  };
  list("");
  return h("div", { class: "card filters" },
    h("label", { class: "search" }, `Find one of ${plural(repeated.size, "question")} asked more than once`,
      h("input", { type: "search", oninput: (event) => list(event.target.value.toLowerCase()) })), place);
}

function changes(one, other) {
  const line = (label, before, after) => h("span", { class: "chip num" }, before === after ? `${label} ${after}` : `${label} ${before} → ${after}`);
  return h("div", { class: "chips" }, line("score", fixed(one.score), fixed(other.score)), line("F1", fixed(one.f1), fixed(other.f1)),
    line("searches", String(one.depth), String(other.depth)), line("answer", one.answer ?? "none", other.answer ?? "none"));
}
