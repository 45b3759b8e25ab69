"""mountaincar_env.py against Gymnasium's MountainCar-v0, and what its rollout counts and saves."""

import contextlib
import io
from unittest.mock import Mock

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mountaincar_env as car

ENV, THEIRS = car.MountainCar(), gymnax.make("MountainCar-v0")[0]
KEY = jax.random.key(0)


def states(position, velocity, time=0):
    time = jnp.broadcast_to(jnp.int32(time), np.shape(position))
    return car.EnvState(position=jnp.float32(position), velocity=jnp.float32(velocity), time=time)


def uniform_starts(obs):
    """Tell whether observations are at rest, uniform in -0.6 to -0.4 (Kolmogorov, Smirnov)."""
    fraction = (np.sort(obs[:, 0].astype(float)) + 0.6) / 0.2
    steps = (np.arange(len(obs)) + 0.5) / len(obs)
    return not obs[:, 1].any() and np.all(np.abs(fraction - steps) < 1.95 / len(obs) ** 0.5)


CHANGES = {"gravity": 0.004, "force": 0.003, "max_speed": 0.05, "min_position": -0.9}
CHANGES |= {"max_position": 0.4, "goal_position": 0.2, "goal_velocity": 0.01}


@pytest.mark.parametrize("changes", [{}, CHANGES], ids=["default", "changed"])
def test_steps_equal_gymnasiums(changes):
    """5,000 states, many at both walls, at top speed, or rolling back from the goal."""
    env, params = gymnasium.make("MountainCar-v0").unwrapped, car.EnvParams(**changes)
    vars(env).update(changes)
    rng = np.random.default_rng(0)
    position = rng.uniform(-1.5, 0.9, 5000).clip(env.min_position, env.max_position)
    velocity = rng.uniform(-0.1, 0.1, 5000).clip(-env.max_speed, env.max_speed)
    for action in range(3):
        reached, terminated = [], []
        for state in zip(position, velocity, strict=True):
            env.state = state
            terminated.append(env.step(action)[2])
            reached.append(env.state)  # in double precision
        assert min(np.sum(np.equal(reached, env.min_position)), np.sum(terminated)) > 300
        step = jax.vmap(ENV.step, (None, 0, None, None))
        *_, ended, _, info = step(KEY, states(position, velocity), action, params)
        np.testing.assert_array_equal(ended, terminated)
        np.testing.assert_allclose(info["final_observation"], reached, rtol=0, atol=1.5e-7)


def test_episodes_begin_and_end_as_in_gymnax():
    """Some of 1,000 cars end, by goal, time limit or both. Starts are drawn with other keys."""
    rng, keys = np.random.default_rng(0), jax.random.split(KEY, 1000)
    time, action = rng.integers(195, 200, 1000), jnp.arange(1000) % 3
    before = states(rng.uniform(-1.2, 0.6, 1000), rng.uniform(-0.07, 0.07, 1000), time)
    found = []
    for env in ENV, THEIRS:
        params = env.default_params.replace(max_steps_in_episode=198, **CHANGES)
        step = jax.vmap(env.step, (0, 0, 0, None))
        obs, state, reward, terminated, truncated, _ = step(keys, before, action, params)
        space, actions = env.observation_space(params), env.action_space(params)
        shapes = space.shape, space.dtype, obs.shape, obs.dtype, state.time.dtype, actions.n
        ends = state.time, reward, terminated, truncated
        found.append([*shapes, *ends, space.low, space.high])
        assert uniform_starts(np.asarray(obs[terminated | truncated]))
        assert uniform_starts(np.asarray(jax.vmap(env.reset, (0, None))(keys, params)[0]))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)


def run(flags, *files):
    return car.main([*flags.split(), *map(str, files)])


def test_the_shortest_episode_is_longer_than_a_block():
    """A search through all actions, in cells of 0.004 x 0.0004 that keep one car each: 83 steps."""
    cars, steps = np.stack([np.linspace(-0.6, -0.4, 200), np.zeros(200)]), 0
    while True:
        steps += 1
        position, velocity = np.repeat(cars, 3, axis=1)
        velocity += 0.001 * (np.arange(len(position)) % 3 - 1) - 0.0025 * np.cos(3 * position)
        velocity = velocity.clip(-0.07, 0.07)
        position = (position + velocity).clip(-1.2, 0.6)
        velocity[(position == -1.2) & (velocity < 0)] = 0
        if np.any((position >= 0.5) & (velocity >= 0)):
            break
        cells = np.round(position * 250) + 1e4 * np.round(velocity * 2500)
        cars = np.stack([position, velocity])[:, np.unique(cells, return_index=True)[1]]
    assert car.BLOCK < 80 < steps < 90


