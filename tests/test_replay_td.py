"""replay_td.py: the ring against a deque, what is drawn from it, one update by hand, Gymnasium."""

from collections import deque
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replay_td as td

SMALL = ["--num-envs", "4", "--buffer-size", "10", "--learning-starts", "1", "--num-centers", "3"]


def random_of(args, seed=0, batch_uniform=None):
    """What one train_step takes."""
    keys = jax.random.split(jax.random.key(seed), args.num_envs)
    uniform = jax.random.uniform(jax.random.key(seed), (args.batch_size,))
    if batch_uniform is not None:
        uniform = jnp.full(args.batch_size, batch_uniform)
    return uniform, keys, jnp.ones(args.num_envs), jnp.zeros(args.num_envs, int)


def test_ring_equals_a_deque(monkeypatch):
    """A size that is no multiple of the environments: writes wrap around in the middle."""
    args = td.parse_args(SMALL)
    state, model = td.init_state(args, 0, 0.01), deque(maxlen=10)

    def numbered_step(args, state, random):
        number = 100.0 * state.written + jnp.arange(4)
        wide = jnp.repeat(number[:, None], 4, axis=1)
        rows = td.Transition(wide, number.astype(int) % 2, number, wide + 0.5, number % 3 == 0)
        return state, (rows, number)

    monkeypatch.setattr(td, "vector_step", numbered_step)
    step = jax.jit(partial(td.train_step, args))
    for count in range(1, 30):
        before = state
        state, _ = step(state, random_of(args))
        rows, _ = numbered_step(args, before, None)[1]
        model.extend(zip(*map(np.asarray, rows), strict=True))
        assert state.written == 4 * count
        oldest = 4 * count % 10 if len(model) == 10 else 0
        for position, row in enumerate(model):
            for ring, field in zip(state.buffer, row, strict=True):
                np.testing.assert_array_equal(ring[(oldest + position) % 10], field)


@pytest.mark.parametrize("written", [4, 8, 40])
def test_only_what_was_written_is_drawn_and_all_of_it(written, monkeypatch):
    """The greatest and the smallest uniform number; then many: a uniform distribution."""
    args = td.parse_args([*SMALL, "--batch-size", "5000"])
    seen = []

    def spy(weights, target_weights, centers, batch, args):
        seen.append(batch.reward)
        return jnp.sum(weights)

    monkeypatch.setattr(td, "td_loss", spy)
    state = td.init_state(args, 0, 0.01)
    ring = state.buffer._replace(reward=jnp.arange(10.0))
    state = state._replace(buffer=ring, written=jnp.array(written - 4))
    filled = min(written, 10)
    slots = [
        1.0 if slot in [(written - 4 + i) % 10 for i in range(4)] else slot for slot in range(10)
    ]
    for uniform, slot in [(0.0, 0), (np.nextafter(np.float32(1), np.float32(0)), filled - 1)]:
        td.train_step(args, state, random_of(args, batch_uniform=uniform))
        np.testing.assert_array_equal(seen[-1], slots[slot])  # a step of CartPole pays 1
    td.train_step(args, state, random_of(args))
    for value in set(slots[:filled]):
        expected = slots[:filled].count(value) / filled
        assert abs(np.mean(seen[-1] == value) - expected) < 5 * np.sqrt(expected / 5000)


def test_one_update_by_hand():
    """One feature, 1 at the start: Q(s, 0) = 2 and the target 1 + 0.9 max Q' = 1 + 0.9 * 7."""
    flags = ["--gamma", "0.9", "--tau", "0.25", "--total-timesteps", "4", "--learning-rate", "0.1"]
    args = td.parse_args([*SMALL, *flags, "--sigma", "1000"])  # phi is 1 wherever the pole stands
    weights = jnp.array([[2.0, 0, 0], [3.0, 0, 0]])
    target_weights = jnp.array([[5.0, 0, 0], [7.0, 0, 0]])
    state = td.init_state(args, 0, 0.1)._replace(weights=weights, target_weights=target_weights)
    uniform, keys, greedy, _ = random_of(args)
    state, _ = td.train_step(args, state, (uniform, keys, 0 * greedy, jnp.zeros(4, int)))
    gradient = 2 - (1 + 0.9 * 7)
    np.testing.assert_allclose(state.opt_state[0].mu[0], [0.1 * gradient] * 3, rtol=1e-4)
    np.testing.assert_allclose(state.weights[0], [2.1, 0.1, 0.1], rtol=1e-4)  # Adam's first step
    np.testing.assert_array_equal(state.weights[1], weights[1])
    averaged = 0.75 * target_weights + 0.25 * state.weights
    np.testing.assert_allclose(state.target_weights, averaged, rtol=1e-6)


def test_warm_up_leaves_weights_and_moments_at_zero():
    args = td.parse_args([*SMALL, "--learning-starts", "12"])
    state = td.init_state(args, 0, 0.1)
    for written, learns in [(4, False), (8, False), (12, True)]:
        state, _ = td.train_step(args, state, random_of(args, written))
        assert state.written == written
        assert bool(jnp.any(state.weights)) == bool(jnp.any(state.opt_state[0].nu)) == learns


def test_the_ring_is_updated_in_place():
    """Temporary memory of a compiled chunk does not grow with the ring, which is aliased."""
    temporary = []
    for size in 20_000, 200_000:
        args = td.parse_args(["--buffer-size", str(size), "--total-timesteps", "320"])
        state = td.over_runs(partial(td.init_state, args), 1)(np.zeros(1, int), np.ones(1))
        chunk = td.over_runs(partial(td.train_chunk, args), 1, donate_argnums=0)
        memory = chunk.lower(state).compile().memory_analysis()
        temporary.append(memory.temp_size_in_bytes)
        assert memory.alias_size_in_bytes > 41 * size  # 10 numbers and a bool a transition
    assert temporary[1] - temporary[0] < 100_000, temporary


def test_no_key_is_used_twice():
    args = td.parse_args(["--total-timesteps", "64", "--eval-episodes", "2", "--num-centers", "3"])
    with jax.debug_key_reuse(True):
        state, _ = jax.jit(partial(td.train_chunk, args))(td.init_state(args, 0, 0.1))
        jax.jit(partial(td.evaluate, args))(state)


def test_learns_and_the_weights_balance_gymnasiums_pole(tmp_path):
    path = str(tmp_path / "weights.npz")
    td.main(["--seed", "7", "--total-timesteps", "300000", "--save", path])
    saved, env = np.load(path), gymnasium.make("CartPole-v1")
    returns = np.zeros(5)
    for episode in range(5):
        obs, _ = env.reset(seed=episode)
        over = False
        while not over:
            distance = obs / [2.4, 3.0, 0.2, 3.0] - saved["centers"][0]
            phi = np.exp(-np.sum(distance**2, axis=1) / (2 * 0.5**2))
            obs, reward, terminated, truncated, _ = env.step(np.argmax(phi @ saved["weights"][0]))
            over = terminated or truncated
            returns[episode] += reward
    assert returns.mean() >= 475, returns
