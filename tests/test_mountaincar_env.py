"""mountaincar_env.py against Gymnasium's MountainCar-v0, and what its rollout counts and saves."""

import json

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mountaincar_env as car

ENV = car.MountainCar()
KEY = jax.random.key(0)


def states(position, velocity, time=0):
    """Many cars."""
    time = jnp.broadcast_to(jnp.int32(time), np.shape(position))
    return car.EnvState(jnp.float32(position), jnp.float32(velocity), time)


def test_steps_equal_gymnasiums():
    """10,000 states, thousands of them at the wall and at the goal, each with three actions."""
    rng = np.random.default_rng(0)
    position = rng.uniform(-1.2, 0.6, 10_000)
    velocity = rng.uniform(-0.07, 0.07, 10_000)
    position[:1000] = -1.2
    position[1000:2000] = rng.uniform(0.43, 0.57, 1000)
    position[2000:3000] = rng.uniform(-1.2, -1.13, 1000)
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


def test_goal_needs_no_negative_velocity():
    *_, terminated, _, info = ENV.step(KEY, states(0.55, -0.01), 1)
    assert info["final_observation"][0] > 0.5 and not terminated


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
    assert params._asdict() == vars(their_params)
    assert env.action_space(params).n == env.num_actions == 3
    assert env.observation_space(params).shape == (2,)
    keys = jax.random.split(KEY, 5)
    obs, state = jax.jit(jax.vmap(env.reset, (0, None)))(keys, params)
    _, their_state = jax.vmap(theirs.reset, (0, None))(keys, their_params)
    np.testing.assert_allclose(state.position, their_state.position, rtol=2e-7)
    state = state._replace(time=state.time + time)
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
    np.testing.assert_array_equal(ours[0], obs if time else reached)  # `reset`'s, of that key
    np.testing.assert_array_equal(ours[1].time, 0 if time else 1)


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
    np.testing.assert_array_equal(obs[1:][~done[:-1]], reached[:-1][~done[:-1]])
    starts = obs[1:][done[:-1]]
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


@pytest.mark.parametrize(("policy", "chunks"), [("random", 1), ("random", 3), ("rocking", 3)])
def test_printed_statistics_are_those_of_finished_episodes(policy, chunks, tmp_path, capsys):
    """Each line again, in NumPy, from the trajectory; 100 steps, then NaN: none has ended."""
    path = tmp_path / "x.npz"
    flags = f"--num-envs 64 --total-timesteps {6400 * chunks} --log-interval 6400 --policy {policy}"
    car.main([*flags.split(), "--save", str(path)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    saved = np.load(path)
    length = np.zeros(64)
    for i, line in enumerate(lines):
        lengths, goals = [], []
        for t in range(100 * i, 100 * (i + 1)):
            length += 1
            done = saved["terminated"][t] | saved["truncated"][t]
            lengths.extend(length[done])
            goals.extend(saved["terminated"][t][done])
            length[done] = 0
        share = f"{np.mean(goals):.1%}" if goals else "nan%"
        mean = f"{-np.mean(lengths):.1f}" if goals else "nan"
        assert [line[3], line[7], line[9]] == [str(len(goals)), share, mean]
    assert len(lines) == chunks