def test_two_episodes_that_end_in_one_block_are_an_error(monkeypatch):
    """The next ones would begin alike. One that ends in each of ten blocks of 50 is allowed."""
    flags = "--num-envs 3 --total-timesteps 1500"
    monkeypatch.setattr(car, "PARAMS", car.EnvParams(max_steps_in_episode=50))
    assert run(flags)["episodes"] == 30
    # Steps 160 and 200 are in one block. In the last block, only one episode ends, at step 480.
    monkeypatch.setattr(car, "PARAMS", car.EnvParams(max_steps_in_episode=40))
    with pytest.raises(ValueError, match="shorter than BLOCK"):
        run(flags)


def test_no_key_is_used_twice():
    args = car.parse_args("--total-timesteps 1 --save x.npz".split())
    with jax.debug_key_reuse(True):
        jax.jit(lambda: car.rollout(args, car.init_state(args))).trace()


class Costly(car.MountainCar):
    """A push to the right costs 3, no push 2, a push to the left 1. Observations end in noise."""

    def step_env(self, key, state, action, params):
        obs, state, reward, terminated, info = super().step_env(key, state, action, params)
        return obs, state, reward - action, terminated, info

    def observe(self, key, state, action, params):
        noise = params.max_speed * jax.random.uniform(key)
        return jnp.append(super().observe(key, state, action, params), noise)


@pytest.fixture(scope="module", params=[("random", 200), ("rocking", 115)], ids=str)
def rollout(request, tmp_path_factory):
    """Policy, time limit, printed lines and saved arrays of 1,200 steps of 999 cars.

    A block is 50 steps of 999 cars. 1,050,001 steps are 22 blocks; 450,001 steps a line are up to
    10, so there are 3 lines of 8 blocks each. The clock makes them last 5, 9 and 13 / 1024 s.
    """
    policy, limit = request.param
    path = tmp_path_factory.mktemp("rollout") / "x.npz"
    flags = f"--num-envs 999 --total-timesteps 1050001 --log-interval 450001 --policy {policy}"
    printed, ticks = (
        io.StringIO(),
        iter([1, 3.5, 4, 4 + 5 / 1024, 5, 5 + 9 / 1024, 6, 6 + 13 / 1024]),
    )
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(car, "PARAMS", car.EnvParams(max_steps_in_episode=limit))
        patch.setattr(car, "ENV", Costly())
        patch.setattr(car, "time", Mock(perf_counter=ticks.__next__))
        results = run(flags, "--save", path)
    np.testing.assert_equal(dict(np.load(path)), results)
    return policy, limit, printed.getvalue().splitlines(), results


def test_printed_statistics_are_those_of_finished_episodes(rollout):
    """Each line again, in NumPy, from the trajectory; the surplus car on two devices is cut."""
    policy, limit, printed, saved = rollout
    reached, length, total = saved["final_observation"], np.zeros(999), np.zeros(999)
    assert reached.shape == (1200, 999, 3)
    at_goal = (reached[..., 0] >= 0.5) & (reached[..., 1] >= 0)
    np.testing.assert_array_equal(saved["terminated"], at_goal)
    device = f"{min(999, jax.device_count())} x {jax.devices()[0].device_kind}"
    lines, expected = [f"999 x MountainCar-v0 on {device}", "compiled in 2.5 s"], []
    for first, speed in (0, 82), (400, 58), (800, 45):  # M steps/s
        returns, goals = [], []
        for t in range(first, first + 400):
            length += 1
            total -= 1 + saved["action"][t]
            np.testing.assert_array_equal(saved["truncated"][t], length == limit)
            done = at_goal[t] | (length == limit)
            returns.extend(total[done])
            goals.extend(at_goal[t][done])
            length[done] = total[done] = 0
        assert (0 < np.mean(goals) < 1) == (policy == "rocking")
        line = {"episodes": len(goals), "goals": np.mean(goals), "returns": np.mean(returns)}
        expected.append({"timesteps": 999 * (first + 400), **line})
        text = "step {timesteps:,}  episodes {episodes:,}  at the goal {goals:.1%}"
        text += f"  return {{returns:.1f}}  {speed} M steps/s"
        lines.append(text.format_map(expected[-1]))
    for name in expected[0]:
        np.testing.assert_allclose(saved[name], [line[name] for line in expected], rtol=1e-6)
    assert (saved["compile_seconds"], saved["rollout_seconds"]) == (2.5, 27 / 1024)
    assert printed == lines and not saved["interrupted"] and saved["timesteps"].dtype == np.int64


