"""mountaincar_env.py against Gymnasium's and gymnax's MountainCar, and what a rollout counts."""

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest
from test_main import OutputThatInterrupts

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


@pytest.fixture(scope="module")
def steps():
    """One `step` of 1,000 cars by the script's class and by gymnax's, from the same states."""
    rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), 1000)
    position, velocity = np.float32(rng.uniform([[-1.2], [-0.07]], [[0.6], [0.07]], (2, 1000)))
    clock = rng.integers(195, 200, 1000)  # some reach the time limit of 198
    before, action = car.EnvState(clock, position, velocity), jnp.arange(1000) % 3
    results = {}
    for name, env in ("own", car.MountainCar()), ("gymnax", gymnax.make("MountainCar-v0")[0]):
        params = env.default_params.replace(max_steps_in_episode=198, **CHANGES)
        step = jax.jit(jax.vmap(env.step, (0, 0, 0, None)))
        obs, state, reward, terminated, truncated, info = step(keys, before, action, params)
        results[name] = {
            "obs": obs,
            "final_observation": info["final_observation"],
            "time": state.time,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
        }
    return results


def test_a_step_of_a_learner_is_that_of_gymnax(steps):
    for name, theirs in steps["gymnax"].items():
        own = steps["own"][name]
        assert (own.shape, own.dtype) == (theirs.shape, theirs.dtype), name
        close(own, theirs, rtol=0, atol=1e-7, err_msg=name)  # the cosine is a series
    assert 0 < np.mean(steps["own"]["terminated"]) < 1
    assert 0 < np.mean(steps["own"]["truncated"]) < 1


def test_parameters_and_spaces_are_those_of_gymnax():
    own, theirs = car.MountainCar(), gymnax.make("MountainCar-v0")[0]
    assert vars(own.default_params) == vars(theirs.default_params)
    params = theirs.default_params
    assert own.action_space(params).n == theirs.action_space(params).n == own.num_actions
    for name in "low", "high", "shape", "dtype":
        box, other = own.observation_space(params), theirs.observation_space(params)
        equal(np.asarray(getattr(box, name)), np.asarray(getattr(other, name)))


def test_the_cosine_suits_wider_tracks():
    x = np.linspace(-60, 60, 10001, dtype=np.float32)
    close(car.cosine(x), np.cos(x.astype(float)), atol=1e-5)


def test_the_clock_of_the_class_counts_its_steps():
    """Learners see the time limit by it. Your own class: put it in the place of ENV."""
    key = jax.random.key(0)
    _, state = car.ENV.reset_env(key, car.PARAMS)
    action = car.ENV.action_space(car.PARAMS).sample(key)
    _, after, *_ = car.ENV.step_env(key, state, action, car.PARAMS)
    assert (state.time, after.time) == (0, 1)


class Costly(car.MountainCar):
    """Rewards of -1 to -3, by action; nan after the end, which nothing may count."""

    def step_env(self, key, before, action, params):
        obs, state, reward, terminated, info = super().step_env(key, before, action, params)
        reward = jnp.where(self.is_terminated(before, params), jnp.nan, reward - action)
        return obs, state, reward, terminated, info


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    """999 costly cars, six episodes each: two lines of three. 999 do not divide evenly."""
    path, patch = tmp_path_factory.mktemp("car") / "x.npz", pytest.MonkeyPatch()
    patch.setattr(car, "PARAMS", car.EnvParams(max_steps_in_episode=LIMIT, **CHANGES))
    patch.setattr(car, "ENV", Costly())
    flags = ["--num-envs", "999", "--num-episodes", "5", "--num-intervals", "2"]
    results = car.main([*flags, "--save", str(path)])
    patch.undo()
    return SimpleNamespace(results=results, file=dict(np.load(path)), **results)


def test_the_file_holds_what_main_returns(rollout):
    equal(rollout.file, rollout.results)
    shapes = {rollout.results[name].shape[:3] for name in car.Step._fields}
    assert shapes == {(999, 6, LIMIT)}


# A part of all episodes, since Gymnasium plays one step at a time.
SOME = [*itertools.product(range(0, 999, 37), range(6))]


def test_steps_are_those_of_gymnasium(rollout):
    env = gymnasium.make("MountainCar-v0").unwrapped
    vars(env).update(CHANGES)
    for place in SOME:
        obs, next_obs = rollout.obs[place], rollout.next_obs[place]
        equal(obs[1:], next_obs[:-1])
        for t in range(LIMIT):
            env.state = np.float64(obs[t])
            _, reward, terminated, *_ = env.step(int(rollout.action[place][t]))
            close(next_obs[t], env.state, rtol=0, atol=3e-7)  # the script has single precision
            assert rollout.terminated[place][t] == terminated
            if rollout.mask[place][t]:
                assert rollout.reward[place][t] == reward - rollout.action[place][t]


