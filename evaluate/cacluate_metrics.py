"""Scores of a rolled-out test set, by data source.

    python evaluate/cacluate_metrics.py EXPERIMENT [--dataset FILE ...]

Reads ``evaluate/{experiment}_result.json``, writes ``evaluate/{experiment}_score.json`` and prints a table: F1 and
exact match under the ``deepresearcher`` and the ``squad`` definition (``verl/utils/reward_score/qa.py``), and MBE, the
share that a judge model calls correct, each with a bootstrap 95 % interval. The judge is asked only where JUDGE_MODEL
is set, at OPENAI_BASE_URL (default: OpenAI's) with OPENAI_API_KEY; its verdicts are kept, so a second run is free.

Results that don't match the dataset are refused. Without ``--dataset`` it is the one in the config.yaml of the newest
run of that name under ``outputs/``.
"""

import argparse
import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs from any directory, installed or not

from verl.trainer.config.paths import locate  # noqa: E402
from verl.utils.dataset import expand_files  # noqa: E402
from verl.utils.reward_score.judge import Claim, JudgeCache, JudgeConfig, judge  # noqa: E402
from verl.utils.reward_score.qa import exact_match, f1, split_golds  # noqa: E402

DEFINITIONS = ("deepresearcher", "squad")
OVERALL = "overall"
RESAMPLES = 1000
LEAST = 10  # answers; the bootstrap of fewer is too narrow to be shown
HELP_MBE = (
    "MBE: not judged. For a judge, export JUDGE_MODEL, OPENAI_BASE_URL and OPENAI_API_KEY of any OpenAI-compatible "
    "endpoint and run this again."
)
AGAIN = "roll the set out again with evaluate.sh"

Row = Mapping[str, Any]
Asked = tuple[str, list[str]]  # question, golds


