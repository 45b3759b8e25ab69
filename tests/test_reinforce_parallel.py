"""reinforce_parallel.py against NumPy, exact gradients by enumeration, and Gymnasium."""

import io
import itertools
import os
import runpy
import sys
from functools import cache, partial
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import gymnasium
import gymnax
import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
from jax.experimental import multihost_utils
from matplotlib.colors import to_rgba
from scipy.stats import norm

import reinforce_parallel as rp

jit = partial(jax.jit, compiler_options=rp.COMPILER_OPTIONS)  # compiles in half the time
SUFFIXES = {"save": "npz", "plot": "png", "gif": "gif"}
SMALL = "--env-id DeepSea-bsuite --num-envs 3 --hidden-size 4 --eval-episodes 2"  # 8 steps


def run(flags, *files):
    return rp.main([*flags.split(), *map(str, files)])


def files(folder):
    """Flags for all files that the script writes."""
    return [f"--{name}={folder / name}.{suffix}" for name, suffix in SUFFIXES.items()]


def gradient_of(args):
    """A compiled function of parameters and batch: what the optimizer gets."""
    grad = jax.grad(rp.policy_loss)
    return jit(lambda params, batch: grad(params, batch, rp.advantages(args, batch)))


def forward(params, obs):
    """Hidden units and outputs of the policy network."""
    hidden = np.tanh(obs @ params["w0"] + params["b0"])
    return hidden, hidden @ params["w1"] + params["b1"]


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def numpy_advantages(gamma, reward, mask):
    """Return to go minus the mean of the others', by loops over steps and episodes."""
    returns = np.zeros((len(mask) + 1, mask.shape[1]))
    for t, i in np.argwhere(mask)[::-1]:
        returns[t, i] = reward[t, i] + gamma * returns[t + 1, i]  # 0 after the end
    result = np.zeros(mask.shape)
    for t, i in np.argwhere(mask):
        result[t, i] = returns[t, i] - np.mean(np.delete(returns[t], i))
    return result


def numpy_gradient(gamma, params, obs, action, reward, mask):
    """Minus the estimate of the policy gradient, by the chain rule."""
    hidden, outputs = forward(params, obs)
    weight = -numpy_advantages(gamma, reward, mask)[..., None] / mask.shape[1]
    gradient = {}
    if "log_std" in params:
        error = (action - outputs) / np.exp(params["log_std"])
        slope = weight * error / np.exp(params["log_std"])
        gradient["log_std"] = (weight * (error**2 - 1)).sum(axis=(0, 1))
    else:
        slope = weight * (np.eye(outputs.shape[-1])[action] - softmax(outputs))
    back = slope @ params["w1"].T * (1 - hidden**2)
    gradient |= {"w0": np.einsum("tnd,tnh->dh", obs, back), "b0": back.sum(axis=(0, 1))}
    gradient |= {"w1": np.einsum("tnh,tna->ha", hidden, slope), "b1": slope.sum(axis=(0, 1))}
    return gradient


def test_no_key_is_used_twice():
    args = rp.parse_args(["--env-id", "Pendulum-v1"])
    with jax.debug_key_reuse(True):
        state = jax.eval_shape(partial(rp.init_state, args), 0, 0.01)
        jax.jit(lambda state: rp.evaluate(args, rp.train_chunk(args, state)[0])).trace(state)


