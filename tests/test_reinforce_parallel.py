"""reinforce_parallel.py: distributions, episodes against Gymnasium, the gradient by enumeration.

The fixture `learning` trains on a changed CartPole-v1 for two intervals, and records each update.
`expected_loss` is a network, a policy and a loss of our own, which say what each update must be.
"""

from functools import partial
from operator import itemgetter
from types import SimpleNamespace

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import POLICY_LOSS, Noise, assert_independent, halves, jit, one_run, watch
from gymnax.environments import spaces
from scipy.special import softmax
from scipy.stats import kstest, norm

import reinforce_parallel as rp

close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)  # sums in single precision
DRAWS = 20_000


def forward(params, obs):
    return np.tanh(obs @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]


def random_params(actions):
    rng = np.random.default_rng(0)
    shapes = {"w0": (3, 8), "b0": 8, "w1": (8, actions), "b1": actions}
    return {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}


def draw(policy):
    keys = jax.random.split(jax.random.key(0), DRAWS)
    return np.asarray(jax.jit(jax.vmap(policy.sample))(keys))


def test_discrete_actions_have_the_probabilities_of_a_softmax():
    params, obs = random_params(4), np.ones(3)
    policy, p = rp.policy(params, obs), softmax(forward(params, obs))
    counts = np.bincount(draw(policy), minlength=4)
    assert np.all(np.abs(counts - DRAWS * p) < 5 * np.sqrt(DRAWS * p * (1 - p)))
    close([policy.log_prob(action) for action in range(4)], np.log(p))
    assert policy.mode() == np.argmax(p)


def test_continuous_actions_are_normal_around_their_mean():
    params, obs, log_std = random_params(2), np.ones(3), np.array([3.0, -5.0])
    policy = rp.policy(params | {"log_std": log_std}, obs)
    mean, std = forward(params, obs), np.exp(log_std)
    close(policy.mode(), mean)
    noise = (draw(policy) - mean) / std
    assert all(kstest(column, norm.cdf).statistic < 2.5 / DRAWS**0.5 for column in noise.T)
    assert abs(np.corrcoef(noise.T)[0, 1]) < 5 / DRAWS**0.5
    action = mean + np.array([1, -2])
    close(policy.log_prob(action), norm.logpdf(action, mean, std).sum())


class Echo(Noise):
    """The reward is the sum of the action. Bounds are -1 and 3, -1 and 7, -1 and 11, ..."""

    shape = ()

    def step_env(self, key, state, action, params):
        assert action.shape == self.shape
        obs, state, _, terminated, info = super().step_env(key, state, 0, params)
        return obs, state, jnp.sum(action), terminated, info

    def action_space(self, params):
        high = 3.0 + 4 * np.arange(np.prod(self.shape, dtype=int)).reshape(self.shape)
        return spaces.Box(jnp.full(self.shape, -1.0), jnp.array(high), self.shape)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_continuous_actions_are_clipped_and_scaled_to_their_bounds(shape):
    env = Echo()
    env.shape = shape
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
    state = jit(rp.init_state, run)()
    episode = jit(rp.play, run)(state.params, jax.random.key(0))
    cosine, sine, speed = episode.obs.T
    assert np.abs(episode.action).max() > 1  # actions are kept as drawn, and clipped afterwards
    torque = 3 * episode.action[:, 0].clip(-1, 1)
    cost = np.arctan2(sine, cosine) ** 2 + 0.1 * speed**2 + 0.001 * torque**2
    close(episode.reward, -cost, rtol=1e-3)  # near the top, the angle loses digits


