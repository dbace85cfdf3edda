#!/usr/bin/env bash
# Exp-05: does the monitor, calibrated on the untrained policy, warn of a collapse and keep silent otherwise?
# Thresholds first (256 cold episodes: lower quartile, for shares the upper one), then
#   5a  healthy: the demo's settings                       5b  a rate thirty times too high
#   5c  std_only with every guard off (Exp-01's raw)       5d  as 5b, and monitor.on_alert=rollback
# shellcheck source=scripts/experiments/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

thresholds="$root/outputs/$experiment/thresholds.yaml"
mkdir -p "${thresholds%/*}"
if [ ! -e "$thresholds" ]; then
    settings=()
    [ "$scale" = full ] || settings=("${demo[@]}")
    python "$root/scripts/calibrate_monitor.py" --episodes 256 --output "$thresholds" "${settings[@]}" "${overrides[@]}" \
        'data.val_files=[]' | tee "${thresholds%.yaml}.log"
fi
if [ "$scale" = demo ]; then high=3e-2; else high=3e-4; fi
watched=(monitor.thresholds_file="$thresholds")
arm 5a 20 "${watched[@]}"
arm 5b 20 "${watched[@]}" actor_rollout_ref.actor.optim.lr="$high"
arm 5c 20 "${watched[@]}" "${raw[@]}"
arm 5d 20 "${watched[@]}" actor_rollout_ref.actor.optim.lr="$high" monitor.on_alert=rollback
finish --steps 1 5 10 15 20 --window 5 --metrics alerts/info_gain alerts/malformed_share alerts/total behavior/search_depth \
    behavior/malformed_share reward/f1 actor/grad_norm actor/entropy critic/advantages/min