def test_initial_parameters():
    """Independent normal numbers; the outputs are near 0."""
    pendulum = rp.parse_args("--env-id Pendulum-v1 --hidden-size 5000".split())
    params = rp.init_state(pendulum, 3, 0.01).params
    w0, w1 = params.pop("w0"), params.pop("w1")
    np.testing.assert_allclose([w0.std() * 3**0.5, w1.std() * 100], 1, atol=0.04)
    assert abs(w0.mean()) < 0.02 and abs(w1.mean()) < 0.0005
    assert np.abs(np.corrcoef(np.vstack([w0, w1.T])) - np.eye(4)).max() < 4 / 5000**0.5
    zeros = {"b0": [0] * 5000, "b1": [0], "log_std": [0]}
    assert {name: array.tolist() for name, array in params.items()} == zeros
    acrobot = rp.parse_args(["--env-id", "Acrobot-v1"])
    rp.make(acrobot.env_id)  # as in main: it cannot be made inside of jit
    state = jax.eval_shape(partial(rp.init_state, acrobot), 0, 0.01)
    shapes = {name: array.shape for name, array in state.params.items()}
    assert shapes == {"w0": (6, 64), "b0": (64,), "w1": (64, 3), "b1": (3,)}


def test_actions_are_mapped_to_unequal_bounds():
    space = gymnax.environments.spaces.Box(np.array([-1, 0]), np.array([3, 1]), (2,))
    actions = np.array([[-2, -1, 0, 0.5, 1, 7]] * 2).T
    expected = np.array([[-1, -1, 1, 2, 3, 3], [0, 0, 0.5, 0.75, 1, 1]]).T
    np.testing.assert_allclose(rp.to_bounds(space, actions), expected)
    assert rp.to_bounds(gymnax.environments.spaces.Discrete(9), 7) == 7


def test_continuous_actions_follow_their_distribution():
    """100,000 draws against mean and standard deviation, log_prob against SciPy's."""
    rng, obs = np.random.default_rng(0), np.array([0.1, -0.4, 0.7])
    params = {"w0": rng.normal(size=(3, 8)), "b0": rng.normal(size=8)}
    params |= {"w1": rng.normal(size=(8, 4)) / 4, "b1": rng.normal(size=4) / 4}
    params["log_std"] = np.log([0.5, 1.5, 2.0, 0.7])
    draws = rp.sample(params, obs, jax.random.normal(jax.random.key(1), (100_000, 4)))
    mean, std = forward(params, obs)[1], np.exp(params["log_std"])
    np.testing.assert_allclose(draws.mean(axis=0), mean, atol=0.02)
    np.testing.assert_allclose(draws.std(axis=0), std, rtol=0.02)
    log_density = norm.logpdf(draws[:9], mean, std).sum(axis=1)
    np.testing.assert_allclose(rp.log_prob(params, obs, draws[:9]), log_density, rtol=1e-4)


def test_gradient_is_unbiased_for_unequal_lengths_by_enumeration():
    """Action 0 ends an episode, action 1 goes on, at most 3 steps: 4 episodes, 16 pairs of them.

    The expectation over all pairs is the exact gradient of a single episode's discounted returns
    to go. A mean over the episodes still alive, or over all with one's own, is not.
    """
    action = np.array([[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1]])  # of each episode, a column
    mask = np.array([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]], bool)
    reward = np.take_along_axis(np.array([[5.0, 1.0], [-2.0, 3.0], [4.0, 7.0]]), action, axis=1)
    to_go = np.array([[1, 0.5, 0.25], [0, 1, 0.5], [0, 0, 1]]) @ (mask * reward)
    pi = np.array([0.6, 0.4])
    probability = np.prod(pi[action], axis=0, where=mask)
    exact = np.einsum("n,tn,tna->a", probability, mask * to_go, np.eye(2)[action] - pi)
    gradient = gradient_of(rp.parse_args(["--gamma", "0.5"]))
    params = {"w0": np.zeros((1, 1)), "b0": np.zeros(1), "w1": np.zeros((1, 2)), "b1": np.log(pi)}
    expected = np.zeros(2)
    for pair in map(list, itertools.product(range(4), repeat=2)):
        batch = rp.Batch(np.zeros((3, 2, 1)), action[:, pair], reward[:, pair], mask[:, pair])
        expected -= np.prod(probability[pair]) * np.asarray(gradient(params, batch)["b1"])
    np.testing.assert_allclose(expected, exact, rtol=1e-5)


