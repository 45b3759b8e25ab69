"""mountaincar_env.py against Gymnasium's MountainCar-v0, and what its rollout counts and saves."""

import contextlib
import io
from functools import partial

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.wrappers import FlattenObservationWrapper, LogWrapper

import mountaincar_env as car

ENV, THEIRS = car.MountainCar(), gymnax.make("MountainCar-v0")[0]
KEY = jax.random.key(0)


def states(position, velocity, time=0):
    time = jnp.broadcast_to(jnp.int32(time), np.shape(position))
    return car.EnvState(position=jnp.float32(position), velocity=jnp.float32(velocity), time=time)


def test_cosine_within_float32():
    """Where 3 position may lie. Measured: 2.1e-7; with a term less 5.5e-6."""
    x = np.linspace(-3.6, 3.6, 100_001, dtype=np.float32)
    np.testing.assert_allclose(car.cosine(x), np.cos(np.float64(x)), rtol=0, atol=3e-7)


def test_works_in_gymnaxs_wrappers():
    env, params = LogWrapper(FlattenObservationWrapper(ENV)), car.EnvParams(max_steps_in_episode=1)
    obs, state = env.reset(KEY, params)
    *_, truncated, info = env.step(KEY, state, 1, params)
    assert obs.shape == (2,) and truncated and info["returned_episode_returns"] == -1


def test_steps_equal_gymnasiums():
    """10,000 states, many at both walls, at top speed, or rolling back from the goal."""
    rng = np.random.default_rng(0)
    position = rng.uniform(-1.5, 0.9, 10_000).clip(-1.2, 0.6)
    velocity = rng.uniform(-0.1, 0.1, 10_000).clip(-0.07, 0.07)
    env = gymnasium.make("MountainCar-v0").unwrapped
    for action in range(3):
        reached, terminated = [], []
        for state in zip(position, velocity, strict=True):
            env.state = state
            _, reward, ended, _, _ = env.step(action)
            assert reward == -1
            reached.append(env.state)  # in double precision
            terminated.append(ended)
        assert min(np.sum(np.equal(reached, -1.2)), np.sum(terminated)) > 600
        ours = jax.vmap(ENV.step, (None, 0, None))(KEY, states(position, velocity), action)
        _, _, reward, ended, truncated, info = ours
        np.testing.assert_array_equal(reward, -1)
        np.testing.assert_array_equal(ended, terminated)
        assert not truncated.any()
        np.testing.assert_allclose(info["final_observation"], reached, rtol=0, atol=1.5e-7)


@partial(jax.jit, static_argnums=0)
def outcome(env, params):
    """Spaces, and the start and one step of 1,000 cars, with parameters as an argument."""
    rng = np.random.default_rng(0)
    position, velocity = rng.uniform(-1.2, 0.6, 1000), rng.uniform(-0.07, 0.07, 1000)
    time = np.append(rng.integers(0, 9, 500), rng.integers(195, 200, 500))
    state, keys = states(position, velocity, time), jax.random.split(KEY, 1000)
    start, _ = jax.vmap(env.reset, (0, None))(keys, params)
    over = jax.vmap(env.is_terminated, (0, None))(state, params)
    step = jax.vmap(env.step, (0, 0, 0, None))
    obs, state, *rest, info = step(keys, state, jnp.arange(1000) % 3, params)
    reached, space = info["final_observation"], env.observation_space(params)
    actions = jnp.array(env.action_space(params).n)
    return start, over, obs, state.time, *rest, reached, space.low, space.high, actions


CHANGES = {"gravity": 0.004, "force": 0.003, "max_speed": 0.02, "min_position": -0.6}
CHANGES |= {"max_position": 0.2, "goal_position": -0.2, "goal_velocity": 0.03}


