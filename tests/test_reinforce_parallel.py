"""reinforce_parallel.py: distributions, episodes against Gymnasium, the gradient by enumeration.

`recorded` trains on the pole of environments.py for two intervals, and records each update.
`expected_loss` is a network, a policy and a loss of our own, which say what each update must be.
test_evaluation.py has its greedy episodes.
"""

from functools import cache, partial
from operator import itemgetter
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import RARE, halves, jit, one_run, train, watch
from environments import LIMIT, Echo, Noise, noise_run, play_in_gymnasium, pole_run
from oracles import random_params, tanh_network
from scipy.special import softmax
from scipy.stats import kstest, norm

import reinforce_parallel as rp

close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)  # sums in single precision
DRAWS = 20_000


def network(num_actions):
    """Parameters of a network with three inputs."""
    shapes = {"w0": (3, 8), "b0": 8, "w1": (8, num_actions), "b1": num_actions}
    return random_params(0, {name: np.zeros(shape) for name, shape in shapes.items()})


def draw(params, obs):
    keys = jax.random.split(jax.random.key(0), DRAWS)
    return np.asarray(jax.jit(jax.vmap(partial(rp.sample_action, params, obs)))(keys))


def test_discrete_actions_have_the_probabilities_of_a_softmax():
    params, obs = network(4), np.ones(3)
    p = softmax(tanh_network(params, obs))
    counts = np.bincount(draw(params, obs), minlength=4)
    assert np.all(np.abs(counts - DRAWS * p) < 5 * np.sqrt(DRAWS * p * (1 - p)))
    close([rp.log_prob(params, obs, action) for action in range(4)], np.log(p))
    assert rp.best_action(params, obs) == np.argmax(p)


def test_continuous_actions_are_normal_around_their_mean():
    log_std, obs = np.array([3.0, -5.0]), np.ones(3)
    params = network(2) | {"log_std": log_std}
    mean, std = tanh_network(params, obs), np.exp(log_std)
    close(rp.best_action(params, obs), mean)
    noise = (draw(params, obs) - mean) / std
    assert all(kstest(column, norm.cdf).pvalue > RARE for column in noise.T)
    assert abs(np.corrcoef(noise.T)[0, 1]) < 5 / DRAWS**0.5
    action = mean + np.array([1, -2])
    close(rp.log_prob(params, obs, action), norm.logpdf(action, mean, std).sum())


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_continuous_actions_are_clipped_and_scaled_to_their_bounds(shape):
    env = Echo(shape)
    action, state = np.linspace(-2, 2, int(np.prod(shape))), env.reset(jax.random.key(0))[1]
    _, _, reward, *_ = rp.BoundedActions(env).step(jax.random.key(0), state, action)
    low, high = -1, 3 + 4 * np.arange(len(action))  # of each number
    close(reward, np.sum(low + (high - low) * (action.clip(-1, 1) + 1) / 2))


# Episodes of at most three steps: action 0 ends an episode, action 1 goes on. So there are four.
ACTIONS = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
REWARDS = np.array([[5.0, 0, 0], [1, -2, 0], [1, 3, 4], [1, 3, 7]])
MASK = np.array([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]], bool)


def probabilities(logits):  # of the four episodes
    return jnp.prod(jax.nn.softmax(logits)[ACTIONS], axis=1, where=MASK)


def test_the_gradient_is_unbiased_for_episodes_of_unequal_length():
    """Its expectation over all batches of two is 1 / 2 of the exact one, by enumeration.

    The factor (N - 1) / N comes from the baseline, which includes the episode's own return.
    """
    logits = np.array([-0.3, 0.2])
    params = {"w0": np.zeros((1, 1)), "b0": np.zeros(1), "w1": np.zeros((1, 2)), "b1": logits}
    p, estimate = probabilities(logits), 0
    advantages = jit(rp.advantages, one_run(rp, gamma=1.0))
    slope = jax.jit(jax.grad(rp.policy_loss))
    for i, j in np.ndindex(4, 4):
        rows = [i, j]
        episodes = rp.Step(np.zeros((2, 3, 1)), ACTIONS[rows], REWARDS[rows], MASK[rows], None)
        estimate -= p[i] * p[j] * slope(params, episodes, advantages(episodes))["b1"]
    exact = jax.grad(lambda logits: probabilities(logits) @ REWARDS.sum(axis=1))(logits)
    close(estimate, exact / 2)


def test_equal_episodes_have_no_advantage_at_all():
    """Adam would turn a rounding error into a full step."""
    shape = (7, 99)  # episodes, steps
    equal = rp.Step(np.zeros(shape), np.zeros(shape), np.full(shape, 0.1), np.ones(shape), None)
    assert not jit(rp.advantages, one_run(rp))(equal).any()


