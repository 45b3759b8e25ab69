"""mountaincar_env.py against Gymnasium's MountainCar-v0, and what its rollout counts and saves."""

import itertools

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest

import mountaincar_env as car

# A strong car reaches both walls, and meets its goal in the valley in any step from the first on.
CHANGES = {"gravity": 0.004, "force": 0.01, "max_speed": 0.05, "min_position": -1.22}
CHANGES |= {"max_position": 0.4, "goal_position": -0.53, "goal_velocity": 0.005}
CASES = {"rocking": (115, {}), "random": (60, CHANGES)}  # policy: time limit, constants


def test_episodes_begin_and_end_as_in_gymnax():
    """Some of 1,000 cars end, by goal, time limit or both."""
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), 1000)
    state = rng.uniform([[-1.2], [-0.07]], [[0.6], [0.07]], (2, 1000))
    time, action = rng.integers(195, 200, 1000), jnp.arange(1000) % 3
    before = car.EnvState(time, *state.astype(np.float32))
    found = []
    for env in car.MountainCar(), gymnax.make("MountainCar-v0")[0]:
        params = env.default_params.replace(max_steps_in_episode=198, **CHANGES)
        step = jax.vmap(env.step, (0, 0, 0, None))
        obs, state, *ends, _ = step(keys, before, action, params)
        space, defaults = env.observation_space(params), vars(env.default_params).values()
        spaces = space.shape, space.dtype, space.low, space.high, env.action_space(params).n
        found.append([*spaces, *defaults, obs.shape, obs.dtype, state.time, *ends])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)


def test_the_cosine_is_right_on_a_wider_track():
    x = np.linspace(-60, 60, 10001, dtype=np.float32)
    np.testing.assert_allclose(car.cosine(x), np.cos(x.astype(float)), atol=1e-5)


class Costly(car.MountainCar):
    """A push to the right costs 3, no push 2, a push to the left 1. Observations end in noise.

    A step from the goal has no reward at all: if it counted, it would be seen in every total.
    """

    def step_env(self, key, before, action, params):
        obs, state, reward, terminated, info = super().step_env(key, before, action, params)
        reward = jnp.where(self.is_terminated(before, params), jnp.nan, reward - action)
        return obs, state, reward, terminated, info

    def observe(self, key, state, action, params):
        return jnp.append(super().observe(key, state, action, params), jax.random.uniform(key))


@pytest.fixture(scope="module", params=CASES)
def rollout(request, tmp_path_factory):
    """Policy, time limit, constants and results. 5 episodes are 2 lines of 3."""
    policy, (limit, changes) = request.param, CASES[request.param]
    path = tmp_path_factory.mktemp("rollout") / "x.npz"
    flags = f"--num-envs 999 --num-episodes 5 --num-intervals 2 --policy {policy} --save {path}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(car, "PARAMS", car.EnvParams(max_steps_in_episode=limit, **changes))
        patch.setattr(car, "ENV", Costly())
        results = car.main(flags.split())
    np.testing.assert_equal(dict(np.load(path)), results)
    assert {results[name].shape[:3] for name in car.Step._fields} == {(999, 6, limit)}
    return policy, limit, changes, results


def test_episodes_are_those_that_gymnasium_plays(rollout):
    """Each step from what is observed, to the time limit; what follows the end is masked."""
    policy, limit, changes, saved = rollout
    env = gymnasium.make("MountainCar-v0").unwrapped
    vars(env).update(changes)
    for place in itertools.product(range(0, 999, 37), range(6)):
        steps = car.Step(*(saved[name][place] for name in car.Step._fields))
        np.testing.assert_array_equal(steps.obs[1:], steps.next_obs[:-1])
        ended = at_goal = False
        for obs, action, reward, next_obs, terminated, mask in zip(*steps, strict=True):
            env.state, paid = obs[:2].astype(float), np.nan if at_goal else -1 - action
            at_goal = env.step(int(action))[2]
            assert (mask, terminated) == (not ended, at_goal)
            np.testing.assert_equal(reward, np.float32(paid))
            # The script computes in single precision; positions are up to 1.2.
            np.testing.assert_allclose(next_obs[:2], env.state, rtol=0, atol=3e-7)
            ended |= at_goal
    if policy == "random":  # the walls and the top speed, and each length of an episode
        for axis, bound in (0, -1.22), (0, 0.4), (1, -0.05), (1, 0.05):
            assert np.mean(saved["next_obs"][..., axis] == np.float32(bound)) > 0.001
        lengths = saved["mask"].sum(axis=2)[np.any(saved["mask"] & saved["terminated"], axis=2)]
        assert {*lengths} == {*range(1, limit + 1)}