def test_a_network_starts_with_random_weights_of_known_size():
    flags = "--env-id Pendulum-v1 --hidden-size 999"
    state, other = [jit(rp.init_state, one_run(rp, flags, seed=seed))() for seed in (3, 4)]
    params = state.params
    assert kstest(np.ravel(params["w0"]) * 3**0.5, norm.cdf).pvalue > 1e-5  # three inputs
    assert kstest(np.ravel(params["w1"]) / 0.01, norm.cdf).pvalue > 1e-5  # nearly equal actions
    assert not params["b0"].any() and not params["b1"].any() and not params["log_std"].any()
    assert not np.any(params["w0"] == other.params["w0"])  # the seed decides
    env = Echo()
    env.shape = (2, 3)
    run = one_run(rp, env=rp.BoundedActions(env), env_params=env.default_params)
    assert jit(rp.init_state, run)().params["log_std"].shape == (6,)  # one for each number
    run = one_run(rp, "--env-id Catch-bsuite")  # its observation is a picture of 10 x 5
    assert jit(rp.init_state, run)().params["w0"].shape == (50, 64)


LIMIT = 20  # steps: some poles fall before
CHANGES = {"gravity": 20.0, "force_mag": 6.0, "x_threshold": 1.0}


class Pole(gymnax.environments.CartPole):
    """A push to the right costs 0.3. The cart starts halfway to the right end."""

    def step_env(self, key, state, action, params):
        obs, state, reward, terminated, info = super().step_env(key, state, action, params)
        return obs, state, reward - 0.3 * action, terminated, info

    def reset_env(self, key, params):
        _, state = super().reset_env(key, params)
        state = state.replace(x=state.x + params.x_threshold / 2)
        return self.get_obs(state), state


def play_in_gymnasium(episode):
    """Play an episode's actions in Gymnasium. Return the observations before each, and rewards."""
    env, seen, rewards = gymnasium.make("CartPole-v1").unwrapped, [], []
    vars(env).update(CHANGES)
    env.state = np.float64(episode.obs[0])
    for action in episode.action.tolist():
        seen.append(env.state)
        rewards.append(1 - 0.3 * action)
        _, _, terminated, *_ = env.step(action)
        if terminated:
            break
    return seen, rewards


def episodes_of(update):
    return [jax.tree.map(itemgetter(i), update.episodes) for i in range(5)]


def train(sync, env=None, params=None):
    """A record of two intervals of three updates (5, rounded up), from five episodes each."""
    patch = pytest.MonkeyPatch()
    flags = "--num-iterations 5 --num-intervals 2 --num-envs 5 --eval-episodes 7 --hidden-size 8"
    flags += f" --sync {sync} --learning-rate 0.05 --gamma 0.9"
    pole_params = Pole().default_params.replace(max_steps_in_episode=LIMIT, **CHANGES)
    run = one_run(rp, flags, env=env or Pole(), env_params=params or pole_params)
    updates = watch(patch, rp, POLICY_LOSS)
    state, interval, lines = jit(rp.init_state, run)(), jit(rp.train_interval, run), []
    for _ in range(2):
        state, metrics = interval(state)
        lines.append(metrics)
    jax.effects_barrier()
    patch.undo()
    return SimpleNamespace(run=run, lines=lines, updates=updates, last=state.params)


@pytest.fixture(scope="module")
def learning():
    return train("padding")


@pytest.fixture(scope="module")
def cut_to_shortest():
    return train("truncation")


def test_updates_learn_from_episodes_that_gymnasium_plays(learning):
    for update in learning.updates:
        for episode in episodes_of(update):
            seen, rewards = play_in_gymnasium(episode)
            n = len(seen)
            close(episode.obs[:n], seen)
            assert episode.mask.tolist() == [True] * n + [False] * (LIMIT - n)
            close(episode.reward, rewards + [0] * (LIMIT - n))


def test_the_record_has_episodes_that_fall_and_episodes_that_reach_the_limit(learning):
    """Else the tests around this one would prove less than they say."""
    lengths = {n for update in learning.updates for n in update.episodes.mask.sum(axis=1)}
    assert len(lengths) > 3 and LIMIT in lengths


def test_truncation_learns_up_to_the_end_of_the_shortest_episode(cut_to_shortest):
    for update in cut_to_shortest.updates:
        rewards = [play_in_gymnasium(episode)[1] for episode in episodes_of(update)]
        n = min(map(len, rewards))
        assert update.episodes.mask.tolist() == [[True] * n + [False] * (LIMIT - n)] * 5
        close(update.episodes.reward[:, :n], [expected[:n] for expected in rewards])
        assert not update.episodes.reward[:, n:].any()


