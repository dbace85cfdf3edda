"""Reads the episodes of rollout files in the terminal; works over SSH.

    python scripts/view_rollouts.py outputs/{project}/{experiment}/rollout/rollout_step_8.json
    python scripts/view_rollouts.py outputs/{project}/{experiment}              # all steps of a run
    python scripts/view_rollouts.py FILE --filter "finish=answer score<0.5 oslo"
    python scripts/view_rollouts.py FILE | less                                 # one line an episode; --full: all of it

Keys: up and down pick an episode, space and backspace page through it, w and b jump to the worst and the best sample
of its group, n and p to the next and previous group, r shows what searches brought, / filters, q ends.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from any directory

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Input, Static

from verl.utils.report.rollouts import EpisodeRecord, RolloutFile, read_rollout, rollout_files
from verl.utils.report.terminal import cells, draw_episode, extreme, parse_filter, siblings

COLUMNS = ("step", "#", "score", "finish", "searches", "question", "answer")


class Viewer(App[None]):
    """Episodes above, the chosen one below."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    DataTable { height: 2fr; min-height: 6; }
    #episode { height: 3fr; border-top: solid $primary; padding: 0 1; }
    #filter { display: none; }
    #filter.open { display: block; }
    """
    BINDINGS = [
        Binding("w", "jump(False)", "worst of group"),
        Binding("b", "jump(True)", "best of group"),
        Binding("n", "group(1)", "next group"),
        Binding("p", "group(-1)", "previous"),
        Binding("r", "results", "results"),
        Binding("slash", "filter", "filter", key_display="/"),
        Binding("space", "page(1)", "page", show=False),
        Binding("backspace", "page(-1)", "page back", show=False),
        Binding("escape", "table", show=False),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, episodes: Sequence[EpisodeRecord], filter_text: str = "") -> None:
        """Raises ValueError for a filter that can't be read."""
        super().__init__()
        self.everything = episodes
        self.filter_text = filter_text
        self.shown = list(filter(parse_filter(filter_text), episodes))
        self.with_results = False

    def compose(self) -> ComposeResult:
        yield DataTable(cursor_type="row", zebra_stripes=True)
        with VerticalScroll(id="episode", can_focus=False):
            yield Static(id="text")
        yield Input(self.filter_text, placeholder="finish=answer score<0.5 depth>1 word ...", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        self.table = self.query_one(DataTable)
        self.table.add_columns(*COLUMNS)
        self._fill()
        self.table.focus()

    def _fill(self) -> None:
        self.table.clear()
        self.table.add_rows(map(cells, self.shown))
        self._draw()

    @property
    def place(self) -> int:
        return self.table.cursor_row

    def _draw(self) -> None:
        text = self.query_one("#text", Static)
        if self.shown:
            text.update(draw_episode(self.shown[self.place], self.with_results))
        else:
            text.update("No episode fits the filter; / changes it.")
        box = self.query_one("#episode")
        box.border_title = f"{self.place + 1 if self.shown else 0} of {len(self.shown)}"
        if len(self.shown) < len(self.everything):
            box.border_title += f" that fit the filter, {len(self.everything)} in all"
        box.scroll_home(animate=False)

    def on_data_table_row_highlighted(self) -> None:
        self._draw()

    def action_jump(self, best: bool) -> None:
        if self.shown:
            self.table.move_cursor(row=extreme(self.shown, self.place, best))

    def action_group(self, by: int) -> None:
        if self.shown:
            group = siblings(self.shown, self.place)
            target = max(group) + 1 if by > 0 else min(group) - 1
            if 0 <= target < len(self.shown):
                self.table.move_cursor(row=target if by > 0 else min(siblings(self.shown, target)))

    def action_results(self) -> None:
        self.with_results = not self.with_results
        self._draw()

    def action_page(self, by: int) -> None:
        box = self.query_one("#episode")
        (box.scroll_page_down if by > 0 else box.scroll_page_up)(animate=False)

    def action_filter(self) -> None:
        box = self.query_one(Input)
        box.add_class("open")
        box.focus()

    def action_table(self) -> None:
        self.query_one(Input).remove_class("open")
        self.table.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        try:
            self.shown = list(filter(parse_filter(event.value), self.everything))
        except ValueError as error:
            self.notify(str(error), severity="error", markup=False)
            return
        self.action_table()
        self._fill()


def load(paths: Sequence[Path]) -> tuple[list[EpisodeRecord], list[str]]:
    """Episodes of files and of runs' folders, and what of them could not be used.

    Raises:
        ValueError: a path that holds no rollout file.
    """
    episodes, problems = [], []
    for path in paths:
        if path.is_dir():
            files = rollout_files(path / "rollout") or rollout_files(path)
        else:
            # A file under another name is read all the same.
            known = {file.path: file for file in rollout_files(path.parent)}
            files = [known.get(path, RolloutFile(0, "train", path))] if path.is_file() else []
        if not files:
            raise ValueError(
                f"{path} holds no rollout file; give outputs/{{project}}/{{experiment}} or a rollout_step_*.json in it"
            )
        for file in files:
            found, said = read_rollout(file)
            episodes += found
            problems += said
    if not episodes:
        raise ValueError("; ".join(problems) or f"{paths[0]} holds no episode yet")
    return episodes, problems


def print_plain(episodes: Sequence[EpisodeRecord], full: bool, console: Console) -> None:
    if full:
        for episode in episodes:
            console.print(draw_episode(episode, results=True), Rule(characters="="))
        return
    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="")
    for episode in episodes:
        table.add_row(*cells(episode))
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE", help="a rollout file, or a run's folder")
    parser.add_argument("--filter", default="", help="fields (step set score f1 depth sample finish source) and words")
    parser.add_argument("--full", action="store_true", help="print whole episodes instead of opening the viewer")
    args = parser.parse_args(argv)
    try:
        episodes, problems = load(args.paths)
        for problem in problems:
            print(problem, file=sys.stderr)
        if sys.stdout.isatty() and sys.stdin.isatty() and not args.full:
            Viewer(episodes, args.filter).run()
        else:
            width = None if sys.stdout.isatty() else 160  # a pipe has no width of its own
            print_plain(list(filter(parse_filter(args.filter), episodes)), args.full, Console(width=width))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
