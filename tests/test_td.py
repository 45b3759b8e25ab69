"""The three linear learners: NumPy works out by hand what they learn, Gymnasium steps."""

import dataclasses
import importlib
import io
import itertools
import json
import sys
from functools import partial
from types import SimpleNamespace

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import pytest

equal, close = np.testing.assert_array_equal, np.testing.assert_allclose
PARALLEL, REPLAY, DECAY = "parallel_td", "replay_td", "epsilon_decay_td"
SCALE = {
    "CartPole-v1": [2.4, 3.0, 0.2, 3.0],
    "MountainCar-v0": [1.2, 0.07],
    "Acrobot-v1": [1, 1, 1, 1, 6, 12],
}
# Three states: two steps before the end, and two others.
STARTS = {
    "CartPole-v1": [[2.37, 1.0, 0.0, 0.0], [0.3, 0.5, 0.1, -0.5], [0.3, 0.5, 0.1, -0.5]],
    "Acrobot-v1": [[1.6, 0.2, 1.5, 1.0], [0.1, 0.2, -2.0, 4.0], [-0.6, 0.3, 1.0, -3.0]],
}
LIMIT = {"CartPole-v1": 60, "Acrobot-v1": 500}  # 60: see Moon
SUMS = "episodes", "returns", "updates", "td_error", "q_value"

both_with_a_ring = pytest.mark.parametrize("td", [REPLAY, DECAY], indirect=True)


@pytest.fixture(scope="module", params=[PARALLEL, REPLAY, DECAY])
def td(request):
    return importlib.import_module(request.param)


# These programs run for a moment: do not let them compile for long.
quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def parse(td, flags, epsilon=0.1, ring="--buffer-size 20 --tau 0.25 --learning-starts 1"):
    """Arguments for any of the three scripts, which differ in some flags."""
    names = ["--start-e", "--end-e"] if td.__name__ == DECAY else ["--epsilon"]
    flags += "" if td.__name__ == PARALLEL else f" {ring}"
    return td.parse_args([*flags.split(), *(f"{name}={epsilon}" for name in names)])


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
    monkeypatch.setattr(td, "make", lambda name: (env, params) if "Pole" in name else make(name))
    theirs = gymnasium.make("CartPole-v1").unwrapped
    theirs.gravity = 5.0
    return theirs


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


class ByHand:
    """Environments that Gymnasium steps one after the other, and a learner, all in float64."""

    def __init__(self, args, env, state):
        self.args, self.env, self.updates = args, env, 0
        self.time = np.array(state.env_state.time)
        self.total = self.time.astype(float)
        self.states, self.weights = self.read(state), np.array(state.weights, float)
        self.centers, self.m, self.v = state.centers, 0.0, 0.0
        self.sums, self.chosen = dict.fromkeys(SUMS, 0.0), set()

    def read(self, state):
        return np.stack([getattr(state.env_state, name) for name in fields(state.env_state)], 1)

    def observe(self, state):
        if self.args.env_id == "CartPole-v1":
            return state.copy()
        first, second, *speeds = state
        return np.array([np.cos(first), np.sin(first), np.cos(second), np.sin(second), *speeds])

    def greedy(self):
        obs = [self.observe(one) for one in self.states]
        phi = [features(SCALE[self.args.env_id], self.args.sigma, self.centers, x) for x in obs]
        return np.argmax(phi @ self.weights, axis=1)

    def step(self, uniform, random_action, epsilon):
        """Step all environments. Return (obs, action, reward, next_obs, terminated) of each."""
        rows = []
        for i, greedy in enumerate(self.greedy()):
            obs, explores = self.observe(self.states[i]), uniform[i] < epsilon
            action = random_action[i] if explores else greedy
            self.chosen |= {(bool(explores), bool(random_action[i] == greedy))}
            self.env.reset()
            self.env.state = np.array(self.states[i], float)
            _, reward, terminated, _, _ = self.env.step(int(action))
            self.states[i] = self.env.state
            rows.append((obs, action, reward, self.observe(self.states[i]), terminated))
            self.time[i] += 1
            self.total[i] += reward
            if terminated or self.time[i] == LIMIT[self.args.env_id]:
                self.sums["episodes"] += 1
                self.sums["returns"] += self.total[i]
                self.time[i] = self.total[i] = 0
        return rows

    def learn(self, rows, next_weights, learns=True):
        """Make one Adam step. Its learning rate is 0.1 at first and falls to 0."""
        self.updates += 1
        grad, td_error, q_value = learn(self.args, self.weights, next_weights, self.centers, rows)
        self.m = 0.9 * self.m + 0.1 * learns * grad
        self.v = 0.999 * self.v + 0.001 * learns * grad**2
        mean, square = self.m / (1 - 0.9**self.updates), self.v / (1 - 0.999**self.updates)
        left = 1 - (self.updates - 1) / self.args.total_updates
        self.weights = self.weights - 0.1 * left * mean / (np.sqrt(square) + 1e-8)
        for name, value in [("updates", 1), ("td_error", td_error), ("q_value", q_value)]:
            self.sums[name] += learns * value

    def compare(self, carry):
        """Assert that the script is where this is. Take the starts of new episodes from it."""
        state, sums = carry
        new = self.time == 0
        self.states[new] = self.read(state)[new]
        assert self.args.env_id != "CartPole-v1" or np.all(self.states[new, 0] == 0.5)
        obs = [self.observe(one) for one in self.states]
        close(state.obs, obs, rtol=1e-3, atol=1e-5)
        equal(state.env_state.time, self.time)
        close(state.episode_return, self.total)
        close(state.weights, self.weights, rtol=1e-3, atol=2e-4)
        for name in SUMS:
            close(sums[name], self.sums[name], rtol=1e-3, err_msg=name)


