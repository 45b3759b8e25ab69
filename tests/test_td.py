"""The three linear learners: replayed step by step in NumPy, and played in Gymnasium."""

import importlib
from functools import cache, partial

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import adam

equal, close = np.testing.assert_array_equal, np.testing.assert_allclose
PARALLEL, REPLAY, DECAY = "parallel_td", "replay_td", "epsilon_decay_td"
SCALE = {
    "CartPole-v1": [2.4, 3.0, 0.2, 3.0],
    "MountainCar-v0": [1.2, 0.07],
    "Acrobot-v1": [1, 1, 1, 1, 6, 12],
}


@pytest.fixture(scope="module", params=[PARALLEL, REPLAY, DECAY])
def td(request):
    return importlib.import_module(request.param)


def test_sizes_by_hand(td):
    """All progress lines have the same number of updates; the run is rounded up for that.

    The random numbers of a line are held at once: it cannot be too long.
    """
    with pytest.raises(SystemExit):
        td.parse_args(["--log-interval", "1000001"])
    for flags, parallel, ring in [  # lines, updates a line, steps a line
        ("", *[(20, 625, 10_000)] * 2),
        ("--total-timesteps 1000 --log-interval 300", *[(4, 16, 256)] * 2),  # not 63 updates
        ("--total-timesteps 1000 --log-interval 15", *[(63, 1, 16)] * 2),
        ("--total-timesteps 1000 --log-interval 2000", *[(1, 63, 1008)] * 2),
        ("--num-envs 3 --batch-size 10 --log-interval 4e4", (5, 3334, 40008), (5, 13334, 40002)),
    ]:
        args = td.parse_args(flags.split())
        sizes = args.num_chunks, args.chunk_updates, args.chunk_timesteps
        assert sizes == (parallel if td.__name__ == PARALLEL else ring)
        assert args.total_updates == args.num_chunks * args.chunk_updates


@pytest.mark.parametrize("td", [DECAY], indirect=True)
def test_epsilon_by_hand(td):
    for start, decay, steps, by_hand in [
        (1, 0.999, [0, 1, 1000, 4602, 4603, 10**6], [1, 0.999, 0.36769542, 0.01000868, 0.01, 0.01]),
        (0.001, 0.5, [0, 1, 10**9], [0.01, 0.01, 0.01]),
        (1, 0.99999999, [0, 10**8], [1, 0.36787944]),  # float32 would round the decay to 1
    ]:
        args = f"--start-e {start} --end-e 0.01 --epsilon-decay {decay}".split()
        close(td.epsilon(td.parse_args(args), jnp.array(steps)), by_hand, rtol=1e-4)


def features(scale, sigma, centers, obs):
    """Features (F,) of one observation (D,), in float64; centers (F, D)."""
    distance = np.array(obs, float) / scale - centers
    return np.exp(-(distance**2).sum(axis=1) / (2 * sigma**2))


def learn(args, weights, next_weights, centers, batch):
    """Semi-gradient (F, A), TD errors and Q-values taken (B,), one transition at a time."""
    phi_of = partial(features, SCALE[args.env_id], args.sigma, centers)
    grad, errors, taken = np.zeros(weights.shape), [], []
    for obs, action, reward, next_obs, terminated in batch:
        bootstrap = 0.0 if terminated else args.gamma * max(phi_of(next_obs) @ next_weights)
        phi = phi_of(obs)
        taken.append(phi @ weights[:, action])
        errors.append(taken[-1] - (reward + bootstrap))
        grad[:, action] += errors[-1] * phi / len(batch)
    return grad, np.array(errors), np.array(taken)


