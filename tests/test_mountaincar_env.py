"""mountaincar_env.py against Gymnasium's and gymnax's MountainCar, and what a rollout counts.

The fixture `rollout` has all steps of many episodes. Each test then checks one fact of them.
"""

import contextlib
import io
import re
import time
from functools import partial
from types import SimpleNamespace

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import RARE
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
TOTALS = ["returns", "timesteps", "terminated"]  # of each episode
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
    """After an episode, the next one starts at rest."""
    obs, state, *own, info = steps_of(car.MountainCar())
    _, other, *theirs, other_info = steps_of(gymnax.make("MountainCar-v0")[0])
    for x, y in zip(own, theirs, strict=True):  # reward, terminated, truncated
        equal(x, y)
    equal(state.time, other.time)
    observed = info["final_observation"], other_info["final_observation"]
    close(*observed, rtol=0, atol=1e-7)  # the cosine is a series
    _, terminated, truncated = own
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


def test_the_cosine_is_accurate_far_beyond_the_track():
    """At 50, neighboring numbers of single precision are 4e-6 apart."""
    x = np.linspace(-50, 50, 100_001, dtype=np.float32)
    close(car.cosine(jnp.array(x)), np.cos(x.astype(float)), rtol=0, atol=4e-6)
    close(car.cosine(0.5), np.cos(0.5), rtol=1e-6)  # a number of Python, in a state made by hand


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
    """5,998 episodes of costly cars on four devices, rounded up to 6,000."""
    path, printed = tmp_path_factory.mktemp("car") / "x.npz", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(car, "PARAMS", car.EnvParams(max_steps_in_episode=LIMIT, **CHANGES))
        patch.setattr(car, "ENV", Costly())
        results = car.main(f"--seed 5 --num-envs 400 --num-episodes 5998 --save {path}".split())
    with np.load(path) as file:
        saved = dict(file)
    steps = {name.removeprefix("steps."): saved[name] for name in saved if "steps." in name}
    text = printed.getvalue()
    return SimpleNamespace(results=results, saved=saved, steps=car.Step(**steps), printed=text)


def test_the_file_has_what_main_returns(rollout):
    assert set(rollout.saved) == set(rollout.results)
    for name, array in rollout.results.items():
        equal(rollout.saved[name], array)
        assert rollout.saved[name].dtype == np.asarray(array).dtype


def test_without_save_no_steps_are_kept():
    args = car.parse_args("--num-episodes 4".split())
    _, kept = jax.eval_shape(partial(car.play, args), jax.random.key(0))
    assert kept is None
    assert set(car.main(["--num-episodes", "4"])) == {"args", "versions", *TOTALS}


def test_steps_are_those_of_gymnasium_and_real_until_an_episode_ends(rollout):
    """In a part of all episodes, since Gymnasium plays one step at a time."""
    env, steps = gymnasium.make("MountainCar-v0").unwrapped, rollout.steps
    vars(env).update(CHANGES)
    for i in range(0, 6000, 97):
        real = True
        for t in range(LIMIT):
            assert steps.mask[i, t] == real
            env.state = np.float64(steps.obs[i, t])
            action = int(steps.action[i, t])
            next_obs, reward, terminated, *_ = env.step(action)
            close(steps.next_obs[i, t], next_obs, rtol=0, atol=3e-7)  # single precision
            close(steps.reward[i, t], reward - 1.3 * action if real else 0.0, rtol=1e-6)
            assert steps.terminated[i, t] == (terminated and real)
            real = real and not terminated
    equal(steps.obs[:, 1:], steps.next_obs[:, :-1])
    # Among them are episodes that ended in each step, and cars at both walls and both top speeds.
    ended = steps.terminated.any(axis=1)
    assert set(steps.mask.sum(axis=1)[ended]) == set(range(1, LIMIT + 1))
    for axis, bound in (0, -1.22), (0, 0.4), (1, -0.05), (1, 0.05):
        assert np.mean(steps.next_obs[..., axis] == np.float32(bound)) > 0.001


