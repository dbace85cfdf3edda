#!/usr/bin/env bash
# Rolls out the demo's test set, or data.val_files, once a question, with a run's latest checkpoint (or the untrained
# policy), and scores it.
#
#   bash evaluate.sh                                            the CPU demo's run, with a GPU the A100 recipe's
#   bash evaluate.sh trainer.experiment_name=my_run             another run; further arguments are Hydra overrides
#   bash evaluate.sh data.val_files=[my_test.parquet]           other questions
#
# Writes outputs/{project}/{experiment}/rollout/rollout_step_0.json, its copy evaluate/{experiment}_result.json, and the
# scores evaluate/{experiment}_score.json. A judge model (MBE) is asked where JUDGE_MODEL is set.
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"

case "${1:-}" in -h | --help)
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit 0
    ;;
esac

# shellcheck source=scripts/env.sh
source "$root/scripts/env.sh" run

profile="$(miniresearcher_profile "$@")"
arguments=("$@" ${profile:+"$profile"} trainer.val_only=true)
case " ${arguments[*]} " in
    *data.val_files=*) ;;
    *) arguments+=("data.val_files=[data/demo/test.parquet]") ;;
esac

# Where the run writes is the configuration's to say; its warnings come again from the trainer.
where="$(python -P -c '
import logging, sys
from verl.trainer.config import load_config, run_dir
logging.disable(logging.WARNING)
try:
    config = load_config(sys.argv[1:])
except ValueError as error:
    sys.exit(str(error))
print("questions:", *config.data.val_files, "(others: data.val_files=[...])", file=sys.stderr)
print(config.trainer.experiment_name, run_dir(config), sep="\n")
' "${arguments[@]}")"
experiment="${where%%$'\n'*}"
rollout="${where#*$'\n'}/rollout/rollout_step_0.json"

rm -f -- "$rollout" # an old one must not pass for this one
bash "$root/train_grpo.sh" "${arguments[@]}"
cp -- "$rollout" "$root/evaluate/${experiment}_result.json"
echo "rollouts: evaluate/${experiment}_result.json" >&2
exec python "$root/evaluate/cacluate_metrics.py" "$experiment"
