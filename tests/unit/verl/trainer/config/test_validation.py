"""Combinations that can't work are refused with value, reason and remedy; odd ones are a warning."""

import re

import pytest

from verl.trainer.config import Config, load_config
from verl.trainer.config.validation import check_inputs, validate, warnings_of

REFUSED = [
    ("agent_grpo.n=1", "agent_grpo.n=1 leaves .*=grpo nothing to compare.*agent_grpo.n to 2"),
    ("agent_grpo.n=1 algorithm.adv_estimator=grpo_turn", "agent_grpo.n=1 leaves"),
    (
        "algorithm.filter_groups.enable=true algorithm.adv_estimator=remax",
        "filter_groups.enable=true drops groups .*=remax learns from these too.*switch it off",
    ),
    ("algorithm.filter_groups.max_num_gen_batches=0", "max_num_gen_batches=0 is out of range"),
    ("algorithm.rollout_correction.rollout_is_threshold=0.5", "rollout_is_threshold=0.5 is out of range"),
    ("actor_rollout_ref.actor.clip_ratio=1.5", "clip_ratio=1.5 is out of range; it must be at least 0 and at most 1"),
    ("actor_rollout_ref.actor.ppo_mini_batch_size=12", "ppo_mini_batch_size=12 does not divide .*=16.*take 8"),
    ("actor_rollout_ref.actor.ppo_mini_batch_size=5", "does not divide .*take 4"),
    ("actor_rollout_ref.actor.use_dynamic_bsz=false", "set actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
    ("actor_rollout_ref.rollout.max_model_len=8192", "512 . .*=8192 = 8704 tokens don't fit .*max_model_len to 8704"),
    ("actor_rollout_ref.rollout.max_turn_tokens=9000", "max_turn_tokens=9000 is more than the whole response"),
    ("search.max_obs_length=7169", "max_obs_length=7169 leaves no room .*to 7168 or less"),
    ("reward_model.min_turns=5", "min_turns=5 is more than max_turns=4"),
    ("tools=[]", "tools is empty"),
    ("curriculum.enable=true curriculum.thresholds=[0.2]", "has 1 values, but 3 stages have 2 promotions; give 2"),
    ("curriculum.enable=true curriculum.stages=[1,3,3]", r"curriculum.stages=\[1, 3, 3\] must rise"),
    ("curriculum.enable=true curriculum.steps=[5]", "must be 2 rising steps for 3 stages"),
    ("curriculum.enable=true curriculum.steps=[9,5]", "must be 2 rising steps"),
    ("curriculum.enable=true curriculum.min_turns=[1]", "has 1 values; give one for each of the 3 stages"),
    (
        "curriculum.enable=true curriculum.min_turns=[1,2,7]",
        "a curriculum stage of 6 tool turns can't have min_turns=7",
    ),
    ("curriculum.enable=true reward_model.min_turns=2", "a curriculum stage of 1 tool turns can't have min_turns=2"),
    ("trainer.async_rollout=1", "async_rollout=1 trains on .* needs correction; set .*rollout_is=token"),
    (
        "trainer.async_rollout=1 algorithm.rollout_correction.rollout_is=token algorithm.adv_estimator=remax",
        "remax needs greedy episodes while trainer.async_rollout=1",
    ),
    (
        "search.mode=http search.cache_mode=record search.cache_path=c",
        "cache_mode=record is the server's business where search.mode=http: start .*server_handler.py with",
    ),
    (
        "actor_rollout_ref.model.attn_implementation=flash_attention_2 actor_rollout_ref.model.dtype=float32",
        "attn_implementation=flash_attention_2 computes in 16 bits only",
    ),
    ("trainer.async_rollout=2", "async_rollout=2 is out of range"),
    ("trainer.experiment_name=a/b", "names a folder, so it can't be empty or hold a slash"),
    ("trainer.experiment_name=..", "names a folder"),
    ("trainer.project_name=''", "names a folder"),
    ("trainer.logger=[]", "nothing would be recorded"),
    ("actor_rollout_ref.model.target_modules=[]", "LoRA would train nothing"),
    ("actor_rollout_ref.rollout.temperature=0", "temperature=0.* is out of range; it must be more than 0"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_impossible_combinations_are_refused(line, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_config(line.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "agent_grpo.n=1 algorithm.adv_estimator=reinforce_plus_plus",
        "agent_grpo.n=1 trainer.val_only=true",
        "algorithm.filter_groups.enable=true algorithm.adv_estimator=grpo_turn",
        "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla algorithm.rollout_correction.rollout_is=sequence",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.use_dynamic_bsz=false actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.max_model_len=8704",
        "search.max_obs_length=7168",
        "reward_model.min_turns=4",
        "reward_model.min_turns=5 reward_model.use_early_stop_penalty=false",
        "curriculum.enable=true",
        "curriculum.enable=true curriculum.steps=[5,9] curriculum.thresholds=[]",
        "curriculum.thresholds=[0.2]",
        "curriculum.enable=true reward_model.min_turns=2 reward_model.use_early_stop_penalty=false",
        "trainer.async_rollout=1 algorithm.rollout_correction.rollout_is=sequence",
    ],
)
def test_their_neighbours_are_accepted(line):
    load_config(line.split())


def test_the_defaults_are_sound():
    validate(Config())
    assert warnings_of(Config()) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("reward_model.use_pbrs=true reward_model.pbrs.gamma=0.9", "pbrs.gamma=0.9 differs from algorithm.gamma=1.0"),
        ("reward_model.use_pbrs=true", "has no effect with algorithm.adv_estimator=grpo: .*grpo_turn sees it"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192", "is less than the longest episode, 8704 tokens"),
        ("algorithm.adv_estimator=drgrpo", "half of Dr. GRPO; .*loss_agg_mode=seq-mean-token-sum-norm"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "hardly ever leaves 1 -/. 0.2; .*clip_ratio_low=3e-4"),
        ("monitor.max_llds=0.01", "max_llds=0.01 watches nothing .*llds_after_update=true measures"),
        ("actor_rollout_ref.actor.llds_coef=0.1", "llds_coef=0.1 has no effect where a batch is one optimizer step"),
        ("actor_rollout_ref.actor.kl_loss_coef=0", "use_kl_loss=false saves its pass"),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
            "ppo_micro_batch_size_per_gpu=2 has no effect beside use_dynamic_bsz=true",
        ),
        ("data.train_files=[x]", "data.val_files is empty"),
        ("actor_rollout_ref.rollout.top_p=0.9", "vLLM gives log-probs of what is left of the distribution"),
        ("actor_rollout_ref.rollout.name=vllm trainer.deterministic=true", "not the last bit .*rollout.name=hf fixes"),
        (
            "search.mode=http search.topk=1 search.language=fr search.timeout_s=9",
            "leaves the search to the server at .*:5004, and search.topk=1, search.language=fr without effect; give",
        ),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=256", "ppo_mini_batch_size=256 is more than .*; taking 16"),
    ],
)
def test_odd_combinations_warn_once(line, message, caplog):
    load_config(line.split())
    (record,) = caplog.records
    assert re.search(message, record.message)


def test_inputs_that_are_not_there_are_named(tmp_path):
    there = tmp_path / "d.parquet"
    there.touch()
    model = "actor_rollout_ref.model.path=some/model"
    train, val = f"data.train_files=[{there}]", f"data.val_files=[{there}]"
    corpus = f"search.index_corpus={there}"
    for overrides, message in [
        ([], "model.path is empty"),
        (["actor_rollout_ref.model.path=./gone"], "model.path=./gone: there is no such folder"),
        (["actor_rollout_ref.model.path=data/demo/gone"], "there is no such folder"),
        ([model], "data.train_files is empty"),
        ([model, "data.train_files=[gone.parquet]"], "data.train_files: gone.parquet is not there"),
        ([model, train, "data.val_files=['gone/*.parquet']"], r"data.val_files: gone/\*.parquet is not there"),
        ([model, "trainer.val_only=true"], "data.val_files is empty"),
        ([model, train, val], "search.index_corpus='' is not a file"),
        ([model, train, val, "search.index_corpus=gone.jsonl"], "search.index_corpus='gone.jsonl' is not a file"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            check_inputs(load_config(overrides))
        assert "\n" not in str(caught.value)
    check_inputs(load_config([model, train, val, corpus]))
    check_inputs(load_config([model, train, corpus]))
    check_inputs(load_config([model, val, corpus, "trainer.val_only=true"]))
    check_inputs(load_config([model, train, f"data.val_files=['{tmp_path}/*.parquet']", "search.mode=http"]))
