"""Combinations of settings that cannot work, refused with value, reason and remedy, and those that work but are odd."""

import glob
import importlib.util
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from scrl.handler.config import HandlerConfig
from scrl.llm_agent.prompts import TOOLS
from verl.trainer.config.schema import Config, SearchConfig
from verl.utils.hub import MODELSCOPE, check_name
from verl.workers.reward_manager.custom import load_function

# Estimators that compare the episodes of one question: a group of one has nothing to compare.
GROUP_ESTIMATORS = ("grpo", "drgrpo", "std_only", "rloo", "grpo_turn")
# Of these, the ones that sum an episode's reward, so that closed shaping at gamma 1 cancels within a group.
EPISODE_ESTIMATORS = ("grpo", "drgrpo", "std_only", "rloo")


def validate(config: Config) -> None:
    """Raise ValueError with one sentence for the first combination that cannot work."""
    for check in (_groups, _sampling, _batches, _lengths, _turns, _curriculum, _trainer, _search):
        for problem in check(config):
            raise ValueError(problem)


def warnings_of(config: Config) -> list[str]:
    """What works but probably isn't meant, one sentence each."""
    return [*_odd(config), *_odd_search(config), *_odd_loss(config)]


def check_model(key: str, model: str) -> None:
    """ValueError, naming ``key``, where ``model`` is meant for a folder (not ``organisation/name``) and isn't there, or
    for a model on ModelScope that can't be had."""
    check_name(model)
    if model.startswith(MODELSCOPE):
        return
    if not Path(model).exists() and (model.startswith((".", "/", "~")) or model.count("/") > 1):
        raise ValueError(f"{key}={model}: there is no such folder here or in the repository")


def check_inputs(config: Config) -> None:
    """Raise ValueError when a file or folder that the run will read isn't there (before Ray starts, so at once)."""
    model = config.actor_rollout_ref.model.path
    if not model:
        raise ValueError(
            "actor_rollout_ref.model.path is empty; give a folder or a Hugging Face name, or start from a recipe: "
            "profile=cpu_demo"
        )
    check_model("actor_rollout_ref.model.path", model)
    needed = {"data.val_files": config.data.val_files if config.data.val_files or config.trainer.val_only else None}
    needed["data.train_files"] = None if config.trainer.val_only else config.data.train_files
    for key, files in needed.items():
        if files is not None:
            _check_files(key, files)
    if config.reward_model.custom:
        load_function(config.reward_model.custom)
    if config.search.mode == "inprocess" and config.search.cache_mode != "replay":
        _check_search(config)
    if config.search.cache_mode == "replay" and not Path(config.search.cache_path).is_file():
        raise ValueError(
            f"search.cache_path={config.search.cache_path} is not there, and search.cache_mode=replay takes all "
            "results from it; check the path, or make it with search.cache_mode=record"
        )


def _check_search(config: Config) -> None:
    from scrl.handler.web_search_agent.search_api import check_engines  # only here: most who validate don't search

    engines, corpus = check_engines(config.search_engine), config.search.index_corpus
    if "local" in engines and not Path(corpus or "?").is_file():
        raise ValueError(
            f"search.index_corpus={corpus!r} is not a file; search_engine=local needs a .jsonl or .parquet of "
            "{title, url, text}, such as data/demo/corpus.jsonl"
        )


def _search(config: Config) -> Iterator[str]:
    if config.search.mode == "http" and config.search.cache_mode != "reuse":
        yield (
            f"search.cache_mode={config.search.cache_mode} is the server's business where search.mode=http: start "
            f"scrl/handler/server_handler.py with cache_mode={config.search.cache_mode} and a cache_path, and leave "
            "search.cache_mode=reuse here"
        )
    try:
        HandlerConfig.from_config(config)
    except ValueError as error:
        yield str(error)


