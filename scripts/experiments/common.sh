# What every experiment shares; sourced. A run already at its last step is left alone, one that was stopped goes on.
#
#   bash scripts/experiments/exp_03_pbrs.sh                      demo scale, two runs at a time
#   bash scripts/experiments/exp_03_pbrs.sh profile=a100_80g     full scale; further arguments are Hydra overrides of all
#
#   SEEDS="1 2 3"  JOBS=2  ARMS="3a 3b"   which seeds, how many runs at once, only these arms
#
# Runs are outputs/{experiment}/{arm}_seed{n} (at full scale outputs/{experiment}_full/...), each with its console.log and
# its overrides; tables: scripts/compare_runs.py.
# shellcheck shell=bash
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)"
experiment="$(basename -- "$0" .sh)"
case "${1:-}" in -h | --help)
    for file in "$0" "${BASH_SOURCE[0]}"; do
        sed -n '/^[^#]/q; /^#!/d; /^# shellcheck/d; s/^# \{0,1\}//p' "$file"
    done
    exit 0
    ;;
esac
# shellcheck source=scripts/env.sh
source "$root/scripts/env.sh" run
export RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false
miniresearcher_has_gpu || export OMP_NUM_THREADS=1
overrides=("$@")
profile="$(miniresearcher_profile "$@")"
[ -z "$profile" ] || overrides=("$profile" "$@")
case " ${overrides[*]} " in
    *"profile=cpu_demo "*) scale=demo suffix='' jobs="${JOBS:-2}" ;;
    *) scale=full suffix=_full jobs="${JOBS:-1}" ;;
esac
experiment+="$suffix"
# Of every run at demo scale: 3 x 4 episodes, so a step is seconds and a hundred of them minutes.
demo=(data.train_batch_size=3 actor_rollout_ref.actor.ppo_mini_batch_size=3 agent_grpo.n=4 trainer.val_before_train=false
    trainer.test_freq=0 trainer.save_freq=40 trainer.max_ckpt_to_keep=1 data.val_max_samples=100)

# The first MiniResearcher's estimator, unguarded: a group of equal rewards -1 gives advantages of -1,000,000.
# shellcheck disable=SC2034  # for Exp-01 and Exp-05
raw=(stability.clamp_advantages=null stability.clamp_logits=null stability.nan_to_num=false
    stability.skip_nonfinite_grad=false actor_rollout_ref.actor.optim.eps=1e-8 actor_rollout_ref.actor.grad_clip=1e12
    algorithm.adv_estimator=std_only reward_model.early_stop_penalty=-1.0)

trap 'trap - INT TERM; kill -TERM $(jobs -rp) 2>/dev/null; wait; exit 130' INT TERM

wait_for_one() { # a run's failure is told at once and doesn't stop the others
    wait -n || true
}

# arm NAME STEPS OVERRIDES...: that many steps for each seed.
arm() {
    local name="$1" steps="$2" seed
    shift 2
    case " ${ARMS:-$name} " in *" $name "*) ;; *) return 0 ;; esac
    for seed in ${SEEDS:-1 2 3}; do
        while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait_for_one; done
        train "${name}_seed$seed" "$steps" trainer.seed="$seed" "$@" &
    done
}

train() {
    local run="$1" steps="$2" began=$SECONDS
    shift 2
    local folder="$root/outputs/$experiment/$run" own
    own="$(printf '%s\n' "$@" "${overrides[@]}")"
    if [ -e "$folder/overrides" ] && [ "$own" != "$(cat "$folder/overrides")" ]; then
        echo "$run: SKIPPED, it was begun with other settings ($folder/overrides); remove that folder to run it anew"
        return
    fi
    if [ -d "$folder/checkpoints/global_step_$steps" ]; then
        echo "$run: done before"
        return
    fi
    mkdir -p "$folder"
    printf '%s\n' "$own" >"$folder/overrides"
    local settings=(trainer.project_name="$experiment" trainer.experiment_name="$run" trainer.total_training_steps="$steps")
    [ "$scale" = full ] || settings=("${demo[@]}" "${settings[@]}")
    local child stopped='' status=0
    trap 'stopped=1; kill -TERM "$child" 2>/dev/null' TERM
    python -P -m verl.trainer.main_ppo "${settings[@]}" "$@" "${overrides[@]}" >>"$folder/console.log" 2>&1 &
    child=$!
    wait "$child" || status=$?
    while kill -0 "$child" 2>/dev/null; do wait "$child" || status=$?; done # a signal ends the wait, not the run
    if [ "$stopped" ]; then
        echo "$run: stopped after $((SECONDS - began)) s; the same command goes on"
    elif [ "$status" -eq 0 ]; then
        echo "$run: $steps steps in $((SECONDS - began)) s"
    else
        echo "$run: FAILED after $((SECONDS - began)) s: $(tail -n 1 "$folder/console.log") ($folder/console.log)"
    fi
}

wait_for_all() {
    while [ -n "$(jobs -rp)" ]; do wait_for_one; done
}

# finish ARGUMENTS...: wait for all runs, then the table (arguments of compare_runs.py).
finish() {
    wait_for_all
    [ -d "$root/outputs/$experiment" ] || return 0 # ARMS asked for none of it
    python "$root/scripts/compare_runs.py" "$root/outputs/$experiment" "$@"
}
