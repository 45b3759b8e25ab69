# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0",
# ]
# ///
"""Q-learning with N parallel environments and one linear learner.

    Q(s, a) = w_a . phi(s),    phi_i(s) = exp(-|s / scale - c_i|^2 / (2 sigma^2))
    target  = r + gamma max_a' Q(s', a'),    or r if s' is terminal

The features phi are radial basis functions with random centers c_i (Sutton & Barto 2018, section
9.5.5). Each batch of B transitions gives one Adam step on the mean squared TD error. No gradient
flows through the target: this is semi-gradient Q-learning (section 11.1). A terminal state cuts
the bootstrap, a time limit does not (Pardo et al. 2018). The learning rate falls linearly to 0,
so that the weights settle; the last weights are the result.

    python parallel_td.py                                    # one run
    python parallel_td.py --num-seeds 20 --plot curve.png    # twenty, in one compiled program

Shapes: R runs, K progress lines, U updates, T steps, N environments, B = T * N transitions,
E evaluation episodes, D observation dimensions, F features, A actions.
"""

import argparse
import json
import math
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple

# jax reads this when it is imported: each CPU core that this process may use becomes a device.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(CORES))
import jax

if "--distributed" in sys.argv:  # before gymnax is imported, because gymnax creates arrays
    jax.distributed.initialize()

import gymnax
import jax.numpy as jnp
import numpy as np
import optax
from gymnax.experimental import RolloutWrapper
from jax.experimental.multihost_utils import process_allgather

# What each observation is divided by, so that centers in [-1, 1] cover the states that matter.
OBS_SCALE = {
    "CartPole-v1": [2.4, 3.0, 0.2, 3.0],  # m, m/s, rad, rad/s: the limits, and usual speeds
    "Acrobot-v1": [1.0, 1.0, 1.0, 1.0, 6.0, 12.0],  # cos, sin (twice); rad/s: about half the limits
    "MountainCar-v0": [1.2, 0.07],  # length: the left wall; length/step: the top speed
}
COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 1,  # compiles in two thirds of the time, runs as fast
    "xla_cpu_prefer_vector_width": 512,  # the widest vectors: 1.5 times as fast
    # Do not split small arrays among threads. Do not use jax 0.11's slow matrix library.
    "xla_disable_hlo_passes": "cpu-parallel-task-assigner,dot-library-rewriter",
}


@cache
def make(env_id):
    """Make an environment and its parameters. To change either, change it here."""
    env, env_params = gymnax.make(env_id)
    # NumPy arrays, because a program made by .compile() cannot hold JAX arrays as constants.
    return env, jax.tree.map(np.asarray, env_params)


def number(kind, low, high):
    """Make an argparse type: an int or a float in [low, high]. An int may be written 2e6."""

    def parse(text):
        value = float(text)
        if not low <= value <= high or value != kind(value):
            raise ValueError
        return kind(value)

    parse.__name__ = f"{kind.__name__} in [{low:g}, {high:g}]"  # argparse shows it in its error
    return parse


def output_file(path):
    """Check for argparse that a file can be opened for writing."""
    try:
        open(path, "ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path!r}: {error.strerror}") from error
    return path


