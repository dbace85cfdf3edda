"""scripts/view_rollouts.py: what is listed, what the keys do, and that nothing reaches the terminal but characters."""

import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from verl.utils.report.rollouts import EpisodeRecord, TurnRecord
from verl.utils.report.terminal import draw_episode, extreme, parse_filter

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "view_rollouts.py"
spec = importlib.util.spec_from_file_location("view_rollouts", SCRIPT)
assert spec and spec.loader
view = importlib.util.module_from_spec(spec)
spec.loader.exec_module(view)


def episode(group="1-0", sample=0, score=0.0, **changes):
    fields = {"step": 1, "split": "train", "question": f"Who? {group}", "group": group, "sample": sample}
    return EpisodeRecord(**(fields | {"score": score, "finish": "answer", "source": "demo"} | changes))


def text_of(drawn) -> str:
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=True, color_system=None).print(drawn)
    return out.getvalue()


def test_filters_take_fields_and_words():
    search = TurnRecord("tool_call", think="The Mayor", asked=["oslo"])
    one = episode(score=0.5, depth=2, turns=[search])
    other = episode(score=None, finish="malformed")
    for text, fits in (
        ("", (True, True)),
        ("score<=0.5", (True, False)),  # without a score there is nothing to compare
        ("score>0.5", (False, False)),
        ("finish=malformed", (False, True)),
        ("mayor OSLO", (True, False)),
        ("mayor rome", (False, False)),
        ("depth>1 step=1 set=train source=demo oslo", (True, False)),
    ):
        test = parse_filter(text)
        assert (test(one), test(other)) == fits, text


@pytest.mark.parametrize(
    "text, said",
    [
        ("skore<1", "there is no field skore; known are step, set, score"),
        ("score<high", "score takes a number, such as score<1"),
        ("finish<answer", "finish is a word, so only finish=... works"),
    ],
)
def test_a_filter_that_cannot_be_read_is_explained(text, said):
    with pytest.raises(ValueError, match="filter .*: ") as raised:
        parse_filter(text)
    assert said in str(raised.value)


def test_worst_and_best_are_of_the_same_group():
    episodes = [episode(score=-1.0), *(episode("1-1", n, score) for n, score in enumerate([0.5, None, 0.9, 0.1]))]
    assert [extreme(episodes, 2, best) for best in (False, True)] == [4, 3]
    assert extreme([episode(score=None)], 0, True) == 0


def test_escape_sequences_and_markup_stay_characters():
    nasty = "\x1b[2J\x1b]0;owned\x07[bold red]x[/]\u202e"
    turns = [
        TurnRecord("tool_call", think=nasty, tool=nasty, asked=[nasty], observation=nasty, parts={nasty: 1.0}),
        TurnRecord("malformed", reason=nasty, text=nasty),
        TurnRecord("answer", answer=nasty),
    ]
    hit = json.dumps([{"query": nasty, "results": [{"title": nasty, "text": nasty}]}])
    turns.append(TurnRecord("tool_call", observation=hit))
    one = episode(
        question=nasty, golds=[nasty], error=nasty, source=nasty, answer=nasty, reward={nasty: 1}, turns=turns
    )
    shown = text_of(draw_episode(one, results=True)) + "".join(cell.plain for cell in view.cells(one))
    assert not set(shown) & set("\x1b\x07\u202e")
    assert shown.count("[bold red]x[/]") >= 12


def test_an_episode_is_drawn_with_what_its_turns_earned(write_run):
    (first, *_), _ = view.load([write_run() / "rollout" / "rollout_step_1.json"])
    drawn = text_of(draw_episode(first, results=False))
    assert "turn 1 · web_search   pbrs +0.50   advantage +1.00   Φ 0.00 → 0.50" in drawn
    assert "⌕ mayor 1" in drawn and "· Page 1" in drawn and "→ Bo" in drawn
    assert "The mayor of Oslo" not in drawn and "not trained on" not in drawn
    assert "not trained on" in text_of(draw_episode(episode(filtered=True), results=False))
    assert "The mayor of Oslo" in text_of(draw_episode(first, results=True))


async def test_keys_page_jump_filter_and_show_results(write_run):
    episodes, problems = view.load([write_run()])
    assert (len(episodes), problems) == (26, [])
    app = view.Viewer(episodes)
    async with app.run_test(size=(110, 40)) as pilot:
        assert (app.table.row_count, app.place) == (26, 0)
        await pilot.press("down", "b")
        assert app.place == 1  # samples 1 and 3 are best, the first of them counts
        await pilot.press("n", "w")
        assert app.place == 4
        await pilot.press("n", "p")
        assert app.place == 4
        await pilot.press("r")
        assert app.with_results
        await pilot.press("slash", *"skore<1", "enter")
        assert app.query_one(view.Input).has_class("open") and len(app.shown) == 26  # explained, nothing changed
        app.query_one(view.Input).value = "step=3 score>0"
        await pilot.press("enter")
        assert [one.sample for one in app.shown] == [1, 3, 1, 3]
        assert app.focused is app.table
        assert app.query_one("#episode").border_title == "1 of 4 that fit the filter, 26 in all"
        app.query_one(view.Input).value = "nothing has this word"
        await pilot.press("slash", "enter", "w", "n")
        assert app.shown == []
        await pilot.press("q")
    assert app.return_code == 0


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, cwd="/", stdin=subprocess.DEVNULL)


def test_without_a_terminal_it_lists_plainly(write_run):
    folder = write_run()
    (folder / "rollout" / "rollout_step_2.json").write_text("[{")
    done = run(folder, "--filter", "sample=0 step=3")
    assert done.returncode == 0
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["step", "#", "score", "finish", "searches", "question", "answer"],
        ["3", "0", "-0.25", "answer", "1", "Who", "is", "mayor", "number", "0?", "Bo"],
        ["3", "0", "-0.25", "answer", "1", "Who", "is", "mayor", "number", "1?", "Bo"],
    ]
    assert done.stderr.startswith("rollout_step_2.json was left out: ") and done.stderr.count("\n") == 1


def test_a_file_of_any_name_opens_and_what_is_none_is_one_sentence(write_run, tmp_path, capsys):
    file = tmp_path / "mine.json"
    file.write_text((write_run() / "rollout" / "rollout_step_1.json").read_text())
    assert view.main([str(file), "--full"]) == 0
    assert capsys.readouterr().out.count("turn 1 · web_search") == 8
    file.write_text("no json")
    for path in (file, tmp_path / "nowhere", tmp_path):
        assert view.main([str(path)]) == 1
        out, err = capsys.readouterr()
        assert not out and err.count("\n") == 1


def test_a_reader_that_leaves_early_is_no_error(write_run):
    folder = write_run(steps=12)
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), "--full"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ,
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
