"""reinforce_parallel.py against loops in NumPy, exact gradients, episodes of prescribed lengths, and Gymnasium's own CartPole-v1."""
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
from gymnax.environments import environment, spaces

import reinforce_parallel as rp

SCRIPT = Path(rp.__file__)
BASELINES = ["mean", "time-independent", "none"]
SMALL = "--num-envs 2 --hidden-size 2 --log-interval 1 --eval-episodes 3".split()
QUICK = os.environ | dict(XLA_FLAGS="--xla_backend_optimization_level=0")  # compiles sooner, where neither speed nor bits matter


def start(*flags, **options):
    """Start the script, its output as text."""
    return subprocess.Popen([sys.executable, str(SCRIPT), *map(str, flags)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def finish(process):
    """Wait for the script's end; returns standard output, standard error and exit code."""
    try:
        return *process.communicate(timeout=240), process.returncode
    finally:
        process.kill()


@pytest.fixture(scope="module", autouse=True)
def quick():
    """What is called from here compiles sooner, and is slower."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """What takes long: started when the first is asked for, it runs beside the tests that follow; {name: process}, and their folder."""
    folder = tmp_path_factory.mktemp("programs")
    film = ["--num-iterations", 1, "--env-id", "Pendulum-v1", "--gif", folder / "x.gif", "--plot", folder / "x.png"]
    running = dict(
        learn=start("--num-seeds", 5, "--seed", 100, "--json", "--save", folder / "learn.npz"),
        film=start(*SMALL, *film, env=QUICK),
    )
    yield running, folder
    for process in running.values():
        process.kill()
        process.communicate()


def some_params(inputs, outputs, continuous, hidden=8):
    """Random parameters, those of the output as large as the others."""
    rng = np.random.default_rng(0)
    shapes = dict(w0=(inputs, hidden), b0=hidden, w1=(hidden, outputs), b1=outputs) | (dict(log_std=outputs) if continuous else {})
    return {name: jnp.asarray(rng.normal(scale=0.5, size=shape), jnp.float32) for name, shape in shapes.items()}


def constant_params(outputs, log_std=None):
    """A policy with these logits (or means) whatever it sees, which is two numbers."""
    params = dict(w0=jnp.zeros((2, 1)), b0=jnp.zeros(1), w1=jnp.zeros((1, len(outputs))), b1=jnp.array(outputs))
    return params if log_std is None else params | dict(log_std=jnp.array(log_std))


def collect(args, params, seeds, num_envs, greedy=False):
    """The script's collect, for as many runs as there are seeds."""
    one_run = jax.vmap(lambda seed: rp.collect(args, params, jax.random.key(seed), num_envs, greedy))
    return jax.tree.map(np.asarray, jax.jit(one_run)(jnp.array(seeds)))


# --- bad input


@pytest.mark.parametrize("flags, named", [("--env-id nonsense", 15), ("--gif x.gif --env-id Swimmer-misc", 8)])
def test_what_would_fit_is_named(flags, named, capsys):
    with pytest.raises(SystemExit) as stop:
        rp.parse_args(flags.split())
    error = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and [env_id in error for env_id in rp.TIME_LIMIT] == [True] * named + [False] * (15 - named)


def test_a_file_of_another_environment_is_refused(tmp_path):
    args = rp.parse_args(["--hidden-size", "3"])
    params = {name: np.ones((1, *x.shape)) for name, x in some_params(4, 2, False, hidden=3).items()}
    np.savez(tmp_path / "x.npz", args=json.dumps(vars(args)), curve_return=np.zeros((1, 1)), **params)
    load = lambda *flags: rp.load(rp.parse_args(["--evaluate", str(tmp_path / "x.npz"), *flags]))
    assert load()["w1"].shape == (1, 3, 2)
    with pytest.raises(ValueError, match="it is for --env-id CartPole-v1"):
        load("--env-id", "Pendulum-v1")


# --- the gradient


@pytest.fixture(scope="module", params=["CartPole-v1", "Pendulum-v1"])
def played(request):
    """Flags, parameters, and a batch of four episodes; those of Pendulum, which all last 200 steps, are cut by hand."""
    flags, continuous = ["--env-id", request.param], request.param == "Pendulum-v1"
    params = some_params(3, 1, True) if continuous else some_params(4, 2, False)
    batch = jax.tree.map(lambda x: x[0], collect(rp.parse_args(flags), params, [0], 4)[0])
    if continuous:
        batch = batch._replace(mask=np.arange(200)[:, None] < [1, 200, 117, 50])
    assert len(set(batch.mask.sum(axis=0))) > 1  # so that there is padding
    return flags, params, batch


@pytest.mark.parametrize("baseline", BASELINES)
def test_what_stands_in_the_padding_changes_no_bit_of_the_gradient(played, baseline):
    """Large random numbers are put there: one that counted would show."""
    flags, params, batch = played
    args, rng = rp.parse_args([*flags, "--baseline", baseline]), np.random.default_rng(0)
    def fill(x):
        noise = rng.integers(0, 2, x.shape, x.dtype) if x.dtype == np.int32 else rng.normal(scale=1e6, size=x.shape).astype(x.dtype)
        return np.where(batch.mask.reshape(*batch.mask.shape, *[1] * (x.ndim - 2)), x, noise)
    filled = rp.Batch(fill(batch.obs), fill(batch.action), fill(batch.reward), batch.mask)
    assert not any(np.array_equal(old, new) for old, new in zip(batch[:3], filled[:3]))
    gradient = jax.jit(lambda batch: rp.policy_gradient(args, params, batch))
    expected, seen = gradient(batch), gradient(filled)
    for name in params:
        assert np.isfinite(expected[name]).all() and np.any(expected[name])
        np.testing.assert_array_equal(seen[name], expected[name])


def test_gradient_is_the_mean_over_episodes_taken_one_at_a_time_unpadded(played):
    """In 64 bits: sums of many large returns of both signs agree to few digits in 32."""
    flags, params, batch = played
    args = rp.parse_args([*flags, "--baseline", "none", "--no-normalize"])
    with jax.enable_x64(True):
        params, batch = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, (params, batch))
        gradient = jax.jit(lambda batch: rp.policy_gradient(args, params, batch))
        episodes = [jax.tree.map(lambda x: x[:length, i:i + 1], batch) for i, length in enumerate(batch.mask.sum(axis=0))]
        alone, together = [gradient(episode) for episode in episodes], gradient(batch)
    for name in params:
        np.testing.assert_allclose(together[name], np.mean([one[name] for one in alone], axis=0), rtol=1e-8)


def advantages_in_numpy(args, reward, mask):
    """Returns-to-go less the mean of those of the other episodes (at that time, or at any), 0 where there are none; scaled."""
    (steps, envs), lengths = mask.shape, mask.sum(axis=0)
    returns, result = np.zeros((2, steps, envs))
    for t, i in np.argwhere(mask):
        returns[t, i] = sum(args.gamma ** (s - t) * reward[s, i] for s in range(t, lengths[i]))
    for t, i in np.argwhere(mask):
        times = [t] if args.baseline == "mean" else range(steps)
        others = [returns[s, j] for s in times for j in range(envs) if j != i and mask[s, j]]
        result[t, i] = returns[t, i] if args.baseline == "none" else returns[t, i] - np.mean(others) if others else 0.0
    return result if args.no_normalize else result / np.sqrt(np.mean(result[mask] ** 2))


@pytest.mark.parametrize("normalize", [[], ["--no-normalize"]], ids=["normalize", "as they are"])
@pytest.mark.parametrize("baseline", BASELINES)
def test_advantages_equal_a_loop_in_numpy(baseline, normalize):
    """Of episodes of many lengths, the longest of which is alone in the end; then of one that is alone all the time."""
    args, rng = rp.parse_args(["--baseline", baseline, "--gamma", "0.9", *normalize]), np.random.default_rng(1)
    for lengths in [7, 2, 12, 1, 7], [12, 12], [1, 1, 1], [4]:
        mask, reward = np.arange(12)[:, None] < lengths, rng.normal(loc=2, size=(12, len(lengths))).astype(np.float32)
        batch = rp.Batch(None, None, jnp.array(reward), jnp.array(mask))
        with np.errstate(invalid="ignore"):  # 0 / 0 where all are 0, which the script makes 0
            expected = np.nan_to_num(advantages_in_numpy(args, reward, mask))
        seen = np.asarray(rp.advantages(args, batch))
        np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-5)
        assert not seen[~mask].any()
        if normalize == [] and expected.any():
            np.testing.assert_allclose(np.mean(seen[mask] ** 2), 1.0, rtol=1e-5)


