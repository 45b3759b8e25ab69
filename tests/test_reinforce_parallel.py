"""reinforce_parallel.py: distributions, episodes against Gymnasium, the gradient by enumeration.

The fixture `learning` trains on CartPole-v1 for two intervals, and records episodes and updates.
"""

import itertools
from functools import partial
from types import SimpleNamespace

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import jit, one_run, watch
from gymnax.environments import spaces
from scipy.special import softmax
from scipy.stats import kstest, norm

import reinforce_parallel as rp

close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)  # sums in single precision
DISCRETE, CONTINUOUS = SimpleNamespace(discrete=True), SimpleNamespace(discrete=False)
DRAWS = 20_000
LIMIT = 40  # steps: some poles fall before


def forward(params, obs):
    return np.tanh(obs @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]


def random_params(actions):
    rng = np.random.default_rng(0)
    shapes = {"w0": (3, 8), "b0": 8, "w1": (8, actions), "b1": actions}
    params = {name: rng.normal(size=shape) / 2 for name, shape in shapes.items()}
    return params | {"log_std": rng.normal(size=actions)}


def draw(run, params, obs):
    keys = jax.random.split(jax.random.key(0), DRAWS)
    return np.asarray(jax.jit(jax.vmap(partial(rp.sample, run, params, obs)))(keys))


def test_a_discrete_action_is_as_likely_as_its_log_probability_says():
    params, obs = random_params(4), np.ones(3)
    p = softmax(forward(params, obs))
    close([rp.log_prob(DISCRETE, params, obs, action) for action in range(4)], np.log(p))
    counts = np.bincount(draw(DISCRETE, params, obs), minlength=4)
    assert np.all(np.abs(counts - DRAWS * p) < 5 * np.sqrt(DRAWS * p * (1 - p)))
    assert rp.greedy_action(DISCRETE, params, obs) == p.argmax()


def test_a_continuous_action_is_normal_around_its_mean():
    params, obs = random_params(2), np.ones(3)
    mean, std = forward(params, obs), np.exp(params["log_std"])
    noise = (draw(CONTINUOUS, params, obs) - mean) / std
    assert all(kstest(column, norm.cdf).statistic < 2.5 / DRAWS**0.5 for column in noise.T)
    assert abs(np.corrcoef(noise.T)[0, 1]) < 5 / DRAWS**0.5
    close(rp.greedy_action(CONTINUOUS, params, obs), mean)


def test_the_log_probability_of_a_continuous_action_is_that_of_a_normal_density():
    params, obs = random_params(2), np.ones(3)
    mean, std = forward(params, obs), np.exp(params["log_std"])
    action = mean + np.array([1, -2])
    log_prob = jax.jit(jax.value_and_grad(partial(rp.log_prob, CONTINUOUS)))
    value, slope = log_prob(params, obs, action)
    close(value, norm.logpdf(action, mean, std).sum())
    close(slope["log_std"], ((action - mean) / std) ** 2 - 1)


@pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
def test_continuous_actions_are_clipped_and_scaled_to_their_space(shape):
    for space in (
        spaces.Box(np.full(shape, -1.0), np.full(shape, 3.0), shape),
        spaces.Box(-1.0, 3.0, shape),
    ):
        env = SimpleNamespace(action_space=lambda params, space=space: space)
        run = SimpleNamespace(discrete=False, env=env, env_params=None)
        size = int(np.prod(shape))
        for of_policy, expected in (-2, -1), (-1, -1), (0.5, 2), (7, 3):
            action = rp.to_env(run, np.full(size, of_policy))
            assert action.shape == shape and np.all(action == expected)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1.0, np.inf, (2,)),
        spaces.Box(0, 2, (), dtype=np.int32),
        spaces.Tuple([spaces.Discrete(2)]),
    ],
    ids=["without a bound", "of integers in a box", "of another kind"],
)
def test_other_spaces_of_actions_are_refused(space, monkeypatch, capsys):
    env = SimpleNamespace(name="x", action_space=lambda params: space)
    monkeypatch.setattr("gymnax.make", lambda env_id: (env, None))
    with pytest.raises(SystemExit):
        rp.parse_args([])
    assert "CartPole-v1: actions must be discrete, or" in capsys.readouterr().err


