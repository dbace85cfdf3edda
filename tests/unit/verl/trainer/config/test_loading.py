"""Command lines: order of what counts, family names, retired and unknown keys, paths."""

import logging
from pathlib import Path

import pytest

from verl.trainer.config import REPO_ROOT, Config, load_config, locate, run_dir
from verl.trainer.config.convert import known_keys, nearest_key
from verl.trainer.config.family import ALIASES, RETIRED, VALUES, replacement


def test_the_command_line_wins_over_the_profile_and_the_profile_over_the_defaults():
    for overrides in (["profile=cpu_demo", "agent_grpo.n=2"], ["agent_grpo.n=2", "+profile=cpu_demo"]):
        config = load_config(overrides)
        assert config.agent_grpo.n == 2  # command line
        assert config.actor_rollout_ref.rollout.max_turn_tokens == 96  # profile
        assert config.trainer.max_ckpt_to_keep == Config().trainer.max_ckpt_to_keep  # default
        assert config.profile == "cpu_demo"


def test_no_profile_by_any_spelling():
    for spelling in ("profile=", "profile=null", "profile=''"):
        assert load_config([spelling]) == Config()


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("actor_rollout_ref.actor.optim.lr=1e-6", 1e-6),
        ("actor_rollout_ref.actor.optim.lr=5e-5", 5e-5),
        ("+trainer.val_before_train=False", False),
        ("++trainer.val_before_train=false", False),
        ("trainer.logger=['console','jsonl']", ("console", "jsonl")),
        ("trainer.logger=[console]", ("console",)),
        ("trainer.experiment_name=qwen2.5-3b_run", "qwen2.5-3b_run"),
        ("trainer.experiment_name='a b'", "a b"),
        ("trainer.experiment_name=007", "007"),
        ("curriculum.stages=[1,3,10]", (1, 3, 10)),
        ("trainer.total_training_steps=null", None),
        ("trainer.experiment_name=${trainer.project_name}_x", "miniresearcher_x"),
    ],
)
def test_overrides_are_read_as_hydra_reads_them(override, value):
    found = load_config([override])
    for name in override.lstrip("+").partition("=")[0].split("."):
        found = getattr(found, name)
    assert found == value and type(found) is type(value)


def test_a_section_can_be_given_as_a_dictionary():
    config = load_config(["actor_rollout_ref.actor.optim={lr: 0.1, weight_decay: 0.2}"])
    assert (config.actor_rollout_ref.actor.optim.lr, config.actor_rollout_ref.actor.optim.weight_decay) == (0.1, 0.2)
    assert config.actor_rollout_ref.actor.optim.eps == 1e-4


FAMILY = """
algorithm.adv_estimator=grpo data.train_files=["./data/train.parquet"] data.val_files=["./data/dev.parquet"]
data.train_batch_size=12 data.max_prompt_length=512 data.max_response_length=8192
actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.model.use_lora=true
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.ulysses_sequence_parallel_size=1
actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.grad_offload=False
actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.3 actor_rollout_ref.rollout.n=1
actor_rollout_ref.rollout.max_num_batched_tokens=32768 actor_rollout_ref.rollout.top_k=-1
actor_rollout_ref.ref.fsdp_config.param_offload=True critic.optim.lr=1e-5 algorithm.kl_ctrl.kl_coef=0.001
trainer.critic_warmup=0 trainer.logger=['console','wandb'] trainer.project_name=deep trainer.experiment_name=run
+trainer.val_before_train=False trainer.default_hdfs_dir=null trainer.n_gpus_per_node=1 trainer.nnodes=1
trainer.save_freq=-1 trainer.test_freq=-1 trainer.total_epochs=1 data.query_signal=1
data.signal_writing_file=./signal/signal.json data.data_writing_file=./signal/data.json do_search=true
agent_grpo.n=4 max_turns=6 search_engine=rag reward_model.use_pbrs=false reward_model.pbrs_gamma=0.9
reward_model.reward_manager=naive hydra.run.dir=outputs
""".split()


def test_a_family_command_line_works(caplog):
    with caplog.at_level(logging.WARNING):
        config = load_config(FAMILY)
    assert config.agent_grpo.n == 4  # its own name wins over rollout.n, which the family ignores
    assert config.reward_model.pbrs.gamma == 0.9
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 12
    assert config.actor_rollout_ref.rollout.top_k == 0
    assert (config.trainer.save_freq, config.trainer.test_freq) == (0, 0)
    assert config.trainer.logger == ("console", "jsonl")
    assert config.search_engine == ("rag",)
    retired = [record.message.split(" is retired")[0] for record in caplog.records if "is retired" in record.message]
    assert retired == [
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        "actor_rollout_ref.actor.fsdp_config.grad_offload",
        "actor_rollout_ref.rollout.max_num_batched_tokens",
        "actor_rollout_ref.ref.fsdp_config.param_offload",
        "critic.optim.lr",
        "algorithm.kl_ctrl.kl_coef",
        "trainer.critic_warmup",
        "trainer.default_hdfs_dir",
        "data.query_signal",
        "data.signal_writing_file",
        "data.data_writing_file",
        "do_search",
        "reward_model.reward_manager",
        "hydra.run.dir",
    ]