def test_the_mask_is_true_up_to_the_end_of_an_episode(rollout):
    for place in SOME:
        ends = np.flatnonzero(rollout.terminated[place])
        length = ends[0] + 1 if len(ends) else LIMIT
        equal(rollout.mask[place], np.arange(LIMIT) < length)


def test_episodes_of_each_length_end_at_the_goal_and_cars_meet_all_bounds(rollout):
    """So the tests above have seen these cases."""
    ended = np.any(rollout.mask & rollout.terminated, axis=2)
    assert set(rollout.mask.sum(axis=2)[ended]) == set(range(1, LIMIT + 1))
    for axis, bound in (0, -1.22), (0, 0.4), (1, -0.05), (1, 0.05):  # walls, top speeds
        assert np.mean(rollout.next_obs[..., axis] == np.float32(bound)) > 0.001


def test_a_line_counts_real_steps_and_their_rewards(rollout):
    ended = np.any(rollout.mask & rollout.terminated, axis=2)  # (N, 6)
    returns = np.sum(rollout.reward, axis=2, where=rollout.mask)  # (N, 6)
    for line, (first, last) in enumerate([(0, 3), (3, 6)]):
        assert rollout.episodes[line] == last
        assert rollout.timesteps[line] == rollout.mask[:, :last].sum()  # so far
        close(rollout.returns[line], returns[:, first:last].mean(), rtol=1e-5)
        close(rollout.terminations[line], ended[:, first:last].mean(), rtol=1e-5)
        close(rollout.truncations[line], 1 - rollout.terminations[line], rtol=1e-5)


def test_episodes_start_at_rest_evenly_over_the_valley(rollout):
    starts = rollout.obs[:, :, 0].reshape(-1, 2)
    assert not starts[:, 1].any()
    assert kstest(starts[:, 0], "uniform", args=(-0.6, 0.2)).pvalue > 1e-6
    assert len(np.unique(starts[:, 0])) > 0.993 * len(starts)  # float32 has few numbers there


def test_random_actions_are_equally_likely_and_independent(rollout):
    """Of the other cars, of the other episodes, and of the other steps."""
    action, deviation = rollout.action, np.sqrt(2 / 9 / rollout.action.size)
    for number in range(3):
        assert abs(np.mean(action == number) - 1 / 3) < 5 * deviation
    for axis in range(3):
        assert abs(np.mean(action == np.roll(action, 1, axis)) - 1 / 3) < 5 * deviation


def test_the_first_action_does_not_depend_on_the_start(rollout):
    starts, first = rollout.obs[:, :, 0, 0].ravel(), rollout.action[:, :, 0].ravel()
    for number in range(3):
        assert abs(np.corrcoef(starts, first == number)[0, 1]) < 5 / len(starts) ** 0.5


@pytest.fixture
def short(monkeypatch, tmp_path):
    """A function that rolls out cars with a time limit of 20 steps."""
    monkeypatch.setattr(car, "PARAMS", car.EnvParams(max_steps_in_episode=20, **CHANGES))
    save = ["--save", str(tmp_path / "x.npz")]
    return lambda flags: car.main([*flags.split(), "--num-episodes", "6", *save])


def test_a_car_is_the_same_alone_and_among_others_with_any_number_of_lines(short):
    """One car takes one device, 51 and 600 take four. Car i has seed + i."""
    many, alone = short("--num-envs 600 --num-intervals 3"), short("--num-envs 1 --num-intervals 1")
    shifted = short("--num-envs 51 --seed 1 --num-intervals 2")
    for name in car.Step._fields:
        close(alone[name], many[name][:1], rtol=0, atol=1e-6)  # another program may round
        close(shifted[name], many[name][1:52], rtol=0, atol=1e-6)


def test_ctrl_c_keeps_the_episodes_so_far(short, monkeypatch):
    whole = short("--num-envs 9 --num-intervals 3")
    monkeypatch.setattr("sys.stdout", OutputThatInterrupts(lines=4))  # the second of three lines
    cut = short("--num-envs 9 --num-intervals 3")
    assert cut["interrupted"] and not whole["interrupted"]
    assert cut["episodes"].tolist() == [2, 4]
    equal(cut["obs"], whole["obs"][:, :4])


def test_an_error_in_the_loop_is_raised_after_the_steps_so_far_are_saved(
    short, monkeypatch, tmp_path
):
    gather, calls = car.gather, []

    def fail_in_the_second_interval(tree, length):
        calls.append(tree)
        if len(calls) == 3:  # metrics and steps of the first one, then metrics
            raise ConnectionError
        return gather(tree, length)

    monkeypatch.setattr(car, "gather", fail_in_the_second_interval)
    with pytest.raises(ConnectionError):
        short("--num-envs 9 --num-intervals 3")
    saved = np.load(tmp_path / "x.npz")
    assert saved["interrupted"] and saved["episodes"].tolist() == [2]