def fields(env_state):
    return [field.name for field in dataclasses.fields(env_state) if field.name != "time"]


def blank_state(td, args, rng):
    """A state made without init_state: zeros, but for the centers and what learning needs."""
    td.make(args.env_id)  # outside of jit, as in main
    shapes = jax.eval_shape(partial(td.init_state, args), 0, 0.1)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    centers = jnp.array(rng.uniform(-1, 1, state.centers.shape), jnp.float32)
    return state._replace(key=jax.random.key(5), learning_rate=jnp.array(0.1), centers=centers)


def place(td, args, moon):
    """Two steps before an end, two before the time limit, and neither; weights are not 0."""
    rng = np.random.default_rng(1)
    env = moon if args.env_id == "CartPole-v1" else gymnasium.make(args.env_id).unwrapped
    state = blank_state(td, args, rng)
    names = fields(state.env_state)
    starts = dict(zip(names, jnp.array(STARTS[args.env_id], float).T, strict=True))
    time = jnp.array([7, LIMIT[args.env_id] - 2, 7])
    env_state = state.env_state.replace(time=time, **starts)
    state = state._replace(
        env_state=env_state,
        episode_return=time.astype(float),
        weights=jnp.array(rng.normal(size=state.weights.shape), jnp.float32),
    )
    hand = ByHand(args, env, state)
    obs = jnp.array([hand.observe(one) for one in hand.states], jnp.float32)
    carry = state._replace(obs=obs), dict.fromkeys(SUMS, jnp.zeros(()))
    return carry, hand, rng


BY_HAND = "--num-envs 3 --num-centers 9 --sigma 0.8 --gamma 0.9 --env-id"


@pytest.mark.parametrize(
    ("flags", "parallel", "ring"),
    [
        ("", *[(20, 625, 12_500, 10_000)] * 2),
        ("--total-timesteps 1000 --log-interval 300", *[(4, 16, 64, 256)] * 2),  # not 63
        ("--total-timesteps 999 --log-interval 15", *[(63, 1, 63, 16)] * 2),
        ("--total-timesteps 40 --log-interval 1000", *[(1, 3, 3, 48)] * 2),
        (
            "--total-timesteps 1050 --num-envs 10 --log-interval 300",
            (4, 14, 56, 280),
            (4, 27, 108, 270),
        ),
        (
            "--total-timesteps 100 --num-envs 3 --batch-size 10 --log-interval 30",
            (3, 3, 9, 36),
            (4, 9, 36, 27),
        ),
    ],
)
def test_sizes_by_hand(td, flags, parallel, ring):
    """All progress lines have the same number of updates; the run is rounded up for that."""
    args = parse(td, flags)
    sizes = args.num_chunks, args.chunk_updates, args.total_updates, args.chunk_timesteps
    assert sizes == (parallel if td.__name__ == PARALLEL else ring)