def test_an_alias_alone_sets_its_key():
    assert load_config(["actor_rollout_ref.rollout.n=6"]).agent_grpo.n == 6


def test_the_family_tables_are_sound():
    assert set(ALIASES.values()) <= set(known_keys())
    assert {key for key, _ in VALUES} <= set(known_keys())
    assert not set(ALIASES) & set(known_keys())
    assert [key for key in ALIASES if replacement(key)] == []  # an alias is not also retired
    for why in RETIRED.values():  # a replacement that looks like a key is one
        for word in why.replace("(", " ").replace(",", " ").split():
            word = word.partition("=")[0]
            if "." in word.strip("."):
                assert word in known_keys(), why


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("agent_grp.n=3", r"unknown key agent_grp.n; did you mean agent_grpo.n\?"),
        ("lr=1e-3", r"did you mean actor_rollout_ref.actor.optim.lr\?"),
        ("+trainer.maxturns=3", r"unknown key trainer.maxturns; did you mean max_turns\?"),
        ("actor_rollout_ref.rollout.temprature=3", r"did you mean actor_rollout_ref.rollout.temperature\?"),
        ("actor_rollout_ref.actor.fsdp_config.param_offlod=true", "did you mean actor_.*.fsdp_config.param_offload"),
        ("ray.wheels=3", "unknown key ray.wheels; ray has num_cpus"),
        ("zzz=3", "--help lists them all"),
        ("actor_rollout_ref.actor.optim={rate: 3}", "unknown key actor_rollout_ref.actor.optim.rate"),
        ("profile=cpu_dmo", r"profile=cpu_dmo is unknown; did you mean cpu_demo\?"),
        ("profile=tpu", "known: a100_80g, cpu_demo"),
        ("max_turns", "'max_turns' is not an override; write key=value"),
        ("~max_turns", "is not an override"),
        ("--max_turns=3", "is not an override"),
        ("agent_grpo.n=1,2", r"'agent_grpo.n=1,2' holds several values; a list is written key=\[a,b\]"),
        ("trainer.experiment_name=a=b", "can't read 'trainer.experiment_name=a=b'; quote"),
        ("data.train_files=[a", r"can't read 'data.train_files=\[a'"),
        ("max_turns=${nowhere}", "doesn't resolve: .*nowhere"),
        ("max_turns=four", "max_turns='four' is not a whole number"),
    ],
)
def test_mistakes_are_one_sentence(override, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_config([override])
    assert "\n" not in str(caught.value)


def test_nearest_key_is_never_a_section():
    assert nearest_key("trainer.foo") is None
    assert nearest_key("trainr") is None or "." in nearest_key("trainr")


def test_paths_are_found_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "here [1]").mkdir()
    monkeypatch.chdir(tmp_path / "here [1]")
    Path("scrl").mkdir()
    Path("scrl/types.py").touch()
    assert locate("scrl/types.py") == str(tmp_path / "here [1]" / "scrl" / "types.py")  # where we are comes first
    assert locate("verl/trainer/main_ppo.py") == str(REPO_ROOT / "verl/trainer/main_ppo.py")
    assert locate("scrl/*.py").endswith("scrl/*.py") and Path(locate("scrl/*.py")).is_absolute()
    assert locate("nowhere/at/all.parquet") == "nowhere/at/all.parquet"
    assert locate("Qwen/Qwen2.5-3B-Instruct") == "Qwen/Qwen2.5-3B-Instruct"
    config = load_config(
        ["data.train_files=scrl/types.py", "data.val_files=scrl/types.py", "trainer.default_local_dir=out"]
    )
    assert config.data.train_files == (str(tmp_path / "here [1]" / "scrl" / "types.py"),)
    assert run_dir(config) == tmp_path / "here [1]" / "out"
    assert run_dir(load_config(["trainer.experiment_name=e"])) == REPO_ROOT / "outputs" / "miniresearcher" / "e"


def test_loading_twice_and_from_another_directory_gives_the_same(tmp_path, monkeypatch):
    first = load_config(["profile=cpu_demo"])
    monkeypatch.chdir(tmp_path)
    assert load_config(["profile=cpu_demo"]) == first