# Episodes of at most three steps: action 0 ends an episode, action 1 goes on. So there are four.
ACTIONS = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
MASK = np.array([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]], bool)
REWARDS = np.array([[5.0, 1.0], [-2.0, 3.0], [4.0, 7.0]])[[0, 1, 2], ACTIONS]  # by step and action
PI = np.array([0.6, 0.4])
PROBABILITY = np.prod(PI[ACTIONS], axis=1, where=MASK)  # of each episode
TRIPLES = np.array([*itertools.product(range(4), repeat=3)])  # (64, 3) all batches of three
GAMMA = SimpleNamespace(gamma=0.5, discrete=True)


def exact_gradient():
    """The expectation of sum_t G_t grad log pi(A_t), by the logits."""
    gradient = np.zeros(2)
    for i, t in np.argwhere(MASK):
        to_go = 0.5 ** np.arange(3 - t) @ (MASK * REWARDS)[i, t:]
        gradient += PROBABILITY[i] * to_go * (np.eye(2)[ACTIONS[i, t]] - PI)
    return gradient


def all_batches():
    """Steps (64, 3, 3). What is observed in the padding is nan; rewards there are 0."""
    obs = np.where(MASK, 0, np.nan)[..., None]
    reward = np.where(MASK, REWARDS, 0)
    return rp.Step(obs[TRIPLES], ACTIONS[TRIPLES], reward[TRIPLES], MASK[TRIPLES])


def test_the_gradient_is_unbiased_for_episodes_of_unequal_length():
    """Its expectation over all batches of three is 2 / 3 of the exact one, by enumeration.

    The factor (N - 1) / N comes from the baseline, which includes the episode's own return.
    """
    params = {"w0": np.zeros((1, 1)), "b0": np.zeros(1), "w1": np.zeros((1, 2)), "b1": np.log(PI)}

    def slope(episodes):
        advantage = rp.advantages(GAMMA, episodes)
        return jax.grad(partial(rp.policy_loss, GAMMA))(params, episodes, advantage)["b1"]

    slopes = jax.jit(jax.vmap(slope))(all_batches())  # (64, 2)
    close(-PROBABILITY[TRIPLES].prod(axis=1) @ slopes, exact_gradient() * 2 / 3)


def test_the_baseline_is_the_mean_of_all_returns_to_go():
    advantage = jax.vmap(partial(rp.advantages, GAMMA))(all_batches())  # (64, 3, 3)
    close(advantage.sum(axis=1), 0)


def test_equal_episodes_have_no_advantage_at_all():
    """Adam would turn a rounding error into a full step."""
    equal = rp.Step(None, None, reward=np.full((7, 99), 0.1), mask=np.ones((7, 99), bool))
    assert not jit(rp.advantages, GAMMA)(equal).any()


def test_the_reward_of_a_pendulum_is_that_of_its_torque():
    run = one_run(rp, "--env-id Pendulum-v1")
    state = jit(rp.init_state, run)()
    episode, _ = jit(rp.play, run)(state.params, jax.random.key(0))
    cosine, sine, speed = episode.obs.T
    torque = 2 * episode.action[:, 0].clip(-1, 1)
    cost = np.arctan2(sine, cosine) ** 2 + 0.1 * speed**2 + 0.001 * torque**2
    close(episode.reward, -cost, rtol=1e-3)  # near the top, the angle loses digits


def test_actions_are_kept_as_they_were_drawn_not_as_they_were_clipped():
    """Normal around the mean, each step on its own: so their log-probabilities are right."""
    run = one_run(rp, "--env-id Pendulum-v1")
    state = jit(rp.init_state, run)()
    keys = jax.random.split(jax.random.key(0), 20)
    episodes, _ = jax.jit(jax.vmap(partial(rp.play, run, state.params)))(keys)  # (20, 200)
    noise = np.ravel(episodes.action - forward(state.params, np.asarray(episodes.obs)))
    assert kstest(noise, norm.cdf).statistic < 2.5 / len(noise) ** 0.5
    assert len(set(noise.tolist())) > 0.99 * len(noise)  # none is repeated


