"""The plan against sums by hand, its verdicts, and what it advises."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from verl.trainer.config import load_config
from verl.utils.model_shape import find_shape

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "plan_memory.py"
GB = 2**30
UTILISATION = "actor_rollout_ref.rollout.gpu_memory_utilization"


@pytest.fixture(scope="module")
def planner():
    spec = importlib.util.spec_from_file_location("plan_memory", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["plan_memory"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def plan(planner, *overrides: str, model: str = "Qwen2.5-3B", card: str = "a100-80g"):
    config = load_config(["profile=a100_80g", *overrides])
    arguments = find_shape(model), config, planner.CARDS[card], planner.Assumptions()
    made = planner.make_plan(*arguments)
    return made, {line.name: line.value for line in made.memory}, planner.verdict(made, *arguments), arguments


def test_memory_by_hand(planner):
    made, memory, said, _ = plan(planner, f"{UTILISATION}=0.3")
    assert memory["base weights"] == pytest.approx(3_085_938_688 * 2 / GB)
    assert memory["adapter"] == memory["gradients"] == pytest.approx(29_491_200 * 4 / GB)
    assert memory["optimizer"] == pytest.approx(29_491_200 * 8 / GB)
    assert memory["activations"] == pytest.approx(16_384 * 36 * 2048 * 2 / GB) == 2.25
    assert memory["logits chunk"] == 1.0
    cache = 0.3 * 79.2 - (3_085_938_688 + 29_491_200) * 2 / GB - 1.5
    assert memory["KV cache"] == pytest.approx(cache)
    assert made.kv_tokens == int(cache * GB / 36_864)
    assert made.left == pytest.approx(79.2 - sum(memory.values()))
    assert said.startswith(f"It fits: {made.left:.1f} GB are left")


def test_a_longer_episode_than_the_limit_sets_the_activations(planner):
    _, memory, _, _ = plan(planner, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096")
    assert memory["activations"] == pytest.approx(8704 * 36 * 2048 * 2 / GB)


def test_without_checkpointing_every_layer_keeps_what_it_needs(planner):
    _, memory, _, _ = plan(planner, "actor_rollout_ref.model.enable_gradient_checkpointing=false")
    each = 2 * 4 * 2048 + 2 * ((2 * 16 + 2 * 2) * 128 + 3 * 11008 + 2048 + 4 * 64)
    assert memory["activations"] == pytest.approx(16_384 * 36 * each / GB)


def test_full_fine_tuning_holds_a_reference_and_moments_of_all(planner):
    made, memory, said, _ = plan(planner, "actor_rollout_ref.model.use_lora=false")
    assert memory["weights"] == memory["gradients"] == memory["optimizer"] / 2 == pytest.approx(3_085_938_688 * 4 / GB)
    assert memory["reference"] == pytest.approx(3_085_938_688 * 2 / GB)
    assert made.left < 0 and said.startswith("It doesn't fit: ")


def test_ranks_share_the_weights_and_an_engine_over_cards_has_them_to_itself(planner):
    _, one, _, _ = plan(planner)
    _, two, _, _ = plan(planner, "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.num_workers=2")
    assert two["base weights"] == one["base weights"] / 2
    assert two["KV cache"] == one["KV cache"], "worker i on the card of rank i"
    _, apart, _, _ = plan(planner, "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    assert "KV cache" not in apart


def test_time_by_hand(planner):
    made, _, _, _ = plan(planner)
    time = {line.name: line.value for line in made.time}
    tokens, sampled, length = 128 * 7564, 7 * 160, 7564
    weights = 36 * (2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 11008)
    attention = 128 * 2 * 36 * 2048 * length**2
    head = 2 * 128 * sampled * 2048 * 151_936
    forward = 2 * (weights + 29_491_200) * tokens + attention + head
    assert time["log-probs"] == pytest.approx(forward / (312e12 * 0.25))
    update = 2 * (2 * weights + 3 * 29_491_200) * tokens + 3 * attention + 2 * head + forward
    assert time["update"] == pytest.approx(update / (312e12 * 0.25))
    together = min(128, made.kv_tokens // length)
    moved = 3_085_938_688 * 2 + together * length / 2 * 36_864
    assert time["decoding"] == pytest.approx(128 * sampled / together * moved / (2039e9 * 0.6))
    assert made.step == pytest.approx(sum(time.values()))
    ahead, _, _, _ = plan(planner, "trainer.async_rollout=1", "algorithm.rollout_correction.rollout_is=token")
    assert ahead.step == pytest.approx(time["log-probs"] + time["update"])


@pytest.mark.parametrize(
    ("overrides", "card", "model", "first"),
    [
        (("actor_rollout_ref.model.enable_gradient_checkpointing=false",), "a100-80g", "Qwen2.5-3B", "checkpointing"),
        ((f"{UTILISATION}=0.9",), "a100-80g", "Qwen2.5-3B", "utilization"),
        ((f"{UTILISATION}=0.05",), "a100-80g", "Qwen2.5-3B", "utilization"),
        ((), "4090-24g", "Qwen2.5-3B", "max_token_len"),
        (("actor_rollout_ref.model.use_lora=false",), "a100-40g", "Qwen2.5-3B", "use_lora"),
    ],
)
def test_what_it_advises_fits(planner, overrides, card, model, first):
    made, _, said, (shape, config, chosen, assumed) = plan(planner, *overrides, card=card, model=model)
    assert made.problem is not None
    changes = planner.advice(shape, config, chosen, assumed)
    assert first in changes[0][0] and changes[0][0] in said
    for key, value in changes:
        config = planner.changed(config, key, value)
    after = planner.make_plan(shape, config, chosen, assumed)
    assert after.problem is None and after.left >= 0


def test_what_no_setting_can_mend_is_said(planner):
    _, _, said, _ = plan(planner, model="Qwen2.5-7B", card="4090-24g")
    assert "No setting of ours helps" in said


def test_from_the_command_line(planner, tmp_path, capsys):
    shape = {"model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert planner.main(["--model", str(tmp_path), "max_turns=3"]) == 0
    printed = capsys.readouterr().out
    assert "29,491,200 parameters x 4 bytes" in printed and "It fits" in printed and "3 x 1 s (assumed)" in printed
    assert planner.main(["--memory-gb", "10", "--tflops", "100", "--bandwidth", "500"]) == 1
    assert "on own card (10 GB)" in capsys.readouterr().out
    assert planner.main(["--model", "nobody/nothing"]) == 2
    assert planner.main(["max_turn=3"]) == 2
    assert "max_turns" in capsys.readouterr().err


def test_the_document_holds_the_plan(planner):
    """doc/a100.md: each line of both tables, what is left, the step, and what it says of other cards and settings."""
    text = (SCRIPT.parents[1] / "doc" / "a100.md").read_text(encoding="utf-8")
    made, _, _, _ = plan(planner)
    lines = [(line.name, f"{line.value:.2f}", line.how) for line in made.memory]
    lines += [(line.name, f"{line.value:.0f}", line.how) for line in made.time]
    for name, value, how in lines:
        source = "assumed" if how.startswith("assumed") else "computed"
        assert f"| {name} | {value} | {source} | {how.removeprefix('assumed: ').removeprefix('assumed, ')} |" in text
    assert f"| **left** | **{made.left:.2f}** |" in text and f"| **step** | **{made.step:.0f}** |" in text

    off = "actor_rollout_ref.model.enable_gradient_checkpointing=false"
    limit = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8704"
    faster, _, _, _ = plan(planner, off, limit, f"{UTILISATION}=0.45")
    saved = next(line.value for line in made.time if line.name == "update") - next(
        line.value for line in faster.time if line.name == "update"
    )
    assert f"costs {saved:.0f} s" in text and f"leaves {faster.left:.1f} GB" in text
    for overrides, card, model in (
        ((), "a100-40g", "Qwen2.5-3B"),
        ((limit, f"{UTILISATION}=0.46"), "4090-24g", "Qwen2.5-3B"),
        ((limit,), "4090-24g", "Qwen2.5-1.5B"),
    ):
        other, _, _, _ = plan(planner, *overrides, card=card, model=model)
        assert (
            f"| {other.left:.1f} GB left, {other.kv_tokens // 8704} full episodes of cache, {other.step:.0f} s" in text
        )
    two, _, _, _ = plan(planner, "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.num_workers=2")
    assert f"a step of {two.step:.0f} s (computed)" in text
    assert made.step > 4 * plan(planner, "max_turns=1", "curriculum.enable=false")[0].step, "a fifth, the document says"
