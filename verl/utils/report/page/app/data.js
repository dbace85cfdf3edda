// The page's data: blocks of gzip in base64. Block 0 is the overview, each other one the turns of a rollout file.

let data; // the overview
const blocks = new Map(); // number -> promise of its episodes; the last few that were opened
const BLOCKS_KEPT = 12;

async function readBlock(number) {
  const text = document.getElementById(`block-${number}`).textContent;
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

async function openData() {
  data = await readBlock(0);
  const { blockSizes } = data;
  data.firstOf = []; // block -> number of its first episode
  data.count = 0;
  for (const size of blockSizes) {
    data.firstOf.push(data.count);
    data.count += size;
  }
  data.alertsOf = new Map(); // episode -> metrics whose alerts name it
  for (const alert of data.alerts) {
    for (const episode of alert.episodes) {
      if (!data.alertsOf.has(episode)) data.alertsOf.set(episode, new Set());
      data.alertsOf.get(episode).add(alert.metric);
    }
  }
}

function blockOf(episode) {
  let low = 0;
  let high = data.firstOf.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (data.firstOf[middle] <= episode) low = middle;
    else high = middle - 1;
  }
  return low;
}

function openBlock(block) {
  if (!blocks.has(block)) {
    blocks.set(block, readBlock(block + 1));
    if (blocks.size > BLOCKS_KEPT) blocks.delete(blocks.keys().next().value);
  }
  return blocks.get(block);
}

// One episode: its row of the table, by name, and its turns and rewards.
async function openEpisode(number) {
  const block = blockOf(number);
  const body = (await openBlock(block))[number - data.firstOf[block]];
  return { ...rowOf(number), ...body };
}

function rowOf(number) {
  const columns = data.episodes;
  const at = (name) => columns[name][number];
  const question = data.questions[at("question")];
  return {
    number, run: at("run"), step: at("step"), split: at("split"), sample: at("sample"), depth: at("depth"),
    score: at("score"), f1: at("f1"), answer: at("answer"), group: at("group"), questionId: at("question"),
    question: question.text, golds: question.golds, source: data.sources[at("source")], finish: data.finishes[at("finish")],
    alerts: [...(data.alertsOf.get(number) || [])],
  };
}

// Numbers of the episodes whose value in a column is the given one, in order.
function episodesWith(column, value) {
  const found = [];
  data.episodes[column].forEach((other, number) => other === value && found.push(number));
  return found;
}

// Observation text to [{query, results: [{title, url, text}]}]; null where it is not in our tools' form.
function parseResults(observation) {
  try {
    const parsed = JSON.parse(observation);
    if (!Array.isArray(parsed) || !parsed.every((one) => one && Array.isArray(one.results))) return null;
    return parsed.map((one) => ({ query: String(one.query ?? one.url ?? ""), results: one.results.map((hit) => hit || {}) }));
  } catch {
    return null;
  }
}
