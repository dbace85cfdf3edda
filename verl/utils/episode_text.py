"""A step's telling episodes as plain text, for trackers. ``rows`` are those of ``batch.episode_rows``."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH = 110  # characters a line


def ranked(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """worst, median (the upper one of two) and best by score of the episodes that didn't fail; {} without any."""
    scored = [row for row in rows if row["finish"] != "error" and row["reward"]["valid"]]
    scored.sort(key=lambda row: row["reward"]["score"])
    return {"worst": scored[0], "median": scored[len(scored) // 2], "best": scored[-1]} if scored else {}


def episode_text(row: Mapping[str, Any]) -> str:
    """Question, golds and score, then of each turn the thought and what was asked or answered. No observations."""
    reward = row["reward"]
    lines = [
        f"question: {row['question']}",
        f"gold: {' | '.join(row['ground_truths'])}",
        f"score {reward['score']:.3f}, F1 {reward['f1']:.3f}, {row['finish']}, {row['data_source']}",
    ]
    for number, turn in enumerate(row["turns"], start=1):
        lines.append("")
        if turn["think"]:
            lines.append(f"{number} think: {turn['think']}")
        if turn["kind"] == "tool_call":
            name = turn["tool_call"]["name"]
            lines += [
                f"{number} {name}: {asked}" for values in turn["tool_call"]["arguments"].values() for asked in values
            ]
        elif turn["kind"] == "answer":
            lines.append(f"{number} answer: {turn['answer']}")
        else:
            lines.append(f"{number} malformed ({turn['reason']}): {turn['text']}")
    written = [line for text in lines for line in text.splitlines() or [""]]
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in written)