@pytest.mark.parametrize("steps", [1, 2])
def test_gradient_is_unbiased_and_a_baseline_makes_it_quieter(steps):
    """A bandit of two arms, pulled `steps` times by each of 4 environments, in 20,000 batches: the exact gradient is known.

    It lies within 4 standard errors of the mean, and 1 - 1/N of it, which an episode's own return in the baseline gives, does not.
    """
    envs, arms, params = 4, jnp.array([4.0, 3.0]), constant_params([0.3, -0.2])
    pi = np.exp([0.3, -0.2]) / np.exp([0.3, -0.2]).sum()
    exact = steps * pi[0] * (arms[0] - pi @ np.asarray(arms))

    def estimate(args, key):
        key_action, key_reward = jax.random.split(key)
        action = (jax.random.uniform(key_action, (steps, envs)) > pi[0]).astype(int)
        reward = arms[action] + 0.1 * jax.random.normal(key_reward, (steps, envs))
        batch = rp.Batch(jnp.zeros((steps, envs, 2)), action, reward, jnp.ones((steps, envs), bool))
        return -rp.policy_gradient(args, params, batch)["b1"]

    variance = {}
    for baseline in BASELINES:
        args = rp.parse_args(["--gamma", "1", "--no-normalize", "--baseline", baseline])
        estimates = np.asarray(jax.jit(jax.vmap(lambda key: estimate(args, key)))(jax.random.split(jax.random.key(0), 20_000)), float)
        mean, error = estimates.mean(axis=0), estimates.std(axis=0) / np.sqrt(20_000)
        variance[baseline] = estimates[:, 0].var()
        assert np.all(np.abs(mean - [exact, -exact]) < 4 * error), (baseline, mean, exact, error)
        assert np.all(np.abs(mean - (1 - 1 / envs) * np.array([exact, -exact])) > 4 * error), (baseline, mean, exact, error)
    assert variance["mean"] < variance["none"] / 10 and variance["time-independent"] < variance["none"] / 5