def test_runs_are_spread_over_devices_by_hand(td, monkeypatch):
    """Devices, runs at once on each of them, copies that fill them."""
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    monkeypatch.setattr(td, "RUNS_AT_ONCE", 16)
    assert td.spread(1, False) == (1, 1, 0)
    assert td.spread(3, False) == (3, 1, 0)
    assert td.spread(3, True) == (4, 1, 1)
    assert td.spread(6, False) == (4, 2, 2)
    assert td.spread(64, False) == (4, 16, 0)
    assert td.spread(65, False) == (4, 9, 7)  # 17 on a device: two batches of 9
    assert td.spread(400, True) == (4, 15, 20)  # 100 on a device: seven batches of 15


def test_runs_keep_their_order(td):
    """Each device takes 6 runs, 2 at once."""
    devices = min(2, jax.device_count())
    a, b = np.arange(6 * devices), np.arange(6 * devices) ** 2
    more, less = td.over_runs(lambda a, b: (a + 2 * b, b - a), devices, 2)(a, b)
    equal([more, less], [a + 2 * b, b - a])


@both_with_a_ring
def test_flags_of_the_ring_at_their_limits(td):
    flags = "--num-envs 7 --total-timesteps 40"
    parse(td, flags, ring="--buffer-size 7 --learning-starts 40")
    for ring in "--buffer-size 6 --learning-starts 40", "--buffer-size 7 --learning-starts 41":
        with pytest.raises(SystemExit):
            parse(td, flags, ring=ring)


@pytest.mark.parametrize("env_id", list(SCALE))
def test_q_values_by_hand(td, env_id):
    """Each dimension of an observation has its own scale. All actions have values."""
    rng = np.random.default_rng(0)
    args = parse(td, f"--env-id {env_id} --sigma 0.7")
    scale = np.array(SCALE[env_id])
    obs, centers = scale * rng.uniform(-1, 1, (4, len(scale))), rng.uniform(-1, 1, (len(scale), 5))
    weights = rng.normal(size=(5, 3))
    by_hand = [features(scale, 0.7, centers, one) for one in obs]
    close(td.rbf_features(args, centers, obs), by_hand, rtol=1e-4)
    values = td.q_values(args, *(jnp.array(x) for x in (weights, centers, obs)))
    close(values, by_hand @ weights, rtol=1e-3, atol=1e-5)
    assert td.OBS_SCALE == SCALE


def test_loss_and_semi_gradient_by_hand(td):
    """TD errors of 1,000 count in full. A terminal state cuts the bootstrap."""
    rng = np.random.default_rng(2)
    args = parse(td, "--env-id Acrobot-v1 --gamma 0.8 --sigma 1.5")
    obs, next_obs = rng.uniform(-1, 1, (2, 5, 6)).astype(np.float32)
    centers = rng.uniform(-1, 1, (6, 4)).astype(np.float32)
    weights, averaged = rng.normal(size=(2, 4, 3)).astype(np.float32)
    reward = np.array([1000.0, -2.0, 0.5, -1000.0, 3.0], np.float32)
    action, terminated = np.array([2, 0, 1, 2, 0]), np.array([0, 1, 0, 0, 1], bool)
    rows = list(zip(obs, action, reward, next_obs, terminated, strict=True))
    next_weights = weights if td.__name__ == PARALLEL else averaged
    grad, magnitude, taken = learn(args, weights.astype(float), next_weights, centers, rows)
    others = [] if td.__name__ == PARALLEL else [averaged]
    batch = td.Transition(*(jnp.array(x) for x in (obs, action, reward, next_obs, terminated)))
    loss = jax.jit(jax.value_and_grad(partial(td.td_loss, args), has_aux=True))
    (value, metrics), by_jax = loss(jnp.array(weights), *others, centers, batch)
    close(by_jax, grad, rtol=1e-3)
    errors = [learn(args, weights.astype(float), next_weights, centers, [row])[1] for row in rows]
    close(value, 0.5 * np.mean(np.square(errors)), rtol=1e-4)
    assert metrics.keys() == {"updates", "td_error", "q_value"} and metrics["updates"] == 1
    close(metrics["td_error"], magnitude, rtol=1e-4)
    close(metrics["q_value"], taken, rtol=1e-4)


