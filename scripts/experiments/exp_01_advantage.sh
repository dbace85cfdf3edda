#!/usr/bin/env bash
# Exp-01: what each guard does for the estimator that exploded, and the estimators, each at its best of three rates.
#   raw                std_only with every guard off: a group of equal rewards -1 gives advantages of -1,000,000
#   raw+clamp, +eps, +clip, +skip, +grpo
#                      the same with one guard on: bounded advantages, Adam's large eps, the gradient's norm clipped,
#                      non-finite steps skipped, and the zero-variance rule (grpo instead of std_only)
# and in outputs/exp_01_estimators
#   {estimator}_lr{rate}   12 steps at 3e-4, 1e-3 and 3e-3 with the first seed; the best rate again with the others
# shellcheck source=scripts/experiments/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

metrics=(critic/advantages/min critic/advantages/max actor/pg_loss actor/grad_norm reward/f1 behavior/search_depth
    critic/score/mean stability/advantages_clamped stability/skipped_steps adv/zero_variance_groups actor/entropy)
arm raw 10 "${raw[@]}"
arm raw+clamp 10 "${raw[@]}" stability.clamp_advantages=1e4
arm raw+eps 10 "${raw[@]}" actor_rollout_ref.actor.optim.eps=1e-4
arm raw+clip 10 "${raw[@]}" actor_rollout_ref.actor.grad_clip=1.0
arm raw+skip 10 "${raw[@]}" stability.skip_nonfinite_grad=true
arm raw+grpo 10 "${raw[@]}" algorithm.adv_estimator=grpo
finish --steps 1 4 8 10 --metrics "${metrics[@]}"

experiment="exp_01_estimators$suffix"
if [ "$scale" = demo ]; then rates=(3e-4 1e-3 3e-3); else rates=(3e-6 1e-5 3e-5); fi
estimators=(grpo drgrpo std_only rloo reinforce_plus_plus remax grpo_turn)
all_seeds="${SEEDS:-1 2 3}"

estimator() { # name, learning rate
    local mode=token-mean
    [ "$1" != drgrpo ] || mode=seq-mean-token-sum-norm
    arm "$1_lr$2" 12 algorithm.adv_estimator="$1" actor_rollout_ref.actor.optim.lr="$2" actor_rollout_ref.actor.loss_agg_mode="$mode"
}

SEEDS="${all_seeds%% *}"
for name in "${estimators[@]}"; do for rate in "${rates[@]}"; do estimator "$name" "$rate"; done; done
wait_for_all

SEEDS="${all_seeds#* }" # the fit's own run is the first seed's
for name in "${estimators[@]}"; do
    best="$(python "$root/scripts/compare_runs.py" "$root/outputs/$experiment" --best "${name}_lr" --metrics reward/f1 --window 4)" || continue
    estimator "$name" "${best#"${name}_lr"}"
done
finish --steps 1 4 8 12 --window 4 --metrics reward/f1 behavior/search_depth actor/kl_loss actor/entropy actor/grad_norm adv/zero_variance_groups