# --- the policy


def test_log_probabilities_equal_the_formulas():
    rng = np.random.default_rng(2)
    obs = rng.normal(size=(5, 3, 4)).astype(np.float32)
    for continuous in False, True:
        params = some_params(4, 3, continuous)
        output = np.tanh(obs @ np.asarray(params["w0"]) + params["b0"]) @ np.asarray(params["w1"]) + params["b1"]
        action = rng.normal(size=(5, 3, 3)).astype(np.float32) if continuous else rng.integers(0, 3, (5, 3))
        if continuous:
            std = np.exp(params["log_std"])
            expected = (-0.5 * ((action - output) / std) ** 2 - np.log(std * np.sqrt(2 * np.pi))).sum(axis=-1)
        else:
            log_pi = output - np.log(np.exp(output).sum(axis=-1, keepdims=True))
            expected = np.array([[log_pi[i, j, action[i, j]] for j in range(3)] for i in range(5)])
        np.testing.assert_allclose(rp.log_prob(params, obs, action), expected, rtol=1e-5, atol=1e-5)


def test_actions_in_bounds():
    """Each dimension has bounds of its own; beyond them it is clipped. A discrete action stays what it is."""
    box = spaces.Box(jnp.array([-2.0, 0.0]), jnp.array([2.0, 1.0]), (2,))
    action = jnp.array([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [-3.0, 7.0]])
    np.testing.assert_allclose(rp.to_bounds(box, action), [[-2, 0], [0, 0.5], [2, 1], [-2, 1]])
    np.testing.assert_array_equal(rp.to_bounds(spaces.Discrete(5), jnp.array([0, 4])), [0, 4])