def test_random_numbers_of_an_update(td):
    """All keys differ, numbers are uniform in [0, 1), all three actions are equally likely."""
    args = parse(td, "--env-id MountainCar-v0 --num-envs 500 --batch-size 1000", ring="")
    draws = quick_jit(jax.vmap(partial(td.draw, args)))(jax.random.split(jax.random.key(3)))
    keys, uniform, action, *batch_uniform = draws
    shape = (2, 2, 500) if td.__name__ == PARALLEL else (2, 500)
    assert keys.shape == uniform.shape == action.shape == shape
    assert [x.shape for x in batch_uniform] == [(2, 1000)] * (td.__name__ != PARALLEL)
    data = np.array(jax.random.key_data(keys)).reshape(-1, 2)
    assert len(np.unique(data, axis=0)) == len(data)
    for numbers in uniform, *batch_uniform:
        numbers = np.sort(np.ravel(numbers))
        even = (np.arange(len(numbers)) + 0.5) / len(numbers)
        assert 0 <= numbers[0] and numbers[-1] < 1 and np.abs(numbers - even).max() < 0.05
        assert len(np.unique(numbers)) > 0.99 * len(numbers)
    counts = np.bincount(np.ravel(action))
    assert len(counts) == 3 and np.all(np.abs(counts / action.size - 1 / 3) < 0.06)


def test_initial_state(td, moon):
    """Weights are 0, centers are spread over [-1, 1], each environment starts somewhere else."""
    init = jax.vmap(partial(td.init_state, parse(td, "--num-envs 4 --num-centers 300")))
    state = quick_jit(init)(np.array([3, 4]), np.array([0.1, 0.2]))
    assert state.centers.shape == (2, 4, 300)
    for dimension in range(4):
        centers = np.sort(np.ravel(state.centers[:, dimension]))
        assert np.abs(centers - np.linspace(-1, 1, 600)).max() < 0.2 and np.abs(centers).max() <= 1
    for numbers in state.centers, state.obs[..., 1:], jax.random.key_data(state.key)[:, 0]:
        assert len(np.unique(numbers)) > 0.99 * numbers.size
    assert np.all(state.obs[..., 0] == 0.5)  # what the parameters in make say
    assert np.abs(state.obs[..., 1:]).max() <= 0.05
    equal(state.obs, np.stack([getattr(state.env_state, x) for x in fields(state.env_state)], 2))
    equal(state.learning_rate, np.float32([0.1, 0.2]))
    assert state.weights.shape == (2, 300, 2) and state.episode_return.shape == (2, 4)
    zeros = [state.weights, state.opt_state, state.env_state.time, state.episode_return]
    if td.__name__ != PARALLEL:
        zeros += [state.target_weights, state.written]
        assert [x.shape for x in state.buffer] == [(2, 20, *x) for x in [(4,), (), (), (4,), ()]]
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(zeros))


@pytest.mark.parametrize("td", [DECAY], indirect=True)
@pytest.mark.parametrize(
    ("decay", "steps", "by_hand"),
    [
        (0.999, [0, 1, 1000, 4602, 4603, 10**6], [1, 0.999, 0.36769542, 0.01000868, 0.01, 0.01]),
        (1e-6, [0, 1, 10**9], [1, 0.01, 0.01]),
        (1, [0, 1, 10**9], [1, 1, 1]),
        (0.9999999, [0, 10**7], [1, 0.36787942]),
        (0.99999999, [0, 10**8], [1, 0.36787944]),  # float32 would round the decay to 1
    ],
)
def test_epsilon_by_hand(td, decay, steps, by_hand):
    args = td.parse_args(["--end-e", "0.01", "--epsilon-decay", str(decay)])
    close(td.epsilon(args, jnp.array(steps)), by_hand, rtol=1e-4)
    half = td.parse_args(["--start-e", "0.5", "--end-e", "0", "--epsilon-decay", str(decay)])
    assert td.epsilon(half, 0) == 0.5


