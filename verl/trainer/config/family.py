"""What lets command lines written for DeepResearcher and the first MiniResearcher work here: plain tables."""

import fnmatch

# Another name for a key that exists. The key's own name wins where a command line gives both.
ALIASES: dict[str, str] = {
    "actor_rollout_ref.rollout.n": "agent_grpo.n",
    "actor_rollout_ref.rollout.max_num_seqs": "actor_rollout_ref.rollout.max_batch_size",
    "actor_rollout_ref.rollout.response_length": "data.max_response_length",
    "actor_rollout_ref.rollout.prompt_length": "data.max_prompt_length",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.use_remove_padding": "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.model.lora.rank": "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.model.lora.alpha": "actor_rollout_ref.model.lora_alpha",
    "data.max_model_len": "actor_rollout_ref.rollout.max_model_len",
    "data.max_obs_length": "search.max_obs_length",
    "data.seed": "trainer.seed",
    "max_obs_length": "search.max_obs_length",
    "reward_model.pbrs_gamma": "reward_model.pbrs.gamma",
    "reward_model.use_curriculum": "curriculum.enable",
    "reward_model.use_query_monitoring": "reward_model.use_repetition_penalty",
    "algorithm.use_pbrs": "reward_model.use_pbrs",
    "algorithm.pbrs_gamma": "reward_model.pbrs.gamma",
}

# A value that the family writes, and what it is called here.
VALUES: dict[tuple[str, str], str] = {
    ("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla"): "ppo",
    ("trainer.save_freq", "-1"): "0",
    ("trainer.test_freq", "-1"): "0",
    ("trainer.total_training_steps", "-1"): "null",
    ("actor_rollout_ref.rollout.top_k", "-1"): "0",
    ("actor_rollout_ref.rollout.val_kwargs.top_k", "-1"): "0",
}

# Trackers of the family that are not here, and what takes their place.
LOGGERS: dict[str, str] = {"wandb": "jsonl", "mlflow": "jsonl"}