def test_a_network_starts_with_random_weights_of_known_size():
    flags = "--env-id Pendulum-v1 --hidden-size 999"
    params, other = (jit(rp.init_state, one_run(rp, flags, seed=seed))().params for seed in (3, 4))
    assert kstest(np.ravel(params["w0"]) * 3**0.5, norm.cdf).pvalue > 1e-5  # three inputs
    assert kstest(np.ravel(params["w1"]) / 0.01, norm.cdf).pvalue > 1e-5  # nearly equal actions
    assert not params["b0"].any() and not params["b1"].any() and not params["log_std"].any()
    assert not np.any(params["w0"] == other["w0"])  # the seed decides


def test_more_steps_than_32_bits_can_count_are_refused(capsys):
    flags = "--num-envs 8192 --num-iterations 1400 --num-intervals"  # of at most 500 steps
    with pytest.raises(SystemExit):
        rp.parse_args(f"{flags} 1".split())
    assert "--num-intervals" in capsys.readouterr().err
    assert rp.parse_args(f"{flags} 3".split()).interval_updates == 467  # 1.9e9 steps


def play_in_gymnasium(obs, choose):
    """Play from an observation on. Return the observations before each action."""
    env, seen, terminated = gymnasium.make("CartPole-v1").unwrapped, [], False
    env.reset()
    env.state = np.float64(obs)
    while not terminated and len(seen) < LIMIT:
        seen.append(env.state)
        terminated = env.step(int(choose(len(seen) - 1, env.state)))[2]
    return seen


class Pole(gymnax.environments.CartPole):
    """A pole whose start is nan if the script forgets to pass the run's own parameters."""

    def reset_env(self, key, params):
        obs, state = super().reset_env(key, params)
        return jnp.where(params.max_steps_in_episode == LIMIT, obs, jnp.nan), state


@pytest.fixture(scope="module", params=["padding", "truncation"])
def learning(request):
    """A record of two intervals of four updates, from five episodes each, and of an evaluation."""
    patch = pytest.MonkeyPatch()
    # 7 updates are rounded up to two intervals of 4.
    flags = "--num-iterations 7 --num-intervals 2 --num-envs 5 --eval-episodes 5 --hidden-size 8"
    params = Pole().default_params.replace(max_steps_in_episode=LIMIT)
    own = {"learning_rate": 0.05, "gamma": 0.9, "env": Pole(), "env_params": params}
    run = one_run(rp, f"{flags} --sync {request.param}", **own)
    updates = watch(patch, rp, "policy_loss")
    plays = watch(patch, rp, "play", ordered=False)
    starts = watch(patch, Pole, "reset", ordered=False)
    state, train = jit(rp.init_state, run)(), jit(rp.train_interval, run)
    first, halves = jax.device_get(state.params), []
    for _ in range(2):
        state, metrics = train(state)
        jax.effects_barrier()
        halves.append(SimpleNamespace(metrics=metrics, plays=plays[:], updates=updates[:]))
        plays.clear()
        updates.clear()
    returns = jit(rp.evaluate, run)(state)["greedy_return"]
    jax.effects_barrier()
    patch.undo()
    updates = halves[0].updates + halves[1].updates
    return SimpleNamespace(
        sync=request.param,
        run=run,
        first=first,
        last=jax.device_get(state.params),
        halves=halves,
        episodes=[play.out[0] for half in halves for play in half.plays],
        updates=updates,
        after=[update.params for update in updates[1:]] + [jax.device_get(state.params)],
        starts=[start.out[0] for start in starts],
        greedy_returns=returns,
    )


def length_of(episode):
    return len(play_in_gymnasium(episode.obs[0], lambda t, _: episode.action[t]))


def test_episodes_are_those_that_gymnasium_plays(learning):
    assert len(learning.episodes) == 40  # 8 updates from 5 episodes
    for episode in learning.episodes:
        seen = play_in_gymnasium(episode.obs[0], lambda t, _, played=episode: played.action[t])
        n = len(seen)
        close(episode.obs[:n], seen)
        assert episode.mask.tolist() == [True] * n + [False] * (LIMIT - n)
        assert episode.reward.tolist() == [1] * n + [0] * (LIMIT - n)
    assert len({length_of(episode) for episode in learning.episodes}) > 5


