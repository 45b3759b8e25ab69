# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0",
# ]
# ///
"""Q-learning with a replay buffer: parallel_td.py, but each update learns from the past.

    Q(s, a) = w_a . phi(s),    phi_i(s) = exp(-|s / scale - c_i|^2 / (2 sigma^2))
    target  = r + gamma max_a' Q'(s', a'),    or r if s' is terminal

The features phi are radial basis functions with random centers c_i (Sutton & Barto 2018, section
9.5.5). A ring buffer keeps the last C transitions (experience replay, Lin 1992). After each vector
step (one step of all N environments), B transitions are drawn from it at random, since these are
less correlated than successive ones (Mnih et al. 2015). They give one Adam step on half the mean
squared TD error. The weights of Q' average those of Q: w' <- w' + tau (w - w') (Lillicrap et al.
2016, section 3).

No gradient flows through the target: this is semi-gradient Q-learning (section 11.1). A terminal
state cuts the bootstrap, a time limit does not (Pardo et al. 2018). The learning rate falls
linearly to 0, so that the weights settle; the last weights are the result.

    python replay_td.py                                    # one run
    python replay_td.py --num-seeds 20 --plot curve.png    # twenty, on all cores

Shapes: R runs, K progress lines, U vector steps, C transitions in the ring, N environments,
B transitions in a batch, E evaluation episodes, D observation dimensions, F features, A actions.

The algorithm comes first, for one run. The flags, and what runs it on all devices, come after it.
"""

import argparse
import json
import math
import os
import sys
import time
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
    centers: jax.Array  # (D, F), faster than (F, D), whose rows are short
    weights: jax.Array  # (F, A)
    target_weights: jax.Array  # (F, A) their running average
    opt_state: optax.OptState
    env_state: gymnax.EnvState  # (N,)
    obs: jax.Array  # (N, D)
    episode_return: jax.Array  # (N,) so far
    buffer: Transition  # (C,) a ring
    written: jax.Array  # transitions written so far


@cache
def make(env_id):
    """Make an environment and its parameters. To change either, change it here."""
    env, env_params = gymnax.make(env_id)
    # NumPy arrays, because a program made by .compile() cannot hold JAX arrays as constants.
    return env, jax.tree.map(np.asarray, env_params)


def optimizer(args, learning_rate):
    """Make Adam. Its learning rate falls linearly to 0, from a value that differs between runs."""
    return optax.adam(optax.linear_schedule(learning_rate, 0.0, args.total_updates))


def init_state(args, seed, learning_rate):
    """Return the state in which the run with this seed starts."""
    env, env_params = make(args.env_id)
    key, key_reset, key_centers = jax.random.split(jax.random.key(seed), 3)
    keys = jax.random.split(key_reset, args.num_envs)
    obs, env_state = jax.vmap(partial(env.reset, params=env_params))(keys)
    weights = jnp.zeros((args.num_centers, env.num_actions))
    shape = (obs.shape[-1], args.num_centers)
    zeros, zeros_obs = jnp.zeros(args.buffer_size), jnp.zeros((args.buffer_size, shape[0]))
    return TrainState(
        key=key,
        learning_rate=learning_rate,
        centers=jax.random.uniform(key_centers, shape, minval=-1.0, maxval=1.0),
        weights=weights,
        target_weights=weights,
        opt_state=optimizer(args, learning_rate).init(weights),
        env_state=env_state,
        obs=obs,
        episode_return=jnp.zeros(args.num_envs),
        buffer=Transition(zeros_obs, zeros.astype(int), zeros, zeros_obs, zeros.astype(bool)),
        written=jnp.array(0),
    )


def rbf_features(args, centers, obs):
    """Features (B, F) of observations (B, D)."""
    scaled = obs / np.array(OBS_SCALE[args.env_id], np.float32)
    difference = scaled.T[:, :, None] - centers[:, None, :]  # (D, B, F)
    return jnp.exp(-jnp.sum(difference**2, axis=0) / (2 * args.sigma**2))


def q_values(args, weights, centers, obs):
    """Values (B, A) of all actions in observations (B, D)."""
    phi = rbf_features(args, centers, obs)
    # phi @ weights, column by column: 1.4 times as fast as one product with few columns.
    return jnp.stack([phi @ column for column in weights.T], axis=1)