@pytest.mark.parametrize(
    ("num_runs", "all_devices", "expected"),
    [  # of two devices: how many are used, runs at once on each, copies to add
        (1, False, (1, 1, 0)),
        (1, True, (2, 1, 1)),
        (7, False, (2, 4, 1)),
        (20, False, (2, 10, 0)),
        (67, True, (2, 12, 5)),  # 34 on each device, 12 at a time
    ],
)
def test_spread_by_hand(num_runs, all_devices, expected, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert rp.spread(num_runs, all_devices) == expected


@pytest.fixture(scope="module", params=["CartPole-v1", "Pendulum-v1", "Acrobot-v1"])
def played(request):
    """Arguments, parameters, a batch of 16 episodes. Those of 200 or 500 steps are cut by hand."""
    args = rp.parse_args(["--env-id", request.param, "--gamma", "0.9"])
    rp.make(args.env_id)  # as in main: Acrobot cannot be made inside of jit
    inputs, outputs = {"C": (4, 2), "P": (3, 1), "A": (6, 3)}[request.param[0]]
    rng = np.random.default_rng(0)
    params = {"w0": rng.normal(size=(inputs, 8)), "b0": rng.normal(size=8) / 4}
    params |= {"w1": rng.normal(size=(8, outputs)) / 4, "b1": 0.4 * np.arange(outputs)}
    if request.param == "Pendulum-v1":
        params["log_std"] = np.array([-0.3])
    play = jit(partial(rp.play, args, num_envs=16, noise_scale=1.0))
    batch = jax.tree.map(np.asarray, play(params, jax.random.key(0))[0])
    if request.param != "CartPole-v1":
        steps = len(batch.mask)
        assert steps == (200 if request.param == "Pendulum-v1" else 500)
        cut = np.arange(steps)[:, None] < np.linspace(1, 200, 16)
        batch = batch._replace(mask=batch.mask & cut)
    return args, params, batch


def test_actions_are_the_policys_and_steps_are_gymnasiums(played):
    """Each step again there, from the observation; a torque is clipped and scaled to [-2, 2]."""
    args, params, batch = played
    continuous = "log_std" in params
    outputs = forward(params, batch.obs)[1]
    taken = batch.action if continuous else np.eye(outputs.shape[-1])[batch.action]
    error = taken - (outputs if continuous else softmax(outputs))
    assert np.abs(error.mean(axis=(0, 1))).max() < 0.03
    env = gymnasium.make(args.env_id).unwrapped
    for t, i in np.argwhere(batch.mask[:-1]):
        env.reset()
        obs = batch.obs[t, i].astype(float)
        angles = {"P": [np.arctan2(obs[1], obs[0]), obs[-1]], "C": obs}
        if args.env_id == "Acrobot-v1":
            angles["A"] = [np.arctan2(obs[1], obs[0]), np.arctan2(obs[3], obs[2]), *obs[4:]]
        env.state = np.array(angles[args.env_id[0]])
        action = batch.action[t, i]
        reached, reward, terminated, _, _ = env.step(
            2 * action.clip(-1, 1) if continuous else action
        )
        np.testing.assert_allclose(batch.reward[t, i], reward, rtol=1e-4)
        if args.env_id == "CartPole-v1":
            assert batch.mask[t + 1, i] == (not terminated)
        if batch.mask[t + 1, i]:
            np.testing.assert_allclose(batch.obs[t + 1, i], reached, atol=2e-4)
    assert batch.mask[0].all() and np.all(batch.mask[1:] <= batch.mask[:-1])


def test_advantages_and_gradient_equal_numpys(played):
    """Of all parameters, also log_std and those of action 2. Equal returns give exactly 0."""
    args, params, batch = played
    expected = numpy_advantages(0.9, batch.reward, batch.mask)
    np.testing.assert_allclose(rp.advantages(args, batch), expected, rtol=1e-4, atol=1e-4)
    equal = jax.tree.map(lambda array: np.repeat(array[:, 1:2], 7, axis=1), batch)
    assert not np.any(rp.advantages(args, equal))
    gradient, expected = gradient_of(args)(params, batch), numpy_gradient(0.9, params, *batch)
    assert gradient.keys() == expected.keys()
    for name, value in expected.items():
        assert np.any(value != 0, axis=0).all()
        np.testing.assert_allclose(gradient[name], value, rtol=1e-3, atol=1e-3)


class Leaning(gymnax.environments.CartPole):
    """A pole whose start depends on a parameter; its rewards, nearly 1, show the steps' keys."""

    def reset_env(self, key, params):
        _, state = super().reset_env(key, params)
        state = state.replace(theta=params.gravity / 1000 + 0 * state.theta)
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        obs, state, _, terminated, info = super().step_env(key, state, action, params)
        return obs, state, 1 + 1e-3 * jax.random.uniform(key), terminated, info


LEANING = Leaning()
CHANGES = {"max_steps_in_episode": 40, "gravity": 50.0, "theta_threshold_radians": 0.3}
LEANING_PARAMS = LEANING.default_params.replace(**CHANGES)


@cache
def vectorized(env):
    """Reset and step of gymnax, of many environments."""
    axes = (0, None), (0, 0, 0, None)
    return [jax.jit(jax.vmap(f, a)) for f, a in zip([env.reset, env.step], axes, strict=True)]


def numpy_play(params, key, num_envs, env, env_params, greedy):
    """Episodes side by side: observations, actions, rewards, masks (T, N), states before steps."""
    key_reset, key_noise, key_step = jax.random.split(key, 3)
    steps = env_params.max_steps_in_episode
    reset, step = vectorized(env)
    obs, state = reset(jax.random.split(key_reset, num_envs), env_params)
    noise = np.asarray(jax.random.gumbel(key_noise, (steps, num_envs, len(params["b1"]))))
    mask, batch, states = np.ones(num_envs, bool), [], []
    for gumbel, keys in zip(noise, jax.random.split(key_step, (steps, num_envs)), strict=True):
        action = np.argmax(forward(params, np.asarray(obs))[1] + gumbel * (not greedy), axis=1)
        states.append(state)
        new_obs, state, reward, terminated, truncated, _ = step(keys, state, action, env_params)
        batch.append([np.asarray(obs), action, np.asarray(reward), mask])
        mask = mask & ~np.asarray(terminated | truncated)
        obs = new_obs
    return *map(np.array, zip(*batch, strict=True)), states


def replay(seed, rate):
    """Four updates by hand, with --sync truncation: returns, steps, parameters and key."""
    key, key_hidden, key_output = jax.random.split(jax.random.key(seed), 3)
    params = {"w0": np.array(jax.random.normal(key_hidden, (4, 64))) / 2, "b0": np.zeros(64)}
    params |= {"w1": np.array(jax.random.normal(key_output, (64, 2))) / 100, "b1": np.zeros(2)}
    returns, steps, mean, square = [], [], dict.fromkeys(params, 0), dict.fromkeys(params, 0)
    for count in range(4):
        key, key_play = jax.random.split(key)
        batch = numpy_play(params, key_play, 4, LEANING, LEANING_PARAMS, greedy=False)
        obs, action, reward, mask, _ = batch
        mask = mask & mask.all(axis=1, keepdims=True)
        returns.append(np.sum(mask * reward) / 4)
        steps.append(mask.sum())
        for name, grad in numpy_gradient(0.99, params, obs, action, reward, mask).items():
            mean[name] = 0.9 * mean[name] + 0.1 * grad
            square[name] = 0.999 * square[name] + 0.001 * grad**2
            scale = np.sqrt(square[name] / (1 - 0.999 ** (count + 1))) + 1e-8
            step = rate * (1 - count / 4)  # the learning rate falls to 0
            params[name] = params[name] - step * mean[name] / (1 - 0.9 ** (count + 1)) / scale
    return returns, steps, params, key


def greedy_steps(env, obs, w0, b0, w1, b1):
    """Length of an episode of the greedy policy in Gymnasium's CartPole-v1 from a given start."""
    env.reset()
    env.unwrapped.state = np.asarray(obs, float)
    for step in itertools.count(1):
        obs, _, *over, _ = env.step(np.argmax(np.tanh(obs @ w0 + b0) @ w1 + b1))
        if any(over):
            return step


def test_the_report_is_that_of_an_independent_replay(tmp_path, capsys, monkeypatch):
    """Three updates are two lines of 2 updates. Replaced parameters of the environment rule."""
    drawn, animated, ticks = [], [], itertools.count(1)
    monkeypatch.setattr(rp, "plot", lambda *call: drawn.extend(call))
    monkeypatch.setattr(rp, "animate", lambda *call: animated.extend(call))
    monkeypatch.setattr(rp, "make", lambda _: (LEANING, LEANING_PARAMS))
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks) ** 2))  # 1, 4, 9, 16, ...
    monkeypatch.setattr(rp, "time", clock)
    env = gymnasium.make("CartPole-v1", max_episode_steps=40)
    env.unwrapped.gravity, env.unwrapped.theta_threshold_radians = 50.0, 0.3
    flags = "--num-iterations 3 --log-interval 2 --num-envs 4 --eval-episodes 4 --seed 7"
    flags += " --learning-rate 0.02 0.05 --num-seeds 2 --sync truncation"
    results, saved = run(flags, *files(tmp_path)), np.load(tmp_path / "save.npz")
    assert saved.files == [*results] and not saved["interrupted"]
    for name, value in results.items():
        np.testing.assert_array_equal(saved[name], value)
    assert saved["timesteps"].dtype == np.int64
    for i, (rate, seed) in enumerate(itertools.product([0.02, 0.05], [7, 8])):
        assert (saved["seed"][i], saved["learning_rate"][i]) == (seed, rate)
        returns, steps, params, key = replay(seed, rate)
        means = np.mean(returns[:2]), np.mean(returns[2:])
        np.testing.assert_allclose(saved["returns"][:, i], means, rtol=1e-6)
        np.testing.assert_array_equal(saved["timesteps"][:, i], np.cumsum(steps)[1::2])
        for name, param in params.items():
            np.testing.assert_allclose(saved[name][i], param, atol=2e-3)
        obs, _, reward, mask, _ = numpy_play(params, key, 4, LEANING, LEANING_PARAMS, greedy=True)
        expected = (mask * reward).sum(axis=0)
        np.testing.assert_allclose(saved["greedy_return"][i], expected, rtol=1e-6)
        weights = {name: saved[name][i] for name in params}
        assert mask.sum(axis=0).tolist() == [
            greedy_steps(env, start, **weights) for start in obs[0]
        ]
        if i == 0:
            assert animated[0].seed == 7 and animated[1] == str(tmp_path / "gif.gif")
            np.testing.assert_equal(animated[2], weights)
            assert np.array_equal(jax.random.key_data(animated[3]), jax.random.key_data(key))
    assert drawn[0] == str(tmp_path / "plot.png")
    for value, name in zip(drawn[1:], ["learning_rate", "timesteps", "returns"], strict=True):
        np.testing.assert_array_equal(value, saved[name])
    returns, steps = saved["returns"].mean(axis=1), saved["timesteps"].sum(axis=1)
    means = saved["greedy_return"].mean(axis=1)
    devices = f"{min(4, jax.device_count())} x {jax.devices()[0].device_kind}"
    assert capsys.readouterr().out.splitlines() == [
        f"CartPole-v1, 4 runs on {devices}",
        "compiled in 3.0 s",
        f"iteration 2  return {returns[0]:.1f}  {steps[0] / 7:,.0f} steps/s",
        f"iteration 4  return {returns[1]:.1f}  {steps[1] / 18:,.0f} steps/s",
        *[
            f"learning rate {rate}: greedy return {np.mean(two):.1f}, worst run {min(two):.1f}"
            for rate, two in [(0.02, means[:2]), (0.05, means[2:])]
        ],
    ]
    assert (results["compile_seconds"], results["train_seconds"]) == (3.0, 18.0)


