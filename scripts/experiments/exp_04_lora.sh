#!/usr/bin/env bash
# Exp-04: a LoRA adapter with its base as frozen reference against full fine-tuning; the actor's memory is measured.
#   4a  LoRA, KL to the base (no second copy)     4b  all weights, KL to a frozen copy
#   4c  LoRA, no KL                               4d  all weights, no KL
# shellcheck source=scripts/experiments/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

# Full fine-tuning wants a rate of about a tenth of the adapter's.
if [ "$scale" = demo ]; then full_rate=1e-4; else full_rate=1e-6; fi
full=(actor_rollout_ref.model.use_lora=false actor_rollout_ref.actor.optim.lr="$full_rate")
arm 4a 20
arm 4b 20 "${full[@]}"
arm 4c 20 actor_rollout_ref.actor.use_kl_loss=false
arm 4d 20 "${full[@]}" actor_rollout_ref.actor.use_kl_loss=false
finish --steps 1 5 10 20 --window 5 --metrics reward/f1 behavior/search_depth perf/max_memory_rss_gb actor/kl_loss actor/grad_norm \
    adv/zero_variance_groups timing_s/update_actor timing_s/ref_log_prob timing_s/update_weights