def test_the_reward_of_a_pendulum_is_that_of_its_torque():
    run = one_run(rp, "--env-id Pendulum-v1")
    run.env_params = run.env_params.replace(max_torque=3.0)
    state = rp.init_state(run)
    episode = jit(rp.play, run)(state.params, jax.random.key(0))
    cosine, sine, speed = episode.obs.T
    assert np.abs(episode.action).max() > 1  # actions are kept as drawn, and clipped afterwards
    torque = 3 * episode.action[:, 0].clip(-1, 1)
    cost = np.arctan2(sine, cosine) ** 2 + 0.1 * speed**2 + 0.001 * torque**2
    close(episode.reward, -cost, rtol=1e-3)  # near the top, the angle loses digits


def test_a_network_starts_with_random_weights_of_known_size():
    flags = "--env-id Pendulum-v1 --hidden-size 999"
    state, other = [rp.init_state(one_run(rp, flags, seed=seed)) for seed in (3, 4)]
    params = state.params
    assert kstest(np.ravel(params["w0"]) * 3**0.5, norm.cdf).pvalue > RARE  # three inputs
    assert kstest(np.ravel(params["w1"]) / 0.01, norm.cdf).pvalue > RARE  # nearly equal actions
    assert not params["b0"].any() and not params["b1"].any() and not params["log_std"].any()
    assert not np.any(params["w0"] == other.params["w0"])  # the seed decides
    env = Echo((2, 3))
    run = one_run(rp, env=rp.BoundedActions(env), env_params=env.default_params)
    assert rp.init_state(run).params["log_std"].shape == (6,)  # one for each number
    run = one_run(rp, "--env-id Catch-bsuite")  # its observation is a picture of 10 x 5
    assert rp.init_state(run).params["w0"].shape == (50, 64)


def play_again(episode):
    """Observations before the steps of an episode and its rewards, as Gymnasium has them."""
    seen, rewards = play_in_gymnasium(episode.obs[0], lambda t, _: episode.action[t])
    return seen[:-1], rewards


def episodes_of(update):
    return [jax.tree.map(itemgetter(i), update.episodes) for i in range(5)]


FLAGS = "--num-iterations 5 --num-intervals 2 --num-envs 5 --eval-episodes 7 --hidden-size 8"
FLAGS += " --learning-rate 0.05 --gamma 0.9"


@cache
def recorded(flags="", run_of=pole_run):
    """A record of two intervals of three updates (5, rounded up), from five episodes each."""
    run = run_of(rp, f"{FLAGS} {flags}")
    with pytest.MonkeyPatch.context() as patch:
        updates = watch(patch, rp, "policy_loss", "params episodes advantage")
        last, lines = train(rp, run, rp.init_state(run))
    return SimpleNamespace(lines=lines, updates=updates, last=last.params, timesteps=last.timesteps)


TRUNCATION = "--sync truncation"


def test_updates_learn_from_episodes_that_gymnasium_plays():
    lengths = set()
    for update in recorded().updates:
        for episode in episodes_of(update):
            seen, rewards = play_again(episode)
            n = len(seen)
            lengths.add(n)
            close(episode.obs[:n], seen)
            assert episode.mask.tolist() == [True] * n + [False] * (LIMIT - n)
            close(episode.reward, rewards + [0] * (LIMIT - n))
    assert len(lengths) > 3 and LIMIT in lengths  # some poles fall, others reach the time limit


def test_truncation_learns_up_to_the_end_of_the_shortest_episode():
    for update in recorded(TRUNCATION).updates:
        rewards = [play_again(episode)[1] for episode in episodes_of(update)]
        n = min(map(len, rewards))
        assert update.episodes.mask.tolist() == [[True] * n + [False] * (LIMIT - n)] * 5
        close(update.episodes.reward[:, :n], [expected[:n] for expected in rewards])
        assert not update.episodes.reward[:, n:].any()


@pytest.mark.parametrize("flags", ["", TRUNCATION])
def test_a_progress_line_describes_whole_episodes(flags):
    timesteps, record = 0, recorded(flags)
    for line, updates in zip(record.lines, halves(record.updates), strict=True):
        rewards = [play_again(x)[1] for update in updates for x in episodes_of(update)]
        timesteps += sum(map(len, rewards))
        assert line["episodes"] == 15  # three updates from five episodes
        close(line["returns"], sum(map(sum, rewards)) / 15)
    assert record.timesteps == timesteps