@pytest.mark.parametrize("steps", [[10, 20], [[10, 11, 12, 5, 6, 9], [20, 24, 22, 15, 30, 19]]])
def test_plot_draws_each_run_and_the_median_of_each_rate(steps, tmp_path):
    """Rate 0.5 has the runs 0, 2 and 4, rate 0.25 the others. Medians are worked out by hand."""
    returns = np.array([[1, 2, 3, 4, 8, 9], [10, 20, 60, 80, 30, 90]])
    rp.plot(tmp_path / "x.png", np.array([0.5, 0.25] * 3), np.array(steps), returns)
    axes = plt.gca()
    plt.close()
    x = np.broadcast_to(np.transpose(steps), (6, 2))
    medians = {
        "C0": [*np.median(x[1::2], axis=0), 4, 80],
        "C1": [*np.median(x[::2], axis=0), 3, 30],
    }
    names = {to_rgba(color): color for color in medians}
    bold, thin = {}, set()
    for line in axes.lines:
        color, numbers = names[line.get_color()], [*line.get_xdata(), *line.get_ydata()]
        if line.get_linewidth() == 2:
            bold[color] = numbers
        else:
            thin.add((color, *numbers))
    assert len(axes.lines) == 8 and bold == medians
    assert thin == {(f"C{1 - i % 2}", *x[i], *returns[:, i]) for i in range(6)}
    handles, labels = axes.get_legend_handles_labels()
    assert [names[line.get_color()] for line in handles] == ["C0", "C1"]
    assert labels == ["median, learning rate 0.25", "median, learning rate 0.5"]
    assert axes.get_xlabel() == "environment steps"
    assert axes.get_ylabel() == "return of training episodes"
    assert axes.xaxis.get_major_formatter()(100_000) == "100k"
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("balances", [False, True])
def test_the_animation_shows_the_first_evaluation_episode(balances, monkeypatch):
    """Up to its end if it falls, and at most 200 steps if it is longer."""
    shown = []

    def visualizer(*call):
        return SimpleNamespace(animate=lambda path: shown.extend([*call, path]))

    monkeypatch.setitem(sys.modules, "gymnax.visualize", SimpleNamespace(Visualizer=visualizer))
    for name in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER"):
        monkeypatch.setenv(name, "x11")
    args, key = rp.parse_args("--eval-episodes 3".split()), jax.random.key(4)
    w0 = np.array([[0], [0.1], [1], [0.5]]) * balances
    params = {"w0": w0, "b0": np.zeros(1), "w1": np.array([[-1.0, 1]]), "b1": np.zeros(2)}
    rp.animate(args, "x.gif", params, key)
    env, env_params, frames, rewards, path = shown
    _, _, reward, mask, states = numpy_play(params, key, 3, env, env_params, greedy=True)
    length = mask[:, 0].sum()
    assert path == "x.gif"
    assert {os.environ[name] for name in ("SDL_VIDEODRIVER", "SDL_AUDIODRIVER")} == {"dummy"}
    assert (length > 200) == balances and len(frames) == min(200, length)
    assert [frame.time for frame in frames] == [*range(len(frames))]
    for frame, state in list(zip(frames, states, strict=False))[:50]:  # later, errors grow
        pose = [frame.x, frame.theta, frame.x_dot, frame.theta_dot]
        expected = [state.x[0], state.theta[0], state.x_dot[0], state.theta_dot[0]]
        np.testing.assert_allclose(pose, expected, atol=5e-3)
    np.testing.assert_array_equal(rewards[: len(frames)], np.cumsum(reward[:, 0])[: len(frames)])


