"""What all three linear learners must pass. The test file of each of them imports all of this."""

import dataclasses
import re
from functools import partial

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import epsilon_decay_td
import parallel_td

SCALE = {"CartPole-v1": [2.4, 3.0, 0.2, 3.0], "MountainCar-v0": [1.2, 0.07]}
# Three starts: one step before the end, one step before the time limit, and on the way.
STARTS = {
    "CartPole-v1": [[2.39, 1.0, 0.0, 0.0], [0.3, 0.5, 0.1, -0.5], [0.3, 0.5, 0.1, -0.5]],
    "MountainCar-v0": [[0.49, 0.05], [-0.5, 0.01], [-0.5, 0.01]],
}
LIMIT = {"CartPole-v1": 60, "MountainCar-v0": 200}  # on the moon, see below


def parse(td, flags, epsilon=0.1):
    """Arguments for any of the three scripts; they differ in how epsilon is given."""
    if td is not parallel_td:
        flags += " --buffer-size 20 --tau 0.25 --learning-starts 1"
    names = ["--start-e", "--end-e"] if td is epsilon_decay_td else ["--epsilon"]
    return td.parse_args([*flags.split(), *(f"{name}={epsilon}" for name in names)])


def place(state, obs, time):
    """Put the environments (N,) into given states. Their returns so far equal their times."""
    names = [field.name for field in dataclasses.fields(state.env_state) if field.name != "time"]
    fields = dict(zip(names, jnp.array(obs).T, strict=True))
    env_state = state.env_state.replace(time=jnp.array(time), **fields)
    return state._replace(
        env_state=env_state, obs=jnp.array(obs), episode_return=jnp.array(time, float)
    )


def gymnasium_step(env, obs, action):
    """One step from the given observation: successor, reward, terminated."""
    env.reset()
    env.unwrapped.state = np.array(obs, float)
    return env.step(int(action))[:3]


def features(scale, sigma, centers, obs):
    """Features (F,) of one observation (D,), in float64; centers (D, F)."""
    distance = np.array(obs, float) / scale - np.array(centers, float).T
    return np.exp(-(distance**2).sum(axis=1) / (2 * sigma**2))


def learn(args, weights, next_weights, centers, batch):
    """Semi-gradient (F, A), mean |TD error| and mean Q-value taken, one transition at a time."""
    phi_of = partial(features, SCALE[args.env_id], args.sigma, centers)
    grad, errors, taken = np.zeros(weights.shape), [], []
    for obs, action, reward, next_obs, terminated in batch:
        bootstrap = 0.0 if terminated else args.gamma * max(phi_of(next_obs) @ next_weights)
        phi = phi_of(obs)
        taken.append(phi @ weights[:, action])
        errors.append(taken[-1] - (reward + bootstrap))
        grad[:, action] += errors[-1] * phi / len(batch)
    return grad, np.mean(np.abs(errors)), np.mean(taken)


class Moon(gymnax.environments.CartPole):
    """CartPole-v1 whose start depends on its parameters: an x of 0.5 for a gravity of 5."""

    def reset_env(self, key, params):
        _, state = super().reset_env(key, params)
        state = state.replace(x=jnp.asarray(params.gravity / 10))
        return self.get_obs(state), state


@pytest.fixture
def moon(td, monkeypatch):
    """Replace CartPole-v1 and its parameters, as a reader would: in make. Return Gymnasium's."""
    env, make = Moon(), td.make
    params = env.default_params.replace(gravity=5.0, max_steps_in_episode=LIMIT["CartPole-v1"])
    monkeypatch.setattr(td, "make", lambda name: make(name) if "Car-" in name else (env, params))
    theirs = gymnasium.make("CartPole-v1")
    theirs.unwrapped.gravity = 5.0
    return theirs


def test_observation_scales_fit_gymnaxs_spaces(td):
    for env_id, scale in td.OBS_SCALE.items():
        env, env_params = gymnax.make(env_id)
        assert env.observation_space(env_params).shape == (len(scale),)


