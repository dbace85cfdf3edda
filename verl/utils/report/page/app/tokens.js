// The token view: each sampled token with its log-probs, and what was only read in between.

const TOKEN_COLOURS = {
  "log-prob": { of: (token) => (token.trainer ?? token.engine ?? 0) / -3, from: "certain", to: "surprising", rgb: "217 102 43" },
  "engine − trainer": { of: (token) => (token.gap === null ? 0 : Math.abs(token.gap) / gapScale), from: "same", to: "apart", rgb: "138 95 176" },
  "loss": { of: (token) => (token.loss ? 0.45 : 0), from: "none", to: "carries loss", rgb: "47 109 181" },
};
let gapScale = 0.1; // the episode's largest gap, at least this much

function tokensOf(turn) {
  const { ids, text, widths, loss, engine, trainer } = turn.tokens;
  const letters = Array.from(text); // widths count code points
  const numbers = (column) => (column ? column.split(" ").map(Number) : []);
  const [id, size, ours, theirs] = [ids, widths, engine, trainer].map(numbers);
  let at = 0;
  return id.map((_, i) => {
    const piece = letters.slice(at, at + size[i]).join("");
    at += size[i];
    const value = (column) => (Number.isFinite(column[i]) ? column[i] : null);
    const [e, t] = [value(ours), value(theirs)];
    return { id: id[i], text: piece, loss: loss[i] === "1", engine: e, trainer: t, gap: e === null || t === null ? null : e - t };
  });
}

function tokenView(episode) {
  const turns = episode.turns.map((turn) => (turn.tokens ? tokensOf(turn) : []));
  const all = turns.flat();
  gapScale = all.reduce((most, token) => Math.max(most, Math.abs(token.gap ?? 0)), 0.1);
  const inspect = h("div", { class: "card inspect num" }, h("span", { class: "faint" }, "Point at a token, or tap it."));
  const spans = [];
  let on = null;
  const show = (event) => {
    const place = event.target.dataset?.token;
    if (place === undefined) return;
    on?.classList.remove("on");
    on = event.target;
    on.classList.add("on");
    inspect.replaceChildren(...describe(all[Number(place)]));
  };
  const paint = (name) => {
    const { of, rgb } = TOKEN_COLOURS[name];
    spans.forEach((span, i) => { span.style.background = `rgb(${rgb} / ${Math.min(0.75, Math.max(0, of(all[i]) * 0.75)).toFixed(3)})`; });
    ramp.style.background = `linear-gradient(90deg, rgb(${rgb} / 0), rgb(${rgb} / 75%))`;
    [from.textContent, to.textContent] = [TOKEN_COLOURS[name].from, TOKEN_COLOURS[name].to];
  };
  const [ramp, from, to] = [h("i"), h("span"), h("span")];
  const choice = select(Object.keys(TOKEN_COLOURS).map((name) => [name, name]), "log-prob", paint, { "aria-label": "Colour by" });
  let at = 0;
  const sections = turns.map((tokens, place) => {
    const turn = episode.turns[place];
    const pieces = tokens.map((token) => {
      const text = token.text.replaceAll("\n", "⏎\n") || "∅";
      const span = h("span", { "data-token": String(at++), class: token.loss ? "" : "off" }, text);
      spans.push(span);
      return span;
    });
    const read = turn.observation ? h("span", { class: "read" },
      `read, not sampled, no loss: ${turn.observation_tokens ? `${turn.observation_tokens} tokens of ` : ""}what the tool brought`) : null;
    return h("section", { class: "card turn", style: { gridTemplateColumns: "minmax(0, 1fr)" } },
      h("div", { class: "said" }, turnHead(turn, place), h("div", { class: "tokens", onpointerover: show, onclick: show }, pieces, read)));
  });
  paint("log-prob");
  return h("div", null, tokenSummary(all),
    h("div", { class: "legend faint" }, h("label", null, "colour by ", choice), h("span", { class: "scale" }, from, ramp, to)), sections, inspect);
}

function tokenSummary(all) {
  const gaps = all.filter((token) => token.gap !== null).map((token) => Math.abs(token.gap));
  const mean = gaps.reduce((sum, gap) => sum + gap, 0) / (gaps.length || 1);
  const loss = all.filter((token) => token.loss).length;
  return h("p", { class: "soft num", style: { marginTop: "14px" } }, `${plural(all.length, "sampled token")}, ${loss} of them carry loss · engine − trainer: `
    + `${short(mean)} on average, ${short(Math.max(0, ...gaps))} at most`);
}

function describe(token) {
  const value = (number) => (number === null ? "–" : `${number.toFixed(4).replace("-", MINUS)} (p ${Math.exp(number).toFixed(3)})`);
  const part = (label, text) => h("span", null, h("span", { class: "faint" }, `${label} `), text);
  return [h("b", { class: "mono" }, JSON.stringify(token.text)), part("id", String(token.id)), part("engine", value(token.engine)),
    part("trainer", value(token.trainer)), part("gap", token.gap === null ? "–" : signed(token.gap, 4)),
    h("span", { class: "faint" }, token.loss ? "carries loss" : "no loss")];
}
