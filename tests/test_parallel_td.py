"""parallel_td.py: what an update learns from, and and a compiler bug that must be absent."""

import jax
import jax.numpy as jnp
import numpy as np
from td_tests import *  # noqa: F403  (what all three linear learners must pass)


def test_updates_learn_from_exactly_their_batch(td, monkeypatch):
    """Three vector steps of four environments, all with the weights from before the update."""
    args = td.parse_args("--num-envs 4 --batch-size 9 --num-centers 2 --epsilon 0".split())
    assert (args.batch_steps, args.update_timesteps) == (3, 12)
    batches, td_loss = [], td.td_loss

    def spy(args, weights, centers, batch):
        batches.append(batch)
        return td_loss(args, weights, centers, batch)

    monkeypatch.setattr(td, "td_loss", spy)
    before = td.init_state(args, 0, 0.04)
    lean = jnp.array([[0, 0], [0, 0], [0.5, -0.5], [0, 0]])  # the pole's angle decides
    before = before._replace(centers=lean, weights=jnp.array([[0.0, 1.0], [1.0, 0.0]]))
    keys = jax.random.split(jax.random.key(1), (3, 4))
    after, _ = td.train_step(args, before, (keys, jnp.ones((3, 4)), jnp.zeros((3, 4), int)))
    (batch,) = batches
    np.testing.assert_array_equal(batch.obs[:4], before.obs)
    np.testing.assert_array_equal(batch.obs[4:], batch.next_obs[:8])
    np.testing.assert_array_equal(batch.next_obs[8:], after.obs)
    q = td.q_values(args, before.weights, before.centers, batch.obs)
    np.testing.assert_array_equal(batch.action, jnp.argmax(q, axis=1))
    assert len(np.unique(batch.action)) == 2
    assert np.abs(after.weights - before.weights).min() > 0.01


def test_jax_issue_39103(td):
    rows = jnp.stack((jnp.arange(32_769.0), jnp.zeros(32_769), jnp.zeros(32_769)), axis=1)
    last = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(rows)[-1]
    assert last == 32_768.0**2, "jax issue 39103: this one miscompiles on a CPU, use the pinned one"