def test_saved_arrays_are_one_trajectory_per_environment(rollout):
    """Each observation is where the last step led, or, after an episode, a start at rest."""
    _, _, _, saved = rollout
    obs, reached = saved["obs"][..., :2], saved["final_observation"][..., :2]
    before = states(*obs.reshape(-1, 2).T)
    step = jax.vmap(ENV.step_env, (None, 0, 0, None))
    expected, *_ = step(KEY, before, saved["action"].ravel(), car.EnvParams())
    # XLA computes the state and its copy apart: they may round differently.
    np.testing.assert_allclose(reached.reshape(-1, 2), expected, rtol=0, atol=1.5e-7)
    done = saved["terminated"] | saved["truncated"]
    lives = ~done[:-1]
    np.testing.assert_allclose(obs[1:][lives], reached[:-1][lives], rtol=0, atol=1.5e-7)
    starts = [np.concatenate([obs[:1, i], obs[1:, i][done[:-1, i]]]) for i in range(999)]
    assert all(len(np.unique(each, axis=0)) == len(each) > 5 for each in starts)  # none alike
    assert len(np.unique(obs[0, :, 0])) > 990 and uniform_starts(np.concatenate(starts))
    # Noise: float32 numbers, 1.2 million of 2^23. If all are random, 1.12 million are different.
    assert len(np.unique(saved["final_observation"][..., 2])) > 1.1e6


def test_actions_are_what_the_policy_says(rollout):
    """Random ones: a third of each, and a third equals those of another car, step or block."""
    policy, _, _, saved = rollout
    obs, action = saved["obs"], saved["action"]
    if policy == "rocking":
        np.testing.assert_array_equal(action, np.where(obs[..., 1] < 0, 0, 2))
        return
    others = [0 * action, 0 * action + 1, *(np.roll(action, n, axis=0) for n in (1, 50, 400))]
    for other in [*others, np.roll(action, 1, axis=1), np.roll(action, 500, axis=1)]:
        assert abs(np.mean(action == other) - 1 / 3) < 4 * (2 / 9 / action.size) ** 0.5


def test_one_car_needs_one_device_unless_the_job_has_more(capsys, monkeypatch):
    """An episode ends in the second line. JAX_ENABLE_X64=1 stopped a run there."""
    with jax.enable_x64(True):
        results = run("--num-envs 1 --total-timesteps 300 --log-interval 100")
    printed = capsys.readouterr().out
    assert printed.startswith("1 x MountainCar-v0 on 1 x ")
    assert "\nstep 100  episodes 0  at the goal nan%  return nan  " in printed
    assert "obs" not in results and results["episodes"].tolist() == [0, 1, 0]
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    run("--num-envs 1 --total-timesteps 1 --distributed")
    assert f" on {jax.device_count()} x " in capsys.readouterr().out


def test_the_seed_decides_everything_and_lines_and_devices_nothing(tmp_path, monkeypatch):
    """Car i of seed 1 is car i + 1 of seed 0. Lines of 2 and 4 blocks show the same 200 steps."""
    few, file = "--num-envs 51 --total-timesteps 10200", tmp_path / "x.npz"
    two_lines = run(f"{few} --log-interval 5100", "--save", file)
    one, other = run(few, "--save", file), run(f"{few} --seed 1", "--save", file)
    assert (len(two_lines["timesteps"]), len(one["timesteps"])) == (2, 1)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    one_device = run(few, "--save", file)
    for name in ("obs", "action", "final_observation", "terminated", "truncated"):
        np.testing.assert_array_equal(two_lines[name], one[name])
        np.testing.assert_array_equal(one_device[name], one[name])
        np.testing.assert_array_equal(other[name][:, :-1], one[name][:, 1:])


def test_steps_are_kept_only_for_save_which_refuses_too_many():
    """Steps are counted after rounding: 1e8 steps of 999 cars are more than 1e8."""
    args = car.parse_args([])
    *_, kept = jax.eval_shape(lambda: car.rollout(args, car.init_state(args)))
    assert kept is None
    car.parse_args("--save x.npz --num-envs 1000 --total-timesteps 1e8".split())
    with pytest.raises(SystemExit):
        car.parse_args("--save x.npz --num-envs 999 --total-timesteps 1e8".split())