def test_learns_and_the_policy_balances_gymnasiums_pole():
    results, env = run("--seed 6 --log-interval 1e9"), gymnasium.make("CartPole-v1")
    weights = {name: results[name][0] for name in ["w0", "b0", "w1", "b1"]}
    starts = np.random.default_rng(0).uniform(-0.05, 0.05, (5, 4))
    lengths = [greedy_steps(env, start, **weights) for start in starts]
    assert np.mean(lengths) >= 475, lengths


def test_other_runs_do_not_change_a_run(capsys):
    """Observations of 8 x 8 numbers are flattened. The last of 7 runs is the same alone."""
    many = run(f"{SMALL} --num-seeds 7 --num-iterations 4")
    alone = run(f"{SMALL} --seed 6 --num-iterations 4")
    assert capsys.readouterr().out.count("DeepSea-bsuite, 1 run on 1 x ") == 1
    assert many["w0"].shape == (7, 64, 4) and many["greedy_return"].shape == (7, 2)
    assert len(np.unique(many["w0"], axis=0)) == 7
    for name in ("w0", "b0", "w1", "b1", "greedy_return"):
        np.testing.assert_allclose(many[name][6], alone[name][0], rtol=1e-4, atol=1e-5)


def press_ctrl_c(line, module, name, monkeypatch):
    """Let Ctrl-C arrive while a progress line is awaited, in the function that waits for it."""
    outcomes = [DEFAULT] * (line - 1) + [KeyboardInterrupt] + [DEFAULT] * 9
    wait = Mock(wraps=getattr(module, name), side_effect=outcomes)
    monkeypatch.setattr(module, name, wait)


