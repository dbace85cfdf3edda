"""The table of a report's episodes, by column, and the alerts with the episodes that they name."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from verl.utils.report.metrics import is_number
from verl.utils.report.rollouts import EpisodeRecord, to_text
from verl.utils.report.source import RunFolder

SPLITS = ("train", "val", "test")
ANSWER_CHARS = 160  # of an answer, in the table


class EpisodeIndex:
    """Columns over all episodes, in the order of their blocks; texts that come again are numbers into a list."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = defaultdict(list)
        self._texts: dict[str, dict[Any, int]] = defaultdict(dict)
        self._places: dict[tuple[int, int, str, int], int] = {}
        self._sizes: list[int] = []

    def __len__(self) -> int:
        return len(self._columns["run"])

    def add(self, run: int, block: int, episodes: Sequence[EpisodeRecord]) -> None:
        """``episodes`` of one rollout file, the ``block``-th in the page."""
        assert block == len(self._sizes)
        self._sizes.append(len(episodes))
        for episode in episodes:
            if episode.split == "train":
                self._places[run, episode.step, episode.group, episode.sample] = len(self)
            row = {
                "run": run,
                "step": episode.step,
                "split": SPLITS.index(episode.split),
                "source": self._number("sources", episode.source or "unknown"),
                "finish": self._number("finishes", episode.finish or "unknown"),
                "question": self._number("questions", (episode.question, *episode.golds)),
                "group": self._number("groups", (run, episode.split, episode.step, episode.group)),
                "sample": episode.sample,
                "depth": episode.depth,
                "score": None if episode.score is None else round(episode.score, 4),
                "f1": None if episode.f1 is None else round(episode.f1, 4),
                "answer": None if episode.answer is None else episode.answer[:ANSWER_CHARS],
            }
            for name, value in row.items():
                self._columns[name].append(value)

    def find(self, run: int, step: int, group: str, sample: int) -> int | None:
        """The number of an episode of training; None if it isn't in the table."""
        return self._places.get((run, step, group, sample))

    def record(self) -> dict[str, Any]:
        return {
            "episodes": dict(self._columns),
            "blockSizes": self._sizes,
            "sources": list(self._texts["sources"]),
            "finishes": list(self._texts["finishes"]),
            "questions": [{"text": text, "golds": golds} for text, *golds in self._texts["questions"]],
        }

    def _number(self, kind: str, key: Any) -> int:
        return self._texts[kind].setdefault(key, len(self._texts[kind]))


def alert_records(runs: Sequence[RunFolder], index: EpisodeIndex) -> list[dict[str, Any]]:
    """``episodes``: numbers of those that show it and are in the table, the worst first."""
    records = []
    for number, run in enumerate(runs):
        for alert in sorted(run.alerts, key=lambda alert: alert["step"]):
            step, shown = int(alert["step"]), alert.get("episodes")
            found = [
                index.find(number, step, to_text(one.get("uid")), int(one["sample_index"]))
                for one in (shown if isinstance(shown, list) else [])
                if isinstance(one, dict) and is_number(one.get("sample_index"))
            ]
            records.append(
                {
                    "run": number,
                    "step": step,
                    "metric": alert["metric"],
                    "value": alert.get("value") if is_number(alert.get("value")) else None,
                    "threshold": alert.get("threshold") if is_number(alert.get("threshold")) else None,
                    "message": to_text(alert.get("message")),
                    "episodes": [place for place in found if place is not None],
                }
            )
    return records