# --- episodes: an environment whose episodes last as long as is drawn at their start


class Hours(NamedTuple):
    max_steps_in_episode: int


class Clock(environment.Environment):
    """Shows how many steps the episode will have, from low to high, and how many are over; pays the sum of the action."""

    def __init__(self, low, high, space):
        self.low, self.high, self.space = low, high, space

    def reset_env(self, key, params):
        return self.show(length := jax.random.randint(key, (), self.low, self.high + 1), 0), State(length, 0)

    def step_env(self, key, state, action, params):
        state = state._replace(time=state.time + 1)
        return self.show(*state), state, jnp.sum(action, dtype=float), state.time >= state.length, {}

    def show(self, length, time):
        return jnp.array([length, time], float)

    def action_space(self, params):
        return self.space

    def observation_space(self, params):
        return spaces.Box(0.0, 99.0, (2,))


class State(NamedTuple):
    length: jax.Array
    time: jax.Array


@pytest.fixture
def clock(monkeypatch):
    """Let `make` give a Clock with this range of lengths and this time limit."""
    def replace(low, high, limit=12, space=spaces.Discrete(2)):
        env = Clock(low, high, space), Hours(limit)
        monkeypatch.setattr(rp, "make", lambda _: env)
        monkeypatch.setitem(rp.TIME_LIMIT, "CartPole-v1", limit)
    return replace


@pytest.mark.parametrize("sync", ["padding", "truncation"])
@pytest.mark.parametrize("low, high, envs", [(1, 9, 6), (5, 5, 6), (99, 99, 6), (8, 16, 6), (1, 1, 6), (1, 9, 1)],
                         ids=["different", "all at once", "none before the limit", "some before the limit", "one step", "one environment"])
def test_mask_and_length_of_the_loop(clock, low, high, envs, sync):
    clock(low, high)
    batch, ended = collect(rp.parse_args(["--sync", sync]), constant_params([0.0, 0.0]), [3], envs)
    batch, ended = jax.tree.map(lambda x: x[0], batch), ended[0]
    lengths = np.minimum(batch.obs[0, :, 0], 12)
    assert (len(set(lengths)) > 2) == (high - low > 5 and envs > 1)
    last = lengths.min() if sync == "truncation" else lengths.max()  # the step with which the loop ends
    np.testing.assert_array_equal(batch.mask, np.arange(12)[:, None] < np.minimum(lengths, last))
    np.testing.assert_array_equal(ended, lengths <= last)
    assert np.all(batch.obs[:int(last), :, 0] > 0) and not any(x[int(last):].any() for x in batch)
    time = np.broadcast_to(np.arange(12)[:, None], batch.mask.shape)
    np.testing.assert_array_equal(batch.obs[..., 1][batch.mask], time[batch.mask])  # of the first episode, not of the next one
    np.testing.assert_array_equal(batch.reward, batch.action * (time < last))  # the reward stands beside the action that earned it


@pytest.mark.parametrize("sync", ["padding", "truncation"])
def test_a_run_may_be_vmapped_beside_longer_ones(clock, sync):
    """An iteration of four different runs, and of each with copies of itself: the same bits of parameters, returns, lengths."""
    clock(1, 11)
    args = rp.parse_args(["--num-envs", "3", "--hidden-size", "4", "--sync", sync])
    def one_run(seed):
        state, outcome = rp.train_iteration(args, rp.init_state(args, seed, 0.01), None)
        return state.params, state.opt_state, outcome
    iterate = jax.jit(jax.vmap(one_run))
    different = iterate(np.arange(5, 9))
    returns, lengths = map(np.asarray, different[2])
    assert len(set(lengths.max(axis=1))) >= 3 and np.isnan(returns).any() == (sync == "truncation")  # NaN: cut short
    for i in range(4):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[i], y[i]), different, iterate(np.full(4, 5 + i)))