def test_totals_are_those_of_each_episode_and_their_means_are_printed(rollout):
    steps, totals = rollout.steps, rollout.results
    equal(totals["timesteps"], steps.mask.sum(axis=1))
    close(totals["returns"], steps.reward.sum(axis=1), rtol=1e-5)
    equal(totals["terminated"], steps.terminated.any(axis=1))
    assert not np.all(totals["terminated"])
    line = rollout.printed.splitlines()[-1]
    assert "6,000 episodes" in line
    for name in TOTALS:
        shown = float(re.search(rf"{name} (\S+)", line)[1])
        assert shown == pytest.approx(totals[name].mean(), rel=1e-3)


def test_episodes_start_evenly_over_the_valley(rollout):
    position, velocity = rollout.steps.obs[:, 0].T
    assert kstest(position, "uniform", args=(-0.6, 0.2)).pvalue > RARE
    assert len(np.unique(position)) > 0.993 * len(position)  # float32 has few numbers there
    equal(velocity, np.float32(CHANGES["goal_velocity"]))  # as a costly car does


def test_random_actions_are_equally_likely_and_independent(rollout):
    """Of the other episodes, and of the other steps."""
    action, deviation = rollout.steps.action, np.sqrt(2 / 9 / rollout.steps.action.size)
    for number in range(3):
        assert abs(np.mean(action == number) - 1 / 3) < 5 * deviation
    for axis in range(2):
        assert abs(np.mean(action == np.roll(action, 1, axis)) - 1 / 3) < 5 * deviation


@pytest.fixture
def short(monkeypatch, tmp_path):
    """A function that plays episodes of at most 20 steps, and returns their steps by name."""
    monkeypatch.setattr(car, "PARAMS", car.EnvParams(max_steps_in_episode=20, **CHANGES))

    def play(flags):
        results = car.main([*flags.split(), "--save", str(tmp_path / "x.npz")])
        return {name: array for name, array in results.items() if "steps." in name}

    return play


def test_an_episode_depends_on_its_seed_and_neither_on_the_batch_nor_on_the_number_of_cars(short):
    many, one_by_one = short("--num-episodes 40"), short("--num-episodes 40 --num-envs 1")
    for name, array in many.items():
        close(array, one_by_one[name], rtol=0, atol=1e-6)  # another program may round
    other = short("--num-episodes 40 --seed 1")
    starts = [steps["steps.obs"][:, 0, 0].tolist() for steps in (many, other)]
    assert not set(starts[0]) & set(starts[1])


def test_as_many_cars_as_asked_for_are_driven_at_once_on_each_device(short, monkeypatch):
    """Ten episodes on each of four devices: three batches of three cars, and the last one."""
    batches = set()

    def choose_action(args, obs, uniform):
        def note(position):
            batches.add(position.shape)
            return np.zeros(position.shape, np.int32)

        shape = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.pure_callback(note, shape, obs[0], vmap_method="broadcast_all")

    monkeypatch.setattr(car, "choose_action", choose_action)
    short("--num-episodes 40 --num-envs 3")
    assert batches == {(3,), (1,)}


def test_episodes_are_divided_among_all_devices(short, capsys):
    for asked, played in (1, 4), (5, 8):
        assert len(short(f"--num-episodes {asked}")["steps.obs"]) == played
        assert "devices: 4 x" in capsys.readouterr().out


def test_lines_are_written_at_once_and_steps_per_second_count_real_steps(monkeypatch, tmp_path):
    """Each of four devices plays an episode of one step, and two of padding. Each takes 0.1 s."""
    path, texts = tmp_path / "printed.txt", []

    def choose_action(args, obs, uniform):
        def wait(position):
            texts.append(path.read_text())
            time.sleep(0.1)
            return np.int32(0)

        shape = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.pure_callback(wait, shape, obs[0], vmap_method="sequential")

    anywhere = {"goal_position": -1.2, "goal_velocity": -0.07}
    monkeypatch.setattr(car, "PARAMS", car.EnvParams(max_steps_in_episode=3, **anywhere))
    monkeypatch.setattr(car, "choose_action", choose_action)
    with path.open("w") as file, contextlib.redirect_stdout(file):
        car.main("--num-episodes 4 --num-envs 1".split())
    assert all("compiled in" in text for text in texts)  # before episodes are played
    assert float(re.search(r"([\d.]+) steps/s", path.read_text())[1]) <= 4 / 0.3


def test_rocking_pushes_in_the_direction_of_motion(short):
    steps = short("--num-episodes 60 --policy rocking")
    equal(steps["steps.action"], np.where(steps["steps.obs"][..., 1] < 0, 0, 2))
