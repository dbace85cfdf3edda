"""Thresholds for the behaviour monitor, from what the cold policy does before any training.

    python scripts/calibrate_monitor.py [--episodes 256] [--output FILE] [--timeout-s 3600] profile=cpu_demo [key=value]

Plays so many episodes of the run's own training questions, as the run's first step would (temperature, group size,
tool turns, search). A figure of which little is bad (depth, diversity, information gain, deviation of rewards) gets its
lower quartile as threshold, one of which much is bad its upper quartile: an alert then says that the mean of a whole
step has fallen to where the worst quarter of the cold episodes was. Where three quarters are as good as can be, the
worst value takes the quartile's place. Shares that are 0 or 1 in one episode (malformed, no answer) are taken over
groups. Likelihood displacement and the gap between engine and trainer arise only in training and are left alone, and
so is a figure that gives no useful threshold; the table says why.

The file is used by ``monitor.thresholds_file=FILE``; the thresholds are printed as overrides, too.
"""

import argparse
import asyncio
import logging
import math
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scrl.types import Episode, EpisodeRequest  # noqa: E402
from verl.trainer.config import Config, load_config  # noqa: E402
from verl.trainer.config.paths import run_dir  # noqa: E402
from verl.trainer.config.validation import check_inputs  # noqa: E402
from verl.utils.behavior_monitor import THRESHOLDS, figures, group_deviations  # noqa: E402

LEAST = 8  # values below which a quartile says nothing
BY_GROUP = ("malformed_share", "answer_avoidance_share")  # 0 or 1 in one episode


def cold_values(episodes: Sequence[Episode], rewards: Sequence[float]) -> dict[str, list[float]]:
    """Values of each figure that can be calibrated, under its key of ``monitor.*``, over episodes or over groups."""
    sound = [(episode, reward) for episode, reward in zip(episodes, rewards, strict=True) if episode.finish != "error"]
    rows = [(episode.uid, figures(episode)) for episode, _ in sound]
    values: dict[str, list[float]] = {}
    for key, metric in THRESHOLDS.items():
        figure = metric.removeprefix("behavior/")
        if rows and figure in rows[0][1]:
            groups: dict[str | int, list[float]] = defaultdict(list)
            for place, (uid, row) in enumerate(rows):
                if row[figure] is not None:
                    groups[uid if figure in BY_GROUP else place].append(row[figure])
            values[key] = [statistics.fmean(group) for group in groups.values()]
    deviations = group_deviations([episode.uid for episode, _ in sound], [reward for _, reward in sound])
    return values | {"min_reward_deviation": list(deviations.values())}


def threshold(key: str, values: Sequence[float]) -> tuple[float | None, str]:
    """(a threshold rounded to four digits, or None where none would be of use; what there is to say about it)

    The quartile on the bad side. Where that is as good as a value can be, any step would alert, so the worst value
    takes its place; where it is as bad as a value can be, no step ever would.
    """
    if len(values) < LEAST:
        return None, f"only {len(values)} values"
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    figures = (low, min(values), max(values), 0.0) if key.startswith("min_") else (high, max(values), 0.0, 1.0)
    quartile, worst, best, limit = (round(figure, 4) for figure in figures)
    tried = ((quartile, "a quarter", ""), (worst, "the worst", "the worst value: three quarters are at the best"))
    for bound, what, note in tried:
        if bound == limit:
            return None, f"{what} is at {bound:g}, and nothing is worse"
        if bound != best:
            return bound, note
    return None, "all are at the best, so any other would alert"


def requests_for(config: Config, count: int, tokenizer: object) -> list[EpisodeRequest]:
    """``count`` episodes (whole groups) of training questions, drawn by the run's seed, as its first step asks."""
    from verl.trainer.ppo.batch import group_requests
    from verl.trainer.ppo.curriculum_scheduler import CurriculumScheduler
    from verl.utils.dataset import RLHFDataset

    data, rollout, size = config.data, config.actor_rollout_ref.rollout, config.agent_grpo.n
    questions = RLHFDataset(data.train_files, tokenizer, max_prompt_length=data.max_prompt_length, tools=config.tools)
    wanted = min(math.ceil(count / size), len(questions))
    curriculum = CurriculumScheduler(config.curriculum, config.max_turns, config.reward_model.min_turns)
    return group_requests(
        [questions[place] for place in random.Random(config.trainer.seed).sample(range(len(questions)), wanted)],
        n=size,
        step=0,
        max_turns=curriculum.max_turns,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        seed=config.trainer.seed,
    )