def test_actions_are_sampled_from_the_policy_in_training_and_greedy_in_evaluation(clock):
    """20,000 actions: chi-square statistic below the 99.9 % point of 2 degrees of freedom; mean and deviation of a Gaussian."""
    args, logits = rp.parse_args([]), np.array([0.5, -1.0, 0.0])
    clock(1, 1, 1, spaces.Discrete(3))
    batch, _ = collect(args, constant_params(logits), [0], 20_000)
    expected = 20_000 * np.exp(logits) / np.exp(logits).sum()
    assert ((np.bincount(batch.action.ravel()) - expected) ** 2 / expected).sum() < 13.8
    batch, _ = collect(args, constant_params(logits), [0], 20, greedy=True)
    assert np.all(batch.action == 0)

    box, means, stds = spaces.Box(jnp.array([0.0, -5.0]), jnp.array([1.0, 5.0]), (2,)), [-0.3, 0.8], [0.5, 2.0]
    clock(1, 1, 1, box)
    params = constant_params(means, np.log(stds).astype(np.float32))
    batch, _ = collect(args, params, [0], 20_000)
    action = batch.action.reshape(-1, 2)
    assert np.all(np.abs(action.mean(axis=0) - means) < 4 * np.array(stds) / np.sqrt(20_000))
    assert np.all(np.abs(action.std(axis=0) / stds - 1) < 4 / np.sqrt(2 * 20_000))
    assert np.abs(np.corrcoef(action.T)[0, 1]) < 4 / np.sqrt(20_000)
    np.testing.assert_allclose(batch.reward.ravel(), rp.to_bounds(box, action).sum(axis=1), rtol=1e-5)  # what the environment was given
    batch, _ = collect(args, params, [0], 20, greedy=True)
    np.testing.assert_allclose(batch.action, np.broadcast_to(np.float32(means), (1, 1, 20, 2)))


def test_evaluation_is_greedy_and_plays_whole_episodes(clock):
    """Also where training cuts them short. The Clock pays 1 for action 1, which is the better one by little."""
    clock(3, 9)
    args = rp.parse_args(["--eval-episodes", "50", "--sync", "truncation"])
    evaluate = jax.vmap(lambda seed: rp.evaluate(args, constant_params([0.0, 0.1]), seed))
    returns, lengths = jax.jit(evaluate)(np.arange(1))
    np.testing.assert_array_equal(returns, lengths)
    np.testing.assert_array_equal(np.unique(lengths), np.arange(3, 10))


def train(*flags):
    """The script's train, silent."""
    return rp.train(rp.parse_args([*flags]), lambda line: None, [])[0]


def test_a_solved_run_keeps_its_parameters_while_others_go_on(clock):
    """The Clock pays for action 1: who takes it always is solved. The first run to be has the parameters of that iteration."""
    clock(8, 12)
    flags = "--num-seeds 4 --num-envs 4 --hidden-size 4 --log-interval 25 --learning-rate 0.003 --solved-at 8".split()
    every = train(*flags, "--num-iterations", "500")
    first = int(np.argmin(every["solved_at"]))
    iterations = 25 * (1 + int(np.argmax(every["curve_return"][first] >= 8)))
    assert np.isfinite(every["solved_at"]).all() and iterations < 25 * len(every["curve_timesteps"])
    then = train(*flags, "--num-iterations", str(iterations))
    for name in "w0", "b0", "w1", "b1", "solved_at":
        np.testing.assert_array_equal(every[name][first], then[name][first])
    assert not np.array_equal(every["w0"], then["w0"])


def test_only_real_steps_are_counted():
    """CartPole-v1 pays 1 for each: of 100 episodes, the sum of the returns is the number of steps."""
    result = train("--num-envs", "100", "--hidden-size", "2", "--num-iterations", "1", "--log-interval", "1")
    assert result["timesteps"] == round(100 * result["curve_return"][0, -1]) == result["curve_timesteps"][-1] > 1000


