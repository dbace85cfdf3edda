"""The transformers engine against transformers itself, on a tiny random Qwen2 with shared key-value heads."""

import asyncio
import dataclasses
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.trainer.config.schema import Config
from verl.workers.rollout import build_engine
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.hf_generate import Sampler, cut_tail
from verl.workers.rollout.hf_rollout import HFEngine

VOCAB = 61
PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 11, 12], [1, 2, 3, 4, 5], [30, 31]]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_model(seed: int = 0) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.3,  # wide, so that the distributions are far from uniform
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).eval()


def sampling(n: int = 12, **changes) -> SamplingParams:
    return dataclasses.replace(SamplingParams(max_new_tokens=n, temperature=1.0, seed=1), **changes)


def ask(engine: HFEngine, prompts: list[list[int]], params: list[SamplingParams]):
    async def together():
        return await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, params, strict=True)))

    return asyncio.run(together())


def reference_logprobs(model, prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)


def test_greedy_is_what_transformers_generates():
    completions = ask(HFEngine(make_model()), PROMPTS, [sampling(temperature=0.0)] * len(PROMPTS))
    model = make_model()
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        out = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=12, do_sample=False
        )
        assert completion.token_ids == out[0, len(prompt) :].tolist()
        torch.testing.assert_close(
            torch.tensor(completion.logprobs),
            reference_logprobs(model, prompt, completion.token_ids, 1.0),
            atol=1e-5,
            rtol=0,
        )


def test_logprobs_are_those_of_a_full_forward_at_each_rows_temperature():
    temperatures = [0.5, 1.0, 2.0, 0.7, 1.3]
    params = [sampling(n=4 + 5 * i, temperature=t, seed=i, top_k=i % 2 * 7) for i, t in enumerate(temperatures)]
    completions = ask(HFEngine(make_model()), PROMPTS, params)
    model = make_model()
    for prompt, p, completion in zip(PROMPTS, params, completions, strict=True):
        assert (len(completion.token_ids), completion.finish_reason) == (p.max_new_tokens, "length")
        expected = reference_logprobs(model, prompt, completion.token_ids, p.temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("max_batch_size", [1, 2, 64])
def test_a_seed_gives_the_same_tokens_in_any_batch(max_batch_size):
    params = [sampling(n=30, seed=100 + i, stop_token_ids=(5, 6)) for i in range(len(PROMPTS))]
    alone = [ask(HFEngine(make_model()), [prompt], [p])[0] for prompt, p in zip(PROMPTS, params, strict=True)]
    together = ask(HFEngine(make_model(), max_batch_size=max_batch_size), PROMPTS, params)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert len({len(c.token_ids) for c in alone}) > 2, "rows should leave the batch at different times"
    assert alone[0].token_ids != alone[3].token_ids  # the same prompt, another seed
    for a, b in zip(alone, together, strict=True):
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5, rtol=0)


def test_without_a_seed_draws_differ():
    a, b = ask(HFEngine(make_model()), [PROMPTS[0]] * 2, [sampling(n=40, seed=None)] * 2)
    assert a.token_ids != b.token_ids


def test_a_stop_token_ends_the_completion_and_is_part_of_it():
    engine = HFEngine(make_model())
    free = ask(engine, [PROMPTS[0]], [sampling()])[0]
    stop = free.token_ids[5]
    end = free.token_ids.index(stop) + 1
    stopped = ask(engine, [PROMPTS[0]], [sampling(stop_token_ids=(stop,))])[0]
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[:end], "stop")


def test_tempered_logprob_of_the_fixture():
    """Logits [2, 0] at temperature .5: log p = -.01815, and -.12693 would be the untempered bug."""
    sampler = Sampler([SamplingParams(1, temperature=0.5, seed=s) for s in range(200)], torch.device("cpu"))
    tokens, logprobs = sampler.draw(torch.tensor([[2.0, 0.0]]).expand(200, 2))
    assert {(t, round(p, 5)) for t, p in zip(tokens.tolist(), logprobs.tolist(), strict=True)} <= {
        (0, -0.01815),
        (1, -4.01815),
    }
    assert (tokens == 0).sum() > 190


def test_draws_follow_the_distribution():
    sampler = Sampler([SamplingParams(1, seed=s) for s in range(20_000)], torch.device("cpu"))
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2])
    tokens, _ = sampler.draw(probs.log().expand(20_000, 4))
    shares = torch.bincount(tokens, minlength=4) / 20_000
    assert shares[1] == 0
    torch.testing.assert_close(shares, probs, atol=0.015, rtol=0)


@pytest.mark.parametrize(
    ("top_p", "top_k", "kept"),
    [
        (1.0, 0, [0.1, 0.4, 0.2, 0.3]),
        (1.0, 2, [0.0, 0.4, 0.0, 0.3]),
        (0.4, 0, [0.0, 0.4, 0.0, 0.0]),
        (0.5, 0, [0.0, 0.4, 0.0, 0.3]),
        (0.57, 2, [0.0, 0.4, 0.0, 0.0]),  # of the .7 that top-k left, .4 is a share of .571
        (0.0, 0, [0.0, 0.4, 0.0, 0.0]),
    ],
)
def test_cut_tail(top_p, top_k, kept):
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]])
    torch.testing.assert_close(cut_tail(probs, torch.tensor([top_p]), torch.tensor([top_k])), torch.tensor([kept]))