def draw(args, key):
    """Random numbers of one update: keys, uniform in [0, 1), random actions (N,); uniform (B,)."""
    env, _ = make(args.env_id)
    key_step, key_uniform, key_action, key_batch = jax.random.split(key, 4)
    shape = (args.num_envs,)
    keys = jax.random.split(key_step, shape)
    uniform = jax.random.uniform(key_uniform, shape)
    random_action = jax.random.randint(key_action, shape, 0, env.num_actions)
    return keys, uniform, random_action, jax.random.uniform(key_batch, (args.batch_size,))


def vector_step(args, state, draws):
    """Step N environments epsilon-greedily. Also return transitions and sums of ended episodes."""
    env, env_params = make(args.env_id)
    keys, uniform, random_action = draws  # (N,)
    greedy_action = jnp.argmax(q_values(args, state.weights, state.centers, state.obs), axis=1)
    action = jnp.where(uniform < args.epsilon, random_action, greedy_action)
    step = jax.vmap(partial(env.step, params=env_params))
    obs, env_state, reward, terminated, truncated, info = step(keys, state.env_state, action)
    transition = Transition(state.obs, action, reward, info["final_observation"], terminated)
    done = terminated | truncated
    total = state.episode_return + reward
    ended = {"episodes": jnp.sum(done), "returns": jnp.sum(done * total)}
    total = jnp.where(done, 0.0, total)
    return state._replace(env_state=env_state, obs=obs, episode_return=total), (transition, ended)


def td_loss(args, weights, target_weights, centers, batch):
    """Half the mean squared TD error of a batch (B,), and what progress lines average."""
    next_q = jnp.max(q_values(args, target_weights, centers, batch.next_obs), axis=1)
    target = jax.lax.stop_gradient(batch.reward + args.gamma * (1 - batch.terminated) * next_q)
    q = q_values(args, weights, centers, batch.obs)
    q_taken = jnp.take_along_axis(q, batch.action[:, None], axis=1)[:, 0]
    td_error = q_taken - target
    magnitude = jnp.mean(jnp.abs(td_error))
    metrics = {"updates": 1.0, "td_error": magnitude, "q_value": jnp.mean(q_taken)}
    return jnp.mean(optax.l2_loss(td_error)), metrics


def train_step(args, carry, draws):
    """Store the transitions of one vector step in the ring, then learn from a random batch."""
    state, sums = carry
    *step_draws, batch_uniform = draws  # (N,) each, (B,)
    state, (transitions, ended) = vector_step(args, state, step_draws)
    slots = (state.written + jnp.arange(args.num_envs)) % args.buffer_size
    buffer = jax.tree.map(lambda ring, new: ring.at[slots].set(new), state.buffer, transitions)
    written = state.written + args.num_envs
    drawn = (batch_uniform * jnp.minimum(written, args.buffer_size)).astype(int)  # (B,)
    batch = jax.tree.map(lambda ring: ring[drawn], buffer)
    gradient = jax.grad(td_loss, argnums=1, has_aux=True)
    grad, metrics = gradient(args, state.weights, state.target_weights, state.centers, batch)
    learns = written >= args.learning_starts
    grad = learns * grad  # while this is 0, Adam leaves the weights and its moments at 0
    updates, opt_state = optimizer(args, state.learning_rate).update(grad, state.opt_state)
    weights = optax.apply_updates(state.weights, updates)
    target_weights = optax.incremental_update(weights, state.target_weights, args.tau)
    learned = jax.tree.map(partial(jnp.multiply, learns), metrics)
    sums = jax.tree.map(jnp.add, sums, learned | ended)
    state = state._replace(weights=weights, target_weights=target_weights, opt_state=opt_state)
    return (state._replace(buffer=buffer, written=written), sums), None


def train_chunk(args, state):
    """Make U updates, up to the next progress line. Return the state and what the line shows."""

    def next_key(key, _):
        key, key_update = jax.random.split(key)
        return key, key_update

    # Each update has a key of its own: what is drawn does not depend on --log-interval.
    key, keys = jax.lax.scan(next_key, state.key, length=args.chunk_updates)
    draws = jax.vmap(partial(draw, args))(keys)  # before the loop: 1.4 times as fast as in it
    # What a line shows is summed up on the way.
    names = "episodes", "returns", "updates", "td_error", "q_value"
    carry = state._replace(key=key), dict.fromkeys(names, jnp.zeros(()))
    (state, sums), _ = jax.lax.scan(partial(train_step, args), carry, draws)
    return state, {
        "returns": sums["returns"] / sums["episodes"],  # nan if no episode ended
        "td_error": sums["td_error"] / sums["updates"],
        "q_value": sums["q_value"] / sums["updates"],
    }