async def play(config: Config, requests: Sequence[EpisodeRequest], timeout_s: float, console: Console) -> list[Episode]:
    """The requests' episodes, one task a group. Raises ValueError where they aren't done within ``timeout_s``."""
    from verl.workers.rollout_worker import RolloutWorker

    groups: dict[str, list[EpisodeRequest]] = defaultdict(list)
    for request in requests:
        groups[request.uid].append(request)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    episodes: list[Episode] = []
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("loading the policy", total=len(requests))
        try:
            async with asyncio.timeout(timeout_s):
                worker = RolloutWorker(config, 0)
                await worker.ready()
                progress.update(task, description="playing episodes")
                for done in asyncio.as_completed([worker.generate(group) for group in groups.values()]):
                    episodes += await done
                    progress.update(task, completed=len(episodes))
        except TimeoutError:
            raise ValueError(
                f"{len(episodes)} of {len(requests)} episodes were done after {timeout_s:g} s; "
                "raise --timeout-s, or lower --episodes"
            ) from None
    return episodes


def score(config: Config, episodes: Sequence[Episode]) -> list[float]:
    """Each episode's return, as training would see it."""
    from verl.trainer.ppo.curriculum_scheduler import CurriculumScheduler
    from verl.workers.reward_manager.naive import NaiveRewardManager

    curriculum = CurriculumScheduler(config.curriculum, config.max_turns, config.reward_model.min_turns)
    longest = max(len(episode.response_ids) for episode in episodes)
    rewards = NaiveRewardManager(config.reward_model)
    _, info = rewards(episodes, longest, min_turns=curriculum.min_turns, discount=config.algorithm.gamma)
    return info["return"].tolist()


def report(values: Mapping[str, Sequence[float]], console: Console) -> dict[str, float]:
    """Print the table; the thresholds that are of use."""
    table = Table(title="the cold policy")
    for name in ("monitor.*", "values", "mean", "threshold"):
        table.add_column(name, no_wrap=True)
    table.add_column("remark")
    found = {}
    for key in THRESHOLDS:
        if key not in values:
            continue
        bound, why = threshold(key, values[key])
        mean = f"{statistics.fmean(values[key]):.3f}" if values[key] else "-"
        table.add_row(key, str(len(values[key])), mean, "-" if bound is None else f"{bound:g}", why)
        if bound is not None:
            found[key] = bound
    console.print(table)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256, help="how many to play, rounded up to whole groups")
    parser.add_argument(
        "--output", type=Path, help="where to write; default: monitor_thresholds.yaml in the run's folder"
    )
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="give up after so many seconds")
    options, overrides = parser.parse_known_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    console = Console()
    try:
        if options.episodes < 1:
            raise ValueError(f"--episodes={options.episodes} plays none; give a positive number")
        config = load_config(overrides)
        check_inputs(config)
        path = (options.output or run_dir(config) / "monitor_thresholds.yaml").absolute()
        try:  # before the work, not after it
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            raise ValueError(f"--output={path} can't be written ({error.strerror}); give another place") from None
        from verl.utils.tokenizer import (
            load_tokenizer,
        )  # torch and transformers, once the settings are known to be good

        requests = requests_for(config, options.episodes, load_tokenizer(config.actor_rollout_ref.model.path))
        episodes = asyncio.run(play(config, requests, options.timeout_s, console))
        if all(episode.finish == "error" for episode in episodes):
            raise ValueError(f"every episode failed, so there is nothing to measure; the first: {episodes[0].error}")
        found = report(cold_values(episodes, score(config, episodes)), console)
    except ValueError as error:
        print(f"calibrate_monitor: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    head = (
        f"# From {len(episodes)} episodes of {config.actor_rollout_ref.model.path}, untrained (calibrate_monitor.py).\n"
    )
    path.write_text(head + yaml.safe_dump({"monitor": found}, sort_keys=False), encoding="utf-8")
    console.print(f"written; use them by\n  monitor.thresholds_file={path}\nor by", soft_wrap=True, highlight=False)
    print("  " + (" ".join(f"monitor.{key}={value:g}" for key, value in found.items()) or "(none is of use)"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