def _check_files(key: str, files: tuple[str, ...]) -> None:
    if not files:
        raise ValueError(f"{key} is empty; give one or more parquet files, such as {key}=data/demo/train.parquet")
    for file in files:
        if not Path(file).is_file() and not glob.glob(file, recursive=True):
            raise ValueError(f"{key}: {file} is not there, neither from here nor from the repository; check the path")


def _groups(config: Config) -> Iterator[str]:
    estimator, n = config.algorithm.adv_estimator, config.agent_grpo.n
    if n == 1 and estimator in GROUP_ESTIMATORS and not config.trainer.val_only:
        yield (
            f"agent_grpo.n=1 leaves algorithm.adv_estimator={estimator} nothing to compare, so every advantage would "
            "be 0; set agent_grpo.n to 2 or more (8 is usual), or algorithm.adv_estimator=reinforce_plus_plus"
        )


def _sampling(config: Config) -> Iterator[str]:
    estimator = config.algorithm.adv_estimator
    if config.algorithm.filter_groups.enable and estimator not in GROUP_ESTIMATORS:
        yield (
            f"algorithm.filter_groups.enable=true drops groups whose episodes score alike, and "
            f"algorithm.adv_estimator={estimator} learns from these too, since it compares no group; switch it off, or "
            "take adv_estimator=grpo_turn"
        )


def _batches(config: Config) -> Iterator[str]:
    actor, batch = config.actor_rollout_ref.actor, config.data.train_batch_size
    if batch % actor.ppo_mini_batch_size:
        divisors = [d for d in range(1, batch + 1) if batch % d == 0]
        near = min(divisors, key=lambda d: abs(d - actor.ppo_mini_batch_size))
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} does not divide "
            f"data.train_batch_size={batch}, so the last step would be smaller; take {near}"
        )
    if not actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is None:
        yield (
            "actor_rollout_ref.actor.use_dynamic_bsz=false needs a micro-batch size; set "
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, or use_dynamic_bsz=true"
        )


def _lengths(config: Config) -> Iterator[str]:
    data, rollout, obs = config.data, config.actor_rollout_ref.rollout, config.search.max_obs_length
    longest = data.max_prompt_length + data.max_response_length
    if longest > rollout.max_model_len:
        yield (
            f"data.max_prompt_length={data.max_prompt_length} + data.max_response_length={data.max_response_length} "
            f"= {longest} tokens don't fit actor_rollout_ref.rollout.max_model_len={rollout.max_model_len}; raise "
            f"max_model_len to {longest}, or lower max_response_length"
        )
    if rollout.max_turn_tokens > data.max_response_length:
        yield (
            f"actor_rollout_ref.rollout.max_turn_tokens={rollout.max_turn_tokens} is more than the whole response "
            f"may have, data.max_response_length={data.max_response_length}; lower max_turn_tokens"
        )
    room = data.max_response_length - rollout.max_turn_tokens
    if obs > room:
        yield (
            f"search.max_obs_length={obs} leaves no room for an answer of max_turn_tokens={rollout.max_turn_tokens} "
            f"in data.max_response_length={data.max_response_length}; lower max_obs_length to {max(room, 1)} or less, "
            "or raise max_response_length"
        )


def _turns(config: Config) -> Iterator[str]:
    reward = config.reward_model
    if reward.use_early_stop_penalty and not config.curriculum.enable and reward.min_turns > config.max_turns:
        yield (
            f"reward_model.min_turns={reward.min_turns} is more than max_turns={config.max_turns}, so every answer "
            "would be penalised; lower min_turns or raise max_turns"
        )
    if not config.tools:
        yield "tools is empty, so the policy could call nothing; set tools=[web_search]"
    if unknown := [name for name in config.tools if name not in TOOLS]:
        yield f"tools={list(config.tools)} names {', '.join(unknown)}; choose from {', '.join(TOOLS)}"


