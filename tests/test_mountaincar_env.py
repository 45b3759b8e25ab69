"""mountaincar_env.py against Gymnasium's and gymnax's MountainCar, and what a rollout counts.

The fixture `rollout` has all steps of many cars. Each test then checks one fact of them.
"""

import itertools
from types import SimpleNamespace

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest

import mountaincar_env as car

# Constants with which a rollout reaches both walls and both top speeds, and ends in any step.
LIMIT = 60
CHANGES = {
    "gravity": 0.004,
    "force": 0.01,
    "max_speed": 0.05,
    "min_position": -1.22,
    "max_position": 0.4,
    "goal_position": -0.53,
    "goal_velocity": 0.005,
}
close, equal = np.testing.assert_allclose, np.testing.assert_equal


def steps_of(env):
    """One `step` of 1,000 cars, as a learner makes it, from random states."""
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), 1000)
    position, velocity = np.float32(rng.uniform([[-1.2], [-0.07]], [[0.6], [0.07]], (2, 1000)))
    clock = rng.integers(195, 200, 1000)  # some reach the time limit of 198
    params = env.default_params.replace(max_steps_in_episode=198, **CHANGES)
    step = jax.jit(jax.vmap(env.step, (0, 0, 0, None)))
    before = car.EnvState(clock, position, velocity)
    return jax.device_get(step(keys, before, jnp.arange(1000) % 3, params))


def test_a_step_of_a_learner_is_that_of_gymnax():
    _, state, *own, info = steps_of(car.MountainCar())
    _, other, *theirs, other_info = steps_of(gymnax.make("MountainCar-v0")[0])
    for x, y in zip(own, theirs, strict=True):  # reward, terminated, truncated
        equal(x, y)
    equal(state.time, other.time)
    observed = info["final_observation"], other_info["final_observation"]
    close(*observed, rtol=0, atol=1e-7)  # the cosine is a series


def test_a_learner_starts_again_at_rest():
    obs, _, _, terminated, truncated, _ = steps_of(car.MountainCar())
    assert terminated.any() and truncated.any()
    position, velocity = obs[terminated | truncated].T
    assert np.all((position >= -0.6) & (position < -0.4)) and not velocity.any()


def test_parameters_and_spaces_are_those_of_gymnax():
    env, params = gymnax.make("MountainCar-v0")
    assert vars(car.PARAMS) == vars(params)
    assert car.ENV.action_space(params).n == env.action_space(params).n
    params = params.replace(**CHANGES)
    own, theirs = car.ENV.observation_space(params), env.observation_space(params)
    assert own.shape == theirs.shape
    assert own.low.tolist() == theirs.low.tolist() and own.high.tolist() == theirs.high.tolist()


class Costly(car.MountainCar):
    """An action costs 1.3 times its number. A car starts with the velocity of the goal."""

    def step_env(self, key, state, action, params):
        obs, state, reward, terminated, info = super().step_env(key, state, action, params)
        return obs, state, reward - 1.3 * action, terminated, info

    def reset_env(self, key, params):
        _, state = super().reset_env(key, params)
        state = state.replace(velocity=jnp.array(params.goal_velocity))
        return self.observe(key, state, None, params), state


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    """999 costly cars on one device, six episodes each: two lines of three."""
    path, patch = tmp_path_factory.mktemp("car") / "x.npz", pytest.MonkeyPatch()
    patch.setattr(car, "PARAMS", car.EnvParams(max_steps_in_episode=LIMIT, **CHANGES))
    patch.setattr(car, "ENV", Costly())
    flags = "--seed 5 --num-envs 999 --num-episodes 5 --num-intervals 2".split()
    results = car.main([*flags, "--save", str(path)])
    returns = car.main(flags)["curves"]["returns"]  # without --save, no steps are kept
    patch.undo()
    close(returns, results["curves"]["returns"], rtol=1e-5)
    return SimpleNamespace(**results.pop("steps")._asdict(), **results)


def test_the_rollout_has_episodes_of_each_length_and_cars_at_all_bounds(rollout):
    ended = np.any(rollout.mask & rollout.terminated, axis=2)
    assert set(rollout.mask.sum(axis=2)[ended]) == set(range(1, LIMIT + 1))
    for axis, bound in (0, -1.22), (0, 0.4), (1, -0.05), (1, 0.05):  # walls, top speeds
        assert np.mean(rollout.next_obs[..., axis] == np.float32(bound)) > 0.001