@pytest.mark.parametrize("fixture", ["learning", "cut_to_shortest"])
def test_a_progress_line_describes_whole_episodes(fixture, request):
    record, timesteps = request.getfixturevalue(fixture), 0
    for line, updates in zip(record.lines, halves(record.updates), strict=True):
        rewards = [play_in_gymnasium(x)[1] for update in updates for x in episodes_of(update)]
        timesteps += sum(map(len, rewards))
        assert line["timesteps"] == timesteps
        close(line["returns"], sum(map(sum, rewards)) / 15)  # three updates from five episodes


def test_advantages_are_discounted_returns_to_go_less_their_mean(learning, cut_to_shortest):
    for update in learning.updates + cut_to_shortest.updates:
        returns = np.zeros((5, LIMIT + 1))
        for t in reversed(range(LIMIT)):
            returns[:, t] = update.episodes.reward[:, t] + 0.9 * returns[:, t + 1]
        close(update.advantage, returns[:, :-1] - returns[:, :-1].mean(axis=0))


def expected_loss(params, episodes, advantage):
    """Minus the mean over episodes of advantage times log pi, summed over real steps."""
    output = jnp.tanh(episodes.obs @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]
    if "log_std" in params:
        scaled = (episodes.action - output) / jnp.exp(params["log_std"])
        terms = -(scaled**2) / 2 - params["log_std"] - jnp.log(2 * jnp.pi) / 2
        log_prob = jnp.sum(terms, axis=-1)
    else:
        taken = jax.nn.one_hot(episodes.action, 2)
        log_prob = jnp.sum(taken * output, axis=-1) - jnp.log(jnp.sum(jnp.exp(output), axis=-1))
    return -jnp.sum(episodes.mask * advantage * log_prob) / len(episodes.mask)


def assert_adam_steps(record):
    """Adam steps along the gradient of `expected_loss`, by all parameters, with a falling size."""
    slope = jax.jit(jax.grad(expected_loss))
    adam = optax.adam(lambda count: 0.05 * (1 - count / 6))
    moments, update_of = adam.init(record.last), jax.jit(adam.update)
    after = [update.params for update in record.updates[1:]] + [record.last]
    for update, params in zip(record.updates, after, strict=True):
        gradient = slope(update.params, update.episodes, update.advantage)
        step, moments = update_of(gradient, moments)
        jax.tree.map(close, params, jax.tree.map(np.add, update.params, step))


def test_each_update_is_an_adam_step_whose_size_falls(learning):
    assert_adam_steps(learning)


def test_continuous_actions_are_learned_by_the_same_adam_steps():
    env, params = gymnax.make("Pendulum-v1")
    assert_adam_steps(train("padding", rp.BoundedActions(env), params))


def noise_run(num_envs=100, **own):
    flags = f"--num-envs {num_envs} --num-iterations 3 --num-intervals 1 --eval-episodes 4"
    params = Noise().default_params.replace(max_steps_in_episode=30)
    return one_run(rp, flags, env=Noise(), env_params=params, **own)


def test_actions_of_other_steps_episodes_updates_and_runs_are_independent(monkeypatch):
    """An untrained policy: each of three actions is taken in a third of the steps."""
    of_run, updates = [], watch(monkeypatch, rp, POLICY_LOSS)
    for seed in (1, 2):
        updates.clear()
        run = noise_run(seed=seed, learning_rate=0.0)
        jit(rp.train_interval, run)(jit(rp.init_state, run)())
        jax.effects_barrier()
        of_run.append(np.stack([update.episodes.action for update in updates]))  # (3, 100, 30)
    p, (one, other) = [1 / 3] * 3, of_run
    assert_independent(one[1:], one[:-1], p)
    assert_independent(one[:, 1:], one[:, :-1], p)
    assert_independent(one[:, :, 1:], one[:, :, :-1], p)
    assert_independent(one, other, p)