@pytest.mark.parametrize("env_id", list(SCALE))
def test_three_updates_by_hand(td, env_id, moon):
    """Gymnasium steps, NumPy learns: what ends, what is drawn, Adam, its schedule, the sums."""
    flags = "--num-envs 3 --batch-size 3 --total-timesteps 9 --num-centers 9 --sigma 0.8"
    args = parse(td, f"{flags} --gamma 0.9 --env-id {env_id}", epsilon=0.4)
    env = moon if env_id == "CartPole-v1" else gymnasium.make(env_id)
    rng = np.random.default_rng(0)
    state = td.init_state(args, 5, 0.1)
    assert len(np.unique(state.obs, axis=0)) == 3
    assert env is not moon or np.all(state.obs[:, 0] == 0.5)
    time = np.array([7, LIMIT[env_id] - 1, 7])
    state, total = place(state, STARTS[env_id], time), time.copy()
    weights, averaged = rng.normal(size=(2, *state.weights.shape))
    state = state._replace(weights=jnp.array(weights))
    if td is not parallel_td:
        state = state._replace(target_weights=jnp.array(averaged))
    train_step = jax.jit(partial(td.train_step, args))
    m, v, ring, sums = 0, 0, {}, 0
    uniform, action = jnp.array([0.3, 0.5, 0.9]), jnp.array([1, 0, 0])
    step_draws = jax.random.split(jax.random.key(1), 3), uniform, action  # for one vector step
    for n in [1, 2, 3]:
        before, rows, finished = np.array(state.obs), [], []
        batch_uniform = jnp.array(rng.uniform(size=3))
        draws = batch_uniform, *step_draws
        if td is parallel_td:
            draws = jax.tree.map(lambda leaf: leaf[None], step_draws)
        state, _ = train_step(state, draws)
        for i, obs in enumerate(before):
            q = features(SCALE[env_id], 0.8, state.centers, obs) @ weights
            chosen = action[i] if uniform[i] < 0.4 else np.argmax(q)
            next_obs, reward, terminated = gymnasium_step(env, obs, chosen)
            rows.append((obs, chosen, reward, next_obs, terminated))
            time[i], total[i] = time[i] + 1, total[i] + reward
            if terminated or time[i] == LIMIT[env_id]:
                finished.append(total[i])
                time[i] = total[i] = 0
                assert env is not moon or state.obs[i, 0] == 0.5  # the next episode's start
            else:
                np.testing.assert_allclose(state.obs[i], next_obs, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(state.env_state.time, time)
        assert n > 1 or len(finished) == 2
        if td is not parallel_td:
            ring |= {3 * (n - 1) + i: row for i, row in enumerate(rows)}
            rows = [ring[int(u * 3 * n)] for u in batch_uniform]
        next_weights = weights if td is parallel_td else averaged
        grad, *means = learn(args, weights, next_weights, state.centers, rows)
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
        adam = m / (1 - 0.9**n) / (np.sqrt(v / (1 - 0.999**n)) + 1e-8)
        weights = weights - 0.1 * (4 - n) / 3 * adam
        averaged = averaged + 0.25 * (weights - averaged)
        np.testing.assert_allclose(state.weights, weights, rtol=1e-3, atol=1e-4)
        if td is not parallel_td:
            np.testing.assert_allclose(state.target_weights, averaged, rtol=1e-3, atol=1e-4)
        sums += np.array([len(finished), sum(finished), 1, *means])
        np.testing.assert_allclose(state.metrics, sums, rtol=1e-3)
    after, _ = train_step(state, draws)
    np.testing.assert_allclose(after.weights, state.weights, atol=1e-7)  # the rate is 0 now


def test_evaluation_is_one_whole_greedy_episode_from_each_start(td, moon):
    """Weights that push to where the pole leans, although training explores always."""
    args = parse(td, "--num-centers 2 --eval-episodes 9 --num-envs 2", epsilon=1.0)
    centers = np.array([[0, 0], [0, 0], [0.5, -0.5], [0, 0]], np.float32)
    weights, lengths = np.array([[0, 1], [1, 0]], np.float32), []
    state = td.init_state(args, 0, 0.1)._replace(centers=centers, weights=weights)
    env, env_params = td.make("CartPole-v1")
    for key in jax.random.split(state.key, 9):
        obs, _ = env.reset(jax.random.split(key)[0], env_params)  # as gymnax's wrapper begins
        lengths.append(0)
        for _ in range(LIMIT["CartPole-v1"]):
            phi = features(SCALE["CartPole-v1"], args.sigma, centers, obs)
            obs, _, terminated = gymnasium_step(moon, obs, np.argmax(phi @ weights))
            lengths[-1] += 1
            if terminated:
                break
    returns = jax.jit(partial(td.evaluate, args))(state)
    np.testing.assert_array_equal(returns, lengths)
    assert len(set(lengths)) > 3 and max(lengths) == LIMIT["CartPole-v1"]


def test_chunks_draw_fresh_numbers_and_report_means(td, monkeypatch):
    """Two chunks of 20 updates: no number is drawn twice, and the sums start anew."""
    args = parse(td, "--num-envs 4 --batch-size 4 --num-centers 3 --total-timesteps 160")
    seen, train_step = [], td.train_step

    def spy(args, state, draws):
        state, nothing = train_step(args, state, draws)
        *batch_uniform, keys, uniform, action = draws
        numbers = jax.random.key_data(keys), uniform, action, *batch_uniform
        jax.debug.callback(lambda *numbers: seen.append(numbers), *numbers)
        return state, nothing

    monkeypatch.setattr(td, "train_step", spy)
    chunk = jax.jit(partial(td.train_chunk, args, 20))
    state = td.init_state(args, 0, 0.1)
    for n in [20, 40]:
        state, means = chunk(state)
        jax.effects_barrier()
        assert len(seen) == n
        episodes, returns, updates, td_error, q_value = np.array(state.metrics)
        assert episodes > 0 and updates == 20
        by_hand = [returns / episodes, td_error / 20, q_value / 20]
        np.testing.assert_allclose(means, by_hand, rtol=1e-6)
    keys, uniform, action, *batch_uniform = map(np.stack, zip(*seen, strict=True))
    assert len(np.unique(keys.reshape(-1, 2), axis=0)) == 160
    for draw in [uniform, *batch_uniform]:
        assert len(np.unique(draw)) == 160 and draw.min() < 0.1 and draw.max() > 0.9
    assert 50 < action.sum() < 110 and action.max() == 1
    assert state.opt_state[0].count == args.learning_updates == 40


def test_no_key_is_used_twice(td):
    """JAX checks the keys when it traces a program; nothing has to run."""
    args = parse(td, "--num-envs 4 --batch-size 4 --eval-episodes 2 --num-centers 3")
    with jax.debug_key_reuse(True):
        state = jax.eval_shape(partial(td.init_state, args), 0, 0.01)
        jax.jit(lambda state: td.evaluate(args, td.train_chunk(args, 2, state)[0])).trace(state)


@pytest.mark.filterwarnings("ignore:Mean of empty slice")  # no episode ends in the first line
def test_a_run_alone_equals_the_run_among_others(td, tmp_path, capsys):
    """Bit for bit. The printed lines say what is saved. Updates of 32 steps: 1,024 for 1,001."""
    few = "--num-envs 32 --total-timesteps 1001 --log-interval 100 --eval-episodes 5"
    few += "" if td is parallel_td else " --learning-starts 200"
    flags = [*few.split(), "--num-centers", "50", "--save"]
    td.main([*flags, f"{tmp_path}/1", "--seed", "3", "--learning-rate", "0.05"])
    capsys.readouterr()
    td.main([*flags, f"{tmp_path}/8", "--num-seeds", "4", "--learning-rate", "0.05", "0.0005"])
    among, alone = np.load(tmp_path / "8.npz"), np.load(tmp_path / "1.npz")
    for name in ["seed", "learning_rate", "greedy_return", "centers", "weights"]:
        np.testing.assert_array_equal(among[name][3], alone[name][0], err_msg=name)
    for name in ["returns", "td_error", "q_value"]:
        np.testing.assert_array_equal(among[name][:, 3], alone[name][:, 0], err_msg=name)
    np.testing.assert_array_equal(among["seed"], [0, 1, 2, 3] * 2)
    np.testing.assert_array_equal(among["timesteps"], range(128, 1025, 128))
    _, _, *lines, first, second = capsys.readouterr().out.splitlines()
    curves = among["returns"], among["td_error"], among["q_value"]
    means = [[np.nanmean(line) for line in curve] for curve in curves]
    for line, *numbers in zip(lines, among["timesteps"], *means, strict=True):
        form = "step {:,}  return {:.1f}  td_error {:.3f}  q_value {:.2f}  "
        assert line.startswith(form.format(*numbers))
    for line, rate, runs in (first, 0.05, slice(4)), (second, 0.0005, slice(4, 8)):
        means = among["greedy_return"][runs].mean(axis=1)
        mean, worst = means.mean(), means.min()
        assert line == f"learning rate {rate:g}: greedy return {mean:.1f}, worst {worst:.1f}"


def test_learns_and_reports_what_happened(td, tmp_path, capsys, monkeypatch):
    """Returns from the ages of all poles; greedy returns from the saved weights in Gymnasium."""
    ages, vector_step = [], td.vector_step

    def spy(args, state, draws):
        after, report = vector_step(args, state, draws)
        jax.debug.callback(lambda time: ages.append(np.array(time)), after.env_state.time)
        return after, report

    monkeypatch.setattr(td, "vector_step", spy)
    flags = "--seed 2 --total-timesteps 60000 --log-interval 40000 --num-centers 200".split()
    td.main([*flags, "--save", f"{tmp_path}/run.npz"])
    saved, env = np.load(tmp_path / "run.npz"), gymnasium.make("CartPole-v1")
    np.testing.assert_array_equal(saved["timesteps"], [40_000, 60_000])
    ages = np.reshape(ages, (60_000 // 16, 16))
    ended, before = ages[1:] == 0, ages[:-1]  # an episode that ended was one step older
    for line, part in enumerate([slice(0, 2499), slice(2499, 3749)]):
        by_hand = np.mean(before[part][ended[part]] + 1)
        np.testing.assert_allclose(saved["returns"][line], by_hand, rtol=1e-4)
    scale, sigma, centers = saved["obs_scale"], saved["sigma"], saved["centers"][0].T
    returns = np.zeros(15)
    for episode in range(15):
        obs, _ = env.reset(seed=episode)
        over = False
        while not over:
            action = np.argmax(features(scale, sigma, centers, obs) @ saved["weights"][0])
            obs, reward, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
            returns[episode] += reward
    printed = float(re.search(r"greedy return ([\d.]+)", capsys.readouterr().out)[1])
    assert printed == pytest.approx(saved["greedy_return"].mean(), abs=0.05)
    error = 4 * saved["greedy_return"].std() / np.sqrt(15) + 1
    assert returns.mean() > 150 and abs(returns.mean() - printed) < error, (returns, printed)
