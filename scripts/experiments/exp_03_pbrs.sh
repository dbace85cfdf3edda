#!/usr/bin/env bash
# Exp-03: does potential-based shaping keep the training alive? 129 steps, the first MiniResearcher's longest run.
#   3a  outcome only, grpo
#   3b  shaping as the first MiniResearcher had it: gamma 0.9, left open, summed over the episode (grpo)
#   3c  closed shaping, gamma 1, credit by turn (grpo_turn)
#   3d  outcome only with std_only, the estimator whose advantages reached -1,000,000
#   3e  outcome only, grpo_turn: with grpo, closed shaping sums to 0 over an episode and is 3a, so this splits 3c
#   3f  as 3c, discounted by 0.5 a turn: a turn earns mostly what it found itself (a lambda return with the potential as
#       value; undiscounted, closed shaping is no more than a baseline)
#   3g  open shaping, gamma 1, grpo: what profile=a100_80g takes
# shellcheck source=scripts/experiments/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

[ "$scale" = full ] || demo+=(max_turns=3)
outcome=(reward_model.use_pbrs=false reward_model.use_repetition_penalty=false)
arm 3a 129 "${outcome[@]}" algorithm.adv_estimator=grpo
arm 3b 129 reward_model.use_pbrs=true reward_model.pbrs.gamma=0.9 reward_model.pbrs.terminal=carry algorithm.adv_estimator=grpo
arm 3c 129 reward_model.use_pbrs=true reward_model.pbrs.gamma=1.0 reward_model.pbrs.terminal=zero algorithm.adv_estimator=grpo_turn
arm 3d 129 "${outcome[@]}" algorithm.adv_estimator=std_only
arm 3e 129 "${outcome[@]}" algorithm.adv_estimator=grpo_turn
arm 3f 129 reward_model.use_pbrs=true reward_model.pbrs.gamma=1.0 reward_model.pbrs.terminal=zero algorithm.adv_estimator=grpo_turn algorithm.gamma=0.5
arm 3g 129 reward_model.use_pbrs=true reward_model.pbrs.gamma=1.0 reward_model.pbrs.terminal=carry algorithm.adv_estimator=grpo
finish --steps 1 32 64 96 129 --window 5 --metrics behavior/search_depth reward/f1 critic/score/mean actor/grad_norm \
    actor/kl_loss actor/entropy adv/zero_variance_groups behavior/reward_deviation critic/advantages/min val/f1/mean