@pytest.mark.parametrize("env_id", list(SCALE))
def test_loss_and_semi_gradient_by_hand(td, env_id):
    """Two and three actions. TD errors of 1,000 count in full. The scales are each dimension's."""
    rng = np.random.default_rng(2)
    args = td.parse_args(f"--env-id {env_id} --gamma 0.8 --sigma 1.5".split())
    scale, num_actions = SCALE[env_id], 2 if env_id == "CartPole-v1" else 3
    obs, next_obs = (scale * rng.uniform(-1, 1, (2, 5, len(scale)))).astype(np.float32)
    centers = rng.uniform(-1, 1, (4, len(scale))).astype(np.float32)
    weights, others = rng.normal(size=(2, 4, num_actions)).astype(np.float32)
    reward = np.array([1000.0, -2.0, 0.5, -1000.0, 3.0], np.float32)
    action = np.array([1, 0, 1, num_actions - 1, 0])
    terminated = np.array([0, 1, 0, 0, 1], bool)
    rows = list(zip(obs, action, reward, next_obs, terminated, strict=True))
    targets = [] if td.__name__ == PARALLEL else [others]
    next_weights = [weights, *targets][-1]
    grad, errors, taken = learn(args, weights.astype(float), next_weights, centers, rows)
    batch = td.Transition(*map(jnp.array, (obs, action, reward, next_obs, terminated)))
    loss = jax.jit(jax.value_and_grad(partial(td.td_loss, args), has_aux=True))
    (value, metrics), by_jax = loss(jnp.array(weights), *targets, centers.T, batch)
    close(by_jax, grad, rtol=1e-3)
    close(value, np.mean(errors**2) / 2, rtol=1e-4)
    expected = {"updates": 1, "td_error": np.mean(np.abs(errors)), "q_value": np.mean(taken)}
    close([metrics.pop(name) for name in expected], [*expected.values()], rtol=1e-4)
    assert not metrics and td.OBS_SCALE == SCALE
    drawn = td.draw(args, jax.random.key(0))[2]  # the random actions
    assert {*np.ravel(drawn)} == {*range(num_actions)}


@pytest.mark.parametrize("td", [REPLAY, DECAY], indirect=True)
def test_learning_starts_when_enough_is_written(td):
    """In vector step 5 of four environments for 17 and 20, in step 4 for 16; the ring is small."""
    flags = "--num-envs 4 --total-timesteps 20 --learning-starts 20 --buffer-size 10"
    args = td.parse_args(flags.split())
    state = td.init_state(args, 0, 0.1)

    def learn(starts):
        args.learning_starts = starts
        return td.train_chunk(args, state)[0].weights

    learn = jax.jit(jax.vmap(learn), compiler_options=td.COMPILER_OPTIONS)
    by_16, by_17, by_20, by_21 = learn(jnp.array([16, 17, 20, 21]))
    equal(by_17, by_20)
    assert by_20.any() and not by_21.any() and (by_16 != by_20).any()


class Moon(gymnax.environments.CartPole):
    """A pole whose start depends on its parameters: an x of 0.5 for a gravity of 5."""

    def reset_env(self, key, params):
        _, state = super().reset_env(key, params)
        state = state.replace(x=jnp.asarray(params.gravity / 10))
        return self.get_obs(state), state


MOON, LIMIT, MOON_SCALE = Moon(), 12, [2.0, 3.5, 0.25, 2.5]
FIRST_WEIGHTS = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
PARAMS = MOON.default_params.replace(gravity=5.0, max_steps_in_episode=LIMIT)


@cache
def vectorized(method):
    return jax.jit(jax.vmap(partial(getattr(MOON, method), params=PARAMS)))


