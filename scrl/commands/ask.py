"""Let the trained agent answer a question, and watch it think and search.

    python -m scrl ask "In which city was the director of The Ashen Valley born?"    the demo's latest checkpoint
    python -m scrl ask --chat                                                        one question after another
    python -m scrl ask "..." --model Qwen/Qwen2.5-3B-Instruct --adapter PATH/checkpoints/global_step_200

Prompts, tools and limits are those of the adapter's run. Further key=value arguments are those of training
(verl/trainer/config/ppo_trainer.yaml). Every episode is saved under outputs/ask/.
"""

import argparse
import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from scrl.agent import Agent, find_run, latest_checkpoint
from scrl.commands.search import plain, printable
from scrl.llm_agent.parsing import THINK_CLOSE
from scrl.types import Episode, Turn

if TYPE_CHECKING:
    from verl.trainer.config.schema import Config

DEMO = "outputs/miniresearcher/cpu_demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", nargs="?", default="")
    parser.add_argument("--chat", action="store_true", help="several questions, until an empty one or Ctrl-D")
    add_agent_arguments(parser)


def add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    """Which agent."""
    parser.add_argument("--model", help="a folder or a Hugging Face name; default: the run's")
    parser.add_argument("--adapter", type=Path, help="a PEFT adapter or a checkpoint; default: the demo's latest one")
    parser.add_argument("--search-engine", "--engine", metavar="NAME", help="default: the run's")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")


def open_agent(options: argparse.Namespace) -> Agent:
    """The agent that the arguments name, not yet loaded. ValueError, one sentence, for what isn't there."""
    from verl.trainer.config.paths import REPO_ROOT, locate
    from verl.trainer.config.validation import check_model

    if not options.temperature >= 0:
        raise ValueError(f"--temperature {options.temperature} is below 0; 0 is greedy, 1 samples as training does")
    adapter = options.adapter and Path(locate(str(options.adapter)))
    if adapter and not adapter.is_dir():
        raise ValueError(f"--adapter={options.adapter}: there is no such folder here or in the repository")
    if options.model:
        check_model("--model", locate(options.model))
    if adapter is None and options.model is None:
        adapter = latest_checkpoint(REPO_ROOT / DEMO)
    overrides = list(options.overrides)
    overrides += [f"actor_rollout_ref.model.path={options.model}"] if options.model else []
    overrides += [f"search_engine={options.search_engine}"] if options.search_engine else []
    return Agent(_config(adapter and find_run(adapter), overrides), adapter)


def _config(run: Path | None, overrides: list[str]) -> "Config":
    """Of the run, else of the recipe for this machine, with ``overrides`` over it."""
    import torch

    from verl.trainer.config.loading import load_config, load_run_config

    if run is not None:
        return load_run_config(run, overrides)
    return load_config([f"profile={'a100_80g' if torch.cuda.is_available() else 'cpu_demo'}", *overrides])


class ThoughtText:
    """A turn's token ids to the text of its thought, piece by piece; what isn't whole yet is held back.

    The action behind the thought is not shown as it is written: ``turn`` tells what it means.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def add(self, token_id: int) -> str:
        """The text that ``token_id`` completes; often its own, sometimes none."""
        self._ids.append(token_id)
        text = self.tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        thought, closed, _ = text.partition(THINK_CLOSE)
        if not closed:  # its end may be the beginning of the tag, or of a character
            thought = thought.rstrip("\ufffd")
            held = next((n for n in range(len(THINK_CLOSE) - 1, 0, -1) if thought.endswith(THINK_CLOSE[:n])), 0)
            thought = thought[: len(thought) - held]
        piece, self._shown = thought[self._shown :], max(self._shown, len(thought))
        return piece


class ConsoleListener:
    """Writes each thought as it comes, then the tool call and what it found."""

    def __init__(self, console: Console, tokenizer: Any) -> None:
        self._console, self._thought = console, ThoughtText(tokenizer)

    def token(self, token_id: int) -> None:
        self._console.print(Text(printable(self._thought.add(token_id)), style="dim"), end="", soft_wrap=True)

    def turn(self, turn: Turn) -> None:
        self._thought = ThoughtText(self._thought.tokenizer)
        self._console.print()
        if turn.tool_call:
            (asked,) = turn.tool_call.arguments.values()
            self._console.print(f"[cyan]{turn.tool_call.name}[/]  " + "  ·  ".join(map(plain, asked)))

    def observation(self, turn: Turn) -> None:
        for title, url in turn.sources:
            self._console.print(f"  [green]›[/] {plain(title)}  [dim]{plain(url)}[/]")
        if not turn.search_ok:
            self._console.print(f"  [red]{plain(turn.observation)}[/]")


def sources(episode: Episode) -> list[tuple[str, str]]:
    """(title, URL) of everything it found, each once, in order."""
    return list(dict.fromkeys(source for turn in episode.turns for source in turn.sources))


def why_no_answer(episode: Episode) -> str:
    return episode.error or (episode.turns[-1].reason if episode.turns else "") or "no room was left for one"


def run(options: argparse.Namespace) -> int:
    if not options.chat and not options.question.strip():
        raise ValueError('there is no question; python -m scrl ask "a question", or --chat')
    console = Console()
    agent = open_agent(options)
    return asyncio.run(_converse(agent, options, console))


async def _converse(agent: Agent, options: argparse.Namespace, console: Console) -> int:
    with console.status("loading the model"):
        await agent.open()
    try:
        question, code = options.question, 1
        if question:
            code = await _ask(agent, question, options.temperature, console)
        while options.chat and (question := _read_question()):
            try:
                code = await _ask(agent, question, options.temperature, console)
            except ValueError as error:  # too long: the next question may be shorter
                console.print(f"[red]{plain(str(error))}[/]")
        return code
    finally:
        agent.close()


def _read_question() -> str:
    """On the loop's own thread, since nothing else goes on at the prompt: a thread's ``input`` outlives Ctrl-C."""
    of_the_loop = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input("? ").strip()
    except EOFError:
        return ""
    finally:
        signal.signal(signal.SIGINT, of_the_loop)


async def _ask(agent: Agent, question: str, temperature: float, console: Console) -> int:
    episode = await agent.answer(question, ConsoleListener(console, agent.tokenizer), temperature)
    saved = agent.save(episode)
    if episode.answer is None:
        console.print(f"[red]no answer[/]: {plain(why_no_answer(episode))}")
    else:
        console.print(f"\n[bold green]{plain(episode.answer)}[/]")
        for number, (title, url) in enumerate(sources(episode), start=1):
            console.print(f"[dim]{number}. {plain(title)}  {plain(url)}[/]")
    console.print(f"[dim]{episode.search_depth} searches, saved as {saved}[/]\n")
    return 0 if episode.answer is not None else 1