def test_the_figure_shows_the_returns(td, monkeypatch):
    """Thin lines for runs, a bold one for each rate's median; what is nan is left out."""
    paths, nan = [], np.nan
    monkeypatch.setattr(plt, "savefig", paths.append)
    learning_rate = np.array([0.3, 0.3, 0.3, 0.1, 0.1])
    returns = np.array([[nan, nan, nan, nan, nan], [7, 1, nan, 5, 6], [9.0, 2, 4, 8, 8]])
    td.plot("a.png", learning_rate, np.array([10, 20, 30]), returns)
    axes, _ = plt.gca(), plt.close()
    lines = axes.get_lines()
    thin = [line for line in lines if line.get_linewidth() < 1]
    bold = [line for line in lines if line.get_linewidth() > 1]
    equal([line.get_ydata() for line in thin], returns.T[[3, 4, 0, 1, 2]])  # small rate first
    equal([line.get_ydata() for line in bold], [[nan, 5.5, 8], [nan, 4, 4]])
    equal([line.get_xdata() for line in (*thin, *bold)], [[10, 20, 30]] * 7)
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["median, learning rate 0.1", "median, learning rate 0.3"]
    first, second = (line.get_color() for line in bold)
    assert [line.get_color() for line in thin] == [first] * 2 + [second] * 3 and first != second
    assert axes.get_xlabel() == "environment steps"
    assert axes.get_ylabel() == "return of training episodes"
    assert paths == ["a.png"]


@pytest.mark.parametrize("env_id", list(STARTS))
@pytest.mark.parametrize("td", [PARALLEL], indirect=True)
def test_three_updates_of_two_vector_steps_by_hand(td, env_id, moon):
    """An update learns from six transitions, all made with the weights from before it."""
    args = parse(td, f"{BY_HAND} {env_id} --batch-size 4 --total-timesteps 18", epsilon=0.5)
    carry, hand, rng = place(td, args, moon)
    train_step = quick_jit(partial(td.train_step, args))
    keys = jax.random.split(jax.random.key(1), (2, 3))
    for update in range(3):
        uniform = rng.integers(8, size=(2, 3)) / 8
        action = rng.integers(hand.weights.shape[1], size=(2, 3))
        carry, _ = train_step(carry, (keys, jnp.array(uniform), jnp.array(action)))
        rows = hand.step(uniform[0], action[0], 0.5) + hand.step(uniform[1], action[1], 0.5)
        hand.learn(rows, hand.weights)
        hand.compare(carry)
        assert update > 0 or hand.sums["episodes"] == 2
    assert {(True, False), (False, False)} <= hand.chosen
    after, _ = train_step(carry, (keys, jnp.array(uniform), jnp.array(action)))
    close(after[0].weights, carry[0].weights, atol=1e-7)  # the rate is 0 now


@pytest.mark.parametrize("env_id", list(STARTS))
@both_with_a_ring
def test_four_updates_from_a_ring_by_hand(td, env_id, moon):
    """A ring of 5 takes 12 transitions. The schedules begin with the first step, Adam later."""
    starts = {"CartPole-v1": 6, "Acrobot-v1": 7}[env_id]
    ring = f"--buffer-size 5 --tau 0.25 --learning-starts {starts}"
    args = parse(td, f"{BY_HAND} {env_id} --batch-size 5 --total-timesteps 12", 0.5, ring)
    epsilons = [0.5] * 4
    if td.__name__ == DECAY:
        args.start_e, args.end_e, args.epsilon_decay = 0.75, 0.25, 0.4
        epsilons = [0.75, 0.3, 0.25, 0.25]
    (state, sums), hand, rng = place(td, args, moon)
    averaged, ring, written = rng.normal(size=state.weights.shape), {}, 0
    carry = state._replace(target_weights=jnp.array(averaged)), sums
    train_step = quick_jit(partial(td.train_step, args))
    keys = jax.random.split(jax.random.key(1), 3)
    near = [[0.5, 0.75, 0.25], [0.28, 0.31, 0.0], [0.25, 0.2, 0.5], [0.0, 0.25, 0.3]]
    for epsilon, uniform in zip(epsilons, near, strict=True):
        action = (hand.greedy() + 1) % hand.weights.shape[1]
        batch_uniform = (rng.integers(16, size=5) + 0.5) / 16
        draws = keys, jnp.array(uniform), jnp.array(action), jnp.array(batch_uniform)
        carry, _ = train_step(carry, draws)
        for row in hand.step(uniform, action, epsilon):
            ring[written % 5] = row
            written += 1
        rows = [ring[int(u * min(written, 5))] for u in batch_uniform]
        hand.learn(rows, averaged, learns=written >= starts)
        averaged = averaged + 0.25 * (hand.weights - averaged)
        hand.compare(carry)
        close(carry[0].target_weights, averaged, rtol=1e-3, atol=1e-4)
        assert carry[0].written == written and (written != 6 or hand.sums["episodes"] == 2)
    assert {(True, False), (False, False)} <= hand.chosen
    after, _ = train_step(carry, draws)
    close(after[0].weights, carry[0].weights, atol=1e-7)  # the rate is 0 now


