// One question at two steps, side by side.

// Questions that were asked at more than one step or by more than one run, with their episodes.
function repeatedQuestions() {
  const byQuestion = new Map();
  data.episodes.question?.forEach((question, number) => {
    if (!byQuestion.has(question)) byQuestion.set(question, []);
    byQuestion.get(question).push(number);
  });
  const when = (number) => `${data.episodes.run[number]} ${data.episodes.step[number]} ${data.episodes.val[number]}`;
  return new Map([...byQuestion].filter(([, numbers]) => new Set(numbers.map(when)).size > 1));
}

async function comparePage(left, right) {
  const repeated = repeatedQuestions();
  if (!repeated.size) {
    return h("p", { class: "note" }, "No question was asked at two steps yet. Validation asks the same ones each time: trainer.test_freq.");
  }
  if (!(left >= 0 && left < data.count)) {
    const [, numbers] = [...repeated].find(([, some]) => data.episodes.val[some[0]]) ?? [...repeated][0];
    [left, right] = [numbers[0], numbers.at(-1)];
  }
  const question = data.episodes.question[left];
  const numbers = repeated.get(question) ?? episodesWith("question", question);
  if (!(right >= 0 && data.episodes.question[right] === question)) right = numbers.at(-1);
  const go = (one, other) => { location.hash = `#/compare/${one}/${other}`; };
  const label = (number) => {
    const row = rowOf(number);
    return `${data.runs.length > 1 ? `${data.runs[row.run].name} · ` : ""}${splitOf(row)} step ${row.step} · #${row.sample} · score ${fixed(row.score)}`;
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
      const numbers = repeated.get(Number(id));
      go(numbers[0], numbers.at(-1));
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
