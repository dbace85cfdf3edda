// Which page is shown: #/, #/episodes?filters, #/episode/12, #/compare/12/340.

let shownFor = 0; // a slow page must not replace one that was asked for later

async function route() {
  const mine = ++shownFor;
  searchRun++;
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, first, second] = path.split("/");
  const number = (text) => (/^\d+$/.test(text ?? "") ? Number(text) : NaN);
  forgetCharts();
  let page;
  if (name === "episodes") page = episodesPage(query);
  else if (name === "episode") page = await episodePage(number(first));
  else if (name === "compare") page = await comparePage(number(first), number(second));
  else page = curvesPage();
  if (mine !== shownFor) return;
  const current = name === "episode" ? "episodes" : name || "curves";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.getElementById("main").replaceChildren(page);
  document.body.dataset.shown = current;
}

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  const apply = () => {
    const dark = chosen ?? system.matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    if (data) route();
  };
  system.addEventListener("change", apply);
  document.getElementById("theme").addEventListener("click", () => {
    chosen = !isDark();
    apply();
  });
  apply();
}

async function start() {
  const main = document.getElementById("main");
  startTheme();
  if (typeof DecompressionStream === "undefined") {
    main.replaceChildren(h("p", { class: "note" }, "This browser is too old for the report; any of the last three years will do."));
    return;
  }
  try {
    await openData();
  } catch (error) {
    main.replaceChildren(h("p", { class: "note" }, `This file is damaged (${error.message}); make the report again.`));
    return;
  }
  document.title = `${data.runs.map((run) => run.name).join(", ")} – run report`;
  window.addEventListener("hashchange", () => {
    scrollTo(0, 0);
    route();
  });
  await route();
}

start();