def parse_args(argv=None):
    """Read and check the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.allow_abbrev = False
    add = parser.add_argument
    count = number(int, 1, 1e6)
    steps = number(int, 1, 1e9)
    unit = number(float, 0, 1)
    add("--env-id", choices=list(OBS_SCALE), default="CartPole-v1", help="gymnax environment")
    add("--seed", type=number(int, 0, 2e9), default=0, help="seed of run 0; run i uses seed + i")
    add("--num-seeds", type=count, default=1, help="runs per learning rate, spread over devices")
    add("--total-timesteps", type=steps, default=200_000, help="environment steps per run")
    add("--num-envs", type=count, default=16, help="environments stepped in lockstep")
    add("--batch-size", type=count, default=16, help="least number of transitions per update")
    text = "initial step size of Adam, falls to 0; several values: each one runs with each seed"
    add("--learning-rate", type=unit, default=[0.06], nargs="+", help=text)
    add("--gamma", type=unit, default=0.99, help="discount factor")
    add("--epsilon", type=unit, default=0.2, help="probability of a random action")
    add("--num-centers", type=count, default=500, help="number of radial basis features")
    add("--sigma", type=number(float, 1e-3, 1e3), default=0.5, help="width of the features")
    add("--eval-episodes", type=count, default=100, help="greedy episodes after training")
    add("--log-interval", type=steps, default=10_000, help="environment steps per progress line")
    add("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    add("--save", type=output_file, metavar="FILE.npz", help="write weights, curves, arguments")
    add("--plot", type=output_file, metavar="FILE.png", help="draw the learning curve of each run")
    args = parser.parse_args(argv)
    args.batch_steps = math.ceil(args.batch_size / args.num_envs)
    args.update_timesteps = args.batch_steps * args.num_envs
    args.total_updates = math.ceil(args.total_timesteps / args.update_timesteps)
    args.learning_updates = args.total_updates
    args.log_updates = math.ceil(args.log_interval / args.update_timesteps)
    return args


class Transition(NamedTuple):
    """One environment transition."""

    obs: jax.Array  # (D,)
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array  # (D,) before the reset, if the episode ended
    terminated: jax.Array  # true if next_obs is terminal; false at a time limit


class TrainState(NamedTuple):
    """The state of one run."""

    key: jax.Array
    learning_rate: jax.Array  # initial value
    centers: jax.Array  # (D, F)
    weights: jax.Array  # (F, A)
    opt_state: optax.OptState
    env_state: gymnax.EnvState  # (N,)
    obs: jax.Array  # (N, D)
    episode_return: jax.Array  # (N,) so far
    metrics: jax.Array  # (5,) sums since the last line: episodes, returns, updates, |TD error|, Q


def optimizer(args, learning_rate):
    """Make Adam. Its learning rate falls linearly to 0, from a value that differs between runs."""
    return optax.adam(optax.linear_schedule(learning_rate, 0.0, args.learning_updates))


def init_state(args, seed, learning_rate):
    """Return the state in which the run with this seed starts."""
    env, env_params = make(args.env_id)
    key, key_reset, key_centers = jax.random.split(jax.random.key(seed), 3)
    keys = jax.random.split(key_reset, args.num_envs)
    obs, env_state = jax.vmap(partial(env.reset, params=env_params))(keys)
    weights = jnp.zeros((args.num_centers, env.num_actions))
    shape = (obs.shape[-1], args.num_centers)
    return TrainState(
        key=key,
        learning_rate=learning_rate,
        centers=jax.random.uniform(key_centers, shape, minval=-1.0, maxval=1.0),
        weights=weights,
        opt_state=optimizer(args, learning_rate).init(weights),
        env_state=env_state,
        obs=obs,
        episode_return=jnp.zeros(args.num_envs),
        metrics=jnp.zeros(5),
    )


def rbf_features(args, centers, obs):
    """Features (B, F) of observations (B, D)."""
    scaled = obs / np.array(OBS_SCALE[args.env_id], np.float32)
    difference = scaled.T[:, :, None] - centers[:, None, :]  # (D, B, F)
    return jnp.exp(-jnp.sum(difference**2, axis=0) / (2 * args.sigma**2))


def q_values(args, weights, centers, obs):
    """Values (B, A) of all actions in observations (B, D)."""
    phi = rbf_features(args, centers, obs)
    # phi @ weights, as one product per action: up to 1.4 times as fast as one with few columns.
    per_action = jnp.broadcast_to(phi, (weights.shape[1], *phi.shape))  # (A, B, F)
    return jax.vmap(jnp.matmul)(per_action, weights.T).T


def vector_step(args, state, draws):
    """Step N environments epsilon-greedily. Also return transitions, done, and returns if done."""
    env, env_params = make(args.env_id)
    keys, uniform, random_action = draws  # (N,)
    greedy = jnp.argmax(q_values(args, state.weights, state.centers, state.obs), axis=1)
    action = jnp.where(uniform < args.epsilon, random_action, greedy)
    step = jax.vmap(partial(env.step, params=env_params))
    obs, env_state, reward, terminated, truncated, info = step(keys, state.env_state, action)
    transition = Transition(state.obs, action, reward, info["final_observation"], terminated)
    total = state.episode_return + reward
    done = terminated | truncated
    state = state._replace(env_state=env_state, obs=obs, episode_return=jnp.where(done, 0.0, total))
    return state, (transition, done, done * total)


def td_loss(args, weights, centers, batch):
    """Half the mean squared TD error of a batch (B,), and means (2,): |TD error|, Q-value."""
    next_q = jnp.max(q_values(args, weights, centers, batch.next_obs), axis=1)
    target = jax.lax.stop_gradient(batch.reward + args.gamma * (1 - batch.terminated) * next_q)
    q = q_values(args, weights, centers, batch.obs)
    q_taken = jnp.take_along_axis(q, batch.action[:, None], axis=1)[:, 0]
    td_error = q_taken - target
    means = jnp.stack([jnp.mean(jnp.abs(td_error)), jnp.mean(q_taken)])
    return jnp.mean(optax.l2_loss(td_error)), means


def train_step(args, state, draws):
    """Collect B transitions with the current weights, then learn from exactly those."""
    state, (transitions, done, returns) = jax.lax.scan(partial(vector_step, args), state, draws)
    batch = jax.tree.map(jnp.concatenate, transitions)  # (T, N) -> (B,)
    gradient = jax.grad(td_loss, argnums=1, has_aux=True)
    grad, means = gradient(args, state.weights, state.centers, batch)
    updates, opt_state = optimizer(args, state.learning_rate).update(grad, state.opt_state)
    weights = optax.apply_updates(state.weights, updates)
    metrics = state.metrics + jnp.stack([jnp.sum(done), jnp.sum(returns), 1.0, *means])
    return state._replace(weights=weights, opt_state=opt_state, metrics=metrics), None


def train_chunk(args, num_updates, state):
    """Train up to the next progress line. Return the state and the means for that line."""
    env, _ = make(args.env_id)
    key, key_step, key_uniform, key_action = jax.random.split(state.key, 4)
    shape = (num_updates, args.batch_steps, args.num_envs)  # (U, T, N)
    draws = (  # for all steps at once: a fifth faster than inside the loop
        jax.random.split(key_step, shape),
        jax.random.uniform(key_uniform, shape),
        jax.random.randint(key_action, shape, 0, env.num_actions),
    )
    state = state._replace(key=key, metrics=jnp.zeros(5))
    state, _ = jax.lax.scan(partial(train_step, args), state, draws)
    episodes, returns, updates, td_error, q_value = state.metrics
    return state, (returns / episodes, td_error / updates, q_value / updates)


def evaluate(args, state):
    """Undiscounted returns (E,) of the greedy policy in E new episodes."""

    def policy(params, obs, _):
        return jnp.argmax(q_values(args, *params, obs[None])[0])  # a batch of one

    env, env_params = make(args.env_id)
    rollout = RolloutWrapper(policy, env=env, env_params=env_params)  # up to the time limit
    keys = jax.random.split(state.key, args.eval_episodes)
    *_, returns = rollout.batch_rollout(keys, (state.weights, state.centers))  # (E, 1)
    return returns[:, 0]


def over_runs(function, num_devices, **jit_options):
    """Compile a function of one run for R runs: vmapped, and sharded over the devices."""
    mesh = jax.make_mesh((num_devices,), ("runs",), axis_types=(jax.sharding.AxisType.Auto,))
    runs = jax.P("runs")
    batched = jax.vmap(function)
    # No check_vma: runs do not communicate, and the check rejects loops that start from constants.
    sharded = jax.shard_map(batched, mesh=mesh, in_specs=runs, out_specs=runs, check_vma=False)
    return jax.jit(sharded, compiler_options=COMPILER_OPTIONS, **jit_options)


def gather(tree, num_runs):
    """Copy the arrays of all runs, in all processes, to the host. Cut the surplus runs off."""
    # In a thread: Python handles Ctrl-C while it waits for a thread, but not inside of jax.
    host = ThreadPoolExecutor(1).submit(process_allgather, tree, tiled=True).result()
    return jax.tree.map(lambda array: array[:num_runs], host)


def catch_signals():
    """Collect Ctrl-C and SIGTERM in a list. The same signal again ends the process."""
    caught = []

    def handler(signum, frame):
        caught.append(signum)
        signal.signal(signum, signal.SIG_DFL)

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    return caught


def plot(path, learning_rate, timesteps, returns):
    """Draw returns (K, R) over timesteps (K, R): each run thin, each rate's median in bold."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    plt.figure()
    for i, rate in enumerate(np.unique(learning_rate)):
        x, y = timesteps[:, learning_rate == rate], returns[:, learning_rate == rate]
        plt.plot(x, y, f"C{i}", linewidth=0.5)
        x, y = np.median(x, axis=1), jnp.nanmedian(y, axis=1)  # NumPy's would warn if all are nan
        plt.plot(x, y, f"C{i}", linewidth=2, label=f"median, learning rate {rate:g}")
    plt.gca().xaxis.set_major_formatter(EngFormatter(sep=""))  # 100k
    plt.xlabel("environment steps")
    plt.ylabel("return of training episodes")
    plt.legend()
    plt.savefig(path)