def load_results(path: Path) -> list[Row]:
    """The rows of a result file. Raises ValueError for a file that can't be scored, naming the rows at fault."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; {AGAIN}, which writes it, or check the experiment's name") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON ({error}); {AGAIN}") from error
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path} holds no list of rows; {AGAIN}")
    for place, row in enumerate(rows):
        if fault := _fault(row):
            raise ValueError(f"{path}, row {place}: {fault}; {AGAIN}")
    seen: set[int | str] = set()
    twice = [row["idx"] for row in rows if row["idx"] in seen or seen.add(row["idx"])]
    if twice:
        raise ValueError(f"{path}: idx {_names(twice)} stands more than once; one row a question, so {AGAIN}")
    return rows


def _fault(row: Any) -> str:
    """What keeps a row from being scored; "" if nothing does."""
    if not isinstance(row, dict):
        return f"is {type(row).__name__}, not an object"
    kinds = {"idx": (int, str), "question": str, "ground_truths": list, "data_source": str, "answer": (str, type(None))}
    for key, kind in kinds.items():
        if key not in row:
            return f"has no {key!r}"
        if not isinstance(row[key], kind) or isinstance(row[key], bool):
            return f"{key} is {row[key]!r}"
    if not row["ground_truths"] or not all(isinstance(gold, str) for gold in row["ground_truths"]):
        return f"ground_truths is {row['ground_truths']!r}, not a list of texts"
    return f"the data source can't be named {OVERALL!r}" if row["data_source"] == OVERALL else ""


def recorded_dataset(experiment: str) -> tuple[list[str], int | None]:
    """Validation files, and how many rows of them, of the newest run named ``experiment``; none if there is no run.

    A roll-out of its own (``trainer.val_only``) leaves ``val_config.yaml``, which counts before the training's.
    """
    for name in ("val_config.yaml", "config.yaml"):
        found = (ROOT / "outputs").glob(f"*/{experiment}/{name}")
        if configs := sorted(found, key=lambda path: path.stat().st_mtime):
            break
    if not configs:
        return [], None
    data = (yaml.safe_load(configs[-1].read_text(encoding="utf-8")) or {}).get("data") or {}
    files = data.get("val_files") or []
    return [files] if isinstance(files, str) else list(files), data.get("val_max_samples")


def load_questions(files: Sequence[str], limit: int | None = None) -> dict[int | str, Asked]:
    """Question and golds of each row of parquet files, by its place (int) and by ``extra_info.index`` where it is text.

    Raises ValueError for a file that is missing or holds other columns.
    """
    rows: list[dict[str, Any]] = []
    for path in expand_files([locate(name) for name in files]):
        try:
            rows += pq.read_table(path).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} can't be read as parquet: {error}") from error
    questions: dict[int | str, Asked] = {}
    for place, row in enumerate(rows[:limit]):
        try:
            text = [message["content"] for message in row["prompt"] if message["role"] == "user"][-1].strip()
            truth = row["reward_model"]["ground_truth"]
            golds = [gold for alias in ([truth] if isinstance(truth, str) else truth) for gold in split_golds(alias)]
        except (LookupError, TypeError, AttributeError):
            raise ValueError(
                f"{', '.join(files)}, row {place}: a user message in 'prompt' and 'reward_model.ground_truth' are "
                "needed; give a dataset in the format of data/demo"
            ) from None
        key = (row.get("extra_info") or {}).get("index")
        for name in [place, key] if isinstance(key, str) else [place]:
            questions[name] = text, golds
    return questions


def check_against(rows: Sequence[Row], questions: Mapping[int | str, Asked], name: str) -> None:
    """Raise ValueError unless ``rows`` answer exactly the ``questions`` of the dataset called ``name``."""
    by_place = all(isinstance(row["idx"], int) for row in rows)
    expected = {key: asked for key, asked in questions.items() if isinstance(key, int) == by_place}
    results = {row["idx"]: (row["question"].strip(), row["ground_truths"]) for row in rows}
    both = [key for key in results if key in expected]
    faults = {
        "missing": [key for key in expected if key not in results],
        "not in the dataset": [key for key in results if key not in expected],
        "asking another question": [key for key in both if results[key][0] != expected[key][0]],
        "with other golds": [key for key in both if results[key][1] != expected[key][1]],
    }
    found = [f"{len(keys)} {what} (idx {_names(keys)})" for what, keys in faults.items() if keys]
    if found:
        raise ValueError(
            f"the results do not match {name} ({len(expected)} questions): {'; '.join(found)}; {AGAIN}, "
            "or name the file that was rolled out with --dataset"
        )


def score(rows: Sequence[Row], verdicts: Sequence[bool | None] | None) -> dict[str, Any]:
    """``{data_source: {count, answered, judged, definition: {metric: mean, metric_interval: [low, high]}}}``.

    Metrics: f1, em, and mbe over the judged rows (the same under each definition, null if there are none). The key
    ``overall`` holds the mean over all rows, not over sources.
    """
    columns = {
        (definition, name): np.array([measure(row["answer"], row["ground_truths"], definition) for row in rows])
        for definition in DEFINITIONS
        for name, measure in (("f1", f1), ("em", exact_match))
    }
    judged = np.array([np.nan if verdict is None else verdict for verdict in verdicts or [None] * len(rows)], float)
    members = defaultdict(list)
    for place, row in enumerate(rows):
        members[row["data_source"]].append(place)
    scores = {}
    for source, places in (*sorted(members.items()), (OVERALL, list(range(len(rows))))):
        ruled = judged[places][~np.isnan(judged[places])]
        mbe = _summary("mbe", ruled)
        entry: dict[str, Any] = {
            "count": len(places),
            "answered": sum(bool(rows[place]["answer"]) for place in places),
            "judged": len(ruled),
        }
        for definition in DEFINITIONS:
            named = {name: values[places] for (owner, name), values in columns.items() if owner == definition}
            entry[definition] = {k: v for name in named for k, v in _summary(name, named[name]).items()} | mbe
        scores[source] = entry
    return scores


def _summary(name: str, values: np.ndarray) -> dict[str, Any]:
    """Mean and the percentile bootstrap's 95 % interval (Efron 1979), the same at every run."""
    if not len(values):
        return {name: None, f"{name}_interval": None}
    rng = np.random.default_rng(0)
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(RESAMPLES)]
    return {name: float(values.mean()), f"{name}_interval": [float(q) for q in np.percentile(means, (2.5, 97.5))]}


