#!/usr/bin/env bash
# Exp-06: the penalty on a query that repeats an earlier one.
#   6a  none   6b  -0.2 above a similarity of 0.7   6c  -0.5 above 0.7   6d  -0.2 above 0.5
# shellcheck source=scripts/experiments/common.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

penalty() { # size, threshold
    echo "reward_model.use_repetition_penalty=true reward_model.repetition_penalty=$1 reward_model.repetition_threshold=$2"
}
arm 6a 40 reward_model.use_repetition_penalty=false
# shellcheck disable=SC2046  # two words on purpose
arm 6b 40 $(penalty -0.2 0.7)
# shellcheck disable=SC2046
arm 6c 40 $(penalty -0.5 0.7)
# shellcheck disable=SC2046
arm 6d 40 $(penalty -0.2 0.5)
finish --steps 1 10 20 40 --window 5 --metrics behavior/query_diversity behavior/search_depth reward/f1 reward/repetition_raw