def evaluate(args, state):
    """Undiscounted returns (E,) of the greedy policy in E new episodes."""

    def greedy_policy(params, obs, _):
        return jnp.argmax(q_values(args, *params, obs[None])[0])  # a batch of one

    env, env_params = make(args.env_id)
    rollout = RolloutWrapper(greedy_policy, env=env, env_params=env_params)  # up to the time limit
    keys = jax.random.split(state.key, args.eval_episodes)
    *_, returns = rollout.batch_rollout(keys, (state.weights, state.centers))  # (E, 1)
    return returns[:, 0]


COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 1,  # compiles in two thirds of the time, runs as fast
    "xla_cpu_prefer_vector_width": 512,  # the widest vectors: 1.4 times as fast
    # Do not split small arrays among threads: 1.4 times as fast. Do not use the matrix library of
    # jax 0.11, which is slow for small matrices: 2 times as fast.
    "xla_disable_hlo_passes": "cpu-parallel-task-assigner,dot-library-rewriter",
}


# On a CPU, the data of many runs would leave the cache. A GPU takes all runs at once.
RUNS_AT_ONCE = 16 if jax.default_backend() == "cpu" else 10**6


def spread(num_runs, all_devices):
    """Spread R runs evenly. Return how many devices, runs at once on each, and copies to add."""
    num_devices = jax.device_count() if all_devices else min(num_runs, jax.device_count())
    per_device = math.ceil(num_runs / num_devices)
    num_batches = math.ceil(per_device / RUNS_AT_ONCE)
    at_once = math.ceil(per_device / num_batches)
    return num_devices, at_once, num_devices * num_batches * at_once - num_runs


def over_runs(function, num_devices, at_once):
    """Compile a function of one run for R runs: each device takes a few at a time, vmapped."""

    def on_one_device(*runs):
        return jax.lax.map(lambda run: function(*run), runs, batch_size=at_once)

    mesh = jax.make_mesh((num_devices,), ("runs",), axis_types=(jax.sharding.AxisType.Auto,))
    # No check_vma: runs do not communicate, and the check rejects loops that start from constants.
    shard = partial(jax.shard_map, mesh=mesh, check_vma=False)
    sharded = shard(on_one_device, in_specs=jax.P("runs"), out_specs=jax.P("runs"))
    return jax.jit(sharded, compiler_options=COMPILER_OPTIONS)


def gather(tree, num_runs):
    """Copy the arrays of all runs, in all processes, to the host. Cut the padding off."""
    return jax.tree.map(lambda array: array[:num_runs], process_allgather(tree, tiled=True))


def number(kind, low, high):
    """Make an argparse type: an int or a float in [low, high]. An int may be written 2e6."""

    def parse(text):
        value = float(text)
        if not low <= value <= high or value != kind(value):
            raise ValueError
        return kind(value)

    parse.__name__ = f"{kind.__name__} in [{low:g}, {high:g}]"  # argparse shows it in its error
    return parse


