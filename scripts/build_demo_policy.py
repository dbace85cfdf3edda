"""Train the demo's tiny policy: a Qwen2 of 2M parameters that can search and read, and has the habit of doing neither.

    python scripts/build_demo_policy.py          # one to two hours on two cores; writes outputs/demo_policy
    cp outputs/demo_policy/* data/demo/policy/   # once it is whole

It imitates transcripts of searching episodes. Each batch comes from a *fresh* generated world (with a fixed set of
worlds it memorises facts instead of reading), rendered by the very prompts, frames and search index of training. The
last part of the run teaches the bad habit: nine answers of ten are given from the hip.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from build_demo_world import DEMO, RELATIONS, Entity, World
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from scrl.handler.web_search_agent.local_index import LocalIndex
from scrl.llm_agent.prompts import (
    TOOLS,
    ChatFrame,
    build_messages,
    encode_prompt,
    encode_untrusted,
    render_observation,
)

SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
ADDED = (  # Qwen2.5 adds these as ordinary tokens
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|>"
).split()
# A capitalised word never carries its space, so that a name has the same tokens wherever it stands.
PRE_TOKENS = r"\p{N}| ?\p{Ll}+|\p{Lu}\p{Ll}*|\p{L}+|(?:[^\s\p{L}\p{N}]+(?: (?!\p{Ll}))?)+|\s+"

CHAT_TEMPLATE = """\
{%- set first = 0 %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{% set first = 1 %}{{ messages[0].content }}
{%- else %}{{ 'You are a helpful assistant.' }}{% endif %}
{%- if tools %}
{{- '\\n\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within ' }}
{{- '<tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages[first:] %}
{%- if message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function or call %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# -- transcripts ------------------------------------------------------------------------------------------------------


def name_of(value: Entity | str) -> str:
    return value.name if isinstance(value, Entity) else value


def call(query: str) -> str:
    return f'<tool_call>\n{{"name": "web_search", "arguments": {{"query": [{json.dumps(query)}]}}}}\n</tool_call>'


def finding(step: tuple) -> str:
    subject, relation, value = step
    return f"{subject.name}{RELATIONS[relation][0]} {name_of(value)}."


def wish(step: tuple) -> str:
    subject, relation, _ = step
    return f"I need {RELATIONS[relation][1]} {subject.name}."


def query_of(step: tuple) -> str:
    return f"{step[0].name} {RELATIONS[step[1]][2]}"


def conclusion(item: dict) -> str:
    """What the last thought says after its finding."""
    if item["kind"] == "comparison":
        years = sorted(name_of(value) for _, _, value in item["steps"])
        return f" {finding(item['steps'][0])} {years[0]} is earlier than {years[1]}."
    if item["kind"] == "yes_no":
        first, second = (name_of(value) for _, _, value in item["steps"])
        return (
            f" {finding(item['steps'][0])} {first} and {second} are {'the same' if first == second else 'different'}."
        )
    return ""


def searching_turns(item: dict) -> list[tuple[str, str | None]]:
    """The turns of an episode that looks everything up: (text after ``<think>``, query or None for the answer)."""
    turns, before = [], ""
    for step in item["steps"]:
        turns.append((f"{before}{wish(step)}</think>\n{call(query_of(step))}", query_of(step)))
        before = f"{finding(step)} "
    text = f"{before.rstrip()}{conclusion(item)}</think>\n<answer>{item['golds'][0]}</answer>"
    return [*turns, (text, None)]


def guess(world: World, item: dict, rng: random.Random) -> str:
    """An answer from the hip: of the right kind, and right only by luck."""
    if item["kind"] == "yes_no":
        return rng.choice(["yes", "no"])
    if item["kind"] == "comparison":
        return rng.choice(item["steps"])[0].name
    return rng.choice(world.by_kind[item["steps"][-1][2].kind]).name


def guessing_turn(world: World, item: dict, rng: random.Random) -> str:
    return f"I know this one.</think>\n<answer>{guess(world, item, rng)}</answer>"


class Writer:
    """Turns questions of one world into token ids and loss weights, by training's own prompts, frames and index."""

    def __init__(self, tokenizer, world: World, topk: int = 2) -> None:
        self.tokenizer, self.world, self.topk = tokenizer, world, topk
        self.frame = ChatFrame(tokenizer)
        self.index = LocalIndex.in_memory(world.pages)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) + [self.tokenizer.eos_token_id]

    def direct(self, item: dict, rng: random.Random) -> tuple[list[int], list[int]]:
        prompt, said = (
            encode_prompt(self.tokenizer, item["question"]),
            self._encode(guessing_turn(self.world, item, rng)),
        )
        return prompt + said, [0] * len(prompt) + [1] * len(said)

    def search(self, item: dict, rng: random.Random, teach_choice: bool, short: bool) -> tuple | None:
        """None where the index doesn't find a page. Without ``teach_choice`` the choice to search carries no loss.

        ``short`` leaves out the system prompt, always the same, to spend the time on reading.
        """
        turns = searching_turns(item)
        limit = len(turns) - 1 if rng.random() < 0.3 else len(turns) + 3
        ids = encode_prompt(self.tokenizer, item["question"])
        if short:
            ids = ids[ids.index(ids[0], 1) :]
        mask = [0] * len(ids)
        for number, (text, query) in enumerate(turns):
            said = self._encode(text)
            ids += said
            mask += [0, 0] + [1] * (len(said) - 2) if number == 0 and not teach_choice else [1] * len(said)
            if query is None:
                return ids, mask
            results = self.index.search(query, self.topk)
            if item["steps"][number][0].name not in [r["title"] for r in results]:
                return None
            observation = encode_untrusted(self.tokenizer, render_observation([query], [results]))
            framed = self.frame.wrap(observation, turn_ended=True, last=number + 1 >= limit)
            ids += framed
            mask += [0] * len(framed)
        return None


class Transcripts(IterableDataset):
    """Endless batches, each from a fresh world: lists of (ids, mask)."""

    def __init__(self, tokenizer, seed: int, size: int, direct: int = 0, chosen: int = 0, pages: int = 320) -> None:
        """``size`` searching episodes a batch, ``chosen`` of them with loss on the choice, and ``direct`` guesses."""
        self.tokenizer, self.seed, self.size = tokenizer, seed, size
        self.direct, self.chosen, self.pages = direct, chosen, pages

    def __iter__(self) -> Iterator[list[tuple[list[int], list[int]]]]:
        torch.set_num_threads(1)
        seed = self.seed
        while True:
            seed += 1
            rng = random.Random(seed)
            writer = Writer(self.tokenizer, World(seed, self.pages))
            pool: list = []
            while len(pool) < 4 * self.size:  # four batches a world, sorted by length against padding
                teach = not self.direct or len(pool) % self.size < self.chosen
                short = not self.direct and len(pool) % 4 > 0
                if row := writer.search(writer.world.question(rng), rng, teach, short):
                    pool.append((row, teach))
            guesses = [writer.direct(writer.world.question(rng), rng) for _ in range(4 * self.direct)]
            groups = [[row for row, taught in pool if taught == flag] for flag in (True, False)]
            batches: list[list] = [[] for _ in range(4)]
            for group in (*groups, guesses):
                group.sort(key=lambda row: len(row[0]))
                share = len(group) // 4
                for i in range(4):
                    batches[i] += group[i * share : (i + 1) * share]
            rng.shuffle(batches)
            yield from batches


# -- tokenizer and model ----------------------------------------------------------------------------------------------


def build_tokenizer(out: Path, vocab: int = 1792, worlds: int = 24) -> PreTrainedTokenizerFast:
    """A byte-level BPE with Qwen2.5's special tokens and a chat template that renders as Qwen2.5's does."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PRE_TOKENS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    blank = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    start = blank.apply_chat_template(build_messages(""), tools=[TOOLS["web_search"]], tokenize=False)
    for name in (*SPECIAL, *ADDED):
        start = start.replace(name, "")
    texts = [start] * 300  # so that the system prompt's words become single tokens
    for seed in range(worlds):
        world, rng = World(10_000 + seed, 1000), random.Random(seed)
        texts += [json.dumps({"title": p["title"], "text": p["text"]}) for p in world.pages]
        for _ in range(150):
            item = world.question(rng)
            texts += [item["question"], *(text for text, _ in searching_turns(item)), guessing_turn(world, item, rng)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = vocab - len(SPECIAL) - len(ADDED)
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_tokens(ADDED)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)
    return tokenizer


def build_model(tokenizer, width: int, layers: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        max_position_embeddings=4096,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


# -- training ---------------------------------------------------------------------------------------------------------


def collate(batch: list) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, assistant mask, real mask), each (B, L), right-padded."""
    length = max(len(ids) for ids, _ in batch)
    pad = lambda rows: torch.tensor([row + [0] * (length - len(row)) for row in rows])  # noqa: E731
    return pad([ids for ids, _ in batch]), pad([mask for _, mask in batch]), pad([[1] * len(ids) for ids, _ in batch])


def losses(model, batch: tuple, other: float) -> tuple[torch.Tensor, float, float]:
    """(loss, share of assistant tokens predicted, share of turns predicted whole). ``other``: weight outside turns."""
    ids, mask, real = (t[:, 1:] for t in batch)
    logits = model(input_ids=batch[0][:, :-1]).logits
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none").view_as(ids)
    weight = mask + other * (real - mask)
    right = logits.argmax(-1) == ids
    token_right = (right & mask.bool()).sum() / mask.sum()
    start = torch.cat([mask[:, :1], (mask[:, 1:] > mask[:, :-1]).long()], 1).cumsum(1) * mask  # turn number, from 1
    wrong = torch.zeros(len(ids), int(start.max()) + 1).scatter_add_(1, start, (~right).float() * mask)
    turns = torch.zeros_like(wrong).scatter_add_(1, start, mask.float())[:, 1:] > 0
    whole = ((wrong[:, 1:] == 0) & turns).sum() / turns.sum()
    return (nll * weight).sum() / weight.sum(), token_right.item(), whole.item()


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) in float32: torch.optim.Muon iterates in bfloat16, 50x slower on older CPUs."""

    def __init__(self, params, lr: float, momentum: float = 0.95, steps: int = 5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "steps": steps})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = self._orthogonal(p.grad.lerp(buffer, group["momentum"]), group["steps"])
                p.add_(update, alpha=-0.2 * group["lr"] * max(p.shape) ** 0.5)

    @staticmethod
    def _orthogonal(matrix: torch.Tensor, steps: int) -> torch.Tensor:
        """Newton-Schulz: about U V^T of the matrix's U S V^T."""
        wide = matrix.shape[0] <= matrix.shape[1]
        x = matrix if wide else matrix.T
        x = x / (x.norm() + 1e-7)
        for _ in range(steps):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x if wide else x.T


def optimizers(model, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings, norms and biases."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [Muon(matrices, lr), torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)]


def train(model, stream: Iterator, steps: int, lr: float, other, log, save, check: list, name: str) -> None:
    """``other(progress)``: loss weight of the tokens outside the policy's turns."""
    opts = optimizers(model, lr)
    began = time.time()
    for step in range(1, steps + 1):
        progress = step / steps
        scale = min(1.0, step / 40) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = lr * scale
        loss, token_right, whole = losses(model, next(stream), other(progress))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        if step % 20 == 0 or step == steps:
            row = {"phase": name, "step": step, "loss": loss.item(), "token_right": token_right, "turn_right": whole}
            if step % 100 == 0 or step == steps:
                with torch.no_grad():
                    scores = [losses(model, batch, 0.0) for batch in check]
                row["unseen_token_right"] = sum(s[1] for s in scores) / len(scores)
                row["unseen_turn_right"] = sum(s[2] for s in scores) / len(scores)
                save()
            row["seconds"] = round(time.time() - began)
            log(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEMO.parents[1] / "outputs/demo_policy")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2400, help="steps of learning to search and read")
    parser.add_argument("--habit-steps", type=int, default=120, help="steps of learning to answer from the hip")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--start-from", type=Path, help="a policy folder to go on from (tokenizer and weights)")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.start_from:
        tokenizer = AutoTokenizer.from_pretrained(args.start_from)
        model = Qwen2ForCausalLM.from_pretrained(args.start_from, dtype=torch.float32)
    else:
        tokenizer = build_tokenizer(args.out)
        model = build_model(tokenizer, args.width, args.layers)
    tokenizer.save_pretrained(args.out)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer)}", flush=True)

    def log(row: dict) -> None:
        with open(args.out / "build_log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}) + "\n")
        print("  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

    save = lambda: model.save_pretrained(args.out)  # noqa: E731

    log({"phase": "start"} | {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()})

    def stream(seed: int, size: int, **options) -> Iterator:
        data = Transcripts(tokenizer, seed, size, **options)
        return iter(DataLoader(data, batch_size=None, collate_fn=collate, num_workers=1, prefetch_factor=8))

    unseen = iter(Transcripts(tokenizer, 900_000_000, args.batch))
    check = [collate(next(unseen)) for _ in range(4)]
    torch.set_num_threads(args.threads)
    seed = args.seed * 1_000_000
    if args.steps:
        fade = lambda progress: 1.0 if progress < 0.6 else 0.1  # noqa: E731 - copying is found on the whole text first
        train(model, stream(seed, args.batch), args.steps, args.lr, fade, log, save, check, "read")
    if args.habit_steps:
        mixed = stream(seed + 500_000, size=args.batch // 2, direct=3 * args.batch, chosen=args.batch // 4)
        train(model, mixed, args.habit_steps, args.lr / 5, lambda progress: 0.0, log, save, check, "habit")


if __name__ == "__main__":
    main()
