"""Two Ray nodes, a rank of the actor and a rollout worker on each: what one node alone would have done."""

import shutil
import tempfile
from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster

STEPS = ("trainer.deterministic=true", "trainer.total_training_steps=2", "trainer.save_freq=0")


@pytest.fixture
def two_nodes(monkeypatch) -> Iterator[str]:
    """The address of a cluster in which no node has room for two ranks."""
    folder = tempfile.mkdtemp(prefix="r")  # short, for Ray's sockets; its own, so that no other run finds this Ray
    monkeypatch.setenv("RAY_TMPDIR", folder)
    with monkeypatch.context() as without_token:  # tests before this one may have asked for tokens
        without_token.setenv("RAY_AUTH_MODE", "disabled")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        cluster.add_node(num_cpus=1)
    try:
        cluster.wait_for_nodes(timeout=120)
        yield cluster.address
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(900)
def test_two_nodes_train_as_one(start, tmp_path, two_nodes):
    one = start(*STEPS, folder=tmp_path / "one", environment={"RAY_ADDRESS": "local"})
    assert one.finish(400) == 0, one.text
    two = start(
        *STEPS,
        "trainer.nnodes=2",
        "actor_rollout_ref.rollout.num_workers=2",
        folder=tmp_path / "two",
        environment={"RAY_ADDRESS": two_nodes, "RAY_AUTH_MODE": "disabled"},
    )
    assert two.finish(400) == 0, two.text
    assert f"using the Ray that runs at {two_nodes}" in two.text

    for alone, shared in zip(one.metrics, two.metrics, strict=True):
        for name in ("critic/score/mean", "reward/f1", "behavior/search_depth", "response_length/mean"):
            assert shared[name] == pytest.approx(alone[name], abs=1e-9), name  # the same episodes
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm"):
            assert shared[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-6), name
    assert max(row["actor/grad_norm"] for row in two.metrics) > 0
