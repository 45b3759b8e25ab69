"""mountaincar_env.py against Gymnasium's MountainCar-v0, and what its rollout counts and saves."""

import json

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.wrappers import FlattenObservationWrapper, LogWrapper

import mountaincar_env as car

ENV = car.MountainCar()
KEY = jax.random.key(0)


def states(position, velocity, time=0):
    """Many cars."""
    time = jnp.broadcast_to(jnp.int32(time), np.shape(position))
    return car.EnvState(position=jnp.float32(position), velocity=jnp.float32(velocity), time=time)


def test_steps_equal_gymnasiums():
    """10,000 states, many at both walls, at the goal and at top speed, each with three actions."""
    rng = np.random.default_rng(0)
    position = rng.uniform(-1.2, 0.6, 10_000)
    velocity = rng.uniform(-0.07, 0.07, 10_000)
    position[:1000] = -1.2
    position[1000:2000] = rng.uniform(0.43, 0.57, 1000)
    position[2000:3000] = rng.uniform(-1.2, -1.13, 1000)
    position[3000:3500] = 0.6
    position[4500:5000] = rng.uniform(0.55, 0.6, 500)
    velocity[4000:5000] = rng.choice([-0.07, 0.0, 0.07], 1000)
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


def test_episodes_equal_gymnasiums():
    """1,000 whole episodes, half of them random, half to the goal: each ends as Gymnasium's."""
    rng = np.random.default_rng(0)
    env = gymnasium.make("MountainCar-v0")
    actions = rng.integers(0, 3, (200, 1000))
    starts = np.zeros(1000)
    path = np.full((200, 1000, 2), np.nan)
    ended = np.zeros((200, 1000, 2), bool)  # terminated, truncated
    for episode in range(1000):
        env.reset(seed=episode)
        starts[episode] = env.unwrapped.state[0]
        for t in range(200):
            if episode % 2:
                actions[t, episode] = 0 if env.unwrapped.state[1] < 0 else 2
            _, _, *ended[t, episode], _ = env.step(int(actions[t, episode]))
            path[t, episode] = env.unwrapped.state
            if ended[t, episode].any():
                break

    def step(state, action):
        _, state, _, *done, info = jax.vmap(ENV.step, (None, 0, 0))(KEY, state, action)
        return state, (jnp.stack(done, axis=-1), info["final_observation"])

    _, (done, reached) = jax.lax.scan(step, states(starts, np.zeros(1000)), actions)
    lived = ~np.isnan(path[..., 0])
    assert (ended[..., 0].sum(), ended[199, :, 1].sum()) == (500, 500)
    np.testing.assert_array_equal(np.array(done)[lived], ended[lived])
    np.testing.assert_allclose(np.array(reached)[lived], path[lived], rtol=0, atol=2e-5)


def test_goal_in_the_last_step_both_terminates_and_truncates_as_gymnasium():
    env = gymnasium.make("MountainCar-v0")
    env.reset()
    env.unwrapped.state = 0.48, 0.05
    env._elapsed_steps = 199
    _, _, *theirs, _ = env.step(2)
    _, _, _, *ours, _ = ENV.step(KEY, states(0.48, 0.05, 199), 2)
    assert ours == theirs == [True, True]


@pytest.mark.parametrize("velocity", [-0.07, -0.01, 0.0, 0.07])
def test_goal_is_not_reached_by_rolling_back(velocity):
    *_, terminated, _, info = ENV.step(KEY, states(0.59, velocity), 1)
    assert info["final_observation"][0] > 0.5
    assert terminated == (velocity >= 0)


def test_cosine_within_float32():
    """Measured: 2.1e-7 where 3 position may lie, 5.4e-7 to 20; with a term less 5.5e-6."""
    for end, tolerance in [(3.6, 3e-7), (20, 7e-7)]:
        x = np.linspace(-end, end, 100_001, dtype=np.float32)
        np.testing.assert_allclose(car.cosine(x), np.cos(np.float64(x)), rtol=0, atol=tolerance)