def test_chunks_draw_fresh_numbers_and_do_not_depend_on_the_log_interval(td, monkeypatch):
    """Two chunks of half the run equal one of the whole, bit for bit; their sums start anew."""
    flags = "--num-envs 4 --batch-size 8 --num-centers 3 --total-timesteps 160 --gamma 0.9"
    seen, train_step = [], td.train_step

    def spy(args, carry, draws):
        carry, nothing = train_step(args, carry, draws)
        keys, *numbers = draws
        numbers = jax.random.key_data(keys), *numbers, carry[1]
        jax.debug.callback(lambda *numbers: seen.append(numbers), *numbers, ordered=True)
        return carry, nothing

    monkeypatch.setattr(td, "train_step", spy)
    histories = []
    for interval, by_hand in [(80, [16, 20]), (160, [36])]:  # the first four only collect
        ring = "--buffer-size 20 --learning-starts 20"
        args = parse(td, f"{flags} --log-interval {interval}", 0.1, ring)
        chunk = quick_jit(partial(td.train_chunk, args))
        state = blank_state(td, args, np.random.default_rng(0))
        for learned in by_hand:
            state, means = chunk(state)
            jax.effects_barrier()
            sums = seen[-1][-1]
            assert sums["updates"] == (args.chunk_updates if td.__name__ == PARALLEL else learned)
            sums = [sums[name] for name in SUMS]
            by_name = [means[name] for name in ("returns", "td_error", "q_value")]
            close(by_name, [sums[1] / sums[0], sums[3] / sums[2], sums[4] / sums[2]])
        *numbers, _ = zip(*seen, strict=True)
        histories.append([*map(np.stack, numbers), np.array(state.weights), np.array(state.obs)])
        seen.clear()
    for half, whole in zip(*histories, strict=True):
        equal(half, whole)
    keys, uniform, _, *batch_uniform, _, _ = histories[0]
    for numbers in keys[..., 0], uniform, *batch_uniform:
        assert len(np.unique(numbers)) == numbers.size >= 160


def test_no_key_is_used_twice(td):
    """JAX checks the keys when it traces a program; nothing has to run."""
    args = parse(td, "--num-envs 4 --batch-size 4 --eval-episodes 2 --num-centers 3")
    with jax.debug_key_reuse(True):
        state = jax.eval_shape(partial(td.init_state, args), 0, 0.01)
        jax.jit(lambda state: td.evaluate(args, td.train_chunk(args, state)[0])).trace(state)


def test_evaluation_is_one_whole_greedy_episode_from_each_start(td, moon):
    """Weights that push to where the pole leans, although training explores always."""
    args = parse(td, "--num-centers 2 --eval-episodes 9 --num-envs 2", epsilon=1.0)
    centers = np.array([[0, 0], [0, 0], [0.5, -0.5], [0, 0]], np.float32)
    weights, lengths = np.array([[0, 1], [1, 0]], np.float32), []
    state = blank_state(td, args, np.random.default_rng(0))
    state = state._replace(key=jax.random.key(58), centers=centers, weights=weights)
    env, env_params = td.make("CartPole-v1")
    for key in jax.random.split(state.key, 9):
        obs, _ = env.reset(jax.random.split(key)[0], env_params)  # as gymnax's wrapper begins
        moon.reset()
        moon.state, over = np.array(obs, float), False
        lengths.append(0)
        while not over and lengths[-1] < LIMIT["CartPole-v1"]:
            phi = features(SCALE["CartPole-v1"], args.sigma, centers, moon.state)
            over = moon.step(int(np.argmax(phi @ weights)))[2]
            lengths[-1] += 1
    returns = quick_jit(partial(td.evaluate, args))(state)
    equal(returns, lengths)
    assert len(set(lengths)) > 3 and max(lengths) == LIMIT["CartPole-v1"]


