"""Log-probs and entropies from hidden states, without a (tokens x vocabulary) float32 matrix; and the value guard."""

import torch
import torch.nn.functional as F

# Logits alive at once: on a CPU few enough for its cache, on a GPU enough for wide products. But never so few tokens
# that reading the head's weights costs more than the products with them. Both measured on a CPU.
LOGITS_PER_CHUNK = {"cpu": 2**20, "cuda": 2**26}
TOKENS_PER_CHUNK = 128


class ValueGuard:
    """Replaces non-finite values by finite ones, clamps the rest, and counts both: a silent guard hides a bug.

    NaN becomes 0 and +-Inf the clamp limit (or the largest float). A guard that finds nothing costs one pass.
    """

    def __init__(self, nan_to_num: bool = True, clamp: float | None = 1e4) -> None:
        self.nan_to_num = nan_to_num
        self.clamp = clamp
        self.nonfinite = 0
        self.clamped = 0

    def __call__(self, values: torch.Tensor, count: bool = True) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Guard ``values`` (any shape).

        Returns:
            ``(guarded, touched)``: ``touched`` is None or a bool mask of what was changed (its gradient is 0).
        """
        limit = self.clamp if self.clamp is not None else float("inf")
        if not values.numel() or not (self.nan_to_num or self.clamp is not None):
            return values, None
        low, high = (float(v) for v in torch.aminmax(values))  # NaN if any value is
        if -limit <= low and high <= limit and abs(low) != float("inf") and abs(high) != float("inf"):
            return values, None
        nonfinite = ~torch.isfinite(values)
        touched = torch.zeros_like(nonfinite)
        if self.nan_to_num:
            values = torch.nan_to_num(
                values,
                nan=0.0,
                posinf=self.clamp,
                neginf=None if self.clamp is None else -limit,
            )
            touched |= nonfinite
        if self.clamp is not None:
            beyond = values.abs() > limit  # without nan_to_num, NaN stays NaN here and is seen in the gradient
            values = values.clamp(-limit, limit)
            touched |= beyond
            self.clamped += int(beyond.sum()) if count else 0
        self.nonfinite += int(nonfinite.sum()) if count else 0
        return values, touched

    def drain(self, name: str) -> dict[str, float]:
        """The counts since the last call, as ``{name}_nonfinite`` and ``{name}_clamped``."""
        counts = {
            f"{name}_nonfinite": float(self.nonfinite),
            f"{name}_clamped": float(self.clamped),
        }
        self.nonfinite = self.clamped = 0
        return counts


class _LinearLogProb(torch.autograd.Function):
    """log p(target) and entropy of softmax(hidden W^T / temperature), chunk by chunk.

    With p = softmax(z) and H its entropy: d log p_t / dz_j = [j = t] - p_j and dH / dz_j = -p_j (log p_j + H).
    Where only the log-probs' gradient in the hidden states is wanted (under a frozen head), the forward makes it while
    it has the logits: (N, H) to keep, as much as the hidden states. Else hidden states and one log-normaliser a token
    are kept, and the backward makes each chunk's logits again.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, guard, with_entropy, entropy_gradient, chunk):
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        log_norms = torch.empty_like(log_probs)
        entropies = torch.zeros_like(log_probs)
        at_once = ctx.needs_input_grad[:2] == (True, False) and not entropy_gradient
        slopes = torch.empty_like(hidden) if at_once else None  # d log p(target) / d hidden
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            logits, touched = guard(F.linear(hidden[part], weight).float())
            logits = logits / temperature
            chosen = logits.gather(1, targets[part, None])[:, 0]
            log_norms[part] = torch.logsumexp(logits, dim=1)
            log_probs[part] = chosen - log_norms[part]
            if with_entropy or at_once:
                probs = torch.exp(logits - log_norms[part, None])
            if with_entropy:
                entropies[part] = log_norms[part] - torch.einsum("nv,nv->n", probs, logits)
            if slopes is not None:
                probs[torch.arange(len(probs), device=probs.device), targets[part]] -= 1.0
                if touched is not None:
                    probs.masked_fill_(touched, 0.0)
                slopes[part] = probs.div_(-temperature).to(hidden.dtype) @ weight
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        ctx.at_once = at_once
        if at_once:
            ctx.save_for_backward(slopes)
            return log_probs, entropies
        ctx.save_for_backward(hidden, weight, targets, log_norms, entropies)
        ctx.temperature, ctx.guard, ctx.entropy_gradient, ctx.chunk = temperature, guard, entropy_gradient, chunk
        return log_probs, entropies

    @staticmethod
    def backward(ctx, grad_log_probs, grad_entropies):
        if ctx.at_once:
            (slopes,) = ctx.saved_tensors
            return (grad_log_probs[:, None] * slopes).to(slopes.dtype), *[None] * 7
        hidden, weight, targets, log_norms, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            logits, touched = ctx.guard(F.linear(hidden[part], weight).float(), count=False)
            log_p = (logits / ctx.temperature).sub_(log_norms[part, None])
            probs = log_p.exp()
            slope = -grad_log_probs[part, None]
            if ctx.entropy_gradient:
                slope = slope - grad_entropies[part, None] * log_p.add_(entropies[part, None])
            grad_logits = probs.mul_(slope)
            chosen = torch.arange(len(logits), device=logits.device), targets[part]
            grad_logits[chosen] += grad_log_probs[part]
            if touched is not None:
                grad_logits.masked_fill_(touched, 0.0)
            grad_logits = grad_logits.div_(ctx.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 6


def log_probs_from_hidden(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    guard: ValueGuard,
    with_entropy: bool = False,
    entropy_gradient: bool = True,
    logits_per_chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the targets at the sampling temperature, and entropies, differentiable in hidden and weight.

    Args:
        hidden: (N, H) last hidden states of the positions *before* the targets.
        weight: (V, H) output embedding.
        targets: (N,) long.
        temperature: above 0; the distribution is softmax(logits / temperature).
        guard: counts and repairs logits before the division.
        with_entropy: else the entropies are 0.
        entropy_gradient: whether entropies carry one; without it a frozen head saves a third of the products.
        logits_per_chunk: logits alive at once; None takes that of the device, but at least ``TOKENS_PER_CHUNK`` tokens.

    Returns:
        ``(log_probs, entropies)``, each (N,) float32, in nats.

    Raises:
        ValueError: the temperature is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} defines no distribution to train; sample with one above 0")
    if logits_per_chunk is None:
        chunk = LOGITS_PER_CHUNK.get(hidden.device.type, LOGITS_PER_CHUNK["cuda"]) // weight.shape[0]
        chunk = max(chunk, TOKENS_PER_CHUNK)
    else:
        chunk = max(1, logits_per_chunk // weight.shape[0])
    return _LinearLogProb.apply(
        hidden, weight, targets, temperature, guard, with_entropy, with_entropy and entropy_gradient, chunk
    )
