"""mountaincar_env.py against Gymnasium's MountainCar-v0, and what its rollout counts and saves."""

import itertools

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest
from test_launcher import Output, shown

import mountaincar_env as car

# A strong car reaches both walls, and meets its goal in the valley in any step from the first on.
LIMIT, CHANGES = 60, {"gravity": 0.004, "force": 0.01, "max_speed": 0.05, "min_position": -1.22}
CHANGES |= {"max_position": 0.4, "goal_position": -0.53, "goal_velocity": 0.005}
close, equal = np.testing.assert_allclose, np.testing.assert_equal


def test_a_learners_step_is_that_of_gymnax_and_the_cosine_suits_wider_tracks():
    rng, keys, found = np.random.default_rng(0), jax.random.split(jax.random.key(0), 1000), []
    state = np.float32(rng.uniform([[-1.2], [-0.07]], [[0.6], [0.07]], (2, 1000)))
    before, action = car.EnvState(rng.integers(195, 200, 1000), *state), jnp.arange(1000) % 3
    for env in car.MountainCar(), gymnax.make("MountainCar-v0")[0]:
        params = env.default_params.replace(max_steps_in_episode=198, **CHANGES)
        obs, state, *ends, _ = jax.vmap(env.step, (0, 0, 0, None))(keys, before, action, params)
        box, defaults = env.observation_space(params), vars(env.default_params).values()
        spaces = box.shape, box.dtype, box.low, box.high, env.action_space(params).n
        time = state.time, env.reset(keys[0], params)[1].time
        found.append([*spaces, *defaults, obs.shape, obs.dtype, *time, *ends])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)
    x = np.linspace(-60, 60, 10001, dtype=np.float32)
    close(car.cosine(x), np.cos(x.astype(float)), atol=1e-5)


class Costly(car.MountainCar):
    """Rewards of -1 to -3, by action; nan after the end."""

    def step_env(self, key, before, action, params):
        obs, state, reward, terminated, info = super().step_env(key, before, action, params)
        reward = jnp.where(self.is_terminated(before, params), jnp.nan, reward - action)
        return obs, state, reward, terminated, info


def test_random_episodes_are_those_that_gymnasium_plays(monkeypatch, tmp_path):
    monkeypatch.setattr(car, "PARAMS", car.EnvParams(max_steps_in_episode=LIMIT, **CHANGES))
    monkeypatch.setattr(car, "ENV", Costly())
    flags = "--num-envs 999 --num-episodes 5 --num-intervals 2 --save"  # 2 lines of 3 episodes
    saved = car.main([*flags.split(), str(tmp_path / "x.npz")])
    equal(dict(np.load(tmp_path / "x.npz")), saved)
    assert {saved[name].shape[:3] for name in car.Step._fields} == {(999, 6, LIMIT)}
    env = gymnasium.make("MountainCar-v0").unwrapped
    vars(env).update(CHANGES)
    for place in itertools.product(range(0, 999, 37), range(6)):
        steps, ended, at_goal = [saved[name][place] for name in car.Step._fields], False, False
        equal(steps[0][1:], steps[3][:-1])
        for obs, action, reward, next_obs, terminated, mask in zip(*steps, strict=True):
            env.state, paid = obs.astype(float), np.nan if at_goal else -1 - action
            at_goal = env.step(int(action))[2]
            assert (mask, terminated) == (not ended, at_goal)
            equal(reward, np.float32(paid))
            close(next_obs, env.state, rtol=0, atol=3e-7)  # the script has single precision
            ended |= at_goal
    mask, ends, lengths = saved["mask"], saved["terminated"], saved["mask"].sum(axis=2)
    for axis, bound in (0, -1.22), (0, 0.4), (1, -0.05), (1, 0.05):  # the walls, the top speed
        assert np.mean(saved["next_obs"][..., axis] == np.float32(bound)) > 0.001
    assert {*lengths[np.any(mask & ends, axis=2)]} == {*range(1, LIMIT + 1)}
    for i, some in enumerate((slice(3), slice(3, 6))):
        assert saved["episodes"][i] == some.stop
        assert saved["timesteps"][i] == lengths[:, : some.stop].sum()
        returns = np.sum(saved["reward"][:, some], axis=2, where=mask[:, some])
        close(saved["returns"][i], returns.mean(), rtol=1e-5)
        close(saved["terminations"][i], np.any(ends & mask, axis=2)[:, some].mean(), rtol=1e-5)
    starts, action = saved["obs"][:, :, 0].reshape(-1, 2), saved["action"]  # (N, 6, T)
    assert len(np.unique(starts[:, 0])) > 0.993 * len(starts) and not starts[:, 1].any()
    assert kstest(starts[:, 0], "uniform", args=(-0.6, 0.2)).pvalue > 1e-6
    for other in 0, 1, 2, *(np.roll(action, 1, axis) for axis in range(3)):  # car, episode, step
        assert abs(np.mean(action == other) - 1 / 3) < 5 * (2 / 9 / action.size) ** 0.5


def test_the_seed_decides_everything_and_lines_devices_and_ctrl_c_nothing(monkeypatch, tmp_path):
    """Car i of seed 1 is car i + 1 of seed 0. One car takes one device, 51 take two or more."""
    monkeypatch.setattr(car, "PARAMS", car.EnvParams(max_steps_in_episode=20, **CHANGES))
    flags = f"--num-episodes 6 --save {tmp_path / 'x.npz'} --num-intervals"
    runs, cases = [], [(None, 3, "51"), (4, 3, "51"), (None, 3, "51 --seed 1"), (None, 1, "1")]
    for num_lines, intervals, cars in cases:
        monkeypatch.setattr("sys.stdout", out := Output(num_lines))
        results = car.main(f"{flags} {intervals} --num-envs {cars}".split())
        runs.append([results, *out.getvalue().splitlines()])
    (one, *lines), (cut, *_), (other, *_), (alone, *_) = runs
    for name in car.Step._fields:
        equal(cut[name], one[name][:, :4])
        equal(other[name][:-1], one[name][1:])
        equal(alone[name], one[name][:1])
    assert cut["interrupted"] and cut["episodes"].tolist() == [2, 4]
    assert not one["interrupted"] and one["rollout_seconds"] < 1
    ends = 6, one["returns"][2], one["terminations"][2] * 100
    assert all(shown(value, lines[4], 0.06) for value in ends)
    rocking = car.main(f"{flags} 2 --num-envs 9 --policy rocking".split())
    equal(rocking["action"], np.where(rocking["obs"][..., 1] < 0, 0, 2))
    with pytest.raises(SystemExit):  # counted after rounding: 499 episodes are 5 lines of 100
        car.parse_args("--save x.npz --num-envs 10001 --num-episodes 499".split())