def file_name(suffix):
    """Make an argparse type: the name of a file that can be written and has this suffix."""

    def parse(path):
        if not path.endswith(suffix) or not os.access(os.path.dirname(path) or ".", os.W_OK):
            raise ValueError
        return path

    parse.__name__ = f"{suffix} file in a writable folder"
    return parse


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
    text = "environment steps per run, rounded up to whole progress lines"
    add("--total-timesteps", type=steps, default=200_000, help=text)
    add("--num-envs", type=count, default=16, help="environments stepped in lockstep")
    add("--buffer-size", type=count, default=100_000, help="capacity of the ring, in transitions")
    add("--learning-starts", type=count, default=1_000, help="transitions before the first update")
    add("--batch-size", type=count, default=32, help="transitions per update")
    add("--tau", type=unit, default=0.01, help="step size of the target's running average")
    text = "initial step size of Adam, falls to 0; several values: each one runs with each seed"
    add("--learning-rate", type=unit, default=[0.03], nargs="+", help=text)
    add("--gamma", type=unit, default=0.99, help="discount factor")
    add("--epsilon", type=unit, default=0.25, help="probability of a random action")
    add("--num-centers", type=count, default=500, help="number of radial basis features")
    add("--sigma", type=number(float, 1e-3, 1e3), default=0.5, help="width of the features")
    add("--eval-episodes", type=count, default=100, help="greedy episodes after training")
    text = "approximate number of environment steps per progress line"
    add("--log-interval", type=count, default=10_000, help=text)
    add("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    add("--save", type=file_name(".npz"), metavar="FILE", help="write weights, curves, arguments")
    add("--plot", type=file_name(".png"), metavar="FILE", help="draw the learning curves")
    args = parser.parse_args(argv)
    if len(set(args.learning_rate)) < len(args.learning_rate):
        parser.error("argument --learning-rate: the same value twice")
    if args.buffer_size < args.num_envs:
        parser.error("--buffer-size must be at least --num-envs")
    if args.learning_starts > args.total_timesteps:
        parser.error("--learning-starts must be at most --total-timesteps")
    update_timesteps = args.num_envs
    min_updates = math.ceil(args.total_timesteps / update_timesteps)
    args.num_chunks = math.ceil(min_updates / math.ceil(args.log_interval / update_timesteps))
    args.chunk_updates = math.ceil(min_updates / args.num_chunks)
    args.total_updates = args.num_chunks * args.chunk_updates
    args.chunk_timesteps = args.chunk_updates * update_timesteps
    return args


def plot(path, learning_rate, timesteps, returns):
    """Draw returns (K, R) over timesteps (K,) or (K, R): runs thin, each rate's median in bold."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    plt.figure()
    timesteps = np.broadcast_to(timesteps.T, returns.T.shape).T  # (K, R)
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


def main(argv=None):
    """Train, evaluate and report. Return what --save writes."""
    args = parse_args(argv)
    make(args.env_id)  # here, since some environments cannot be made inside of jit
    if jax.process_index() > 0:  # process 0 reports for all
        sys.stdout = open(os.devnull, "w")
        args.save = args.plot = None
    learning_rate = np.repeat(args.learning_rate, args.num_seeds)  # (R,)
    seed = np.tile(args.seed + np.arange(args.num_seeds), len(args.learning_rate))  # (R,)
    num_runs = len(seed)
    num_devices, at_once, copies = spread(num_runs, args.distributed)
    compiled = partial(over_runs, num_devices=num_devices, at_once=at_once)
    how_many = "1 run" if num_runs == 1 else f"{num_runs} runs"
    print(f"{args.env_id}, {how_many} on {num_devices} x {jax.devices()[0].device_kind}")

    began = time.perf_counter()
    runs = [np.pad(values, (0, copies), "edge") for values in (seed, learning_rate)]
    state = compiled(partial(init_state, args))(*runs)
    train = compiled(partial(train_chunk, args)).lower(state).compile()
    compile_seconds = time.perf_counter() - began
    print(f"compiled in {compile_seconds:.1f} s")

    timesteps = args.chunk_timesteps * np.arange(1, args.num_chunks + 1)  # (K,)
    lines, train_seconds = [], 0.0
    try:
        for timestep in timesteps:
            began = time.perf_counter()
            next_state, metrics = train(state)
            lines.append(gather(metrics, num_runs))  # waits for the chunk; Ctrl-C is raised here
            state = next_state
            train_seconds += time.perf_counter() - began
            mean = jax.tree.map(jnp.nanmean, lines[-1])  # NumPy's would warn if all are nan
            speed = timestep * num_runs / train_seconds
            print(
                f"step {timestep:,}  return {mean['returns']:.1f}  td_error {mean['td_error']:.3f}"
                f"  q_value {mean['q_value']:.2f}  {speed:,.0f} steps/s"
            )
    except KeyboardInterrupt:
        if args.distributed or not lines:
            raise
        print("interrupted: the results are those of the last line")

    greedy_return = compiled(partial(evaluate, args))(state)  # (R, E)
    learned = {"centers": state.centers.mT, "weights": state.weights}  # (R, F, D), (R, F, A)
    greedy_return, learned = gather((greedy_return, learned), num_runs)
    for rate in args.learning_rate:
        means = greedy_return[learning_rate == rate].mean(axis=1)
        mean, worst = means.mean(), means.min()
        print(f"learning rate {rate:g}: greedy return {mean:.1f}, worst run {worst:.1f}")
    results = {
        "args": json.dumps(vars(args)),
        "seed": seed,
        "learning_rate": learning_rate,
        "compile_seconds": compile_seconds,
        "train_seconds": train_seconds,
        "interrupted": len(lines) < args.num_chunks,
        "timesteps": timesteps[: len(lines)],
        **jax.tree.map(lambda *values: np.stack(values), *lines),  # (K, R)
        "greedy_return": greedy_return,
        "obs_scale": OBS_SCALE[args.env_id],
        "sigma": args.sigma,
        **learned,
    }
    if args.save:
        np.savez(args.save, **results)
    if args.plot:
        plot(args.plot, learning_rate, results["timesteps"], results["returns"])
    return results


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # progress appears at once, in a log too
    sys.exit(130 if main()["interrupted"] else 0)