def test_curves_are_computed_from_real_steps(rollout):
    """Each point again, in NumPy, from all steps."""
    *_, saved = rollout
    lengths = np.sum(saved["mask"], axis=2)  # (N, 6)
    returns = np.sum(saved["reward"], axis=2, where=saved["mask"])
    terminations = np.any(saved["terminated"] & saved["mask"], axis=2)
    for i, last in enumerate((3, 6)):
        assert saved["episodes"][i] == last and saved["timesteps"][i] == lengths[:, :last].sum()
        close = np.testing.assert_allclose
        close(saved["returns"][i], returns[:, last - 3 : last].mean(), rtol=1e-5)
        close(saved["terminations"][i], terminations[:, last - 3 : last].mean(), rtol=1e-5)
    assert saved["timesteps"].dtype == np.int64 and not saved["interrupted"]


def test_all_that_is_drawn_is_different_and_starts_are_uniform(rollout):
    """Noise is that of 100 cars: among more single-precision numbers, many are equal."""
    *_, saved = rollout
    starts, first = saved["obs"][:, :, 0, :2].reshape(-1, 2), saved["obs"][::10, :, 0, 2]
    for numbers in starts[:, 0], np.append(first, saved["next_obs"][::10, :, :, 2]):
        assert len(np.unique(numbers)) > 0.993 * len(numbers)
    uniform = kstest(starts[:, 0], "uniform", args=(-0.6, 0.2))
    assert uniform.pvalue > 1e-6 and not starts[:, 1].any()


def test_actions_are_what_the_policy_says(rollout):
    """Random ones: a third of each, and a third equals those of another car, episode or step."""
    policy, *_, saved = rollout
    action = saved["action"]  # (N, 6, T)
    if policy == "rocking":
        np.testing.assert_array_equal(action, np.where(saved["obs"][..., 1] < 0, 0, 2))
        return
    deviation = (2 / 9 / action.size) ** 0.5  # of a fraction of 1 / 3
    for other in [0, 1, 2, *(np.roll(action, 1, axis) for axis in range(3))]:
        assert abs(np.mean(action == other) - 1 / 3) < 5 * deviation


def test_the_seed_decides_everything_and_lines_and_devices_nothing(tmp_path):
    """Car i of seed 1 is car i + 1 of seed 0. One car takes one device, 51 take two or more."""
    few = f"--num-episodes 4 --save {tmp_path / 'x.npz'} --num-envs".split()
    one, other = car.main([*few, "51"]), car.main([*few, "51", "--seed", "1"])
    line, alone = car.main([*few, "51", "--num-intervals", "1"]), car.main([*few, "1"])
    assert (len(line["timesteps"]), len(one["timesteps"])) == (1, 4)
    for name in car.Step._fields:
        np.testing.assert_array_equal(line[name], one[name])
        np.testing.assert_array_equal(alone[name], one[name][:1])
        np.testing.assert_array_equal(other[name][:-1], one[name][1:])


def test_steps_are_kept_only_for_save_which_refuses_too_many():
    """Steps are counted after rounding: 499 episodes are 5 lines of 100, of 200 steps each."""
    assert "obs" not in car.main("--num-envs 2 --num-episodes 1".split())
    car.parse_args("--save x.npz --num-envs 1000 --num-episodes 499".split())
    with pytest.raises(SystemExit):
        car.parse_args("--save x.npz --num-envs 1001 --num-episodes 499".split())
