"""One rank's share of the policy: log-probs of its episodes, and optimizer steps on them in step with all ranks."""

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verl.trainer.config.schema import ActorConfig, RolloutCorrectionConfig, StabilityConfig
from verl.trainer.ppo.core_algos import (
    Denominators,
    aggregate_loss,
    count_denominators,
    kl_penalty,
    likelihood_displacement,
    policy_loss,
    rollout_weights,
)
from verl.utils.fsdp_utils import (
    full_tensor,
    gather_full_state,
    like,
    reduce_numbers,
    trainable_parameters,
    world_size,
)
from verl.utils.seqlen_balancing import micro_batches_by_count, micro_batches_by_tokens
from verl.utils.torch_functional import ValueGuard, log_probs_from_hidden
from verl.workers.actor.packing import ForwardBatch, forward_batch, needed_tokens

if TYPE_CHECKING:  # tensordict is not needed to compute, so scripts/gpu_check.py does without
    from verl.protocol import DataProto


class PolicyModel(nn.Module):
    """A causal language model whose forward gives log-probs instead of logits.

    It is the root that FSDP wraps: the output embedding is used inside its forward, where it is whole.
    """

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        batch: ForwardBatch,
        temperature: float,
        guard: ValueGuard,
        with_entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(log_probs, entropies)``, each (N,) float32, of ``batch.targets`` at the sampling temperature."""
        causal_lm = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        packing = {}
        if batch.boundaries is not None:
            packing = {
                "cu_seq_lens_q": batch.boundaries,
                "cu_seq_lens_k": batch.boundaries,
                "max_length_q": batch.longest,
                "max_length_k": batch.longest,
            }
        output = causal_lm.get_decoder()(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            **packing,
        )
        hidden = output.last_hidden_state.flatten(0, 1)[batch.select]
        head = causal_lm.get_output_embeddings().weight
        return log_probs_from_hidden(hidden, head, batch.targets, temperature, guard, with_entropy, entropy_gradient)


def _displacement_metrics(displaced: torch.Tensor, mask: torch.Tensor, denominators: Denominators) -> dict[str, float]:
    """Nats of likelihood lost a token, and the share of tokens that lost more than rounding can, of all sampled."""
    values = {"actor/llds": displaced, "actor/llds_frac": (displaced > 1e-3).float()}
    return {name: aggregate_loss(value, mask, "token-mean", denominators).item() for name, value in values.items()}


class DataParallelPPOActor:
    """Computes log-probs and, with an optimizer, updates the policy. Every rank calls each method at the same time.

    The gradient of an optimizer step is that of one loss over all its episodes: denominators are counted over all
    ranks before the first forward, so neither micro-batches nor the number of ranks change it.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ActorConfig,
        stability: StabilityConfig,
        *,
        max_response_length: int,
        correction: RolloutCorrectionConfig | None = None,
        packed: bool = True,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """
        Args:
            model: a ``PolicyModel``, sharded by FSDP or (without a process group) plain.
            max_response_length: tokens; the Lmax of ``seq-mean-token-sum-norm``.
            correction: importance weights between engine and trainer; None: none.
            packed: no padding (``use_remove_padding``).
            optimizer: None for a frozen reference.
        """
        self.model, self.config, self.stability = model, config, stability
        self.max_response_length, self.correction = max_response_length, correction or RolloutCorrectionConfig()
        self.packed, self.optimizer = packed, optimizer
        self.steps = 0  # optimizer steps asked for, skipped ones too: what the warm-up counts
        self.skipped_in_a_row = 0
        self.logits_guard = ValueGuard(stability.nan_to_num, stability.clamp_logits)
        self.advantage_guard = ValueGuard(stability.nan_to_num, stability.clamp_advantages)

    # ------------------------------------------------------------------------------------------------ log-probs
    @torch.no_grad()
    def compute_log_prob(self, data: "DataProto", with_entropy: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the sampled tokens, at ``meta_info["temperature"]``.

        Args:
            data: input_ids (B, L), attention_mask (B, L), response_mask (B, R).

        Returns:
            ``(log_probs, entropies)``, each (B, R) float32 in nats, 0 where ``response_mask`` is 0.
        """
        batch = data.batch
        mask = batch["response_mask"]
        needed = needed_tokens(batch["attention_mask"], mask)
        log_probs = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        entropies = torch.zeros_like(log_probs)
        self.model.eval()
        for rows in self._micro_batches(needed, list(range(len(mask)))):
            part = self._forward(
                batch["input_ids"],
                needed,
                mask,
                rows,
                data.meta_info["temperature"],
                with_entropy,
            )
            log_probs[rows], entropies[rows] = part
        if isinstance(self.model, FSDPModule):  # without a backward the root would stay gathered, and not be itself
            self.model.reshard()
        return log_probs, entropies

    def _micro_batches(self, needed: torch.Tensor, rows: list[int]) -> list[list[int]]:
        """The same number of row lists on every rank, at least one, some of them empty."""
        lengths = needed[rows].sum(dim=1).tolist()
        by_tokens = self.config.use_dynamic_bsz or self.config.ppo_micro_batch_size_per_gpu is None
        split = micro_batches_by_tokens if by_tokens else micro_batches_by_count
        limit = self.config.ppo_max_token_len_per_gpu if by_tokens else self.config.ppo_micro_batch_size_per_gpu
        own = split(lengths, limit)
        (most,) = reduce_numbers([max(1, len(own))], "max")
        return [[rows[i] for i in part] for part in own] + [[] for _ in range(int(most) - len(own))]

    def _forward(
        self, input_ids, needed, mask, rows, temperature, with_entropy, entropy_gradient=False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(log_probs, entropies)`` of the episodes ``rows``, each (b, R) float32, 0 where nothing was sampled.

        Without rows both are (0, R) and still hang on the model, so that a backward reaches all of it.
        """
        batch = forward_batch(input_ids, needed, mask, rows, self.packed)
        flat = self.model(batch, temperature, self.logits_guard, with_entropy, entropy_gradient)
        zeros = torch.zeros(len(rows), mask.shape[1], dtype=torch.float32, device=mask.device)
        return tuple(zeros.index_put(batch.index, values[: len(batch.index[0])]) for values in flat)

    # --------------------------------------------------------------------------------------------------- update
    def update_policy(self, data: "DataProto") -> tuple[dict[str, float], torch.Tensor]:
        """One pass (``ppo_epochs`` passes) of optimizer steps over this rank's episodes.

        Args:
            data: input_ids, attention_mask (B, L); response_mask, advantages (B, R); ref_log_prob where
                ``use_kl_loss``; rollout_log_probs where ``correction`` weighs. Optionally mini_batch (B,), the number
                of the optimizer step that an episode belongs to, on whichever rank it is (else all go into one);
                old_log_probs and, for ``actor/entropy`` where the loss has no entropy term, entropys. Without
                old_log_probs the policy before each optimizer step counts as the old one, which saves a pass and is
                exact where all episodes go into a single step.
                meta_info: temperature, and entropy_coeff where it is scheduled.

        Returns:
            ``(metrics, log_probs)``. The same metrics on every rank: means over the optimizer steps, ``stability/*``
            counted in all. log_probs (B, R) float32: of each episode, before its (last) optimizer step.

        Raises:
            FloatingPointError: ``max_skipped_steps`` steps in a row had a gradient that is not finite.
        """
        assert self.optimizer is not None, "a frozen reference has nothing to update"
        batch = dict(data.batch.items())
        steps = batch.pop("mini_batch", torch.zeros(len(batch["response_mask"]), dtype=torch.long)).tolist()
        (last,) = reduce_numbers([max(steps, default=0)], "max")
        mini_batches = [[row for row, step in enumerate(steps) if step == k] for k in range(int(last) + 1)]
        batch["advantages"], _ = self.advantage_guard(batch["advantages"].float())
        batch["needed"] = needed_tokens(batch["attention_mask"], batch["response_mask"])
        batch["own_log_probs"] = torch.zeros_like(batch["advantages"])
        coefficient = data.meta_info.get("entropy_coeff", self.config.entropy_coeff)
        sums: dict[str, float] = defaultdict(float)
        norms: list[float] = []
        self.model.train()
        for rows in mini_batches * self.config.ppo_epochs:
            norms.append(self._step(batch, rows, data.meta_info["temperature"], coefficient, sums))
        metrics = self._metrics(sums, norms, coefficient)
        if self.config.llds_after_update:
            metrics |= self._displacement(data, batch)
        return metrics, batch["own_log_probs"]

    def _step(
        self,
        batch: dict,
        rows: list[int],
        temperature: float,
        entropy_coeff: float,
        sums: dict,
    ) -> float:
        """One optimizer step on the episodes ``rows`` of this rank (and its like on the others): the gradient norm."""
        counts = count_denominators(batch["response_mask"][rows], self.max_response_length)
        tokens, sequences = reduce_numbers([counts.tokens, counts.sequences])
        denominators = Denominators(tokens, sequences, counts.max_length)
        micro_batches = self._micro_batches(batch["needed"], rows)
        self.optimizer.zero_grad(set_to_none=True)
        adapter = isinstance(self.model.model, PeftModel)
        for number, part in enumerate(micro_batches):
            if isinstance(self.model, FSDPModule) and adapter:
                # They add up here, whole, and travel once. A whole model's gradients are more than a rank can hold.
                self.model.set_requires_gradient_sync(number == len(micro_batches) - 1)
            loss = self._loss(batch, part, temperature, entropy_coeff, denominators, sums)
            (loss * world_size()).backward()  # FSDP averages over ranks what is a sum
        return self._apply_gradient(batch, rows, sums)

    def _loss(self, batch, rows, temperature, entropy_coeff, denominators, sums) -> torch.Tensor:
        """This micro-batch's part of the step's loss, a scalar; its metrics are added to ``sums``."""
        config, mode = self.config, self.config.loss_agg_mode
        mask, advantages = batch["response_mask"][rows], batch["advantages"][rows]
        with_entropy = entropy_coeff != 0 or "entropys" not in batch
        log_prob, entropy = self._forward(
            batch["input_ids"],
            batch["needed"],
            batch["response_mask"],
            rows,
            temperature,
            with_entropy,
            entropy_gradient=entropy_coeff != 0,
        )
        batch["own_log_probs"][rows] = log_prob.detach()
        old = batch["old_log_probs"][rows] if "old_log_probs" in batch else log_prob.detach()
        loss, metrics = policy_loss(
            old,
            log_prob,
            advantages,
            mask,
            clip_low=config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low,
            clip_high=config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high,
            clip_dual=config.clip_ratio_c,
            loss_agg_mode=mode,
            loss_kind=config.policy_loss.loss_mode,
            weights=self._weights(batch, rows, old, mask),
            denominators=denominators,
        )
        if "old_log_probs" in batch:  # else old and new are the same, and nothing has been displaced
            displaced = likelihood_displacement(old, log_prob, advantages, mask)
            if config.llds_coef:
                loss = loss + config.llds_coef * aggregate_loss(displaced, mask, mode, denominators)
            metrics |= _displacement_metrics(displaced.detach(), mask, denominators)
        if config.use_kl_loss:
            kl = kl_penalty(log_prob, batch["ref_log_prob"][rows], config.kl_loss_type)
            kl_loss = aggregate_loss(kl, mask, mode, denominators)
            loss = loss + config.kl_loss_coef * kl_loss
            metrics["actor/kl_loss"] = kl_loss.item()
        if entropy_coeff:
            loss = loss - entropy_coeff * aggregate_loss(entropy, mask, mode, denominators)
        seen = entropy.detach() if with_entropy else batch["entropys"][rows]
        metrics["actor/entropy"] = aggregate_loss(seen, mask, "token-mean", denominators).item()
        for name, value in metrics.items():
            sums[name] += value
        return loss

    def _weights(self, batch: dict, rows: list[int], old: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """Importance weights of these episodes, (b, R), of the policy before the step over the engine's."""
        if self.correction.rollout_is is None:
            return None
        engine = batch["rollout_log_probs"][rows]
        return rollout_weights(old, engine, mask, self.correction.rollout_is, self.correction.rollout_is_threshold)

    def _displacement(self, data: "DataProto", batch: dict) -> dict[str, float]:
        """``actor/llds*`` of the whole update, by another forward pass over its episodes."""
        mask, old = batch["response_mask"], batch.get("old_log_probs", batch["own_log_probs"])
        now, _ = self.compute_log_prob(data, with_entropy=False)
        self.logits_guard.drain("")  # what it touched was counted in the update
        displaced = likelihood_displacement(old, now, batch["advantages"], mask)
        (tokens,) = reduce_numbers([count_denominators(mask).tokens])
        own = _displacement_metrics(displaced, mask, Denominators(tokens, 1.0, 1.0))
        return dict(zip(own, reduce_numbers(list(own.values())), strict=True))

    def _apply_gradient(self, batch: dict, rows: list[int], sums: dict) -> float:
        """Clip and step, or skip: the norm is one number for all ranks, so all decide alike."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = float(full_tensor(torch.nn.utils.get_total_norm([p.grad for p in parameters])))
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        if not math.isfinite(norm) and self.stability.skip_nonfinite_grad:
            self._skip(batch, rows)
            sums["stability/skipped_steps"] += 1 / world_size()  # summed over ranks later
            return norm
        if 0 < self.config.grad_clip < norm:
            for parameter in parameters:
                parameter.grad.mul_(self.config.grad_clip / norm)
        self.optimizer.step()
        self.skipped_in_a_row = 0
        return norm

    def learning_rate(self) -> float:
        """The rate of step ``self.steps`` (from 1): rises linearly over ``lr_warmup_steps``, then stays."""
        optim = self.config.optim
        return optim.lr * min(1.0, self.steps / optim.lr_warmup_steps) if optim.lr_warmup_steps else optim.lr

    def _skip(self, batch: dict, rows: list[int]) -> None:
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row < self.stability.max_skipped_steps:
            return
        names: list[Any] = [self._first_nonfinite(batch, rows)]
        if dist.is_initialized():
            names = [None] * world_size()
            dist.all_gather_object(names, self._first_nonfinite(batch, rows))
        _, name = min(
            (found for found in names if found is not None),
            default=(0, "the gradient's norm"),
        )
        raise FloatingPointError(
            f"{self.skipped_in_a_row} optimizer steps in a row had a gradient that is not finite; the first tensor "
            f"that is not finite is {name}. Resume from the last checkpoint with a lower learning rate, or raise "
            "stability.max_skipped_steps"
        )

    def _first_nonfinite(self, batch: dict, rows: list[int]) -> tuple[int, str] | None:
        """The earliest tensor on the way from weights to gradients that holds NaN or Inf here, with its place."""

        def broken(tensor: torch.Tensor) -> bool:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            return not bool(torch.isfinite(local).all())

        mask = batch["response_mask"][rows] > 0
        inputs = [key for key in ("advantages", "old_log_probs", "rollout_log_probs", "ref_log_prob") if key in batch]
        checks = [("weight " + name, lambda p=p: broken(p)) for name, p in self.model.named_parameters()]
        checks += [(key, lambda key=key: broken(batch[key][rows][mask])) for key in inputs]
        checks += [("logits", lambda: self.logits_guard.nonfinite > 0)]
        trained = trainable_parameters(self.model).items()
        checks += [("gradient of " + name, lambda p=p: p.grad is not None and broken(p.grad)) for name, p in trained]
        return next(
            ((place, name) for place, (name, check) in enumerate(checks) if check()),
            None,
        )

    def _metrics(self, sums: dict[str, float], norms: list[float], entropy_coeff: float) -> dict[str, float]:
        guards = self.logits_guard.drain("stability/logits") | self.advantage_guard.drain("stability/advantages")
        own = {"stability/skipped_steps": 0.0, "stability/adam_eps_bound": self._bound_by_eps()} | sums | guards
        names = sorted(own)
        metrics = dict(zip(names, reduce_numbers([own[name] for name in names]), strict=True))
        for name in names:
            if not name.startswith("stability/"):
                metrics[name] /= max(len(norms), 1)
        if finite := [norm for norm in norms if math.isfinite(norm)]:
            metrics["actor/grad_norm"] = sum(finite) / len(finite)
        metrics["actor/lr"] = self.learning_rate()
        metrics["actor/entropy_coeff"] = entropy_coeff
        return metrics

    def _bound_by_eps(self) -> float:
        """How many weights here Adam's eps holds back: its root of the second moment is below it."""
        counts = []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if state := self.optimizer.state.get(parameter):
                    moment = state["exp_avg_sq"]
                    moment = moment.to_local() if isinstance(moment, DTensor) else moment
                    corrected = group["eps"] ** 2 * (1 - group["betas"][1] ** float(state["step"]))
                    counts.append((moment < corrected).sum())
        return float(torch.stack(counts).sum()) if counts else 0.0

    # ---------------------------------------------------------------------------------------------------- state
    def gather_state(self) -> dict[str, Any]:
        """Optimizer moments by parameter name, whole and on the CPU (on rank 0), and the step counters."""
        moments = {
            f"{name}/{key}": value
            for name, parameter in trainable_parameters(self.model).items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        return {
            "moments": gather_full_state(moments),
            "steps": self.steps,
            "skipped": self.skipped_in_a_row,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what ``gather_state`` gave, which every rank passes whole; at any number of ranks.

        Raises:
            ValueError: it belongs to another model.
        """
        trained = trainable_parameters(self.model)
        moments: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for key, value in state["moments"].items():
            name, _, moment = key.rpartition("/")
            if name not in trained or (value.dim() and value.shape != trained[name].shape):
                raise ValueError(
                    f"the saved optimizer state of {name} fits no trained parameter of this model; "
                    "resume with the model and lora_rank that wrote the checkpoint"
                )
            moments[name][moment] = like(trained[name], value) if value.dim() else value
        self.optimizer.state.clear()  # a state from before the first step has no moments, and these are its moments
        for name, values in moments.items():
            self.optimizer.state[trained[name]] = values
        self.steps, self.skipped_in_a_row = state["steps"], state["skipped"]
