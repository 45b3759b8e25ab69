"""mountaincar_env.py against Gymnasium's and gymnax's own MountainCar-v0, and its rollout over devices and processes."""
import json
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import mountaincar_env as car

SCRIPT = Path(car.__file__)
ARRAYS = dict(obs=(2,), action=(), reward=(), terminated=(), truncated=(), final_observation=(2,), discount=())
FEW = "--total-timesteps 6400 --log-interval 3200 --num-envs 16".split()  # two chunks of 200 steps
LONG = "--total-timesteps 1e12 --log-interval 12800 --num-envs 64".split()  # hours, a few milliseconds per chunk


@contextmanager
def scripts():
    """Gives a function that starts the script; kills what still runs at the end, stopped processes too."""
    processes = []

    def begin(*flags):
        processes.append(subprocess.Popen([sys.executable, str(SCRIPT), *map(str, flags)], text=True,
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return processes[-1]
    try:
        yield begin
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture
def begin():
    with scripts() as begin:
        yield begin


def begin_some_of_two(begin, numbers, *flags):
    """Start these (0, 1) of the two processes of one rollout, at a port of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"--num-processes 2 --coordinator 127.0.0.1:{probe.getsockname()[1]} --process-id".split()
    return [begin(*flags, *where, number) for number in numbers]


def end(process, code=0, seconds=120):
    """Wait for a process that should end with this code in this time; returns what it wrote."""
    stdout, stderr = process.communicate(timeout=seconds)
    assert process.returncode == code, stderr
    return stdout, stderr


def until(word, stream):
    """Read lines until one holds the word, which must come before the end; returns that line."""
    return next(line for line in stream if word in line)


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """1,000 environments of each policy, as a user saves them; the second goes on to draw, and ends in the last tests below."""
    folder = tmp_path_factory.mktemp("rollouts")
    with scripts() as begin:
        flags = "--num-envs", 1000, "--log-interval", 400_000, "--json", "--save"
        random = begin(*flags, folder / "random.npz", "--total-timesteps", 1_200_000)
        rocking = begin(*flags, folder / "rocking.npz", "--total-timesteps", 400_000, "--policy", "rocking",
                        "--plot", folder / "x.png", "--gif", folder / "x.gif")
        report = json.loads(end(random)[0])
        yield folder, dict(np.load(folder / "random.npz")), report, rocking


# --- one step, and one episode


@cache
def gymnasium_steps():
    """30,000 states and actions, and where Gymnasium goes from there, in double precision: position, velocity, reward, terminated."""
    rng = np.random.default_rng(0)
    position, velocity = rng.uniform(-1.2, 0.6, 10_000), rng.uniform(-0.07, 0.07, 10_000)
    position[:1000], position[1000:2000], position[2000:3000] = -1.2, rng.uniform(0.43, 0.57, 1000), rng.uniform(-1.2, -1.13, 1000)
    env, reached = gymnasium.make("MountainCar-v0").unwrapped, []
    for action, state in product(range(3), zip(position, velocity)):
        env.state = state
        reached.append([*env.step(action)[1:3], *env.state])
    reward, terminated, *state = np.array(reached).T
    assert np.sum(state[0] == -1.2) > 2000 and np.sum(terminated) > 1800  # the wall and the goal are tried
    return np.tile(position, 3), np.tile(velocity, 3), np.repeat(range(3), 10_000), state, reward, terminated


def states(position, velocity, time=0):
    """Many states at once, of the precision that is in force."""
    return car.EnvState(jnp.asarray(position, float), jnp.asarray(velocity, float), jnp.full(len(position), time, jnp.int32))


@pytest.mark.parametrize("x64, tolerance", [(False, 1.5e-7), (True, 1e-15)])
def test_steps_equal_gymnasiums(x64, tolerance):
    """Measured: 1.2e-7 and 2.2e-16, an ulp; none comes so near to the wall or the goal, 1.3e-5, that float32 falls on the other side."""
    position, velocity, action, expected, reward, terminated = gymnasium_steps()
    with jax.enable_x64(x64):
        *_, ours, ended, truncated, info = jax.vmap(car.step, (None, 0, 0))(jax.random.key(0), states(position, velocity), action)
    assert info["final_observation"].dtype == (np.float64 if x64 else np.float32)
    np.testing.assert_array_equal([ours, ended, truncated], [reward, terminated, 0 * reward])
    np.testing.assert_allclose(info["final_observation"].T, expected, rtol=0, atol=tolerance)


@cache
def gymnasium_episodes():
    """1,000 whole episodes, half of them random: starts (E,), actions (E, 200), and what follows each (5, E, 200), NaN after the end."""
    rng, env = np.random.default_rng(0), gymnasium.make("MountainCar-v0")
    starts, actions, reached = np.zeros(1000), rng.integers(0, 3, (1000, 200)), np.full((1000, 200, 5), np.nan)
    for episode in range(1000):
        env.reset(seed=episode)
        starts[episode] = env.unwrapped.state[0]
        for t in range(200):
            if episode % 2:
                actions[episode, t] = 0 if env.unwrapped.state[1] < 0 else 2
            _, *after, _ = env.step(int(actions[episode, t]))
            reached[episode, t] = *after, *env.unwrapped.state
            if any(after[1:]):
                break
    return starts, actions, np.moveaxis(reached, 2, 0)


@pytest.mark.parametrize("x64, tolerance", [(False, 1e-5), (True, 1e-12)])
def test_whole_episodes_equal_gymnasiums_with_its_time_limit(x64, tolerance):
    """Measured: 1.7e-6 and 2.8e-15 at most, over 200 steps. No episode parts company: 208 touch the wall, where positions are compared
    for equality, and 500 reach the goal, but none comes nearer to these thresholds than 4.6e-5."""
    starts, actions, (reward, terminated, truncated, *expected) = gymnasium_episodes()

    def episode(state, actions):
        def act(state, action):
            _, state, *rest, info = car.step(jax.random.key(0), state, action)
            return state, (rest, info["final_observation"])
        return jax.lax.scan(act, state, actions)[1]
    with jax.enable_x64(x64):
        ours, observation = jax.jit(jax.vmap(episode))(states(starts, 0 * starts), actions)
    lived = ~np.isnan(reward)
    assert np.nansum(terminated) == np.nansum(truncated) == 500 and np.sum(np.nanmin(expected[0], axis=1) == -1.2) > 200
    for name, ours_, gyms in zip(("reward", "terminated", "truncated"), ours, (reward, terminated, truncated)):
        np.testing.assert_array_equal(np.asarray(ours_)[lived], gyms[lived], err_msg=name)
    np.testing.assert_allclose(np.asarray(observation)[lived].T, [x[lived] for x in expected], rtol=0, atol=tolerance)


@pytest.mark.parametrize("x64, tolerance", [(False, 1e-6), (True, 2e-15)])
def test_cosine(x64, tolerance):
    """Measured: 5.4e-7 and 1.1e-15, over six periods; cos(x) doubles the error of cos(x / 2) twice."""
    with jax.enable_x64(x64):
        x = jnp.linspace(-20, 20, 100_001)
        ours = jax.jit(car.cosine)(x)
    np.testing.assert_allclose(ours, np.cos(np.asarray(x, np.float64)), rtol=0, atol=tolerance)


# --- in gymnax's place


def as_tree(state):
    return {name: getattr(state, name) for name in ("position", "velocity", "time")}


def test_steps_equal_gymnaxs():
    """Measured: 1.2e-7, an ulp; the states are in the last ten steps before the time limit."""
    position, velocity, action, *_ = gymnasium_steps()
    time = np.arange(len(position)) % 10 + 190
    keys = jax.random.split(jax.random.key(0), len(position))
    env, env_params = gymnax.make("MountainCar-v0")
    theirs_before = jax.vmap(env.reset)(keys)[1].replace(**as_tree(states(position, velocity, time)))
    obs, after, *ours, info = jax.vmap(car.MountainCar().step)(keys, states(position, velocity, time), action)
    obs_, after_, *theirs, info_ = jax.vmap(env.step, (0, 0, 0, None))(keys, theirs_before, action, env_params)
    np.testing.assert_array_equal(ours, theirs)  # reward, terminated, truncated
    assert sum(ours[2]) == 3000 and jnp.any(ours[1] & ours[2])
    for name in ("terminated", "truncated", "discount"):
        np.testing.assert_array_equal(info[name], info_[name])
    np.testing.assert_allclose(info["final_observation"], info_["final_observation"], rtol=0, atol=1.5e-7)
    np.testing.assert_array_equal(after.time, after_.time)
    goes_on = ~(ours[1] | ours[2])
    np.testing.assert_allclose(obs[goes_on], obs_[goes_on], rtol=0, atol=1.5e-7)
    np.testing.assert_array_equal(obs, jnp.stack(after[:2], axis=1))
    begun, _ = jax.vmap(car.reset)(keys)  # where an episode ended, the key, and only it, says how the next begins
    np.testing.assert_allclose(obs[~goes_on], begun[~goes_on], rtol=0, atol=6e-8)


def as_a_user_would(env, env_params):
    """Everything that a script does with what gymnax.make returned; gives back names, shapes and dtypes."""
    keys = jax.random.split(jax.random.key(0), 5)
    obs, state = jax.jit(jax.vmap(env.reset, (0, None)))(keys, env_params)
    action = jax.vmap(env.action_space(env_params).sample)(keys)
    many = jax.jit(jax.vmap(env.step, (0, 0, 0, None)))(keys, state, action, env_params)
    obs_one, state_one = env.reset(keys[0])
    one, same = env.step(keys[0], state_one, action[0]), env.step(keys[0], state_one, 1, env.default_params)
    space = env.observation_space(env_params)
    assert space.contains(obs_one) and not space.contains(obs_one + 2) and jnp.all(action < env.action_space(env_params).n)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), [(obs, as_tree(state), *((x[0], as_tree(x[1]), x[2:]) for x in (many, one, same)))])
    return env.name, env.num_actions, env.action_space(env_params).n, space.shape, space.dtype, *map(list, (space.low, space.high)), shapes


def test_it_takes_the_place_of_what_gymnax_makes():
    gymnax.register("OwnMountainCar-v0", car.MountainCar)
    theirs = as_a_user_would(*gymnax.make("MountainCar-v0"))
    assert as_a_user_would(*gymnax.make("OwnMountainCar-v0")) == as_a_user_would(car.MountainCar(), car.EnvParams()) == theirs
    assert car.EnvParams()._asdict() == vars(gymnax.make("MountainCar-v0")[1])
    gymnax.registered_envs.remove("OwnMountainCar-v0")  # other tests go through this list


def test_environments_of_one_batch_may_differ_in_gravity():
    """Without any, only the engine acts: 0.02 + 0.001."""
    gravity, state = jnp.linspace(0, 0.005, 11), car.EnvState(jnp.float32(-0.3), jnp.float32(0.02), jnp.int32(0))
    step = lambda g: car.MountainCar.step(jax.random.key(0), state, 2, car.EnvParams(gravity=g))[0]
    together, alone = jax.vmap(step)(gravity), jnp.stack([step(g) for g in gravity])
    np.testing.assert_allclose(together, alone, rtol=1e-6)
    np.testing.assert_allclose(together[0], [-0.279, 0.021], rtol=1e-5)
    assert np.all(np.diff(together[:, 1]) < 0)


# --- what a rollout keeps


def test_saved_arrays_are_one_trajectory_per_environment(rollouts):
    """What is seen next is where the last step led, or, after the end of an episode, a start: at rest, at -0.6 to -0.4."""
    _, saved, *_ = rollouts
    assert {name: saved[name].shape for name in ARRAYS} == {name: (1200, 1000, *shape) for name, shape in ARRAYS.items()}
    done = saved["terminated"] | saved["truncated"]
    np.testing.assert_array_equal(saved["obs"][1:][~done[:-1]], saved["final_observation"][:-1][~done[:-1]])
    started = np.concatenate([saved["obs"][:1].reshape(-1, 2), saved["obs"][1:][done[:-1]]])
    assert len(started) == 6000 and np.all(started[:, 1] == 0) and started[:, 0].min() >= -0.6 and started[:, 0].max() < -0.4
    ours = jax.vmap(car.step, (None, 0, 0))(jax.random.key(0), states(*saved["obs"].reshape(-1, 2).T), saved["action"].ravel())[5]
    np.testing.assert_allclose(saved["final_observation"].reshape(-1, 2), ours["final_observation"], rtol=0, atol=1.5e-7)
    moves = np.any(saved["obs"] != saved["final_observation"], axis=2)
    assert moves.mean() > 0.999 and len(np.unique(saved["obs"][..., 0])) > 500_000  # stored, each of them


def test_the_time_limit_is_200_and_is_no_end_of_the_task(rollouts):
    """Random actions never reach the goal in 200 steps."""
    _, saved, report, _ = rollouts
    np.testing.assert_array_equal(saved["truncated"], np.broadcast_to((np.arange(1200) % 200 == 199)[:, None], (1200, 1000)))
    assert not saved["terminated"].any() and np.all(saved["discount"] == 1) and np.all(saved["reward"] == -1)
    assert report["runs"][0] == dict(seed=0, episodes=6000, goal_share=0.0, return_mean=-200.0, return_std=0.0)


def test_all_actions_are_drawn_equally_often_and_each_by_itself(rollouts):
    """Chi-square, 2 degrees of freedom, 99.9 % point; correlations between environments and between steps within five standard errors."""
    action = rollouts[1]["action"]
    counts = np.bincount(action.ravel(), minlength=3)
    assert counts.sum() == len(counts) * counts.mean() == action.size and ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 13.8
    between_envs, between_steps = np.corrcoef(action.T), np.corrcoef(action)
    assert np.abs(between_envs - np.eye(1000)).max() < 5.5 / 1200**0.5 and np.abs(between_steps - np.eye(1200)).max() < 5.5 / 1000**0.5
    assert len(np.unique(rollouts[1]["obs"][0, :, 0])) > 990  # among 1,000 starts of 24 bits two may be equal


def assert_uniform(positions):
    """Kolmogorov and Smirnov's test on [-0.6, -0.4), 99.9 % point."""
    fraction = np.sort((np.asarray(positions, np.float64) + 0.6) / 0.2)
    assert np.abs(fraction - (np.arange(len(fraction)) + 0.5) / len(fraction)).max() * len(fraction) ** 0.5 < 1.95


def test_starts_are_uniform(rollouts):
    assert_uniform(jax.vmap(car.reset)(jax.random.split(jax.random.key(1), 20_000))[0][:, 0])
    obs = rollouts[1]["obs"]
    assert_uniform(obs[0, :, 0])
    assert_uniform(obs[200::200, :, 0].ravel())
    assert car.start(jnp.float32(0)).position == jnp.float32(-0.6) and car.start(jnp.float32(1 - 2.0**-24)).position < jnp.float32(-0.4)


def test_starts_do_not_follow_from_the_actions_of_their_word(rollouts):
    """An episode that ends is followed by a start from the very word that gave these eight actions: each, and their sum, says nothing."""
    obs, action = rollouts[1]["obs"], rollouts[1]["action"]
    starts = obs[200::200, :, 0].ravel()  # (5000,)
    words = np.stack([action[t - 8:t] for t in range(200, 1200, 200)], axis=1).reshape(8, -1)
    assert np.abs(np.corrcoef(starts, np.concatenate([words, words.sum(axis=0, keepdims=True)]))[0, 1:]).max() < 4 / 5000**0.5
    for digit, value in product(words, range(3)):
        assert_uniform(starts[digit == value])


def test_no_key_is_used_twice():
    """One environment, under jax's checker (which takes keys scanned under vmap for used: not vmapped)."""
    args = car.parse_args(["--num-envs", "1", "--total-timesteps", "400", "--save", "x.npz"])
    with jax.debug_key_reuse(True):
        jax.jit(lambda index: car.rollout(args, *car.rollout(args, *car.init(args, index))[0]))(0)
        with pytest.raises(jax.errors.KeyReuseError):
            jax.jit(lambda key: jax.random.uniform(key) + jax.random.uniform(key))(jax.random.key(0))


# --- devices and processes


def test_same_bits_on_any_number_of_devices_and_processes(begin, tmp_path):
    running = [begin(*FEW, "--num-devices", devices, "--save", tmp_path / f"{devices}.npz") for devices in (1, 2, 4, 8)]
    first, second = begin_some_of_two(begin, (0, 1), *FEW, "--json", "--save", tmp_path / "pair.npz")
    assert end(second) == ("", "")
    report, progress = end(first)
    assert len(report.splitlines()) == 1 and json.loads(report)["num_devices"] == 2 and "compiled in" in progress
    assert json.loads(report)["runs"][0]["episodes"] == 32
    assert all("episodes          32  return -200.0" in end(process)[0].splitlines()[-1] for process in running)
    one = np.load(tmp_path / "1.npz")
    for other in (2, 4, 8, "pair"):
        for name in ARRAYS:
            np.testing.assert_array_equal(np.load(tmp_path / f"{other}.npz")[name], one[name], err_msg=f"{name}, {other}")
    assert one["obs"].shape == (400, 16, 2)


def test_a_process_that_is_missing_or_lost_ends_the_other(begin):
    """Never started, on either side; stopped; and killed, which is noticed at once."""
    stopped = begin_some_of_two(begin, (0, 1), *LONG, "--timeout", 8)
    alone = [begin_some_of_two(begin, [number], *LONG, "--timeout", 3)[0] for number in (0, 1)]
    until("step", stopped[0].stdout)
    stopped[1].send_signal(signal.SIGSTOP)
    killed = begin_some_of_two(begin, (0, 1), *LONG, "--timeout", 100)
    until("step", killed[0].stdout)
    killed[1].kill()
    error = "mountaincar_env.py: another process is missing: "
    assert end(stopped[0], 1, 13)[1] == error + "waited for 8 s\n"
    _, stderr = end(killed[0], 1, 5)
    assert stderr.startswith(error) and len(stderr.splitlines()) == 1
    assert [end(process, 1, 1) for process in alone] == [("", error + "waited for 3 s\n")] * 2


# --- the program


def test_memory_does_not_grow_with_the_number_of_steps(begin):
    """If anything were kept per step, 36 M steps more of it."""
    running = [begin("--num-envs", 4, "--total-timesteps", steps, "--json") for steps in ("4e6", "4e7")]
    few, many = (json.loads(end(process)[0])["peak_memory_mb"] for process in running)
    assert abs(many - few) < 10


def test_ctrl_c_keeps_what_there_is(begin, tmp_path):
    """While jax is imported, while it compiles, and in the midst of a long run, in one process, which stops the other."""
    importing, compiling = begin(*LONG), begin(*LONG)
    first, second = begin_some_of_two(begin, (0, 1), "--num-envs", 8, "--total-timesteps", 1e7, "--log-interval", 1600, "--json",
                                      "--save", tmp_path / "x.npz")
    while "jaxlib" not in Path(f"/proc/{importing.pid}/maps").read_text():
        assert importing.poll() is None
    importing.send_signal(signal.SIGINT)
    assert end(importing, 130) == ("", "")
    until("environments: 64", compiling.stdout)
    compiling.send_signal(signal.SIGINT)
    until("step", first.stderr)
    second.send_signal(signal.SIGINT)
    stdout, stderr = end(compiling, 130)
    assert stderr == "" and [line.split()[0] for line in stdout.splitlines()] == ["compiled", "step"]
    assert end(second, 130) == ("", "")
    stdout, stderr = end(first, 130)
    assert all(line.startswith("step") for line in stderr.splitlines())
    saved, report = np.load(tmp_path / "x.npz"), json.loads(stdout)
    assert 0 < report["timesteps"] == saved["action"].size < 1e7 and saved["obs"].shape == (*saved["action"].shape, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


@pytest.mark.parametrize("flags", [
    "--seed -1", "--seed 0.5", "--num-envs 0", "--num-envs 1.5", "--num-envs nan", "--num-envs 1e9 --log-interval 1e12",
    "--total-timesteps 0", "--total-timesteps -5", "--total-timesteps inf", "--total-timesteps x", "--policy nonsense",
    "--num-devices 0", "--num-devices 3", "--log-interval 0", "--log-interval nan", "--num-processes 0", "--num-processes 3",
    "--process-id 2 --num-processes 2", "--process-id 1", "--process-id -1",
    "--coordinator host --num-processes 2", "--coordinator host:x", "--timeout 0", "--timeout inf", "--coordinator",
    "--save missing/x.npz --total-timesteps 1", "--save x.txt --total-timesteps 1", "--save . --total-timesteps 1",
    "--save x.npz --total-timesteps 1e12", "--plot x.jpg", "--plot /", "--gif x.png", "--gif missing/x.gif", "--unknown 1",
])
def test_bad_input_is_one_line_and_exit_code_2(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        car.parse_args(flags.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.splitlines()[-1].startswith(Path(sys.argv[0]).name + ": error: ") and "Traceback" not in error
    if "1e12" in flags:
        assert "GiB of memory" in error


def test_rocking_reaches_the_goal_and_the_report_says_what_is_saved(rollouts):
    """Every number of the row again, in NumPy, from the arrays."""
    folder, *_, process = rollouts
    report = json.loads(end(process)[0])
    saved, row = np.load(folder / "rocking.npz"), report["runs"][0]
    assert set(saved) == {*ARRAYS, "args"} and json.loads(str(saved["args"])) == report["args"]
    np.testing.assert_array_equal(saved["action"], np.where(saved["obs"][..., 1] < 0, 0, 2))
    done, total = saved["terminated"] | saved["truncated"], np.cumsum(saved["reward"], axis=0, dtype=np.float64)
    returns = np.concatenate([np.diff(total[done[:, n], n], prepend=0) for n in range(1000)])
    assert (row["episodes"], row["goal_share"]) == (len(returns), saved["terminated"].sum() / len(returns)) == (len(returns), 1.0)
    np.testing.assert_allclose([row["return_mean"], row["return_std"]], [returns.mean(), returns.std()], rtol=1e-6)
    assert abs(returns.mean() + 119) < 1 and report["timesteps"] == done.size == 400_000


def test_pictures(rollouts):
    """The film shows one whole episode: it ends with the first arrival at the goal."""
    folder, *_, process = rollouts
    process.wait(timeout=120)
    assert (folder / "x.png").read_bytes().startswith(b"\x89PNG") and (folder / "x.gif").read_bytes().startswith(b"GIF8")
    assert Image.open(folder / "x.gif").n_frames == 2 + np.argmax(np.load(folder / "rocking.npz")["terminated"][:, 0])