def program(module, argv, monkeypatch):
    """Run a script as a shell would. Return its exit code and what it printed."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *argv])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(module.__file__, run_name="__main__")
    assert sys.stdout.line_buffering
    return end.value.code, sys.stdout.buffer.getvalue().decode()


def test_ctrl_c_keeps_what_the_last_line_shows(tmp_path, monkeypatch):
    """Before the first line, or in a job of many processes, it is an error."""
    few = f"{SMALL} --num-seeds 2 --log-interval 1 --num-iterations"
    with monkeypatch.context() as patch:
        press_ctrl_c(3, multihost_utils, "process_allgather", patch)
        argv = f"{few} 3 --save {tmp_path / 'x.npz'}".split()
        code, printed = program(rp, argv, patch)
    assert code == 130 and printed.count("steps/s\n") == 2
    assert "\ninterrupted: the results are those of the last line\n" in printed
    for flags, line in ("3", 1), ("3 --distributed", 2):
        press_ctrl_c(line, rp, "gather", monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            run(f"{few} {flags}")
    two = rp.parse_args(f"{few} 2 --log-interval 2".split())  # the same updates, in one line
    two.total_updates = 3  # the learning rate would have fallen to 0 in three updates
    monkeypatch.setattr(rp, "parse_args", lambda argv: two)
    press_ctrl_c(10, rp, "gather", monkeypatch)  # never
    complete, saved = run(""), np.load(tmp_path / "x.npz")
    for name in ("greedy_return", "w0", "b0", "w1", "b1"):
        np.testing.assert_array_equal(saved[name], complete[name])
    assert saved["interrupted"] and saved["timesteps"].shape == (2, 2)
    np.testing.assert_array_equal(saved["timesteps"][1], complete["timesteps"][0])
    np.testing.assert_allclose(saved["returns"].mean(axis=0), complete["returns"][0], rtol=1e-5)


def test_only_the_first_process_prints_and_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout", None)  # is restored at the end
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    results = run(f"{SMALL} --num-iterations 1", *files(tmp_path))
    assert results["b1"].shape == (1, 2)
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""