@pytest.fixture(scope="module")
def programs(td):
    """Let all the calls of main in this file share their programs."""
    made, over_runs = {}, td.over_runs
    other = {"seed", "num_seeds", "learning_rate", "save", "plot", "distributed"}

    def shared(function, num_devices, at_once):
        settings = {k: v for k, v in vars(function.args[0]).items() if k not in other}
        key = function.func.__name__, str(settings), num_devices, at_once
        if key not in made:
            made[key] = over_runs(function, num_devices, at_once)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(td, "over_runs", shared)
        yield


MAIN = "--num-envs 4 --num-centers 10 --total-timesteps 96 --log-interval 32 --eval-episodes 3"
SEEDS, RATES = np.array([7, 8, 7, 8]), np.array([0.05, 0.05, 0.0005, 0.0005])


def main(td, *flags, runs="--seed 7 --num-seeds 2 --learning-rate 0.05 0.0005"):
    ring = "" if td.__name__ == PARALLEL else "--buffer-size 50 --learning-starts 20"
    return td.main([*f"{MAIN} --batch-size 8 {runs} {ring}".split(), *flags])


def lines_of(td, args, count):
    """What main should return of the four runs after so many lines."""
    devices = min(4, jax.device_count())
    compiled = partial(td.over_runs, num_devices=devices, at_once=-(-4 // devices))
    state, lines = compiled(partial(td.init_state, args))(SEEDS, RATES), []
    for _ in range(count):
        state, metrics = compiled(partial(td.train_chunk, args))(state)
        lines.append(metrics)
    return jax.tree.map(lambda *values: np.stack(values), *lines) | {
        "seed": SEEDS,
        "learning_rate": RATES,
        "timesteps": 32 * np.arange(1, count + 1),
        "centers": np.swapaxes(state.centers, 1, 2),
        "weights": state.weights,
        "greedy_return": compiled(partial(td.evaluate, args))(state),
        "obs_scale": SCALE["CartPole-v1"],
        "sigma": 0.5,
    }


def test_what_is_printed_drawn_and_saved_is_what_happened(
    td, programs, monkeypatch, tmp_path, capsys
):
    """Two learning rates, two seeds, three lines; a clock that ticks as the test says."""
    ticks = iter([10, 13.25, 20, 21, 30, 32, 40, 44])
    monkeypatch.setattr(td, "time", SimpleNamespace(perf_counter=ticks.__next__))
    gather, count = td.gather, itertools.count(1)

    def without_episodes(tree, num_runs):
        """Say that in the second line no episode of the second run ended."""
        tree = gather(tree, num_runs)
        if next(count) == 2:
            tree["returns"] = np.where(np.arange(4) == 1, np.nan, tree["returns"])
        return tree

    monkeypatch.setattr(td, "gather", without_episodes)
    results = main(td, "--save", f"{tmp_path}/a.npz", "--plot", f"{tmp_path}/a.png")
    figure = plt.gcf()
    plt.close(figure)
    args = json.loads(results["args"])
    assert args["learning_rate"] == [0.05, 0.0005] and args["num_chunks"] == 3
    by_hand = lines_of(td, SimpleNamespace(**args), 3)
    by_hand["returns"][1, 1] = np.nan
    by_hand |= {"interrupted": False, "compile_seconds": 3.25, "train_seconds": 7}
    assert results.keys() == {"args", *by_hand}
    for name, value in by_hand.items():
        equal(results[name], value, err_msg=name)
    with np.load(tmp_path / "a.npz") as saved:
        assert set(saved) == results.keys()
        for name in saved:
            equal(saved[name], results[name], err_msg=name)
    kind, devices = jax.devices()[0].device_kind, min(4, jax.device_count())
    printed = [f"CartPole-v1, 4 runs on {devices} x {kind}", "compiled in 3.2 s"]
    returns = results["returns"]
    assert not np.all(np.isnan(returns[1])) and np.any(np.isnan(returns[0]))
    for line, speed in enumerate(["128", "85", "55"]):  # 4 runs: 128 / 1, 256 / 3, 384 / 7
        seen = returns[line][~np.isnan(returns[line])]
        mean = sum(seen) / len(seen) if len(seen) else np.nan
        td_error, q_value = results["td_error"][line].mean(), results["q_value"][line].mean()
        printed.append(
            f"step {32 * (line + 1)}  return {mean:.1f}  td_error {td_error:.3f}"
            f"  q_value {q_value:.2f}  {speed} steps/s"
        )
    for rate, runs in ("0.05", [0, 1]), ("0.0005", [2, 3]):
        first, second = results["greedy_return"][runs].mean(axis=1)
        mean, worst = (first + second) / 2, min(first, second)
        printed.append(f"learning rate {rate}: greedy return {mean:.1f}, worst run {worst:.1f}")
    assert capsys.readouterr().out.splitlines() == printed
    thin = [line for line in figure.axes[0].get_lines() if line.get_linewidth() < 1]
    equal([x.get_ydata() for x in thin], returns.T[[2, 3, 0, 1]])
    equal([x.get_xdata() for x in thin], [[32, 64, 96]] * 4)
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_ctrl_c_reports_the_lines_before_it(td, programs, monkeypatch, tmp_path, capsys):
    """Not before the first line, and not if other processes wait."""
    gather = td.gather

    def stop_in_line(line):
        count = itertools.count(1)

        def stopping(tree, num_runs):
            if next(count) == line:
                raise KeyboardInterrupt
            return gather(tree, num_runs)

        monkeypatch.setattr(td, "gather", stopping)

    stop_in_line(3)
    results = main(td, "--save", f"{tmp_path}/a.npz", "--plot", f"{tmp_path}/a.png")
    plt.close()
    assert "interrupted: the results are those of the last line\n" in capsys.readouterr().out
    by_hand = lines_of(td, SimpleNamespace(**json.loads(results["args"])), 2)
    by_hand["interrupted"] = True
    with np.load(tmp_path / "a.npz") as saved:
        for name, value in by_hand.items():
            equal(results[name], value, err_msg=name)
            equal(saved[name], value, err_msg=name)
    assert (tmp_path / "a.png").exists()
    for line, flags in (1, []), (3, ["--distributed"]):
        stop_in_line(line)
        with pytest.raises(KeyboardInterrupt):
            main(td, "--save", f"{tmp_path}/b.npz", *flags)
    assert not (tmp_path / "b.npz").exists()


def test_process_1_neither_prints_nor_writes(td, programs, monkeypatch, tmp_path):
    printed = io.StringIO()
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    results = main(td, "--save", f"{tmp_path}/a.npz", "--plot", f"{tmp_path}/a.png")
    sys.stdout.close()
    assert printed.getvalue() == "" and list(tmp_path.iterdir()) == []
    assert results["weights"].shape == (4, 10, 2)


def test_a_run_among_others_does_not_depend_on_them(td, programs):
    """Bit for bit: in four runs, and in three and a copy."""
    four, three = main(td), main(td, runs="--seed 7 --num-seeds 3 --learning-rate 0.05")
    for name in "seed", "learning_rate", "centers", "weights", "greedy_return":
        equal(three[name][:2], four[name][:2], err_msg=name)
        assert len(three[name]) == 3
    for name in "returns", "td_error", "q_value":
        equal(three[name][:, :2], four[name][:, :2], err_msg=name)
    equal(three["seed"], [7, 8, 9])
    assert np.all(three["centers"][2] != three["centers"][1])


def test_learned_weights_play_in_gymnasium(td, capsys):
    flags = "--seed 2 --total-timesteps 40000 --num-centers 200 --eval-episodes 20".split()
    results, env = td.main(flags), gymnasium.make("CartPole-v1")
    kind = jax.devices()[0].device_kind
    assert capsys.readouterr().out.startswith(f"CartPole-v1, 1 run on 1 x {kind}\n")
    centers, weights, returns = results["centers"][0].T, results["weights"][0], np.zeros(15)
    for episode in range(15):
        obs, _ = env.reset(seed=episode)
        over = False
        while not over:
            phi = features(results["obs_scale"], results["sigma"], centers, obs)
            obs, reward, terminated, truncated, _ = env.step(np.argmax(phi @ weights))
            over = terminated or truncated
            returns[episode] += reward
    greedy = results["greedy_return"]
    error = 4 * greedy.std() / np.sqrt(15) + 1
    assert returns.mean() > 150 and abs(returns.mean() - greedy.mean()) < error, returns
