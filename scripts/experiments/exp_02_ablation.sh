#!/usr/bin/env bash
# Exp-02: which of the three mechanisms (entropy bonus, early-stop penalty, curriculum) makes it search within 8 steps?
# 12 x 4 episodes a step, as in the first MiniResearcher, on questions that need two or more hops.
# shellcheck source=scripts/experiments/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

if [ "$scale" = demo ]; then
    questions="$root/outputs/$experiment/two_or_more_hops.parquet"
    mkdir -p "${questions%/*}"
    python - "$root/data/demo/train.parquet" "$questions" <<'PYTHON'
import sys

import pyarrow.parquet as pq

pq.write_table(pq.read_table(sys.argv[1], filters=[("data_source", "in", ["demo_two_hop", "demo_three_hop"])]), sys.argv[2])
PYTHON
    demo+=("data.train_files=[$questions]" data.train_batch_size=12 actor_rollout_ref.actor.ppo_mini_batch_size=12)
fi
entropy=(actor_rollout_ref.actor.entropy_coeff=0.01 actor_rollout_ref.actor.entropy_schedule=cosine)
early_stop=(reward_model.use_early_stop_penalty=true reward_model.min_turns=2)
no_early_stop=(reward_model.use_early_stop_penalty=false)
curriculum=(curriculum.enable=true "curriculum.stages=[1,2,4]" "curriculum.steps=[3,5]" "curriculum.min_turns=[1,2,2]")
two_first=("${curriculum[@]}" "curriculum.stages=[2,3,4]" "curriculum.min_turns=[2,2,2]")

arm 2a 8 "${no_early_stop[@]}"
arm 2b 8 "${entropy[@]}" "${no_early_stop[@]}"
arm 2c 8 "${early_stop[@]}"
arm 2d 8 "${no_early_stop[@]}" "${curriculum[@]}"
arm 2e 8 "${early_stop[@]}" "${curriculum[@]}"
arm 2f 8 "${entropy[@]}" "${early_stop[@]}" "${curriculum[@]}"
arm 2g 8 "${entropy[@]}" "${early_stop[@]}" "${two_first[@]}" # 2f with two searches from the start
finish --steps 1 3 6 8 --metrics behavior/search_depth critic/score/mean reward/f1 actor/grad_norm actor/entropy