def judge_rows(rows: Sequence[Row], config: JudgeConfig, cache: Path, console: Console) -> list[bool | None]:
    """A verdict a row, None where the judge gave none; what failed is said on ``console``."""
    claims = [Claim(row["question"], tuple(row["ground_truths"]), row["answer"]) for row in rows]
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"judged by {config.model}", total=len(claims))
        result = asyncio.run(judge(claims, config, JudgeCache(cache), lambda: progress.advance(bar)))
    for reason, count in result.failures.most_common(3):
        console.print(f"{count} of {len(rows)} answers were not judged: {reason}", style="yellow", markup=False)
    return result.verdicts


def show(experiment: str, scores: Mapping[str, Any], console: Console) -> None:
    """The table; MBE is in it where answers were judged, an interval where there are enough of them."""
    judged = scores[OVERALL]["judged"] > 0
    enough = any(entry["count"] >= LEAST for entry in scores.values())
    table = Table(title=f"{experiment}: per cent" + (", with the bootstrap's 95 % interval" if enough else ""))
    table.add_column("data source")
    # DeepResearcher's definition is the default; full names beside each other would not fit 80 columns.
    for heading in ("count", "F1", "EM", "F1\n(SQuAD)", "EM\n(SQuAD)", *["MBE"] * judged):
        table.add_column(heading, justify="right")
    for source, entry in scores.items():
        if source == OVERALL:
            table.add_section()
        cells = [_cell(entry[d], metric, entry["count"]) for d in DEFINITIONS for metric in ("f1", "em")]
        cells += [_cell(entry[DEFINITIONS[0]], "mbe", entry["judged"])] * judged
        table.add_row(source, str(entry["count"]), *cells)
    console.print(table)


def _cell(entry: Mapping[str, Any], name: str, count: int) -> str:
    if entry[name] is None:
        return "–"
    low, high = entry[f"{name}_interval"]
    return f"{100 * entry[name]:.1f}" + (f"\n{100 * low:.1f}–{100 * high:.1f}" if count >= LEAST else "")


def _names(keys: Iterable[int | str], shown: int = 5) -> str:
    keys = list(keys)
    return ", ".join(map(str, keys[:shown])) + (f" and {len(keys) - shown} more" if len(keys) > shown else "")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", help="names evaluate/{experiment}_result.json")
    parser.add_argument("--dataset", nargs="+", metavar="FILE", help="parquet files that were rolled out, in order")
    parser.add_argument("--folder", type=Path, default=ROOT / "evaluate", help="where results and scores lie")
    parser.add_argument("--judge-cache", type=Path, default=ROOT / "outputs" / "judge_cache.jsonl", metavar="FILE")
    parser.add_argument("--judge-deadline", type=float, default=1800.0, metavar="S", help="seconds for all judging")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args, console = _arguments(argv), Console()
    try:
        rows = load_results(args.folder / f"{args.experiment}_result.json")
        files, limit = (args.dataset, None) if args.dataset else recorded_dataset(args.experiment)
        if files:
            check_against(rows, load_questions(files, limit), ", ".join(files))
        else:
            console.print("No dataset to check against: no run of that name; give one with --dataset.", style="yellow")
        config = JudgeConfig.from_env(os.environ, deadline_s=args.judge_deadline)
        verdicts = judge_rows(rows, config, args.judge_cache, console) if config else None
        scores = score(rows, verdicts)
        target = args.folder / f"{args.experiment}_score.json"
        partial = target.with_suffix(".json.tmp")
        partial.write_text(json.dumps(scores, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(target)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show(args.experiment, scores, console)
    if config is None:
        console.print(HELP_MBE)
    console.print(f"Written to {target}", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