# A part of all episodes, since Gymnasium plays one step at a time.
SOME = [*itertools.product(range(0, 999, 37), range(6))]


def test_steps_are_those_of_gymnasium(rollout):
    env = gymnasium.make("MountainCar-v0").unwrapped
    vars(env).update(CHANGES)
    for place in SOME:
        for t in range(LIMIT):
            env.state = np.float64(rollout.obs[place][t])
            action = int(rollout.action[place][t])
            next_obs, reward, terminated, *_ = env.step(action)
            close(rollout.next_obs[place][t], next_obs, rtol=0, atol=3e-7)  # single precision
            expected = reward - 1.3 * action if rollout.mask[place][t] else 0.0
            close(rollout.reward[place][t], expected, rtol=1e-6)
            assert rollout.terminated[place][t] == terminated


def test_a_step_begins_where_the_one_before_ended(rollout):
    equal(rollout.obs[:, :, 1:], rollout.next_obs[:, :, :-1])


def test_the_mask_is_true_until_an_episode_ends(rollout):
    for place in SOME:
        ends = np.flatnonzero(rollout.terminated[place])
        length = ends[0] + 1 if len(ends) else LIMIT
        equal(rollout.mask[place], np.arange(LIMIT) < length)


def test_a_line_describes_the_episodes_of_each_car(rollout):
    lengths = rollout.mask.sum(axis=2)  # (999, 6)
    returns = np.sum(rollout.reward, axis=2)
    ended = np.any(rollout.mask & rollout.terminated, axis=2)
    equal(rollout.curves["timesteps"], [lengths[:, :3].sum(axis=1), lengths.sum(axis=1)])
    for line, episodes in enumerate([slice(0, 3), slice(3, 6)]):
        close(rollout.curves["returns"][line], returns[:, episodes].mean(axis=1), rtol=1e-5)
        close(rollout.curves["terminated"][line], ended[:, episodes].mean(axis=1), rtol=1e-5)
        close(rollout.curves["truncated"][line], 1 - ended[:, episodes].mean(axis=1), atol=1e-6)


def test_episodes_start_evenly_over_the_valley(rollout):
    starts = rollout.obs[:, :, 0].reshape(-1, 2)
    assert kstest(starts[:, 0], "uniform", args=(-0.6, 0.2)).pvalue > 1e-6
    assert len(np.unique(starts[:, 0])) > 0.993 * len(starts)  # float32 has few numbers there
    equal(starts[:, 1], np.float32(CHANGES["goal_velocity"]))  # as a costly car does


def test_random_actions_are_equally_likely_and_independent(rollout):
    """Of the other cars, of the other episodes, and of the other steps."""
    action, deviation = rollout.action, np.sqrt(2 / 9 / rollout.action.size)
    for number in range(3):
        assert abs(np.mean(action == number) - 1 / 3) < 5 * deviation
    for axis in range(3):
        assert abs(np.mean(action == np.roll(action, 1, axis)) - 1 / 3) < 5 * deviation


@pytest.fixture
def short(monkeypatch, tmp_path):
    """A function that rolls out cars with a time limit of 20 steps, and returns their steps."""
    monkeypatch.setattr(car, "PARAMS", car.EnvParams(max_steps_in_episode=20, **CHANGES))
    save = ["--num-episodes", "6", "--save", str(tmp_path / "x.npz")]
    return lambda flags: car.main([*flags.split(), *save])["steps"]


def test_a_car_depends_on_its_seed_alone(short):
    """Neither the other cars nor the number of lines change it."""
    many = short("--num-envs 600 --num-intervals 3")
    alone = short("--num-envs 1 --num-intervals 1 --seed 7")
    for of_all, of_one in zip(many, alone, strict=True):
        close(of_one[0], of_all[7], rtol=0, atol=1e-6)  # another program may round
    far = short(f"--num-envs 1 --num-intervals 1 --seed {2**16 + 7}")
    assert not np.any(far.obs[0, :, 0, 0] == many.obs[7, :, 0, 0])  # positions at the start


@pytest.mark.parametrize(("cars", "devices"), [(8, 4), (6, 2), (1, 1)])
def test_cars_are_divided_evenly_among_devices(cars, devices, short, capsys):
    short(f"--num-envs {cars}")
    assert f"cars: {cars}  devices: {devices} x" in capsys.readouterr().out


def test_rocking_pushes_in_the_direction_of_motion(short):
    steps = short("--num-envs 9 --policy rocking")
    equal(steps.action, np.where(steps.obs[..., 1] < 0, 0, 2))
