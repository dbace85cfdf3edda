"""Batched sampling from a transformers model: prefill, decode, sample. Synchronous; the queue is in ``hf_rollout``.

Shapes, beside the project's legend: H key-value heads, D head size, T columns of a cache. Columns are not positions:
rows are aligned at the right, and the columns that a row doesn't own are masked.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from verl.workers.rollout.base import SamplingParams

ATTENTION = "grouped_sdpa"
_PREFILL_TOKENS = 2048  # padded tokens of one prefill forward, unless a single row is longer; bounds its memory


@dataclass
class Row:
    """One completion to make, and what came of it. A cache is (layers, 2, H, tokens, D): keys and values.

    ``kept`` holds the first tokens of the prompt, never all. ``cache`` ends up with the prompt and what was sampled,
    but for the last token, which was never fed to the model.
    """

    prompt_ids: list[int]
    params: SamplingParams
    kept: torch.Tensor | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "length"
    cache: torch.Tensor | None = None

    @property
    def new(self) -> int:
        """Prompt tokens still to compute."""
        return len(self.prompt_ids) - (0 if self.kept is None else self.kept.shape[3])

    def add(self, token: int, logprob: float) -> bool:
        """Takes a sampled token; whether the completion is now complete."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if self.params.on_token is not None:
            self.params.on_token(token)
        if token in self.params.stop_token_ids:
            self.finish_reason = "stop"
        return self.finish_reason == "stop" or len(self.token_ids) == self.params.max_new_tokens


@torch.inference_mode()
def generate(model: PreTrainedModel, rows: Sequence[Row]) -> int:
    """Samples every row's completion into it; returns how many prompt tokens went through the model.

    The model's attention must be ``ATTENTION``. Log-probs are those of the whole distribution at the row's temperature
    (at 1 where it is 0), before top-k and top-p cut it: the ones that the trainer computes again.
    Raises FloatingPointError when the model gives no finite ones.
    """
    prompt_columns = max(len(row.prompt_ids) for row in rows)
    cache = StaticCache(model, len(rows), prompt_columns + max(row.params.max_new_tokens for row in rows))
    logits, computed = _prefill(model, rows, cache, prompt_columns)
    _decode(model, rows, cache, logits)
    if not math.isfinite(sum(map(sum, (row.logprobs for row in rows)))):
        raise FloatingPointError("the policy's log-probs are not finite; its weights or activations hold NaN or inf")
    return computed