def turns(engine: HFEngine, observation: list[int], order: bool):
    """Two turns of two episodes: (second completions, their prompts)."""
    prompts = [PROMPTS[0], PROMPTS[2]]
    key = lambda i, turn: {"order": (f"q{i}", 0, turn)} if order else {}  # noqa: E731
    first = ask(engine, prompts, [sampling(n=5 + i, seed=i, **key(i, 0)) for i in range(2)])
    prompts = [p + c.token_ids + observation[i:] for i, (p, c) in enumerate(zip(prompts, first, strict=True))]
    return ask(engine, prompts, [sampling(n=9, seed=i, **key(i, 1)) for i in range(2)]), prompts


def test_a_later_turn_computes_only_its_new_tokens_and_gives_the_same():
    observation = [40, 41, 42, 43]
    kept, fresh = HFEngine(make_model()), HFEngine(make_model())
    with_cache, prompts = turns(kept, observation, order=True)
    without, same_prompts = turns(fresh, observation, order=False)
    assert prompts == same_prompts
    computed = [engine.metrics()["rollout/computed"] for engine in (kept, fresh)]
    # Beside the first turns' 5 + 11 tokens: each episode's last sampled token and its observation, or all of it.
    assert computed == [16 + (1 + 4) + (1 + 3), 16 + len(prompts[0]) + len(prompts[1])]
    for a, b, prompt in zip(with_cache, without, prompts, strict=True):
        assert a.token_ids == b.token_ids
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5, rtol=0)
        expected = reference_logprobs(make_model(), prompt, a.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(a.logprobs), expected, atol=1e-5, rtol=0)


def test_what_was_kept_is_used_only_where_the_prompt_goes_on_from_it():
    engine = HFEngine(make_model())
    first = ask(engine, [PROMPTS[0]], [sampling(order=("q", 0, 0))])[0]
    other = [*PROMPTS[0], *first.token_ids[:-2], 33, 34, 35]
    second = ask(engine, [other], [sampling(order=("q", 0, 1))])[0]
    expected = reference_logprobs(make_model(), other, second.token_ids, 1.0)
    torch.testing.assert_close(torch.tensor(second.logprobs), expected, atol=1e-5, rtol=0)
    again = ask(engine, [other], [sampling(order=("q", 0, 2))])[0]  # the prompt is shorter than what is kept
    assert again.token_ids == second.token_ids


def test_kept_memory_is_bounded():
    tokens = len(PROMPTS[0]) + 12 - 1
    row_bytes = 3 * 2 * 2 * tokens * 8 * 4  # layers, keys and values, heads, tokens, head size, float32
    engine = HFEngine(make_model(), kept_bytes=2 * row_bytes)
    ask(engine, [PROMPTS[0]] * 4, [sampling(seed=i, order=("q", i, 0)) for i in range(4)])
    assert list(engine._kept) == [("q", 2), ("q", 3)]


def test_the_same_prompt_is_prefilled_once():
    engine = HFEngine(make_model())
    ask(engine, [PROMPTS[0]] * 6 + [PROMPTS[1]], [sampling(seed=i) for i in range(7)])
    assert engine.metrics()["rollout/computed"] == len(PROMPTS[0]) + len(PROMPTS[1])


def test_many_rows_are_prefilled_in_parts(monkeypatch):
    monkeypatch.setattr("verl.workers.rollout.hf_generate._PREFILL_TOKENS", 8)
    params = [sampling(seed=i) for i in range(len(PROMPTS))]
    in_parts = ask(HFEngine(make_model()), PROMPTS, params)
    monkeypatch.undo()
    assert [c.token_ids for c in in_parts] == [c.token_ids for c in ask(HFEngine(make_model()), PROMPTS, params)]


# -- weights -----------------------------------------------------------------------------------------------------------


