"""replay_td.py: the ring against a deque, sampling against its distribution, one update by hand, and the whole on its task."""
import json
import subprocess
import sys
from collections import deque
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

import replay_td as td

SCRIPT = Path(td.__file__)


def run(*flags, **options):
    """Run the script to its end; returns the finished process, its output as text."""
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, flags)], capture_output=True, text=True, timeout=240, **options)


def args_of(*flags):
    """Arguments for a small learner: 4 environments, 12 slots, 3 features."""
    small = ["--num-envs", "4", "--buffer-size", "12", "--learning-starts", "4", "--batch-size", "4", "--num-centers", "3"]
    return td.parse_args([*small, *flags])


def numbered(first):
    """Four transitions that carry their own number in every field."""
    number = jnp.arange(first, first + 4)
    wide = jnp.repeat(number[:, None].astype(float), 4, axis=1)
    return td.Transition(wide, number % 2, number.astype(float), wide + 0.5, number % 3 == 0)


def test_ring_equals_a_deque_over_thousands_of_writes():
    args = args_of("--buffer-size", "12")
    state, model, rng = td.init_state(args, 0, 0.01), deque(maxlen=12), np.random.default_rng(0)
    write = jax.jit(lambda state, transitions: td.write(args, state, transitions))
    for count in range(1500):
        transitions = numbered(int(rng.integers(0, 1_000_000)))
        state = write(state, transitions)
        model.extend(zip(*(np.asarray(field) for field in transitions)))
        if count < 5 or count % 97 == 0:
            assert int(state.written) == 4 * (count + 1)
            start = int(state.written) % 12 if len(model) == 12 else 0
            for position, expected in enumerate(model):
                for ring, field in zip(state.buffer, expected):
                    np.testing.assert_array_equal(ring[(start + position) % 12], field)


def test_sampling_is_uniform_over_the_filled_part_and_never_reads_an_empty_slot():
    """Ten of a thousand slots filled: a chi-square statistic with 9 degrees of freedom stays below its 99.9 % point, 27.9."""
    args = td.parse_args(["--num-envs", "10", "--buffer-size", "1000", "--num-centers", "3"])
    buffer = td.Transition(*(jnp.full((1000, *shape), -1.0) for shape in ((4,), (), (), (4,), ())))
    buffer = buffer._replace(reward=jnp.where(jnp.arange(1000) < 10, jnp.arange(1000.0), -1.0))
    state = td.init_state(args, 0, 0.01)._replace(buffer=buffer, written=jnp.int32(10))
    drawn = np.asarray(td.sample(args, state, jax.random.bits(jax.random.key(0), (100_000,))).reward)
    assert drawn.min() == 0 and drawn.max() == 9
    counts = np.bincount(drawn.astype(int))
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 27.9


def test_a_full_ring_is_sampled_from_all_its_slots():
    args = args_of()
    state = td.init_state(args, 0, 0.01)
    for first in (0, 4, 8, 12):
        state = td.write(args, state, numbered(first))
    drawn = np.asarray(td.sample(args, state, jax.random.bits(jax.random.key(1), (1000,))).reward)
    assert set(drawn) == set(range(4, 16))


def test_one_update_by_hand():
    """A ring of one transition, drawn four times: Q(s, 0) = 2, target 1 + 0.9 max(5, 7); Adam's first step is the learning rate."""
    args = args_of("--gamma", "0.9", "--tau", "0.25")
    obs, far = jnp.full(4, 0.1), jnp.full(4, 50.0)  # phi = (1, 0, 0): the other centres are far away
    state = td.init_state(args, 0, 0.1)
    transition = td.Transition(obs, jnp.int32(0), jnp.float32(1.0), obs, jnp.bool(False))
    buffer = jax.tree.map(lambda x: jnp.broadcast_to(x, (12, *x.shape)), transition)
    centers = jnp.stack([obs / td.OBS_SCALE, far, far], axis=1)
    weights, average = jnp.array([[2.0, 3.0], [0, 0], [0, 0]]), jnp.array([[5.0, 7.0], [0, 0], [0, 0]])
    state = state._replace(buffer=buffer, written=jnp.int32(12), centers=centers, weights=weights, average=average)
    gradient = jax.grad(td.td_loss)(weights, average, centers, td.sample(args, state, jnp.arange(4, dtype=jnp.uint32)), args)
    np.testing.assert_allclose(gradient, [[2 - (1 + 0.9 * 7), 0], [0, 0], [0, 0]], rtol=1e-5)
    after, _ = td.learn(args, state, jnp.arange(4, dtype=jnp.uint32))
    np.testing.assert_allclose(after.opt_state[0].mu, 0.1 * gradient, rtol=1e-5)  # Adam's average of gradients after one
    np.testing.assert_allclose(after.weights, [[2.1, 3.0], [0, 0], [0, 0]], rtol=1e-5)
    np.testing.assert_allclose(after.average, [[0.75 * 5 + 0.25 * 2.1, 0.75 * 7 + 0.25 * 3], [0, 0], [0, 0]], rtol=1e-5)


