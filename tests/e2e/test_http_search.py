"""A training that searches over HTTP, through the proxy and two servers, is the training that searches in-process."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The demo's batch: its first three steps bring about a hundred searches.
DEMO = ("profile=cpu_demo", "trainer.val_before_train=false", "trainer.test_freq=0", "data.val_max_samples=8")
STEPS = ("trainer.deterministic=true", "trainer.total_training_steps=3", "trainer.save_freq=0")
# The clock's, the memory's, and the caches': each server has its own, and what it holds depends on who came first.
NOT_LEARNED = ("timing_s/", "search/cache_hits") + tuple(
    f"perf/{name}" for name in ("time", "throughput", "gen_tokens", "overhead", "engine_busy", "max_mem")
)


@pytest.fixture
def service(tmp_path) -> Iterator[Callable[..., tuple[subprocess.Popen, str]]]:
    """``service(script, *overrides)``: a process of the search side, and its URL."""
    started: list[subprocess.Popen] = []

    def start(script: str, *overrides: str) -> tuple[subprocess.Popen, str]:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SCRL_TOKEN")}
        process = subprocess.Popen(
            [sys.executable, "-P", str(ROOT / "scrl/handler" / script), *overrides],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process, process.stdout.readline().split()[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def learned(run) -> list[dict]:
    """What a step says about data, episodes, searches and weights."""
    return [{key: value for key, value in row.items() if not key.startswith(NOT_LEARNED)} for row in run.metrics]


@pytest.mark.timeout(1800)
def test_http_through_proxy_and_two_servers_gives_the_same_metrics(start, service, tmp_path):
    demo = ("index_corpus=data/demo/corpus.jsonl", "topk=2", "port=0")
    (first, first_url), (_, second_url) = (service("server_handler.py", *demo) for _ in range(2))
    _, url = service("handler.py", f"server_url_list=[{first_url},{second_url}]", "proxy_port=0")
    over_http = start(*STEPS, "search.mode=http", f"search.server_url={url}", folder=tmp_path / "http", base=DEMO)
    over_http.wait_for(lambda: len(over_http.metrics) >= 1, 800)
    first.kill()  # the other one goes on alone, and nothing is lost
    assert over_http.finish(800) == 0, over_http.text
    inprocess = start(*STEPS, folder=tmp_path / "inprocess", base=DEMO)
    assert inprocess.finish(800) == 0, inprocess.text

    rows = learned(over_http)
    assert rows == learned(inprocess)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert min(row["search/calls"] for row in rows[1:]) > 5, "little was searched, so little was tested"
    assert all(row["search/errors"] == 0 for row in rows)