def test_environments_never_get_the_same_random_numbers_twice(monkeypatch):
    """Neither in other steps, episodes, updates or runs, nor in evaluation."""
    starts = watch(monkeypatch, Noise, "reset_env", ordered=False)
    steps = watch(monkeypatch, Noise, "step_env", ordered=False)
    for seed in (1, 2):
        run = noise_run(num_envs=20, seed=seed)
        state, _ = jit(rp.train_interval, run)(jit(rp.init_state, run)())
        jit(rp.evaluate, run)(state)
        jax.effects_barrier()
    seen = [record.out[0] for record in starts + steps]
    assert len(np.unique(seen, axis=0)) == len(seen) > 2 * (3 * 20 + 4) * 30


def test_greedy_episodes_have_the_most_probable_actions_and_their_rewards(learning):
    """Seven episodes of a policy that mostly pushes to where the pole leans or falls."""
    falls = np.array([[0.0], [0.0], [10.0], [1.0]])  # 10 theta + theta_dot
    params = {"w0": falls, "b0": np.zeros(1), "w1": np.array([[-1.0, 1.0]]), "b1": np.zeros(2)}
    state = rp.TrainState(jax.random.key(0), params, None, 0)
    run = SimpleNamespace(**vars(learning.run) | {"gif": "x.gif"})  # so an episode is returned
    evaluation = jax.device_get(jit(rp.evaluate, run)(state))
    returns, episode = evaluation["greedy_return"], evaluation["episode"]
    leans = 10 * episode.obs[:, 2] + episode.obs[:, 3]
    assert episode.action.tolist() == (leans > 0).tolist()
    assert 0 < episode.action.mean() < 1
    _, rewards = play_in_gymnasium(episode)
    close(returns[0], sum(rewards))
    assert returns.shape == (7,)


class Impatient(Noise):
    """The environment itself gives up after 3 steps."""

    def is_truncated(self, state, params):
        return state.time >= 3


def test_an_episode_that_is_truncated_sooner_is_padded():
    run = noise_run()
    run.env = Impatient()
    episode = jit(rp.play, run)(jit(rp.init_state, run)().params, jax.random.key(0))
    assert episode.mask.tolist() == [True] * 3 + [False] * 27


def test_a_film_shows_the_states_of_the_first_greedy_episode_up_to_its_end(monkeypatch):
    """The pole falls after less than 30 of 500 steps. Frames are what was observed."""
    films = []

    class Visualizer:
        def __init__(self, env, env_params, states, rewards):
            films.append((states, rewards))

        def animate(self, path):
            assert path == "x.gif"

    monkeypatch.setattr("gymnax.visualize.Visualizer", Visualizer)
    run = one_run(rp, "--gif x.gif --eval-episodes 2", env=Pole())
    params = {"w0": np.zeros((4, 1)), "b0": np.zeros(1), "w1": np.zeros((1, 2))}
    state = rp.TrainState(jax.random.key(0), params | {"b1": np.array([0.0, 1.0])}, None, 0)
    learned = jit(rp.evaluate, run)(state)
    rp.animate(run, jax.tree.map(lambda array: np.asarray(array)[None], learned))  # of one run
    [(states, rewards)] = films
    length = round(float(learned["greedy_return"][0]) / 0.7)  # pushes to the right cost 0.3
    assert len(states) == length < 30
    shown = [[state.x, state.x_dot, state.theta, state.theta_dot] for state in states]
    close(shown, learned["episode"].obs[:length], atol=1e-6)
    close(rewards[:length], 0.7 * np.arange(1, length + 1))


def test_a_film_shows_run_0_and_at_most_200_steps(monkeypatch):
    """Two runs of 300 steps. A state is the number of its step, or 300 more in run 1."""
    films = []

    def visualizer(env, env_params, states, rewards):
        films.append(states)
        return SimpleNamespace(animate=len)

    monkeypatch.setattr("gymnax.visualize.Visualizer", visualizer)
    t = np.arange(600).reshape(2, 300)
    rp.animate(one_run(rp, "--gif x.gif"), {"episode": rp.Step(t, t, t, t >= 0, t)})
    assert films == [[*range(200)]]