def test_ring_keeps_the_true_final_observation_and_termination():
    args = args_of("--num-envs", "4")
    state = td.init_state(args, 0, 0.01)
    env_state = state.env_state.replace(x=jnp.array([2.39, 0.3, 0.3, 0.3]), x_dot=jnp.array([1.0, 0.5, 0.5, 0.5]),
                                        theta=jnp.zeros(4), theta_dot=jnp.zeros(4), time=jnp.array([7, 499, 7, 7]))
    obs = jnp.stack([env_state.x, env_state.x_dot, env_state.theta, env_state.theta_dot], axis=1)
    noise = (jnp.ones(4), jnp.zeros(4, int), jax.random.split(jax.random.key(0), 4), jnp.zeros((0, 4), jnp.uint32))
    state, _ = td.train_update(args, state._replace(env_state=env_state, obs=obs, weights=0 * state.weights), noise)
    np.testing.assert_array_equal(state.buffer.terminated[:4], [True, False, False, False])
    np.testing.assert_allclose(state.buffer.next_obs[:4, 0], [2.41, 0.31, 0.31, 0.31], rtol=1e-6)
    assert int(state.opt_state[0].count) == 0 and int(state.written) == 4  # no draws: no update


def test_updates_start_after_the_warm_up_and_are_counted():
    args = args_of("--updates-per-step", "3", "--total-timesteps", "100", "--learning-starts", "9", "--log-interval", "40")
    state, _ = td.train_chunk(args, args.warm_up, 0, td.init_state(args, 0, 0.01))
    assert int(state.written) == 12 and int(state.opt_state[0].count) == 0
    state, returns = td.train_chunk(args, args.steps, 3, state)
    assert returns.shape == (10, 4) and int(state.written) == 52 and int(state.opt_state[0].count) == 30


def test_memory_is_the_buffers_own_size_and_no_copy():
    """The compiled program of one chunk: its temporary memory does not grow with the buffer, which it updates in place."""
    temporary = []
    for size in (16_000, 160_000):
        args = td.parse_args(["--buffer-size", str(size), "--total-timesteps", "2000"])
        state = td.over_runs(lambda seed: td.init_state(args, seed, 0.01), 1)(np.zeros(1, np.uint32))
        chunk = td.over_runs(lambda state: td.train_chunk(args, args.steps, 1, state), 1, donate_argnums=0).lower(state).compile()
        analysis = chunk.memory_analysis()
        temporary.append(analysis.temp_size_in_bytes)
        assert analysis.alias_size_in_bytes > 37 * size
    assert abs(temporary[1] - temporary[0]) < 100_000, temporary


def test_no_key_is_used_twice():
    args = args_of("--total-timesteps", "100", "--eval-episodes", "2")

    def whole_run(seed):
        state, _ = td.train_chunk(args, args.warm_up, 0, td.init_state(args, seed, 0.01))
        state, _ = td.train_chunk(args, args.steps, 1, state)
        return td.evaluate(args, state.average, state.centers, seed)

    with jax.debug_key_reuse(True):
        jax.jit(whole_run)(0)


def test_learns_and_its_weights_balance_gymnasiums_pole(tmp_path):
    process = run("--num-seeds", 4, "--seed", 100, "--json", "--save", tmp_path / "weights.npz")
    report = json.loads(process.stdout)
    assert all(row["solved_at"] and row["solved_at"] <= 400_000 for row in report["runs"]), report["runs"]
    assert sum(row["eval_mean"] >= 475 for row in report["runs"]) >= 3, report["runs"]
    saved = np.load(tmp_path / "weights.npz")
    best = int(np.argmax([row["eval_mean"] for row in report["runs"]]))
    env, returns = gymnasium.make("CartPole-v1"), []
    for episode in range(10):
        obs, _ = env.reset(seed=episode)
        total, done = 0.0, False
        while not done:
            distance = ((obs / [2.4, 3.0, 0.2, 3.0] - saved["centers"][best]) ** 2).sum(axis=1)
            obs, reward, terminated, truncated, _ = env.step(int(np.argmax(np.exp(-distance / (2 * 0.5**2)) @ saved["weights"][best])))
            total, done = total + reward, terminated or truncated
        returns.append(total)
    assert np.mean(returns) >= 475, returns