@pytest.mark.parametrize("name", [*CHANGES, "max_steps_in_episode"])
def test_parameters_have_the_same_effect_as_in_gymnax(name):
    """Values, shapes and types; some cars end, by goal, time limit or both, and start again."""
    changed = {name: CHANGES.get(name, 7)}
    ours = outcome(ENV, ENV.default_params.replace(**changed))
    expected = outcome(THEIRS, THEIRS.default_params.replace(**changed))
    for mine, other in zip(ours, expected, strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(mine, other, rtol=0, atol=2e-7)


@pytest.fixture(scope="module", params=[("random", 200), ("rocking", 120)], ids=str)
def rollout(request, tmp_path_factory):
    """Policy, time limit, printed lines and saved arrays of 1,200 steps of 1,000 cars."""
    policy, limit = request.param
    path = tmp_path_factory.mktemp("rollout") / "x.npz"
    flags = f"--num-envs 1000 --total-timesteps 1150001 --log-interval 5e5 --policy {policy}"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(car, "EnvParams", partial(car.EnvParams, max_steps_in_episode=limit))
        assert car.main([*flags.split(), "--save", str(path)]) == 0
    printed.seek(0)
    return policy, limit, printed.read().splitlines(), dict(np.load(path))


def test_saved_arrays_are_one_trajectory_per_environment(rollout):
    """Where the last step led, or, after an episode, a start: at rest, uniform in -0.6 to -0.4."""
    _, _, _, saved = rollout
    obs, reached = saved["obs"], saved["final_observation"]
    done = saved["terminated"] | saved["truncated"]
    lives = ~done[:-1]  # XLA computes the state and its copy apart: they may round differently
    np.testing.assert_allclose(obs[1:][lives], reached[:-1][lives], rtol=0, atol=1.5e-7)
    starts = np.concatenate([obs[0], obs[1:][done[:-1]]])
    assert len(np.unique(obs[0, :, 0])) > 990  # each car has its own
    assert np.all(starts[:, 1] == 0)
    fraction = np.sort((starts[:, 0] + 0.6) / 0.2)
    uniform = (np.arange(len(fraction)) + 0.5) / len(fraction)
    assert np.abs(fraction - uniform).max() < 1.95 / len(fraction) ** 0.5  # Kolmogorov, Smirnov


def test_actions_are_what_the_policy_says(rollout):
    """Random ones: chi-square, 99.9 % point; no two environments or steps go together."""
    policy, _, _, saved = rollout
    action = saved["action"]
    if policy == "rocking":
        np.testing.assert_array_equal(action, np.where(saved["obs"][..., 1] < 0, 0, 2))
        return
    counts = np.bincount(action.ravel())
    assert np.sum((counts - 4e5) ** 2 / 4e5) < 13.8
    assert np.abs(np.corrcoef(action.T) - np.eye(1000)).max() < 5.5 / 1200**0.5
    assert np.abs(np.corrcoef(action) - np.eye(1200)).max() < 5.5 / 1000**0.5


def test_printed_statistics_are_those_of_finished_episodes(rollout):
    """Each line again, in NumPy, from the trajectory."""
    policy, limit, printed, saved = rollout
    lines = [line.split() for line in printed[2:]]
    assert [line[1] for line in lines] == ["500,000", "1,000,000", "1,200,000"]
    reached, length = saved["final_observation"], np.zeros(1000)
    at_goal = (reached[..., 0] >= 0.5) & (reached[..., 1] >= 0)
    np.testing.assert_array_equal(saved["terminated"], at_goal)
    for line, first, last in zip(lines, [0, 500, 1000], [500, 1000, 1200], strict=True):
        lengths, goals = [], []
        for t in range(first, last):
            length += 1
            np.testing.assert_array_equal(saved["truncated"][t], length == limit)
            done = at_goal[t] | (length == limit)
            lengths.extend(length[done])
            goals.extend(at_goal[t][done])
            length[done] = 0
        assert (0 < np.mean(goals) < 1) == (policy == "rocking")
        statistics = [str(len(goals)), f"{np.mean(goals):.1%}", f"{-np.mean(lengths):.1f}"]
        assert [line[3].replace(",", ""), line[7], line[9]] == statistics


@pytest.mark.parametrize("cars", [7, 12])
def test_cars_are_spread_over_the_largest_divisor(cars, capsys):
    """In the first 100 steps no episode ends."""
    assert car.main(f"--num-envs {cars} --total-timesteps 1 --log-interval 1e9".split()) == 0
    largest = max(n for n in range(1, jax.device_count() + 1) if cars % n == 0)
    out = capsys.readouterr().out
    assert out.startswith(f"{cars} x MountainCar-v0 on {largest} x ")
    assert f"step {100 * cars:,}  episodes 0  at the goal nan%" in out
    args = car.parse_args(["--distributed", "--num-envs", str(cars)])  # on all devices, filled up
    assert 0 <= args.num_envs - cars < jax.device_count() and not args.num_envs % jax.device_count()


def test_episodes_equal_gymnasiums(rollout):
    """Each step of the first episodes of 1,000 cars, and how they end."""
    _, limit, _, saved = rollout
    ended = np.stack([saved["terminated"], saved["truncated"]], axis=-1)
    env = gymnasium.make("MountainCar-v0", max_episode_steps=limit)
    for i in range(1000):
        env.reset()
        env.unwrapped.state = saved["obs"][0, i].astype(float)
        path = []
        over = [False, False]
        while not any(over):
            _, _, *over, _ = env.step(int(saved["action"][len(path), i]))
            path.append(env.unwrapped.state)  # in double precision
            assert over == ended[len(path) - 1, i].tolist()
        reached = saved["final_observation"][: len(path), i]
        np.testing.assert_allclose(reached, path, rtol=0, atol=2e-5)