@pytest.mark.parametrize("time", [0, 199])
def test_stands_for_what_gymnax_makes(time):
    """Through gymnax.register, vmapped and compiled: shapes, types, spaces; resets as it says."""
    gymnax.register(f"MyCar-v{time}", car.MountainCar)
    env, params = gymnax.make(f"MyCar-v{time}")
    gymnax.registered_envs.remove(f"MyCar-v{time}")  # other tests go through this list
    theirs, their_params = gymnax.make("MountainCar-v0")
    assert vars(params) == vars(their_params)
    assert env.action_space(params).n == env.num_actions == 3
    assert env.observation_space(params).shape == (2,)
    keys = jax.random.split(KEY, 5)
    _, state = jax.jit(jax.vmap(env.reset, (0, None)))(keys, params)
    _, their_state = jax.vmap(theirs.reset, (0, None))(keys, their_params)
    np.testing.assert_allclose(state.position, their_state.position, rtol=2e-7)
    state = state.replace(time=state.time + time)
    their_state = their_state.replace(time=their_state.time + time)
    actions = jnp.arange(5) % 3
    over = 0, 0, 0, None
    ours = jax.jit(jax.vmap(env.step, over))(keys, state, actions, params)
    their = jax.vmap(theirs.step, over)(keys, their_state, actions, their_params)
    for mine, other in zip(ours[2:5], their[2:5], strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(mine, other)
    reached = ours[5]["final_observation"]
    np.testing.assert_allclose(reached, their[5]["final_observation"], rtol=0, atol=1.5e-7)
    np.testing.assert_allclose(ours[0], their[0], rtol=0, atol=1.5e-7)  # a start at time 199
    np.testing.assert_array_equal(ours[1].time, 0 if time else 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"gravity": 0.004},
        {"force": 0.003},
        {"max_speed": 0.02},
        {"min_position": -0.6},
        {"max_position": 0.2},
        {"goal_position": -0.2},
        {"goal_velocity": 0.05, "goal_position": -0.2},
        {"max_steps_in_episode": 7},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_other_parameters_have_the_same_effect_as_in_gymnax(changed):
    """1,000 cars, under `jit`, with parameters as an argument; the change has an effect."""
    theirs, default = gymnax.make("MountainCar-v0")
    rng = np.random.default_rng(0)
    position, velocity = rng.uniform(-1.2, 0.6, 1000), rng.uniform(-0.07, 0.07, 1000)
    state = states(position, velocity, rng.integers(0, 9, 1000))
    actions, keys = jnp.arange(1000) % 3, jax.random.split(KEY, 1000)

    def outcome(env, params):
        step = jax.vmap(env.step, (0, 0, 0, None))
        obs, _, _, *done, info = step(keys, state, actions, params)
        return (
            obs,
            info["final_observation"],
            *done,
            jax.vmap(env.is_terminated, (0, None))(state, params),
        )

    ours = jax.jit(lambda params: outcome(ENV, params))(car.EnvParams().replace(**changed))
    expected = outcome(theirs, default.replace(**changed))
    for mine, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=2e-7)
    assert not all(map(np.array_equal, expected, outcome(theirs, default)))


def test_works_in_gymnaxs_wrappers():
    env = LogWrapper(FlattenObservationWrapper(ENV))
    keys = jax.random.split(KEY, 3)
    obs, state = jax.vmap(env.reset, (0, None))(keys, ENV.default_params)
    assert obs.shape == (3, 2)
    params = ENV.default_params.replace(max_steps_in_episode=5)
    for _ in range(5):
        obs, state, _, _, truncated, info = jax.vmap(env.step, (0, 0, None, None))(
            keys, state, 1, params
        )
    assert truncated.all() and np.all(info["returned_episode_returns"] == -5)


@pytest.fixture(scope="module", params=["random", "rocking"])
def saved(request, tmp_path_factory):
    """1,200 steps of 1,000 environments, in two chunks."""
    path = tmp_path_factory.mktemp("rollout") / "x.npz"
    flags = f"--num-envs 1000 --total-timesteps 1.2e6 --log-interval 6e5 --policy {request.param}"
    assert car.main([*flags.split(), "--save", str(path)]) == 0
    return dict(np.load(path))