def test_advantages_are_discounted_returns_to_go_less_their_mean():
    for update in recorded().updates + recorded(TRUNCATION).updates:
        returns = np.zeros((5, LIMIT + 1))
        for t in reversed(range(LIMIT)):
            returns[:, t] = update.episodes.reward[:, t] + 0.9 * returns[:, t + 1]
        close(update.advantage, returns[:, :-1] - returns[:, :-1].mean(axis=0))


def expected_loss(params, episodes, advantage):
    """Minus the mean over episodes of advantage times log pi, summed over real steps."""
    output = jnp.tanh(episodes.obs @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]
    if "log_std" in params:
        terms = jax.scipy.stats.norm.logpdf(episodes.action, output, jnp.exp(params["log_std"]))
    else:
        terms = jax.nn.one_hot(episodes.action, 2) * jax.nn.log_softmax(output)
    log_prob = jnp.sum(terms, axis=-1)
    return -jnp.sum(episodes.mask * advantage * log_prob) / len(episodes.mask)


@pytest.mark.parametrize(("flags", "run_of"), [("", pole_run), ("--env-id Pendulum-v1", one_run)])
def test_each_update_is_an_adam_step_along_the_gradient_of_the_expected_loss(flags, run_of):
    """By all parameters. Its size falls to 0 in the five updates that were asked for."""
    record = recorded(flags, run_of)
    slope = jax.jit(jax.grad(expected_loss))
    adam = optax.adam(lambda count: 0.05 * jnp.maximum(0, 1 - count / 5))
    moments, update_of = adam.init(record.last), jax.jit(adam.update)
    after = [update.params for update in record.updates[1:]] + [record.last]
    for update, params in zip(record.updates, after, strict=True):
        gradient = slope(update.params, update.episodes, update.advantage)
        step, moments = update_of(gradient, moments)
        expected = jax.tree.map(np.add, update.params, step)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), params, expected)


def test_continuous_actions_are_learned_from_where_nothing_is_replaced():
    run = one_run(rp, "--env-id MountainCarContinuous-v0 --num-envs 2 --hidden-size 8")
    first = rp.init_state(run)
    last, metrics = jit(rp.train_step, run)(first, None)
    assert last.timesteps > 0 and metrics["returns"] < 0  # each push costs
    for name, array in last.params.items():
        assert np.isfinite(array).all() and not np.array_equal(array, first.params[name])


def test_an_episode_that_is_truncated_sooner_is_padded(monkeypatch):
    """The environment itself gives up after 3 steps."""
    monkeypatch.setattr(Noise, "is_truncated", lambda self, state, params: state.time >= 3)
    run = noise_run(rp, "")
    episode = jit(rp.play, run)(rp.init_state(run).params, jax.random.key(0))
    assert episode.mask.tolist() == [True] * 3 + [False] * 2


def film(monkeypatch, run, params, seed=0):
    """Animate a run. Return the states and rewards of which gymnax is to draw a film."""
    visualizer = Mock()
    monkeypatch.setattr("gymnax.visualize.Visualizer", visualizer)
    monkeypatch.setattr(rp, "make_env", lambda args: (run.env, run.env_params))
    rp.animate(rp.parse_args(["--gif", "x.gif", "--seed", str(seed)]), {"params": params})
    visualizer.return_value.animate.assert_called_once_with("x.gif")
    _, _, states, rewards = visualizer.call_args.args
    return states, rewards


def test_a_film_shows_a_greedy_episode_of_run_0_up_to_its_end_or_for_200_steps(monkeypatch):
    """Run 0 always pushes to the right, so its pole falls before the time limit."""
    run, params = pole_run(rp, ""), {"w0": np.zeros((2, 4, 1)), "b0": np.zeros((2, 1))}
    params |= {"w1": np.zeros((2, 1, 2)), "b1": np.array([[0.0, 1.0], [1.0, 0.0]])}
    states, rewards = film(monkeypatch, run, params)
    shown = [[state.x, state.x_dot, state.theta, state.theta_dot] for state in states]
    seen, paid = play_in_gymnasium(shown[0], lambda t, _: 1)
    assert len(paid) < LIMIT
    close(shown, seen[:-1])
    close(rewards[: len(paid)], np.cumsum(paid))

    starts = [film(monkeypatch, run, params, seed)[0][0].x for seed in (0, 1)]
    assert starts[0] == states[0].x != starts[1]  # the seed decides which episode

    unbounded = {"theta_threshold_radians": np.inf, "x_threshold": np.inf}  # no pole falls
    run.env_params = run.env_params.replace(max_steps_in_episode=300, **unbounded)
    states, _ = film(monkeypatch, run, params)
    assert [state.time for state in states] == [*range(200)]
