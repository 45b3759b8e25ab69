"""parallel_td.py against NumPy, numbers worked out by hand, and Gymnasium's own CartPole-v1."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

import parallel_td as td


def features(obs, centers, sigma=0.5):
    """Features (F,) of one observation in float64, one at a time."""
    scaled = obs / np.array([2.4, 3.0, 0.2, 3.0])
    return np.array([np.exp(-((scaled - c) ** 2).sum() / (2 * sigma**2)) for c in centers])


def gradient(args, weights, centers, batch):
    """The semi-gradient (A, F) of half the mean squared TD error, transition by transition."""
    grad = np.zeros(weights.shape)
    for obs, action, reward, next_obs, terminated in zip(*batch, strict=True):
        bootstrap = 0 if terminated else args.gamma * max(weights @ features(next_obs, centers))
        phi = features(obs, centers)
        grad[action] += (weights[action] @ phi - (reward + bootstrap)) * phi / len(batch.obs)
    return grad


def state_of(args, obs, time, weights=0.0):
    """A state whose environments (N,) stand as given; the best action is 0 where weights are 0."""
    state = td.init_state(args, 0, 0.04)
    obs = jnp.array(obs, jnp.float32)
    x, x_dot, theta, theta_dot = obs.T
    env_state = state.env_state.replace(x=x, x_dot=x_dot, theta=theta, theta_dot=theta_dot)
    env_state = env_state.replace(time=jnp.array(time))
    weights = jnp.broadcast_to(weights, state.weights.shape)
    total = jnp.array(time, float)  # a reward of 1 a step
    return state._replace(env_state=env_state, obs=obs, weights=weights, episode_return=total)


def greedy(*shape):
    """What vector_step takes as random, for greedy actions."""
    return jax.random.split(jax.random.key(0), shape), jnp.ones(shape), jnp.zeros(shape, int)


def test_features_and_gradient_equal_numpy():
    args = td.parse_args([])
    rng = np.random.default_rng(0)
    centers, weights = rng.uniform(-1, 1, (5, 4)), rng.normal(size=(2, 5))
    obs, next_obs = rng.normal(scale=0.5, size=(2, 6, 4))
    terminated = np.array([True, False, False, True, False, False])
    batch = td.Transition(obs, rng.integers(0, 2, 6), rng.uniform(size=6), next_obs, terminated)
    expected = [features(row, centers) for row in obs]
    np.testing.assert_allclose(td.rbf_features(obs, centers, 0.5).T, expected, rtol=1e-5)
    grad = jax.grad(td.td_loss)(jnp.array(weights), centers, batch, args)
    np.testing.assert_allclose(grad, gradient(args, weights, centers, batch), rtol=1e-4, atol=1e-6)


def test_targets_of_a_terminated_a_truncated_and_an_ordinary_transition():
    """Each step, and what it bootstraps from, as Gymnasium has it: also at the time limit."""
    args = td.parse_args(["--num-envs", "3", "--batch-size", "3"])
    weights = np.random.default_rng(0).normal(size=(2, 500))
    obs = [[2.39, 1.0, 0.0, 0.0], [0.3, 0.5, 0.1, -0.5], [0.3, 0.5, 0.1, -0.5]]
    state = state_of(args, obs, [7, 499, 7], weights)
    after, (transition, returns) = td.vector_step(args, state, greedy(3))
    env = gymnasium.make("CartPole-v1")
    ended = []
    for i, (start, time) in enumerate(zip(obs, [7, 499, 7], strict=True)):
        env.reset()
        env.unwrapped.state, env._elapsed_steps = start, time
        next_obs, reward, *end, _ = env.step(int(transition.action[i]))
        ended.append(end)
        one = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], transition)
        np.testing.assert_allclose(one.next_obs[0], next_obs, rtol=1e-5)
        q = weights @ features(np.array(start), state.centers)
        next_q = weights @ features(next_obs, state.centers)
        assert transition.action[i] == np.argmax(q)
        target = reward + args.gamma * (0 if end[0] else max(next_q))
        loss = td.td_loss(state.weights, state.centers, one, args)
        np.testing.assert_allclose(loss, 0.5 * (max(q) - target) ** 2, rtol=1e-3)
    assert ended == [[True, False], [False, True], [False, False]]
    np.testing.assert_array_equal(returns, [8, 500, np.nan])
    np.testing.assert_array_equal(after.episode_return, [0, 0, 8])
    assert np.abs(after.obs[:2]).max() <= 0.05  # reset
    np.testing.assert_array_equal(after.obs[2], transition.next_obs[2])


def test_evaluation_plays_one_whole_episode_from_each_start(monkeypatch):
    """Who always pushes left falls after as many steps as in Gymnasium, and is counted once."""
    args = td.parse_args(["--eval-episodes", "20", "--num-envs", "20", "--batch-size", "20"])
    starts = np.random.default_rng(1).uniform(-0.05, 0.05, (20, 4))
    state = state_of(args, starts, [0] * 20)
    monkeypatch.setattr(td, "env_reset", lambda keys: (state.obs, state.env_state))
    env, lengths = gymnasium.make("CartPole-v1"), []
    for start in starts:
        env.reset()
        env.unwrapped.state = start
        lengths.append(next(step for step in range(1, 500) if env.step(0)[2]))
    assert min(lengths) < max(lengths)
    np.testing.assert_array_equal(td.evaluate(args, state), lengths)


def test_epsilon_is_the_share_of_random_actions():
    args = td.parse_args(["--num-envs", "1000", "--batch-size", "1000"])
    uniform, ones = (jnp.arange(1000) + 0.5) / 1000, jnp.ones(1000, int)
    state = state_of(args, np.zeros((1000, 4)), [0] * 1000)
    _, (transition, _) = td.vector_step(args, state, (greedy(1000)[0], uniform, ones))
    np.testing.assert_array_equal(transition.action, uniform < 0.1)


def test_updates_learn_from_exactly_their_batch_and_the_learning_rate_falls_to_zero():
    """Three Adam steps in NumPy, each from two vector steps of four environments."""
    args = td.parse_args("--num-envs 4 --batch-size 8 --total-timesteps 24 --num-centers 9".split())
    weights, m, v = np.zeros((3, 2, 9))
    state = td.init_state(args, 5, 0.04)
    for update in range(3):
        steps, collecting = [], state
        for _ in range(2):
            collecting, (transition, _) = td.vector_step(args, collecting, greedy(4))
            steps.append(transition)
        batch = jax.tree.map(lambda *parts: np.concatenate(parts), *steps)
        grad = gradient(args, weights, state.centers, batch)
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        m_hat, v_hat = m / (1 - 0.9 ** (update + 1)), v / (1 - 0.999 ** (update + 1))
        weights = weights - 0.04 * (1 - update / 3) * m_hat / (np.sqrt(v_hat) + 1e-8)
        twice = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), greedy(4))
        state, _ = td.train_step(args, state, twice)
        np.testing.assert_allclose(state.obs, collecting.obs, rtol=1e-5)
        np.testing.assert_allclose(state.weights, weights, rtol=1e-3)
    np.testing.assert_array_equal(td.train_step(args, state, twice)[0].weights, state.weights)


def test_no_key_is_used_twice():
    """One run, from its seed to its evaluation, under jax's checker."""
    args = td.parse_args("--total-timesteps 320 --log-interval 160 --eval-episodes 2".split())

    def whole_run(seed):
        state, _ = td.train_chunk(args, td.init_state(args, seed, 0.04))
        state, _ = td.train_chunk(args, state)
        return td.evaluate(args, state)

    with jax.debug_key_reuse(True):
        jax.jit(whole_run)(0)


