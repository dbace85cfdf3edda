"""The command: what people see when they ask, mistype, or start it as a file; which errors are theirs."""

import subprocess
import sys

import pytest
import yaml

from verl.trainer import main_ppo
from verl.trainer.config import REPO_ROOT, from_dict, load_config


def test_cfg_prints_the_resolved_configuration(capsys):
    for arguments in (["--cfg", "profile=cpu_demo"], ["profile=cpu_demo", "--cfg", "job"]):
        assert main_ppo.main(arguments) == 0
        assert from_dict(yaml.safe_load(capsys.readouterr().out)) == load_config(["profile=cpu_demo"])


def test_help_names_every_recipe_and_key(capsys):
    assert main_ppo.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "a100_80g, cpu_demo" in shown
    assert "  agent_grpo.n=4\n      episodes a question\n" in shown
    assert "  actor_rollout_ref.actor.optim.lr=1.0e-6\n" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["agent_grp.n=4"], "main_ppo: unknown key agent_grp.n; did you mean agent_grpo.n?\n"),
        (["--cfg", "max_turns=x"], "main_ppo: max_turns='x' is not a whole number\n"),
        (["--config-name=x"], "main_ppo: '--config-name=x' is not an override; write key=value, such as "),
        (
            ["actor_rollout_ref.model.path=some/model", "data.train_files=gone.parquet"],
            "main_ppo: data.train_files: gone.parquet is not there",
        ),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_code_2(arguments, message, capsys):
    assert main_ppo.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(message) and shown.err.count("\n") == 1


def test_as_a_file_and_as_a_module_from_any_directory(tmp_path):
    file = str(REPO_ROOT / "verl" / "trainer" / "main_ppo.py")
    as_file = subprocess.run(
        [sys.executable, file, "--cfg", "max_turns=0"], cwd=tmp_path, capture_output=True, text=True
    )
    as_module = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", "--cfg", "max_turns=0"],
        cwd=REPO_ROOT,
        capture_output=True,
        text=True,
    )
    for done in (as_file, as_module):
        assert done.returncode == 2
        assert done.stderr == "main_ppo: max_turns=0 is out of range; it must be at least 1\n"


def raised(action) -> ValueError:
    with pytest.raises(ValueError) as caught:
        action()
    return caught.value


def test_our_own_value_errors_are_sentences_and_a_librarys_is_a_bug():
    ours = raised(lambda: load_config(["max_turns=0"]))
    assert main_ppo.users_mistake(ours) == str(ours)
    assert main_ppo.users_mistake(raised(lambda: int("x"))) is None  # raised outside verl and scrl


def test_an_error_from_a_ray_worker_is_judged_by_where_the_worker_raised_it():
    class RemoteError(ValueError):  # as Ray makes it: the worker's traceback as text, its exception as the cause
        def __init__(self, file: str) -> None:
            super().__init__(
                f'ray::W.run()\n  File "/a/ray.py", line 1, in f\n  File "{file}", line 9, in g\nValueError: no'
            )
            self.cause = ValueError("the adapter does not fit")

    assert main_ppo.users_mistake(RemoteError(str(REPO_ROOT / "verl/utils/lora.py"))) == "the adapter does not fit"
    assert main_ppo.users_mistake(RemoteError("/lib/torch/nn.py")) is None