def _curriculum(config: Config) -> Iterator[str]:
    curriculum = config.curriculum
    if not curriculum.enable:
        return
    stages, gates = curriculum.stages, len(curriculum.stages) - 1
    if not stages or list(stages) != sorted(set(stages)):
        yield f"curriculum.stages={list(stages)} must rise, such as [1,3,6]"
    if curriculum.steps:
        if len(curriculum.steps) != gates or list(curriculum.steps) != sorted(set(curriculum.steps)):
            yield (
                f"curriculum.steps={list(curriculum.steps)} must be {gates} rising steps for "
                f"{len(stages)} stages; stage i+1 starts at steps[i]"
            )
    elif len(curriculum.thresholds) != gates:
        yield (
            f"curriculum.thresholds={list(curriculum.thresholds)} has {len(curriculum.thresholds)} values, but "
            f"{len(stages)} stages have {gates} promotions; give {gates}"
        )
    if curriculum.min_turns and len(curriculum.min_turns) != len(stages):
        yield (
            f"curriculum.min_turns={list(curriculum.min_turns)} has {len(curriculum.min_turns)} values; give one for "
            f"each of the {len(stages)} stages, or [] for reward_model.min_turns"
        )
    needed = curriculum.min_turns or (config.reward_model.min_turns,) * len(stages)
    for stage, least in zip(stages, needed, strict=True):
        if config.reward_model.use_early_stop_penalty and least > stage:
            yield (
                f"a curriculum stage of {stage} tool turns can't have min_turns={least}: every answer would be "
                "penalised; lower curriculum.min_turns (or reward_model.min_turns)"
            )


def _trainer(config: Config) -> Iterator[str]:
    trainer, model = config.trainer, config.actor_rollout_ref.model
    for key in ("project_name", "experiment_name"):
        name = getattr(trainer, key)
        if not name or name in (".", "..") or any(sep in name for sep in "/\\\0"):
            yield f"trainer.{key}={name!r} names a folder, so it can't be empty or hold a slash; rename it"
    if not trainer.logger:
        yield "trainer.logger is empty, so nothing would be recorded; set trainer.logger=[console,jsonl]"
    if model.use_lora and not model.target_modules:
        yield (
            "actor_rollout_ref.model.target_modules is empty, so LoRA would train nothing; set "
            "[q_proj,k_proj,v_proj,o_proj], or use_lora=false for full fine-tuning"
        )
    if trainer.async_rollout and not config.algorithm.rollout_correction.rollout_is:
        yield (
            "trainer.async_rollout=1 trains on episodes of the weights before the last update, which needs correction; "
            "set algorithm.rollout_correction.rollout_is=token, or async_rollout=0"
        )
    if trainer.async_rollout and config.algorithm.adv_estimator == "remax":
        yield (
            "algorithm.adv_estimator=remax needs greedy episodes while trainer.async_rollout=1 generates the next "
            "batch on the same engines; set async_rollout=0, or another estimator"
        )
    if model.attn_implementation == "flash_attention_2" and model.dtype == "float32":
        yield (
            "actor_rollout_ref.model.attn_implementation=flash_attention_2 computes in 16 bits only; set "
            "actor_rollout_ref.model.dtype=bfloat16, or attn_implementation=sdpa"
        )
    if model.attn_implementation == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        yield (
            "actor_rollout_ref.model.attn_implementation=flash_attention_2 needs flash-attn, which isn't installed; "
            "pip install flash-attn, or attn_implementation=sdpa"
        )