class StaticCache(Cache):
    """Keys and values in one tensor ``data`` (layers, 2, B, H, T, D), allocated once and written in place.

    In use are its first ``rows`` rows, and of them the columns from ``first`` to ``filled``.
    """

    def __init__(self, model: PreTrainedModel, rows: int, columns: int) -> None:
        super().__init__(layers=[])
        config = model.config.get_text_config()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, rows, config.num_key_value_heads, columns, size)
        # Zeros: a masked column weighs nothing, but nothing times NaN is NaN.
        self.data = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.rows, self.first, self.filled = rows, 0, 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.filled + key_states.shape[2]
        keys, values = self.data[layer_idx, :, : self.rows]
        keys[:, :, self.filled : end] = key_states
        values[:, :, self.filled : end] = value_states
        return keys[:, :, self.first : end], values[:, :, self.first : end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.filled


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers: SDPA in which, at one query token, the heads that share keys are its queries.

    The same numbers without repeating keys and values, which costs twice the attention itself at each decoding step.
    query (B, heads, N, D), key and value (B, H, T, D), additive mask (B, 1, N, T) -> (B, N, heads, D).
    """
    batch, heads, length, size = query.shape
    if length > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], size)
    out = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, attention_mask, scale=scaling)
    return out.reshape(batch, 1, heads, size), None


AttentionInterface.register(ATTENTION, grouped_sdpa)


def _prefill(model: PreTrainedModel, rows: Sequence[Row], cache: StaticCache, columns: int) -> tuple[torch.Tensor, int]:
    """Fills the first ``columns`` of ``cache``; (logits (B, V) of each row's next token, prompt tokens computed).

    Rows with the same prompt (a group's first turn) are computed once.
    """
    same: dict[tuple[int, ...], list[int]] = {}
    for i, row in enumerate(rows):
        same.setdefault(tuple(row.prompt_ids), []).append(i)
    logits: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    leaders = [rows[twins[0]] for twins in same.values()]
    for chunk in _chunks(leaders):
        chunk_logits, chunk_data = _prefill_chunk(model, chunk)
        for j, row in enumerate(chunk):
            for i in same[tuple(row.prompt_ids)]:
                logits[i] = chunk_logits[j]
                own = cache.data[:, :, i, :, columns - len(row.prompt_ids) : columns]
                own[..., -row.new :, :] = chunk_data[:, :, j, :, -row.new :]
                if row.kept is not None:
                    own[..., : -row.new, :] = row.kept
    cache.filled = columns
    return torch.stack(logits), sum(row.new for row in leaders)


def _chunks(rows: list[Row]) -> Iterator[list[Row]]:
    """Rows of similar length together, so that padding them to one length wastes little."""
    chunk: list[Row] = []
    for row in sorted(rows, key=lambda row: row.new):
        if chunk and (len(chunk) + 1) * row.new > _PREFILL_TOKENS:
            yield chunk
            chunk = []
        chunk.append(row)
    yield chunk


def _prefill_chunk(model: PreTrainedModel, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits (B, V) of each row's next token, cache data whose last ``row.new`` columns are the row's new tokens).

    The columns: what was kept, aligned at the right, and then the new tokens, aligned at the right.
    """
    new = max(row.new for row in rows)
    old = max(len(row.prompt_ids) - row.new for row in rows)
    cache = StaticCache(model, len(rows), old + new)
    cache.filled = old
    ids = torch.zeros(len(rows), new, dtype=torch.long)
    positions = torch.zeros(len(rows), new, dtype=torch.long)
    seen = torch.zeros(len(rows), 1, new, old + new, dtype=torch.bool)
    causal = torch.ones(new, new, dtype=torch.bool).tril()
    for i, row in enumerate(rows):
        kept = len(row.prompt_ids) - row.new
        ids[i, new - row.new :] = torch.tensor(row.prompt_ids[kept:])
        positions[i, new - row.new :] = torch.arange(kept, len(row.prompt_ids))
        seen[i, 0, :, old - kept : old] = True
        seen[i, 0, :, old + new - row.new :] = causal[:, new - row.new :]
        if row.kept is not None:
            cache.data[:, :, i, :, old - kept : old] = row.kept
    return _forward(model, ids.to(model.device), positions.to(model.device), _additive(seen, model), cache), cache.data


def _decode(model: PreTrainedModel, rows: Sequence[Row], cache: StaticCache, logits: torch.Tensor) -> None:
    """Samples until every row is complete. A complete row leaves: the last row in use takes its place."""
    device = model.device
    live = list(rows)  # the row in each place of the batch
    lengths = torch.tensor([len(row.prompt_ids) for row in rows], device=device)
    columns = torch.arange(cache.data.shape[4], device=device)
    mask = _additive((columns >= cache.filled - lengths[:, None])[:, None, None], model)
    positions = lengths[:, None].clone()
    sampler = Sampler([row.params for row in rows], device)
    prompt_columns = cache.filled
    while True:
        tokens, logprobs = sampler.draw(logits)
        done = [
            place
            for place, (row, *sampled) in enumerate(zip(live, tokens.tolist(), logprobs.tolist(), strict=True))
            if row.add(*sampled)
        ]
        if done:
            for place in done:
                start = prompt_columns - len(live[place].prompt_ids)
                live[place].cache = cache.data[:, :, place, :, start : cache.filled].clone()
            left = len(live) - len(done)
            if not left:
                return
            source = sorted(set(range(left, len(live))) - set(done))
            target = [place for place in done if place < left]
            if target:
                kv = cache.data[..., cache.first : cache.filled, :]
                for tensor in (tokens, mask, positions, *sampler.state):
                    tensor[target] = tensor[source]
                kv[:, :, target] = kv[:, :, source]
                for place, other in zip(target, source, strict=True):
                    live[place] = live[other]
            del live[left:]
            cache.rows = left
            cache.first = prompt_columns - max(len(row.prompt_ids) for row in live)
        n = len(live)
        window = mask[:n, ..., cache.first : cache.filled + 1]
        logits = _forward(model, tokens[:n, None], positions[:n], window, cache)
        positions += 1


def _forward(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: StaticCache
) -> torch.Tensor:
    """Logits (B, V) after the last column of ``ids`` (B, N), whose keys and values go to ``cache``."""
    out = model(
        input_ids=ids,
        position_ids=positions,
        attention_mask=mask,  # four dimensions: transformers takes it as it is
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    cache.filled += ids.shape[1]
    return out.logits[:, -1]


def _additive(seen: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """0 where ``seen``, else the lowest number: -inf would make NaN of a padding token's row, which sees nothing."""
    mask = torch.zeros(seen.shape, dtype=model.dtype, device=model.device)
    return mask.masked_fill_(~seen.to(model.device), torch.finfo(model.dtype).min)


class Sampler:
    """Draws tokens by inverting the distribution function at uniforms drawn beforehand, each row's from its own seed.

    So a row's tokens depend on its logits and its seed alone, not on what else is in the batch.
    """

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        self._step = 0
        self._uniforms = torch.zeros(len(params), max(p.max_new_tokens for p in params), dtype=torch.float64)
        for row, p in zip(self._uniforms, params, strict=True):
            generator = torch.Generator()
            if p.seed is None:
                generator.seed()
            else:
                generator.manual_seed(p.seed)
            row[: p.max_new_tokens] = torch.rand(p.max_new_tokens, generator=generator, dtype=torch.float64)
        self._uniforms = self._uniforms.to(device)
        self._temperature = torch.tensor([p.temperature for p in params], device=device)
        self._top_p = torch.tensor([p.top_p for p in params], device=device)
        self._top_k = torch.tensor([p.top_k for p in params], device=device)
        self._cuts = any(p.top_k > 0 or p.top_p < 1 for p in params)

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """What belongs to the rows, a row each."""
        return self._uniforms, self._temperature, self._top_p, self._top_k

    def draw(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The next tokens of the first B rows and their log-probs, (B,) each, from ``logits`` (B, V)."""
        n = len(logits)
        uniforms, temperature, top_p, top_k = (t[:n] for t in self.state)
        greedy = temperature == 0
        logprobs = (logits.float() / temperature.masked_fill(greedy, 1.0)[:, None]).log_softmax(-1)
        probs = logprobs.exp()
        if self._cuts:
            probs = cut_tail(probs, top_p, top_k)
        # In float64, since float32 sums of a large vocabulary lose its rare tokens.
        cdf = probs.cumsum(-1, dtype=torch.float64)
        level = uniforms[:, self._step, None] * cdf[:, -1:]
        tokens = torch.searchsorted(cdf, level, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
        self._step += 1
        return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def cut_tail(probs: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """``probs`` (B, V) with 0 for what top-k (0: off), and then top-p of what that left, exclude. Not renormalised.

    top-p keeps the most likely tokens until their share reaches ``top_p``, the one that reaches it included.
    """
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    ordered = ordered.masked_fill((top_k[:, None] > 0) & (rank >= top_k[:, None]), 0.0)
    before = ordered.cumsum(-1) - ordered
    excluded = (top_p[:, None] < 1) & (before >= top_p[:, None] * ordered.sum(-1, keepdim=True)) & (rank > 0)
    return torch.zeros_like(probs).scatter_(1, order, ordered.masked_fill(excluded, 0.0))