class Replay:
    """A run in float64, one transition at a time, with the random numbers of the script's keys.

    Each update has a key of its own: progress lines change nothing that is learned.
    """

    def __init__(self, script, args, seed, learning_rate):
        self.script, self.args, self.learning_rate = script, args, learning_rate
        self.key, key_reset, key_centers = jax.random.split(jax.random.key(seed), 3)
        self.obs, self.env_state = vectorized("reset")(jax.random.split(key_reset, args.num_envs))
        shape = 4, args.num_centers
        self.centers = np.array(jax.random.uniform(key_centers, shape, float, -1, 1), float).T
        self.weights, self.averaged = FIRST_WEIGHTS.astype(float), np.zeros((args.num_centers, 2))
        self.moments, self.total = (0.0, 0.0), np.zeros(args.num_envs)
        self.ring, self.vector_steps, self.ends = {}, 0, set()

    def greedy(self, obs):
        phi = [features(MOON_SCALE, self.args.sigma, self.centers, one) for one in obs]
        return np.argmax(phi @ self.weights, axis=1)

    def epsilon(self):
        if self.script != DECAY:
            return self.args.epsilon
        decayed = self.args.start_e * self.args.epsilon_decay**self.vector_steps
        return max(self.args.end_e, decayed)

    def step(self, keys, uniform, random_action, sums):
        """Step all environments. Return (obs, action, reward, next_obs, terminated) of each."""
        action = np.where(uniform < self.epsilon(), random_action, self.greedy(self.obs))
        stepped = vectorized("step")(keys, self.env_state, action)
        obs, (self.obs, self.env_state, *rest) = self.obs, stepped
        reward, terminated, truncated, info = rest
        self.vector_steps += 1
        self.total = self.total + np.array(reward)
        for i in np.flatnonzero(terminated | truncated):
            sums["episodes"] += 1
            sums["returns"] += self.total[i]
            self.total[i] = 0
            self.ends.add((bool(terminated[i]), bool(truncated[i])))
        columns = obs, action, reward, info["final_observation"], terminated
        return list(zip(*map(np.asarray, columns), strict=True))

    def collect(self, sums):
        """Return the batch of one update, and whether to learn from it."""
        args = self.args
        self.key, key_update = jax.random.split(self.key)
        parallel = self.script == PARALLEL
        keys = jax.random.split(key_update, 3 if parallel else 4)
        shape = (-(-args.batch_size // args.num_envs) if parallel else 1), args.num_envs
        draws = zip(
            jax.random.split(keys[0], shape),
            np.array(jax.random.uniform(keys[1], shape)),
            np.array(jax.random.randint(keys[2], shape, 0, 2)),
            strict=True,
        )
        rows = [row for numbers in draws for row in self.step(*numbers, sums)]
        if parallel:
            return rows, True
        written = self.vector_steps * args.num_envs
        for slot, row in enumerate(rows, written - args.num_envs):
            self.ring[slot % args.buffer_size] = row
        uniform = np.array(jax.random.uniform(keys[3], args.batch_size))
        drawn = (uniform * np.float32(len(self.ring))).astype(int)
        return [self.ring[slot] for slot in drawn], written >= args.learning_starts

    def update(self, count, sums):
        """Make one step of Adam, whose learning rate falls to 0."""
        batch, learns = self.collect(sums)
        target = self.weights if self.script == PARALLEL else self.averaged
        grad, errors, taken = learn(self.args, self.weights, target, self.centers, batch)
        rate = self.learning_rate * (1 - count / self.args.total_updates)
        self.weights, self.moments = adam(self.weights, self.moments, learns * grad, count, rate)
        if self.script != PARALLEL:
            self.averaged = self.averaged + self.args.tau * (self.weights - self.averaged)
        sums["td_error"].extend([np.mean(np.abs(errors))] * learns)
        sums["q_value"].extend([np.mean(taken)] * learns)

    def run(self):
        """Return what each progress line shows: returns, td_error and q_value, (K,) each."""
        lines = []
        for count in range(self.args.total_updates):
            if count % self.args.chunk_updates == 0:
                sums = {"episodes": 0, "returns": 0.0, "td_error": [], "q_value": []}
                lines.append(sums)
            self.update(count, sums)
        returns = [line["returns"] / (line["episodes"] or np.nan) for line in lines]
        return returns, *([np.mean(line[x]) for line in lines] for x in ("td_error", "q_value"))

    def evaluate(self):
        """Steps that greedy episodes take in Gymnasium. They start as gymnax's wrapper does."""
        keys = jax.random.split(self.key, self.args.eval_episodes)
        starts, _ = vectorized("reset")(jnp.stack([jax.random.split(key)[0] for key in keys]))
        env = gymnasium.make("CartPole-v1", max_episode_steps=LIMIT)
        env.unwrapped.gravity = 5.0
        lengths = []
        for obs in np.array(starts, float):
            env.reset()
            env.unwrapped.state, over, length = obs, [False], 0
            while not any(over):
                obs, _, *over, _ = env.step(self.greedy([obs])[0])
                length += 1
            lengths.append(length)
        return lengths


MAIN = """--num-envs 4 --batch-size 10 --num-centers 9 --sigma 0.7 --gamma 0.8 --eval-episodes 6
    --total-timesteps 132 --log-interval 26 --seed 9 --num-seeds 2 --learning-rate 0.3 0.002"""
RING = " --buffer-size 25 --learning-starts 20 --tau 0.25"
OWN = {
    PARALLEL: " --epsilon 0.5",
    REPLAY: f" --epsilon 0.5 {RING}",
    DECAY: f" --start-e 0.9 --end-e 0.5 --epsilon-decay 0.95 {RING}",
}


def test_learning_is_that_of_an_independent_replay(td, monkeypatch):
    """Two learning rates, two seeds, some progress lines.

    A batch is larger than a vector step, the ring of 25 takes 132 transitions, four at a time, and
    learning starts with the 20th.
    """
    init_state, ends = td.init_state, set()
    first = init_state(td.parse_args([]), 9, 0.3)
    assert not first.weights.any()
    assert {len(ring) for ring in getattr(first, "buffer", [])} <= {100_000}

    def not_zero(*call):
        """Change the weights: after one step of Adam from 0, all actions have the same value."""
        return init_state(*call)._replace(weights=jnp.array(FIRST_WEIGHTS))

    for scales in SCALE, td.OBS_SCALE:
        monkeypatch.setitem(scales, "Moon", MOON_SCALE)
    monkeypatch.setattr(td, "make", lambda _: (MOON, PARAMS))
    monkeypatch.setattr(td, "init_state", not_zero)
    flags = ["--env-id", "Moon", *MAIN.split(), *OWN[td.__name__].split()]
    results, args = td.main(flags), td.parse_args(flags)
    num_lines, line_steps = (4, 36) if td.__name__ == PARALLEL else (5, 28)  # rounded up
    equal(results["timesteps"], line_steps * np.arange(1, num_lines + 1))
    for i, (seed, rate) in enumerate([(9, 0.3), (10, 0.3), (9, 0.002), (10, 0.002)]):
        replay = Replay(td.__name__, args, seed, rate)
        for name, value in zip(["returns", "td_error", "q_value"], replay.run(), strict=True):
            close(results[name][:, i], value, rtol=1e-3, atol=1e-5, err_msg=f"{name} of run {i}")
        close(results["centers"][i], replay.centers, atol=1e-6)
        close(results["weights"][i], replay.weights, rtol=1e-3, atol=1e-3)
        equal(results["greedy_return"][i], replay.evaluate())
        ends |= replay.ends
    assert ends >= {(True, False), (False, True)}  # terminated, truncated
    assert results["obs_scale"] == MOON_SCALE and results["sigma"] == 0.7


def test_learns(td, capsys):
    """A fifth of the default run. A random policy's episodes are about 20 steps long."""
    results = td.main("--seed 2 --total-timesteps 40000 --num-centers 200".split())
    kind = jax.devices()[0].device_kind
    assert capsys.readouterr().out.startswith(f"CartPole-v1, 1 run on 1 x {kind}\n")
    assert results["greedy_return"].mean() > 150