def test_saved_arrays_are_one_trajectory_per_environment(saved):
    """Where the last step led, or, after an episode, a start: at rest, uniform in -0.6 to -0.4."""
    obs, action, reached = (saved[name] for name in ("obs", "action", "final_observation"))
    done = saved["terminated"] | saved["truncated"]
    assert (obs.shape, action.shape) == ((1200, 1000, 2), (1200, 1000))
    lives = ~done[:-1]  # XLA computes the state and its copy apart: they may round differently
    np.testing.assert_allclose(obs[1:][lives], reached[:-1][lives], rtol=0, atol=1.5e-7)
    starts = np.concatenate([obs[0], obs[1:][done[:-1]]])
    assert len(np.unique(obs[0, :, 0])) > 990  # each car has its own
    assert np.all(starts[:, 1] == 0)
    fraction = np.sort((starts[:, 0] + 0.6) / 0.2)
    uniform = (np.arange(len(fraction)) + 0.5) / len(fraction)
    assert np.abs(fraction - uniform).max() < 1.95 / len(fraction) ** 0.5  # Kolmogorov, Smirnov
    stepped = jax.vmap(ENV.step, (None, 0, 0))(KEY, states(*obs.reshape(-1, 2).T), action.ravel())[
        5
    ]
    stepped = stepped["final_observation"].reshape(reached.shape)
    np.testing.assert_allclose(stepped, reached, rtol=0, atol=1.5e-7)


def test_actions_are_what_the_policy_says(saved):
    """Random ones: chi-square, 99.9 % point; no two environments or steps go together."""
    action = saved["action"]
    if json.loads(str(saved["args"]))["policy"] == "rocking":
        np.testing.assert_array_equal(action, np.where(saved["obs"][..., 1] < 0, 0, 2))
        return
    counts = np.bincount(action.ravel())
    assert np.sum((counts - 4e5) ** 2 / 4e5) < 13.8
    assert np.abs(np.corrcoef(action.T) - np.eye(1000)).max() < 5.5 / 1200**0.5
    assert np.abs(np.corrcoef(action) - np.eye(1200)).max() < 5.5 / 1000**0.5


@pytest.mark.parametrize(("policy", "limit"), [("random", 200), ("rocking", 200), ("rocking", 120)])
def test_printed_statistics_are_those_of_finished_episodes(
    policy, limit, tmp_path, capsys, monkeypatch
):
    """Each line again, in NumPy, from the trajectory. In the first 100 steps no episode ends."""
    params = car.EnvParams(max_steps_in_episode=limit)
    monkeypatch.setattr(car, "EnvParams", lambda: params)  # 120: some reach the goal, some do not
    path = tmp_path / "x.npz"
    flags = f"--num-envs 64 --total-timesteps 40000 --log-interval 12800 --policy {policy}"
    car.main([*flags.split(), "--save", str(path)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    saved = np.load(path)
    assert len(saved["action"]) == 700  # 625 steps of 64 cars, in whole blocks
    assert [line[1] for line in lines] == ["12,800", "25,600", "38,400", "44,800"]
    length = np.zeros(64)
    for i, line in enumerate(lines):
        lengths, goals = [], []
        for t in range(200 * i, min(200 * (i + 1), 700)):
            length += 1
            np.testing.assert_array_equal(saved["truncated"][t], length == limit)
            done = saved["terminated"][t] | saved["truncated"][t]
            lengths.extend(length[done])
            goals.extend(saved["terminated"][t][done])
            length[done] = 0
        fraction = f"{np.mean(goals):.1%}" if goals else "nan%"
        mean = f"{-np.mean(lengths):.1f}" if goals else "nan"
        assert [line[3], line[7], line[9]] == [str(len(goals)), fraction, mean]
        assert limit == 200 or 0 < np.mean(goals) < 1


@pytest.mark.parametrize(("cars", "text"), [(1, "1 car on 1 x"), (7, "7 cars"), (12, "12 cars")])
def test_cars_are_spread_over_the_largest_divisor(cars, text, capsys):
    assert car.main(f"--num-envs {cars} --total-timesteps 1 --log-interval 1e9".split()) == 0
    out = capsys.readouterr().out
    assert text in out and f"step {100 * cars:,}  episodes 0  at the goal nan%" in out
    largest = [n for n in range(1, jax.device_count() + 1) if cars % n == 0][-1]
    assert f" on {largest} x " in out


@pytest.mark.parametrize("path", ["", ".", "/proc/x.npz", "missing/x.npz"])
def test_file_that_cannot_be_written_is_refused_at_once(path, capsys):
    with pytest.raises(SystemExit) as error:
        car.parse_args(["--save", path, "--total-timesteps", "1"])
    assert error.value.code == 2 and "cannot write" in capsys.readouterr().err