def main(argv=None, signals=()):
    """Train until done, or until `signals` is not empty. Evaluate, report, return the exit code."""
    args = parse_args(argv)
    make(args.env_id)  # here, since some environments cannot be made inside of jit
    if jax.process_index() > 0:  # process 0 reports for all
        sys.stdout = open(os.devnull, "w")
        args.save = args.plot = None
    learning_rate = np.repeat(args.learning_rate, args.num_seeds)  # (R,)
    seed = np.tile(args.seed + np.arange(args.num_seeds), len(args.learning_rate))  # (R,)
    num_runs = len(seed)
    per_device = math.ceil(num_runs / jax.device_count())
    num_devices = jax.device_count() if args.distributed else math.ceil(num_runs / per_device)
    padding = (0, num_devices * per_device - num_runs)  # copies of the last run fill the devices
    runs = "1 run" if num_runs == 1 else f"{num_runs} runs"
    print(f"{args.env_id}, {runs} on {num_devices} x {jax.devices()[0].device_kind}")

    began = time.perf_counter()
    init = over_runs(partial(init_state, args), num_devices)
    state = init(np.pad(seed, padding, "edge"), np.pad(learning_rate, padding, "edge"))
    ends = [*range(args.log_updates, args.total_updates, args.log_updates), args.total_updates]
    chunks = np.diff(ends, prepend=0)  # updates for each progress line
    programs = {}
    for updates in set(chunks):
        chunk = over_runs(partial(train_chunk, args, updates), num_devices, donate_argnums=0)
        programs[updates] = chunk.lower(state).compile()
    compile_seconds = time.perf_counter() - began
    print(f"compiled in {compile_seconds:.1f} s")

    began = time.perf_counter()
    timesteps = np.array(ends) * args.update_timesteps  # (K,)
    report = []  # (K, 3, R)
    for updates, step in zip(chunks, timesteps, strict=True):
        state, means = programs[updates](state)
        report.append(gather(means, num_runs))
        train_seconds = time.perf_counter() - began
        returns, td_error, q_value = report[-1]  # (R,)
        ended = returns[~np.isnan(returns)]  # of runs in which an episode ended
        print(
            f"step {step:,}  return {ended.mean() if len(ended) else math.nan:.1f}"
            f"  td_error {td_error.mean():.3f}  q_value {q_value.mean():.2f}"
            f"  {step * num_runs / train_seconds:,.0f} steps/s"
        )
        if process_allgather(bool(signals)).any():  # in any process
            break

    greedy_return = over_runs(partial(evaluate, args), num_devices)(state)  # (R, E)
    arrays = greedy_return, state.centers, state.weights
    greedy_return, centers, weights = gather(arrays, num_runs)
    for rate in args.learning_rate:
        means = greedy_return[learning_rate == rate].mean(axis=1)
        print(f"learning rate {rate:g}: greedy return {means.mean():.1f}, worst {means.min():.1f}")
    returns, td_error, q_value = np.stack(report, axis=1)  # (K, R)
    timesteps = timesteps[: len(returns)]
    if args.save:
        np.savez(
            args.save,
            args=json.dumps(vars(args)),
            seed=seed,
            learning_rate=learning_rate,
            compile_seconds=compile_seconds,
            train_seconds=train_seconds,
            timesteps=timesteps,
            returns=returns,
            td_error=td_error,
            q_value=q_value,
            greedy_return=greedy_return,
            obs_scale=OBS_SCALE[args.env_id],
            sigma=args.sigma,
            centers=centers.mT,  # (R, F, D)
            weights=weights,
        )
    if args.plot:
        plot(args.plot, learning_rate, np.outer(timesteps, np.ones(num_runs)), returns)
    return 130 if signals else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # progress appears at once, in a log too
    sys.exit(main(signals=catch_signals()))
