"""Episodes -> what one forward reads: only tokens that a loss depends on, packed without padding (or padded right)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PACKED_SDPA = "packed_sdpa"


@dataclass(frozen=True)
class ForwardBatch:
    """One micro-batch. N counts the sampled tokens, T the tokens read, b the episodes.

    ``input_ids``, ``position_ids``: (1, T) packed, or (b, longest) padded on the right.
    ``boundaries``: (b + 1,) int32, where the packed episodes start and end; None where padded.
    ``select``: (N,) where, in the flattened input, the position *before* each sampled token is.
    ``targets``: (N,) the sampled tokens. ``index``: (row, column) of each in the ``(b, R)`` of these episodes.
    A batch of no episode has b = N = 0 and yet T = 1 and one ``select`` and ``targets``.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    boundaries: torch.Tensor | None
    longest: int
    select: torch.Tensor
    targets: torch.Tensor
    index: tuple[torch.Tensor, torch.Tensor]


def needed_tokens(attention_mask: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Which tokens a forward must read: (B, L) bool.

    From an episode's first token to the one before its last sampled token: what follows can't change any log-prob.
    Nothing of an episode without a sampled token.

    Args:
        attention_mask: (B, L), prompts padded on the left, responses on the right.
        response_mask: (B, R), 1 where the policy sampled.
    """
    columns = torch.arange(1, response_mask.shape[1] + 1, device=response_mask.device)
    last_sampled = ((response_mask > 0) * columns).amax(dim=1)  # 1-based; 0: nothing was sampled
    end = attention_mask.shape[1] - response_mask.shape[1] + last_sampled - 1
    positions = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    return attention_mask.bool() & (positions < end[:, None]) & (last_sampled > 0)[:, None]


def forward_batch(
    input_ids: torch.Tensor,
    needed: torch.Tensor,
    response_mask: torch.Tensor,
    rows: list[int],
    packed: bool,
) -> ForwardBatch:
    """Lay the episodes ``rows`` out for one forward.

    Without rows a single token is read, and its result belongs to nobody: an empty micro-batch still runs forward
    and backward, or the other ranks hang in their collectives.

    Args:
        input_ids: (B, L). needed: (B, L) bool, of ``needed_tokens``. response_mask: (B, R).
        rows: the episodes, each with at least one sampled token.
        packed: one row with boundaries, or a row an episode, padded on the right (a causal model never looks there).
    """
    device = input_ids.device
    row = torch.tensor(rows, dtype=torch.long, device=device)
    if not rows:
        zero = torch.zeros(1, 1, dtype=torch.long, device=device)
        boundaries = torch.tensor([0, 1], dtype=torch.int32, device=device) if packed else None
        return ForwardBatch(zero, zero, boundaries, 1, zero[0], zero[0], (row, row))
    keep, sampled = needed[row], response_mask[row] > 0
    lengths = keep.sum(dim=1)
    longest = int(lengths.max())
    tokens, position = input_ids[row][keep], (keep.cumsum(dim=1) - 1)[keep]
    ends = lengths.cumsum(dim=0)
    episode, column = sampled.nonzero(as_tuple=True)
    prompt_length = input_ids.shape[1] - response_mask.shape[1]
    offset = (keep.cumsum(dim=1) - 1)[episode, prompt_length + column - 1]
    targets = input_ids[row[episode], prompt_length + column]
    index = (episode, column)
    if packed:
        boundaries = F.pad(ends, (1, 0)).to(torch.int32)
        select = (ends - lengths)[episode] + offset
        return ForwardBatch(tokens[None], position[None], boundaries, longest, select, targets, index)
    padded = pad_sequence(list(tokens.split(lengths.tolist())), batch_first=True)
    positions = torch.arange(longest, device=device).expand_as(padded)
    return ForwardBatch(padded, positions, None, longest, episode * longest + offset, targets, index)


def packed_sdpa(module, query, key, value, attention_mask, cu_seq_lens_q=None, **kwargs):
    """transformers' SDPA attention, episode by episode: no (T, T) mask, no work between episodes, no padding.

    Args:
        query, key, value: (1, heads, T, D). cu_seq_lens_q: (b + 1,) boundaries; None: one episode, plain SDPA.

    Returns:
        ``((1, T, heads, D), None)``.
    """
    window = kwargs.get("sliding_window")
    if window is not None and query.shape[2] > window:
        raise ValueError(
            f"this model looks back {window} tokens only, which the packed forward doesn't do; "
            "set actor_rollout_ref.model.use_remove_padding=false"
        )
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    lengths = cu_seq_lens_q.diff().tolist()
    parts = zip(
        query.split(lengths, dim=2),
        key.split(lengths, dim=2),
        value.split(lengths, dim=2),
        strict=True,
    )
    outputs = [sdpa_attention_forward(module, q, k, v, None, **kwargs)[0] for q, k, v in parts]
    return torch.cat(outputs, dim=1), None


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