def test_updates_learn_from_whole_episodes_or_up_to_the_end_of_the_shortest(learning):
    lengths = {episode.obs[0].tobytes(): length_of(episode) for episode in learning.episodes}
    for update in learning.updates:
        played = [lengths[obs.tobytes()] for obs in update.episodes.obs[:, 0]]
        expected = played if learning.sync == "padding" else [min(played)] * 5
        assert update.episodes.mask.sum(axis=1).tolist() == expected
        assert update.episodes.reward.sum(axis=1).tolist() == expected


def test_advantages_are_discounted_returns_to_go_less_their_mean(learning):
    for update in learning.updates:
        returns = np.zeros((5, LIMIT + 1))
        for t in reversed(range(LIMIT)):
            returns[:, t] = update.episodes.reward[:, t] + 0.9 * returns[:, t + 1]
        close(update.advantage, returns[:, :-1] - returns[:, :-1].mean(axis=0))


def test_the_loss_is_the_mean_over_episodes_of_minus_advantage_times_log_probability(learning):
    for update in learning.updates:
        log_pi = np.log(softmax(forward(update.params, update.episodes.obs), axis=-1))
        taken = update.episodes.action[..., None]
        log_prob = np.take_along_axis(log_pi, taken, axis=-1)[..., 0]  # (5, LIMIT)
        terms = -update.advantage * log_prob
        close(update.out, np.sum(terms, where=update.episodes.mask) / 5)


def test_each_update_is_a_step_of_adam_whose_size_falls_to_0(learning):
    slope = jit(jax.grad(rp.policy_loss, 1), learning.run)  # checked by enumeration, above
    adam = optax.adam(lambda count: 0.05 * (1 - count / 8))
    moments, update_of = adam.init(learning.first), jax.jit(adam.update)
    for update, after in zip(learning.updates, learning.after, strict=True):
        gradient = slope(update.params, update.episodes, update.advantage)
        step, moments = update_of(gradient, moments)
        jax.tree.map(close, after, jax.tree.map(np.add, update.params, step))


def test_a_progress_line_counts_real_steps_and_shows_their_mean_return(learning):
    for half in learning.halves:
        lengths = [length_of(play.out[0]) for play in half.plays]
        assert half.metrics["timesteps"] == sum(lengths)
        close(half.metrics["returns"], np.mean(lengths))  # a reward of 1 for each step


def test_greedy_returns_are_those_of_gymnasium(learning):
    def best(t, obs):
        return forward(learning.last, obs).argmax()

    expected = [len(play_in_gymnasium(obs, best)) for obs in learning.starts[-5:]]
    assert sorted(learning.greedy_returns.tolist()) == sorted(expected)


def test_no_two_episodes_start_alike(learning):
    assert len({obs.tobytes() for obs in learning.starts}) == len(learning.starts) == 45


def test_an_animation_shows_greedy_steps_of_the_first_run(monkeypatch, tmp_path):
    drawn = []

    class Visualizer:  # in the place of gymnax's
        def __init__(self, env, params, states, rewards):
            drawn.append((states, rewards))

        def animate(self, path):
            assert path == str(tmp_path / "x.gif")

    monkeypatch.setattr("gymnax.visualize.Visualizer", Visualizer)
    flags = "--num-seeds 2 --num-iterations 1 --num-envs 2 --eval-episodes 2"
    results = rp.main([*flags.split(), "--gif", str(tmp_path / "x.gif")])
    ((states, rewards),) = drawn
    params = {name: results[name][0] for name in ("w0", "b0", "w1", "b1")}
    obs = np.array([[s.x, s.x_dot, s.theta, s.theta_dot] for s in states])
    close(obs, play_in_gymnasium(obs[0], lambda _, seen: forward(params, seen).argmax()))
    steps = int(results["greedy_return"][0, 0])  # a reward of 1 for each
    assert len(states) == steps < LIMIT
    assert rewards[:steps].tolist() == [*range(1, steps + 1)]  # added up