def test_learned_weights_balance_gymnasiums_pole(tmp_path):
    td.main(["--seed", "100", "--num-seeds", "2", "--save", f"{tmp_path}/run.npz"])
    saved = np.load(tmp_path / "run.npz")
    assert saved["greedy_return"].mean(axis=1).min() >= 475
    env, returns = gymnasium.make("CartPole-v1"), []
    scale, centers, weights = [2.4, 3.0, 0.2, 3.0], saved["centers"][1], saved["weights"][1]
    for episode in range(5):
        obs, done, total = env.reset(seed=episode)[0], False, 0.0
        while not done:
            phi = np.exp(-((obs / scale - centers) ** 2).sum(axis=1) / (2 * 0.5**2))
            obs, reward, terminated, truncated, _ = env.step(np.argmax(phi @ weights))
            done, total = terminated or truncated, total + reward
        returns.append(total)
    assert np.mean(returns) >= 475, returns


def test_a_run_alone_equals_the_run_among_others(tmp_path):
    flags = "--total-timesteps 6400 --log-interval 3200 --eval-episodes 5".split()
    td.main([*flags, "--num-seeds", "8", "--save", f"{tmp_path}/8.npz"])
    td.main([*flags, "--seed", "3", "--save", f"{tmp_path}/1.npz"])
    among, alone = np.load(tmp_path / "8.npz"), np.load(tmp_path / "1.npz")
    for name in ["seed", "learning_rate", "greedy_return", "centers", "weights"]:
        np.testing.assert_array_equal(among[name][3], alone[name][0], err_msg=name)
    np.testing.assert_array_equal(among["returns"][:, 3], alone["returns"][:, 0])
    np.testing.assert_array_equal(among["timesteps"], alone["timesteps"])


def test_jax_issue_39103():
    rows = jnp.stack((jnp.arange(32_769.0), jnp.zeros(32_769), jnp.zeros(32_769)), axis=1)
    last = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))(rows)[-1]
    assert last == 32_768.0**2, (
        "this jax miscompiles vmapped matrix-vector products on a CPU (jax issue 39103):"
        " use the pinned version"
    )