def _odd(config: Config) -> Iterator[str]:
    reward, algorithm, actor = config.reward_model, config.algorithm, config.actor_rollout_ref.actor
    if reward.use_pbrs and reward.pbrs.gamma != algorithm.gamma:
        yield (
            f"reward_model.pbrs.gamma={reward.pbrs.gamma} differs from algorithm.gamma={algorithm.gamma}, so shaping "
            "may move the optimum (Ng et al. 1999 need the same); set both alike"
        )
    elif reward.use_pbrs and reward.pbrs.gamma == 1.0 and reward.pbrs.terminal == "zero":
        if algorithm.adv_estimator in EPISODE_ESTIMATORS:
            yield (
                f"reward_model.use_pbrs=true has no effect with algorithm.adv_estimator={algorithm.adv_estimator}: "
                "closed shaping sums to the same in a whole group; algorithm.adv_estimator=grpo_turn sees it, and "
                "reward_model.pbrs.terminal=carry leaves it open"
            )
    longest = config.data.max_prompt_length + config.data.max_response_length
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < longest:
        yield (
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={actor.ppo_max_token_len_per_gpu} is less than the "
            f"longest episode, {longest} tokens; such an episode makes a micro-batch of its own and needs its memory"
        )
    if actor.use_dynamic_bsz and actor.ppo_micro_batch_size_per_gpu is not None:
        yield (
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={actor.ppo_micro_batch_size_per_gpu} has no effect "
            "beside use_dynamic_bsz=true, which counts tokens (ppo_max_token_len_per_gpu); set use_dynamic_bsz=false"
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield "actor_rollout_ref.actor.kl_loss_coef=0: the KL is computed, not used; use_kl_loss=false saves its pass"
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "hf" and (rollout.top_p < 1 or rollout.top_k):
        yield (
            f"actor_rollout_ref.rollout.top_p={rollout.top_p}, top_k={rollout.top_k}: vLLM gives log-probs of what is "
            "left of the distribution, the trainer those of the whole; with 1 and 0 both are the same"
        )
    if rollout.name == "vllm" and config.trainer.deterministic:
        yield (
            "trainer.deterministic=true fixes vLLM's draws, not the last bit of its log-probs, which depend on which "
            "requests meet in a batch; actor_rollout_ref.rollout.name=hf fixes both"
        )
    if config.data.train_files and not config.data.val_files and not config.trainer.val_only:
        yield "data.val_files is empty, so nothing is validated"


def _odd_search(config: Config) -> Iterator[str]:
    """Where a server searches, its own settings count: what was set here for nothing."""
    ours = {"mode", "server_url", "timeout_s", "max_workers", "max_obs_length", "index_corpus", "index_dir"}
    usual, search = SearchConfig(), config.search
    names = [field.name for field in fields(search) if field.name not in ours]
    idle = [f"search.{name}={getattr(search, name)}" for name in names if getattr(search, name) != getattr(usual, name)]
    if search.mode == "http" and idle:
        yield (
            f"search.mode=http leaves the search to the server at {search.server_url}, and {', '.join(idle)} without "
            "effect; give them to scrl/handler/server_handler.py"
        )


def _odd_loss(config: Config) -> Iterator[str]:
    actor, estimator = config.actor_rollout_ref.actor, config.algorithm.adv_estimator
    if estimator == "drgrpo" and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield (
            f"algorithm.adv_estimator=drgrpo with loss_agg_mode={actor.loss_agg_mode} is half of Dr. GRPO; the other "
            "half is actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"
        )
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    if actor.policy_loss.loss_mode == "gspo" and low > 0.05:
        yield (
            f"actor_rollout_ref.actor.policy_loss.loss_mode=gspo clips the mean ratio of a sequence, which hardly ever "
            f"leaves 1 -/+ {low:g}; its paper takes clip_ratio_low=3e-4 and clip_ratio_high=4e-4"
        )
    one_step = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size >= config.data.train_batch_size
    if actor.llds_coef and one_step:
        yield (
            f"actor_rollout_ref.actor.llds_coef={actor.llds_coef} has no effect where a batch is one optimizer step: "
            "nothing has been displaced before it; lower ppo_mini_batch_size, or raise ppo_epochs"
        )
    if config.monitor.max_llds is not None and one_step and not actor.llds_after_update:
        yield (
            f"monitor.max_llds={config.monitor.max_llds} watches nothing where a batch is one optimizer step; "
            "actor_rollout_ref.actor.llds_after_update=true measures the displacement by a pass after it"
        )