# Keys (fnmatch patterns) that have no effect here, and what replaces them. The first match counts.
RETIRED: dict[str, str] = {
    "critic": "these algorithms need no critic",
    "critic.*": "these algorithms need no critic",
    "trainer.critic_warmup": "these algorithms need no critic",
    "data.*signal*": "workers talk over Ray, not over signal files; search.mode=inprocess|http chooses the handler",
    "data.data_writing_file": "workers talk over Ray, not over signal files; search.mode=inprocess|http chooses it",
    "do_search": "max_turns sets how often the policy may search",
    "*megatron*": "FSDP is the only backend",
    "*.strategy": "FSDP is the only backend",
    "*hybrid_engine": "training and generation are separate Ray actors",
    "*ulysses_sequence_parallel_size": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu bounds a micro-batch",
    "*log_prob_micro_batch_size*": "the log-prob pass takes actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "*log_prob_use_dynamic_bsz": "the log-prob pass takes actor_rollout_ref.actor.use_dynamic_bsz",
    "*log_prob_max_token_len_per_gpu": "the log-prob pass takes actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.ref": "the reference is the actor with its adapter disabled",
    "actor_rollout_ref.ref.*": "the reference is the actor with its adapter disabled",
    "actor_rollout_ref.actor.shuffle": "data.shuffle orders the questions",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": "actor_rollout_ref.actor.optim.lr_warmup_steps counts steps",
    "actor_rollout_ref.actor.optim.warmup_style": "the rate is constant after lr_warmup_steps",
    "actor_rollout_ref.actor.optim.min_lr_ratio": "the rate is constant after lr_warmup_steps",
    "actor_rollout_ref.actor.optim.total_training_steps": "trainer.total_training_steps sets it",
    "actor_rollout_ref.actor.fsdp_config.wrap_policy*": "layers are wrapped one by one",
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": "the actor shards over all its ranks",
    "actor_rollout_ref.actor.fsdp_config.grad_offload": "actor_rollout_ref.actor.fsdp_config.param_offload covers it",
    "actor_rollout_ref.actor.fsdp_config.model_dtype": "actor_rollout_ref.model.dtype sets precision",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision*": "actor_rollout_ref.model.dtype sets precision",
    "actor_rollout_ref.model.lora_dropout": "adapters train without dropout, so that log-probs are exact",
    "actor_rollout_ref.model.lora.dropout": "adapters train without dropout, so that log-probs are exact",
    "actor_rollout_ref.model.external_lib": "actor_rollout_ref.model.path names any transformers model",
    "actor_rollout_ref.model.override_config*": "actor_rollout_ref.model.path names any transformers model",
    "actor_rollout_ref.model.enable_activation_offload": "actor_rollout_ref.model.enable_gradient_checkpointing does",
    "actor_rollout_ref.rollout.dtype": "actor_rollout_ref.model.dtype sets precision",
    "actor_rollout_ref.rollout.mode": "every episode is its own coroutine",
    **dict.fromkeys(
        (
            f"actor_rollout_ref.rollout.{name}"
            for name in (
                "disable_log_stats",
                "do_sample",
                "enable_chunked_prefill",
                "free_cache_engine",
                "ignore_eos",
                "load_format",
                "max_num_batched_tokens",
                "use_fire_sampling",
            )
        ),
        "the engine sets it itself",
    ),
    "data.*_key": "rows keep DeepResearcher's column names",
    "data.return_raw_*": "prompts are built from the question by the chat template",
    "data.tokenizer": "the tokenizer comes with actor_rollout_ref.model.path",
    "data.num_workers": "rows are tokenised when they are drawn",
    "data.n_gpus_per_node": "trainer.n_gpus_per_node sets it",
    "data.truncation": "a prompt longer than data.max_prompt_length is refused",
    "data.filter_overlong_prompts*": "a prompt longer than data.max_prompt_length is refused",
    "reward_model.early_stop_penalty_coef": "reward_model.early_stop_penalty (a negative number) replaces it",
    "reward_model.query_repetition_penalty_coef": "reward_model.repetition_penalty (a negative number) replaces it",
    "reward_model.curriculum_*": "the curriculum section (stages, thresholds, min_turns) replaces it",
    "reward_model.enable": "the score is computed from the answer; there is no reward network",
    "reward_model.model*": "the score is computed from the answer; there is no reward network",
    "reward_model.*micro_batch_size*": "the score is computed from the answer; there is no reward network",
    "reward_model.*max_token_len*": "the score is computed from the answer; there is no reward network",
    "reward_model.max_length": "the score is computed from the answer; there is no reward network",
    "reward_model.use_dynamic_bsz": "the score is computed from the answer; there is no reward network",
    "reward_model.reward_manager": "there is one reward manager",
    "custom_reward_function": "reward_model.custom=path.py:function replaces it",
    "custom_reward_function.*": "reward_model.custom=path.py:function replaces it",
    "algorithm.filter_groups.metric": "a group is judged by its episodes' returns",
    "algorithm.filter_groups.filter_*": "a group is judged by its episodes' returns",
    "algorithm.rollout_correction.*": "algorithm.rollout_correction.rollout_is names the level of truncated weights",
    "actor_rollout_ref.actor.tis_imp_ratio_cap": "algorithm.rollout_correction.rollout_is_threshold replaces it",
    "algorithm.kl_ctrl*": "actor_rollout_ref.actor.kl_loss_coef weighs the KL, which is part of the loss",
    "algorithm.kl_penalty": "actor_rollout_ref.actor.kl_loss_type names the estimator",
    "algorithm.use_kl_in_reward": "actor_rollout_ref.actor.use_kl_loss puts the KL into the loss",
    "algorithm.lam": "there is no critic, hence no GAE",
    "algorithm.entropy_bonus_coef": "actor_rollout_ref.actor.entropy_coeff replaces it",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.adv_estimator=drgrpo leaves the deviation out",
    "trainer.default_hdfs_dir": "trainer.default_local_dir is where a run writes",
    "trainer.resume_from_path": "trainer.resume_mode takes the path itself",
    "trainer.remove_previous_ckpt_in_save": "trainer.max_ckpt_to_keep sets how many stay",
    "trainer.del_local_ckpt_after_load": "trainer.max_ckpt_to_keep sets how many stay",
    "trainer.val_generations_to_log_to_wandb": "every episode is written to the run's rollout folder",
    "trainer.*_data_dir": "every episode is written to the run's rollout folder",
    "hydra.*": "trainer.default_local_dir is where a run writes",
}


def replacement(key: str) -> str | None:
    """What replaces a retired key; None when the family doesn't know it either."""
    return next((why for pattern, why in RETIRED.items() if fnmatch.fnmatchcase(key, pattern)), None)
