"""The YAML and the schema are one thing; values are converted, or refused with their key."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from verl.trainer.config import Config, config_to_yaml, from_dict, to_dict
from verl.trainer.config.convert import known_keys
from verl.trainer.config.loading import CONFIG_DIR, key_table, load_config, profiles
from verl.trainer.config.schema import Range
from verl.trainer.config.validation import EPISODE_ESTIMATORS, GROUP_ESTIMATORS


def test_the_yaml_has_the_schemas_keys_and_defaults():
    given = yaml.safe_load((CONFIG_DIR / "ppo_trainer.yaml").read_text())
    del given["defaults"]

    def flat(tree: dict, prefix: str = "") -> list[str]:
        return [
            k for n, v in tree.items() for k in (prefix + n, *(flat(v, f"{prefix}{n}.") if type(v) is dict else []))
        ]

    assert flat(given) == list(known_keys())
    assert given == to_dict(Config())
    assert from_dict(given) == Config() == load_config([])


@pytest.mark.parametrize("file", sorted(CONFIG_DIR.glob("ppo_trainer.yaml")))
def test_every_key_of_the_defaults_has_a_comment(file: Path):
    lines = file.read_text().split("profile: null\n", 1)[1].splitlines()
    bare = [line for line in lines if re.match(r"\s*\w+:", line) and " # " not in line]
    assert bare == []
    assert all(meaning for _, _, meaning in key_table())
    assert [key for key, _, _ in key_table()] == [
        key for key in known_keys() if not any(other.startswith(key + ".") for other in known_keys())
    ]


@pytest.mark.parametrize("name", ["a100_80g", "cpu_demo"])
def test_a_profile_loads_and_survives_a_round_trip(name, caplog):
    config = load_config([f"profile={name}"])
    assert config.profile == config.trainer.experiment_name == name
    assert from_dict(yaml.safe_load(config_to_yaml(config))) == config
    assert not caplog.records  # a shipped recipe warns of nothing
    assert sorted(profiles()) == ["a100_80g", "cpu_demo"]


def test_the_recipes_hold_what_they_promise():
    demo, a100 = load_config(["profile=cpu_demo"]), load_config(["profile=a100_80g"])
    assert (demo.data.train_batch_size, demo.agent_grpo.n, demo.max_turns) == (8, 8, 4)
    lora = a100.actor_rollout_ref.model
    assert lora.path == "Qwen/Qwen2.5-3B-Instruct"
    assert (lora.lora_rank, lora.lora_alpha) == (64, 128)
    assert lora.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    longest = a100.data.max_prompt_length + a100.data.max_response_length
    assert longest <= a100.actor_rollout_ref.actor.ppo_max_token_len_per_gpu


def test_yaml_writes_floats_that_yaml_reads_as_floats():
    config = from_dict({"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-6, "eps": 1e-8, "weight_decay": 1}}}})
    optim = yaml.safe_load(config_to_yaml(config))["actor_rollout_ref"]["actor"]["optim"]
    assert optim["lr"] == 1e-6 and optim["eps"] == 1e-8 and optim["weight_decay"] == 1.0
    assert all(type(value) is float for value in (optim["lr"], optim["eps"], optim["weight_decay"]))


@pytest.mark.parametrize(
    ("section", "value", "expected"),
    [
        (("trainer", "save_freq"), 20.0, 20),
        (("trainer", "save_freq"), "20", 20),
        (("trainer", "total_training_steps"), None, None),
        (("trainer", "total_training_steps"), 7, 7),
        (("trainer", "experiment_name"), 129, "129"),
        (("trainer", "default_local_dir"), None, ""),
        (("trainer", "val_only"), "True", True),
        (("trainer", "logger"), "console", ("console",)),
        (("trainer", "logger"), ["jsonl", "swanlab"], ("jsonl", "swanlab")),
        (("data", "train_files"), None, ()),
        (("algorithm", "gamma"), 1, 1.0),
        (("curriculum", "thresholds"), [1, 0.5], (1.0, 0.5)),
    ],
)
def test_values_are_converted(section, value, expected):
    outer, inner = section
    found = getattr(getattr(from_dict({outer: {inner: value}}), outer), inner)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"trainer": {"save_freq": "often"}}, "trainer.save_freq='often' is not a whole number"),
        ({"trainer": {"save_freq": 2.5}}, "trainer.save_freq=2.5 is not a whole number"),
        ({"trainer": {"save_freq": True}}, "trainer.save_freq=True is not a whole number"),
        ({"trainer": {"save_freq": -2}}, "trainer.save_freq=-2 is out of range; it must be at least 0"),
        ({"data": {"train_batch_size": 0}}, "data.train_batch_size=0 is out of range; it must be at least 1"),
        ({"data": {"train_batch_size": None}}, "data.train_batch_size=None is not a whole number"),
        ({"algorithm": {"gamma": "high"}}, "algorithm.gamma='high' is not a number"),
        ({"algorithm": {"gamma": float("nan")}}, "algorithm.gamma=nan is out of range"),
        ({"algorithm": {"gamma": 1.5}}, "it must be at least 0 and at most 1"),
        ({"reward_model": {"early_stop_penalty": 0.5}}, "early_stop_penalty=0.5 is out of range; it must be at most 0"),
        ({"trainer": {"val_only": "perhaps"}}, "trainer.val_only='perhaps' is not true or false"),
        ({"trainer": {"project_name": ["a"]}}, "is not text"),
        ({"trainer": {"logger": ["consol"]}}, r"trainer.logger\[0\]=consol is unknown; did you mean console\?"),
        ({"algorithm": {"adv_estimator": "xyz"}}, "choose one of grpo, drgrpo"),
        ({"curriculum": {"stages": [1, 0]}}, r"curriculum.stages\[1\]=0 is out of range"),
        ({"actor_rollout_ref": {"actor": {"optim": {"betas": [0.9]}}}}, "has 1 values; it takes 2"),
        ({"trainer": 3}, "trainer=3 is a section; set its keys, such as trainer.project_name"),
        ({"trainer": {"sed": 3}}, r"unknown key trainer.sed; did you mean trainer.seed\?"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_key(data, message):
    with pytest.raises(ValueError, match=message):
        from_dict(data)


def test_a_range_is_half_open_where_it_says_so():
    assert 0 in Range(0) and 0 not in Range(0, open_low=True) and 1 in Range(0, 1) and 1.1 not in Range(0, 1)
    assert float("nan") not in Range(0, 1)


def test_the_estimators_are_those_of_core_algos():
    from verl.trainer.config.convert import field_types
    from verl.trainer.config.schema import AlgorithmConfig
    from verl.trainer.ppo.core_algos import ADVANTAGE_ESTIMATORS

    names = set(field_types(AlgorithmConfig)["adv_estimator"].__args__)
    assert names == set(ADVANTAGE_ESTIMATORS)
    assert set(EPISODE_ESTIMATORS) < set(GROUP_ESTIMATORS) < names


def test_the_types_import_without_hydra():
    code = "import sys, verl.trainer.config; print(sorted({'hydra', 'omegaconf', 'torch', 'ray'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=CONFIG_DIR.parents[2], capture_output=True, check=True)
    assert ast.literal_eval(shown.stdout.decode()) == []