def adapted(seed: int, **options):
    """(PEFT model with random factors, what a trainer exports of it)."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"], **options)
    peft_model = get_peft_model(make_model(), config)
    torch.manual_seed(seed)
    for name, parameter in peft_model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return peft_model.eval(), {"weights": get_peft_model_state_dict(peft_model), "peft_config": config.to_dict()}


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}])
def test_an_adapter_is_merged_exactly_and_replaced_not_added(options):
    engine = HFEngine(make_model())
    before = ask(engine, [PROMPTS[2]], [sampling()])[0]
    assert before.version == 0
    for version in (3, 4):
        peft_model, weights = adapted(seed=version, **options)
        asyncio.run(engine.update_weights(weights, version))
        after = ask(engine, [PROMPTS[2]], [sampling()])[0]
        assert (after.version, engine.version) == (version, version)
        expected = reference_logprobs(peft_model, PROMPTS[2], after.token_ids, 1.0)
        torch.testing.assert_close(torch.tensor(after.logprobs), expected, atol=1e-5, rtol=0)
        assert after.token_ids != before.token_ids


def test_full_weights_replace_all_and_drop_what_was_kept():
    engine = HFEngine(make_model(0))
    asyncio.run(engine.update_weights(adapted(seed=1)[1], 1))
    first = ask(engine, [PROMPTS[0]], [sampling(order=("q", 0, 0))])[0]
    other = make_model(9)
    weights = {name: p.detach() for name, p in other.named_parameters()}
    asyncio.run(engine.update_weights({"weights": weights, "peft_config": None}, 2))
    prompt = [*PROMPTS[0], *first.token_ids, 50]
    second = ask(engine, [prompt], [sampling(order=("q", 0, 1))])[0]
    torch.testing.assert_close(
        torch.tensor(second.logprobs), reference_logprobs(other, prompt, second.token_ids, 1.0), atol=1e-5, rtol=0
    )
    assert second.version == 2


def test_weights_of_another_model_are_refused_and_the_version_stays():
    engine = HFEngine(make_model())
    with pytest.raises(ValueError, match="weights of another model"):
        asyncio.run(engine.update_weights({"weights": {"x": torch.zeros(1)}, "peft_config": None}, 5))
    with pytest.raises(ValueError, match="not a LoRA factor"):
        asyncio.run(engine.update_weights({"weights": {"x.lora_A.weight": torch.zeros(1)}, "peft_config": {}}, 5))
    assert engine.version == 0


# -- rounds ------------------------------------------------------------------------------------------------------------


def test_rounds_of_a_deterministic_engine_wait_for_every_living_episode():
    """Three episodes; one's tool is slow. The others' next turn waits for it, until it ends."""
    engine = HFEngine(make_model(), deterministic=True)
    sizes = []
    engine._generate = lambda requests, real=engine._generate: (
        sizes.append([r.params.order for r in requests]),
        real(requests),
    )[1]

    async def episode(i: int, tool_s: float, n_turns: int) -> None:
        for turn in range(n_turns):
            await engine.generate(PROMPTS[i], sampling(n=2, order=("q", i, turn)))
            await asyncio.sleep(tool_s)
        engine.end_episode()

    async def play() -> None:
        for _ in range(3):
            engine.begin_episode()
        await asyncio.gather(episode(2, 0.0, 3), episode(0, 0.15, 2), episode(1, 0.0, 2))

    asyncio.run(play())
    assert sizes == [
        [("q", 0, 0), ("q", 1, 0), ("q", 2, 0)],
        [("q", 0, 1), ("q", 1, 1), ("q", 2, 1)],
        [("q", 2, 2)],
    ]


def test_otherwise_a_slow_episode_holds_back_nobody():
    engine = HFEngine(make_model(), batch_window_s=0.01)

    async def play() -> float:
        for _ in range(2):
            engine.begin_episode()  # the second never asks
        loop = asyncio.get_running_loop()
        started = loop.time()
        await engine.generate(PROMPTS[0], sampling(n=2))
        return loop.time() - started

    assert asyncio.run(play()) < 2.0


def test_an_episode_that_is_cancelled_while_waiting_lets_the_others_go_on():
    engine = HFEngine(make_model(), deterministic=True)

    async def play():
        for _ in range(3):
            engine.begin_episode()
        first, second = (asyncio.ensure_future(engine.generate(PROMPTS[i], sampling(n=2))) for i in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        engine.end_episode()
        engine.end_episode()
        return await asyncio.wait_for(second, 10)

    assert len(asyncio.run(play()).token_ids) == 2


def test_a_failed_batch_fails_its_requests_and_the_engine_goes_on():
    model = make_model()
    engine = HFEngine(model)
    ok = ask(engine, [PROMPTS[0]], [sampling()])[0]
    bias = model.model.layers[0].self_attn.q_proj.bias
    good = bias.detach().clone()
    with torch.no_grad():
        bias.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        ask(engine, PROMPTS[:2], [sampling()] * 2)
    with torch.no_grad():
        bias.copy_(good)
    assert ask(engine, [PROMPTS[0]], [sampling()])[0] == ok


def test_an_impossible_request_or_model_is_refused():
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        ask(HFEngine(make_model()), [PROMPTS[0]], [sampling(n=0)])
    sliding = make_model()
    sliding.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="sliding_attention"):
        HFEngine(sliding)


def test_auto_builds_the_transformers_engine_in_float32_on_cpu(tmp_path):
    make_model().save_pretrained(tmp_path)
    config = Config()
    model = dataclasses.replace(config.actor_rollout_ref.model, path=str(tmp_path))
    rollout = dataclasses.replace(config.actor_rollout_ref, model=model)
    engine = build_engine(dataclasses.replace(config, actor_rollout_ref=rollout), "cpu")
    loaded, made = (ask(e, [PROMPTS[0]], [sampling()])[0] for e in (engine, HFEngine(make_model())))
    assert loaded.token_ids == made.token_ids
    torch.testing.assert_close(torch.tensor(loaded.logprobs), torch.tensor(made.logprobs), atol=1e-5, rtol=0)