def test_ctrl_c_before_the_first_line_ends_the_rollout(short, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(car, "gather", interrupt)  # which waits for the first interval
    with pytest.raises(KeyboardInterrupt):
        short("--num-envs 9")


def test_seconds_of_compiling_and_of_the_rollout_are_parts_of_those_of_the_command(short):
    began = time.perf_counter()
    results = short("--num-envs 9")
    elapsed = time.perf_counter() - began
    compiling, rolling = results["compile_seconds"], results["rollout_seconds"]
    assert compiling > 0 and rolling > 0 and compiling + rolling < elapsed


def test_cars_are_divided_into_equal_batches(monkeypatch):
    monkeypatch.setattr(car, "RUNS_AT_ONCE", 4)
    args, seeds = SimpleNamespace(distributed=False), {"seed": np.arange(22)}
    devices, at_once, rows = car.divide(args, seeds)
    assert len(devices) == 4 and at_once == 3  # six on each: two batches of three
    assert rows["seed"].tolist() == [*range(22), 0, 1]


def test_rocking_pushes_in_the_direction_of_motion(short):
    rocking = short("--num-envs 9 --policy rocking")
    equal(rocking["action"], np.where(rocking["obs"][..., 1] < 0, 0, 2))


def test_the_last_line_shows_the_last_interval(short, capsys):
    results = short("--num-envs 9 --num-intervals 3")
    *_, line = capsys.readouterr().out.splitlines()
    assert "episode 6" in line and "steps/s" in line
    assert f"{results['returns'][2]:.1f}" in line
    assert f"{results['terminations'][2] * 100:.1f}" in line


class Stopped(car.MountainCar):
    """A class whose author forgot to add 1 to `time`: a learner would never see its time limit."""

    def step_env(self, key, state, action, params):
        obs, after, reward, terminated, info = super().step_env(key, state, action, params)
        return obs, after.replace(time=state.time), reward, terminated, info


class WithoutAnEnd(car.MountainCar):
    """No state is terminal: gymnax allows a Python False."""

    def is_terminated(self, state, params):
        return False


def test_a_class_whose_clock_stands_still_is_refused(short, monkeypatch):
    monkeypatch.setattr(car, "ENV", Stopped())
    with pytest.raises(ValueError, match="add 1 to"):
        short("--num-envs 9")


def test_a_class_without_terminal_states_runs_to_the_time_limit(short, monkeypatch):
    monkeypatch.setattr(car, "ENV", WithoutAnEnd())
    results = short("--num-envs 9")
    assert results["mask"].all() and np.all(results["truncations"] == 1)


def test_parameters_may_be_arrays(short, monkeypatch):
    monkeypatch.setattr(car, "PARAMS", jax.tree.map(jnp.array, car.PARAMS))
    assert short("--num-envs 9")["obs"].shape == (9, 6, 20, 2)


def test_flags_of_any_type_are_saved(short, monkeypatch):
    parse_args = car.parse_args

    def with_own_flag(argv):
        args = parse_args(argv)
        args.folder, args.bins = Path("a/b"), np.arange(3)
        return args

    monkeypatch.setattr(car, "parse_args", with_own_flag)
    flags = json.loads(short("--num-envs 9")["args"])
    assert flags["folder"] == "a/b" and flags["bins"] == [0, 1, 2]


def changed_rollout(monkeypatch, **more):
    """Let `play` return more totals."""
    play = car.play

    def with_more(run, key):
        totals, steps = play(run, key)
        return {**totals, **more}, steps

    monkeypatch.setattr(car, "play", with_more)


@pytest.mark.parametrize("name", ["reward", "episodes", "args"])
def test_a_total_whose_name_is_taken_is_refused_before_the_rollout(short, monkeypatch, name):
    changed_rollout(monkeypatch, **{name: jnp.array(1.0)})
    with pytest.raises(ValueError, match=f"the name '{name}'"):
        short("--num-envs 9")


def test_a_total_may_be_an_array(short, monkeypatch):
    """It is averaged over cars and episodes, not over its entries."""
    changed_rollout(monkeypatch, pair=jnp.array([2.0, 5.0]))
    results = short("--num-envs 9 --num-intervals 3")
    close(results["pair"], [[2, 5], [2, 5], [2, 5]])


class HalfPrecision(car.MountainCar):
    def observe(self, key, state, action, params):
        return super().observe(key, state, action, params).astype(jnp.bfloat16)


def test_what_numpy_cannot_save_is_refused_before_the_rollout(short, monkeypatch):
    monkeypatch.setattr(car, "ENV", HalfPrecision())
    with pytest.raises(TypeError, match="bfloat16"):
        short("--num-envs 9")


def test_a_file_of_too_many_steps_is_refused(capsys):
    # 499 episodes are rounded up to 5 lines of 100, so 10,001 cars make more than 1e8 steps.
    with pytest.raises(SystemExit):
        car.parse_args("--save x.npz --num-envs 10001 --num-episodes 499".split())
    assert "at most 1e+08 steps" in capsys.readouterr().err