def test_no_key_is_used_twice(monkeypatch, clock):
    """One run, from seed to evaluation, under jax's checker, which takes keys in loops or under vmap for used: two steps."""
    clock(1, 9)
    args = rp.parse_args(["--num-envs", "3", "--hidden-size", "2", "--eval-episodes", "2"])
    monkeypatch.setattr(jax.lax, "while_loop", lambda going, step, carry: step(step(carry)))

    def whole_run(seed):
        state, _ = rp.train_iteration(args, rp.init_state(args, seed, 0.01), None)
        state, _ = rp.train_iteration(args, state, None)
        return rp.evaluate(args, state.params, seed)

    with jax.debug_key_reuse(True):
        jax.jit(whole_run)(0)
        with pytest.raises(jax.errors.KeyReuseError):
            jax.jit(lambda key: jax.random.uniform(key) + jax.random.uniform(key))(jax.random.key(0))


def test_time_limits_are_those_of_gymnax_and_the_first_eight_can_be_drawn():
    limits = {}
    for env_id in set(gymnax.registered_envs) - {"MNISTBandit-bsuite"}:  # which needs a download
        env, env_params = gymnax.make(env_id)
        space = env.observation_space(env_params)
        if isinstance(space, spaces.Box) and len(space.shape) == 1:
            limits[env_id] = env_params.max_steps_in_episode
    assert rp.TIME_LIMIT == limits
    from gymnax.visualize import visualizer
    drawn = [env_id for env_id in rp.TIME_LIMIT if f'"{env_id}"' in inspect.getsource(visualizer)]
    assert drawn == list(rp.TIME_LIMIT)[:8]


# --- the program


def test_what_learns_balances_gymnasiums_pole(programs):
    """And --evaluate finds again what was reported when it had learned."""
    running, folder = programs
    stdout, stderr, code = finish(running["learn"])
    assert code == 0, stderr
    runs = json.loads(stdout)["runs"]
    assert all(run["solved_at"] for run in runs), runs
    assert sum(run["eval_mean"] >= 475 for run in runs) >= 4, runs
    again, saved = start("--evaluate", folder / "learn.npz", "--json"), np.load(folder / "learn.npz")
    w0, b0, w1, b1 = (saved[name][np.argmax([run["eval_mean"] for run in runs])] for name in ("w0", "b0", "w1", "b1"))
    env, returns = gymnasium.make("CartPole-v1"), []
    for episode in range(10):
        obs, _ = env.reset(seed=episode)
        total, done = 0.0, False
        while not done:
            obs, reward, terminated, truncated, _ = env.step(int(np.argmax(np.tanh(obs @ w0 + b0) @ w1 + b1)))
            total, done = total + reward, terminated or truncated
        returns.append(total)
    stdout, *_ = finish(again)
    assert np.mean(returns) >= 475, returns
    assert [run["eval_mean"] for run in json.loads(stdout)["runs"]] == [run["eval_mean"] for run in runs]


def test_film_and_plot(programs, tmp_path):
    """Of Pendulum-v1 200 frames; of CartPole-v1, always pushing, as many as Gymnasium's pole takes to fall."""
    running, folder = programs
    rp.film(rp.parse_args(["--gif", str(tmp_path / "fall.gif"), "--seed", "5"]), constant_params([1.0, 0.0]) | dict(w0=jnp.zeros((4, 1))))
    key = jax.random.split(jax.random.split(jax.random.key(5), 5)[4], 201)[0]
    env = gymnasium.make("CartPole-v1")
    env.reset()
    env.unwrapped.state = np.asarray(gymnax.make("CartPole-v1")[0].reset(key)[0], float)
    assert PIL.Image.open(tmp_path / "fall.gif").n_frames == next(t for t in range(1, 100) if env.step(0)[2])
    assert [path.name for path in tmp_path.iterdir()] == ["fall.gif"]
    assert finish(running["film"])[1:] == ("", 0)
    assert (folder / "x.gif").read_bytes()[:4] == b"GIF8" and PIL.Image.open(folder / "x.gif").n_frames == 200
    assert (folder / "x.png").read_bytes()[:4] == b"\x89PNG"
