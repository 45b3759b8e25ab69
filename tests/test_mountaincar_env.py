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
close, equal = np.testing.assert_allclose, np.testing.assert_array_equal


def test_a_learners_step_is_that_of_gymnax_and_the_cosine_suits_wider_tracks():
    """Some of 1,000 cars end, by goal, time limit or both."""
    rng, keys, found = np.random.default_rng(0), jax.random.split(jax.random.key(0), 1000), []
    state = rng.uniform([[-1.2], [-0.07]], [[0.6], [0.07]], (2, 1000)).astype(np.float32)
    before, action = car.EnvState(rng.integers(195, 200, 1000), *state), jnp.arange(1000) % 3
    for env in car.MountainCar(), gymnax.make("MountainCar-v0")[0]:
        params = env.default_params.replace(max_steps_in_episode=198, **CHANGES)
        obs, state, *ends, _ = jax.vmap(env.step, (0, 0, 0, None))(keys, before, action, params)
        box, defaults = env.observation_space(params), vars(env.default_params).values()
        spaces = box.shape, box.dtype, box.low, box.high, env.action_space(params).n
        found.append([*spaces, *defaults, obs.shape, obs.dtype, state.time, *ends])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)
    x = np.linspace(-60, 60, 10001, dtype=np.float32)
    close(car.cosine(x), np.cos(x.astype(float)), atol=1e-5)


class Costly(car.MountainCar):
    """Rewards of -1 to -3, by action; nan after the end. Observations end in noise."""

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
    """To the time limit; what follows the end is masked, and does not count in curves."""
    policy, limit, changes, saved = rollout
    env = gymnasium.make("MountainCar-v0").unwrapped
    vars(env).update(changes)
    for place in itertools.product(range(0, 999, 37), range(6)):
        steps, ended, at_goal = [saved[name][place] for name in car.Step._fields], False, False
        equal(steps[0][1:], steps[3][:-1])
        for obs, action, reward, next_obs, terminated, mask in zip(*steps, strict=True):
            env.state, paid = obs[:2].astype(float), np.nan if at_goal else -1 - action
            at_goal = env.step(int(action))[2]
            assert (mask, terminated) == (not ended, at_goal)
            np.testing.assert_equal(reward, np.float32(paid))
            close(next_obs[:2], env.state, rtol=0, atol=3e-7)  # the script has single precision
            ended |= at_goal
    mask, terminated, lengths = saved["mask"], saved["terminated"], saved["mask"].sum(axis=2)
    if policy == "random":  # the walls and the top speed, and each length of an episode
        for axis, bound in (0, -1.22), (0, 0.4), (1, -0.05), (1, 0.05):
            assert np.mean(saved["next_obs"][..., axis] == np.float32(bound)) > 0.001
        assert {*lengths[np.any(mask & terminated, axis=2)]} == {*range(1, limit + 1)}
    for i, last in enumerate((3, 6)):
        assert saved["episodes"][i] == last and saved["timesteps"][i] == lengths[:, :last].sum()
        line = mask[:, last - 3 : last], (slice(None), slice(last - 3, last))
        returns = np.sum(saved["reward"][line[1]], axis=2, where=line[0])
        close(saved["returns"][i], returns.mean(), rtol=1e-5)
        ends = np.any(terminated[line[1]] & line[0], axis=2)
        close(saved["terminations"][i], ends.mean(), rtol=1e-5)


def test_starts_are_uniform_and_actions_are_what_the_policy_says(rollout):
    """A third of the random ones equals those of another car, episode or step. Noise differs."""
    policy, *_, saved = rollout
    starts, noise = saved["obs"][:, :, 0, :2].reshape(-1, 2), saved["next_obs"][::10, :, :, 2]
    assert len(np.unique(starts[:, 0])) > 0.993 * len(starts) and not starts[:, 1].any()
    assert len(np.unique(noise)) > 0.993 * noise.size
    assert kstest(starts[:, 0], "uniform", args=(-0.6, 0.2)).pvalue > 1e-6
    action = saved["action"]  # (N, 6, T)
    if policy == "rocking":
        equal(action, np.where(saved["obs"][..., 1] < 0, 0, 2))
    for other in [0, 1, 2, *(np.roll(action, 1, axis) for axis in range(3))] * (policy == "random"):
        assert abs(np.mean(action == other) - 1 / 3) < 5 * (2 / 9 / action.size) ** 0.5


def test_the_seed_decides_everything_and_lines_and_devices_nothing(tmp_path):
    """Car i of seed 1 is car i + 1 of seed 0. One car takes one device, 51 take two or more."""
    few = f"--num-episodes 4 --save {tmp_path / 'x.npz'} --num-envs".split()
    one, other = car.main([*few, "51"]), car.main([*few, "51", "--seed", "1"])
    line, alone = car.main([*few, "51", "--num-intervals", "1"]), car.main([*few, "1"])
    for name in car.Step._fields:
        equal(line[name], one[name])
        equal(alone[name], one[name][:1])
        equal(other[name][:-1], one[name][1:])
    with pytest.raises(SystemExit):  # counted after rounding: 499 episodes are 5 lines of 100
        car.parse_args("--save x.npz --num-envs 1001 --num-episodes 499".split())
