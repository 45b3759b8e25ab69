# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0",
# ]
# ///
"""Q-learning with decaying exploration: replay_td.py, but epsilon falls during the run.

    Q(s, a) = w_a . phi(s),    phi_i(s) = exp(-|s / (sigma scale) - c_i|^2 / 2)
    target  = r + gamma max_a' Q'(s', a'),    or r if s' is terminal
    epsilon = max(end_e, start_e epsilon_decay^t)    in vector step t = 0, 1, ...

The features phi are radial basis functions with random centers c_i (Sutton & Barto 2018, section
9.5.5). A ring buffer keeps the last C transitions (experience replay, Lin 1992). After each vector
step (one step of all N environments), B transitions are drawn from it at random, since these are
less correlated than successive ones (Mnih et al. 2015). They give one Adam step on half the mean
squared TD error. The weights of Q' average those of Q: w' <- w' + tau (w - w') (Lillicrap et al.
2016, section 3).

No gradient flows through the target: this is semi-gradient Q-learning (section 11.1). A terminal
state cuts the bootstrap, a time limit does not (Pardo et al. 2018). The learning rate falls
linearly to 0, so that the weights settle; the last weights are the result.

    python epsilon_decay_td.py                                                 # one run
    python epsilon_decay_td.py --end-e 0 0.25 --num-seeds 20 --plot curve.png  # forty, all cores

Shapes: R runs, K log intervals, U vector steps, C transitions in the ring, N environments,
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
# These scales suit radial basis functions; a neural network wants observations of unit variance.
OBS_SCALE = {
    "CartPole-v1": [2.4, 3.0, 0.2, 3.0],  # m, m/s, rad, rad/s: the limits, and usual speeds
    "Acrobot-v1": [1.0, 1.0, 1.0, 1.0, 6.0, 12.0],  # cos, sin (twice); rad/s: about half the limits
    "MountainCar-v0": [1.2, 0.07],  # length: the left wall; length/step: the top speed
}

# These flags take several values, and every combination of them is run. In a function of one run,
# args holds that run's own values.
SWEPT = "learning_rate", "gamma", "start_e", "end_e", "epsilon_decay", "sigma", "tau"


class Transition(NamedTuple):
    """One environment transition."""

    obs: jax.Array  # (D,)
    action: jax.Array
    reward: jax.Array
    next_obs: jax.Array  # (D,) before the reset, if the episode ended
    terminated: jax.Array  # true if next_obs is terminal; false at a time limit


class Features(NamedTuple):
    """Radial basis functions, in units of sigma: dividing by sigma in each step takes longer."""

    inverse_scale: jax.Array  # (D,) 1 / (sigma OBS_SCALE)
    centers: jax.Array  # (D, F), faster than (F, D), whose rows are short


class TrainState(NamedTuple):
    """The state of one run."""

    key: jax.Array
    features: Features
    weights: jax.Array  # (F, A)
    target_weights: jax.Array  # (F, A) their running average
    opt_state: optax.OptState
    env_state: gymnax.EnvState  # (N,)
    obs: jax.Array  # (N, D)
    episode_return: jax.Array  # (N,) so far
    buffer: Transition  # (C,) a ring
    written: jax.Array  # transitions written so far


@cache
def make_env(env_id):
    """Make an environment and its parameters. To change either, change it here."""
    env, env_params = gymnax.make(env_id)
    # NumPy arrays, because a program made by .compile() cannot hold JAX arrays as constants.
    return env, jax.tree.map(np.asarray, env_params)


def optimizer(args):
    """Make Adam. Its learning rate falls linearly to 0."""
    return optax.adam(optax.linear_schedule(args.learning_rate, 0.0, args.num_updates))


def init_state(args):
    """State in which a run starts. Raises ValueError if OBS_SCALE has the wrong length."""
    env, env_params = make_env(args.env_id)
    key, key_reset, key_centers = jax.random.split(jax.random.key(args.seed), 3)
    keys = jax.random.split(key_reset, args.num_envs)
    obs, env_state = jax.vmap(partial(env.reset, params=env_params))(keys)
    obs_scale = np.array(OBS_SCALE[args.env_id], np.float32)
    if obs_scale.shape != obs.shape[1:]:
        raise ValueError(f"OBS_SCALE of {args.env_id} needs the shape {obs.shape[1:]}")
    centers = jax.random.uniform(key_centers, (len(obs_scale), args.num_centers), minval=-1.0)
    weights = jnp.zeros((args.num_centers, env.num_actions))
    zeros, zeros_obs = jnp.zeros(args.buffer_size), jnp.zeros((args.buffer_size, len(obs_scale)))
    return TrainState(
        key=key,
        features=Features(1 / (args.sigma * obs_scale), centers / args.sigma),
        weights=weights,
        target_weights=weights,
        opt_state=optimizer(args).init(weights),
        env_state=env_state,
        obs=obs,
        episode_return=jnp.zeros(args.num_envs),
        buffer=Transition(zeros_obs, zeros.astype(int), zeros, zeros_obs, zeros.astype(bool)),
        written=jnp.array(0),
    )


def rbf_features(features, obs):
    """Features (B, F) of observations (B, D)."""
    scaled = obs * features.inverse_scale
    difference = scaled.T[:, :, None] - features.centers[:, None, :]  # (D, B, F)
    return jnp.exp(-jnp.sum(difference**2, axis=0) / 2)


def q_values(features, weights, obs):
    """Values (B, A) of all actions in observations (B, D)."""
    phi = rbf_features(features, obs)
    # phi @ weights, column by column: 1.3 times as fast as one product with few columns.
    return jnp.stack([phi @ column for column in weights.T], axis=1)


def epsilon(args, vector_steps):
    """Probability of a random action after so many vector steps."""
    return jnp.maximum(args.end_e, args.start_e * args.epsilon_decay**vector_steps)


def vector_step(args, state, _):
    """Step N environments epsilon-greedily. Also return transitions and sums of ended episodes."""
    env, env_params = make_env(args.env_id)
    keys = jax.random.split(state.key, args.num_envs + 2)
    key, key_action, keys_step = keys[0], keys[1], keys[2:]
    coin, choice = jax.random.uniform(key_action, (2, args.num_envs))  # in [0, 1)
    random_action = (choice * env.num_actions).astype(int)
    greedy_action = jnp.argmax(q_values(state.features, state.weights, state.obs), axis=1)
    explore = coin < epsilon(args, state.written // args.num_envs)
    action = jnp.where(explore, random_action, greedy_action)
    step = jax.vmap(partial(env.step, params=env_params))
    obs, env_state, reward, terminated, truncated, info = step(keys_step, state.env_state, action)
    transition = Transition(state.obs, action, reward, info["final_observation"], terminated)
    done = terminated | truncated
    total = state.episode_return + reward
    ended = {"episodes": jnp.sum(done), "return_sum": jnp.sum(done * total)}
    total = jnp.where(done, 0.0, total)
    state = state._replace(key=key, env_state=env_state, obs=obs, episode_return=total)
    return state, (transition, ended)


def td_loss(args, weights, target_weights, features, batch):
    """Half the mean squared TD error of a batch (B,). Also return what a progress line shows."""
    next_q = jnp.max(q_values(features, target_weights, batch.next_obs), axis=1)
    target = jax.lax.stop_gradient(batch.reward + args.gamma * (1 - batch.terminated) * next_q)
    q = q_values(features, weights, batch.obs)
    q_taken = jnp.take_along_axis(q, batch.action[:, None], axis=1)[:, 0]
    td_error = q_taken - target
    metrics = {"td_error": jnp.mean(jnp.abs(td_error)), "q_value": jnp.mean(q_taken)}
    return jnp.mean(optax.l2_loss(td_error)), metrics


def train_step(args, state, _):
    """Store the transitions of one vector step in the ring, then learn from a random batch."""
    state, (transitions, ended) = vector_step(args, state, None)
    slots = (state.written + jnp.arange(args.num_envs)) % args.buffer_size
    buffer = jax.tree.map(lambda ring, new: ring.at[slots].set(new), state.buffer, transitions)
    key, key_batch = jax.random.split(state.key)
    state = state._replace(key=key, buffer=buffer, written=state.written + args.num_envs)

    stored = jnp.minimum(state.written, args.buffer_size)
    chosen = (jax.random.uniform(key_batch, args.batch_size) * stored).astype(int)
    batch = jax.tree.map(lambda ring: ring[chosen], buffer)
    gradient = jax.grad(td_loss, argnums=1, has_aux=True)
    grad, metrics = gradient(args, state.weights, state.target_weights, state.features, batch)
    updates, opt_state = optimizer(args).update(grad, state.opt_state)
    weights = optax.apply_updates(state.weights, updates)
    target_weights = optax.incremental_update(weights, state.target_weights, args.tau)

    # Until learning starts, everything stays as it was. jax.lax.cond would save nothing: under
    # vmap, it computes both.
    choose = partial(jnp.where, state.written >= args.learning_starts)
    before = state.weights, state.target_weights, state.opt_state
    after = weights, target_weights, opt_state
    weights, target_weights, opt_state = jax.tree.map(choose, after, before)
    metrics = {name: choose(value, jnp.nan) for name, value in metrics.items()}
    state = state._replace(weights=weights, target_weights=target_weights, opt_state=opt_state)
    return state, metrics | ended


def train_interval(args, state):
    """Make U updates, up to the next progress line. Also return what the line shows."""
    step = partial(train_step, args)
    state, metrics = jax.lax.scan(step, state, length=args.interval_updates)  # (U,)
    return state, {
        "returns": metrics["return_sum"].sum() / metrics["episodes"].sum(),  # nan if none ended
        "td_error": jnp.nanmean(metrics["td_error"]),  # nan until learning starts
        "q_value": jnp.nanmean(metrics["q_value"]),
    }


def evaluate(args, state):
    """Undiscounted returns (E,) of the greedy policy in E new episodes."""

    def greedy_policy(params, obs, _):
        return jnp.argmax(q_values(*params, obs[None])[0])  # a batch of one

    env, env_params = make_env(args.env_id)
    rollout = RolloutWrapper(greedy_policy, env=env, env_params=env_params)  # up to the time limit
    keys = jax.random.split(state.key, args.eval_episodes)
    *_, returns = rollout.batch_rollout(keys, (state.features, state.weights))  # (E, 1)
    return returns[:, 0]


COMPILER_OPTIONS = {  # on a CPU
    "xla_backend_optimization_level": 1,  # compiles in 0.7 of the time, runs as fast
    "xla_cpu_prefer_vector_width": 512,  # the widest vectors: 1.2 times as fast
    # Do not split small arrays among threads: 1.6 times as fast. Do not use the matrix library of
    # jax 0.11, which is slow for small matrices: 1.7 times as fast.
    "xla_disable_hlo_passes": "cpu-parallel-task-assigner,dot-library-rewriter",
}


def sweep(args):
    """Combine the values of the swept flags with each other (a setting) and with the seeds (a run).

    Return the values that differ between runs, (R,) each by name, the runs of a setting one after
    the other; and a label for each setting, which names the flags that vary.
    """
    values = {name: vars(args)[name] for name in SWEPT}
    values["seed"] = args.seed + np.arange(args.num_seeds)
    grid = np.meshgrid(*values.values(), indexing="ij")  # the last one, the seed, varies fastest
    runs = {name: array.ravel() for name, array in zip(values, grid, strict=True)}
    several = [name for name in SWEPT if len(values[name]) > 1]
    firsts = range(0, len(runs["seed"]), args.num_seeds)  # the first run of each setting
    labels = [", ".join(f"{name} {runs[name][run]:g}" for name in several) for run in firsts]
    return runs, labels


def spread(runs, all_devices):
    """Return how many devices R runs need, and runs to which copies of the last one are added.

    The copies fill up the devices: each takes the same number of runs.
    """
    num_runs = len(runs["seed"])
    per_device = math.ceil(num_runs / jax.device_count())
    num_devices = jax.device_count() if all_devices else math.ceil(num_runs / per_device)
    copies = num_devices * per_device - num_runs
    return num_devices, {name: np.pad(own, (0, copies), "edge") for name, own in runs.items()}


def over_runs(function, args, num_devices):
    """Compile function(args, *arrays) of one run for all runs, vmapped and spread over devices.

    The compiled function takes runs in the place of args: each run's own values replace those in
    args. The other arrays have an axis of runs in front.
    """

    def of_one_run(own, *arrays):
        return function(argparse.Namespace(**vars(args) | own), *arrays)

    mesh = jax.make_mesh((num_devices,), ("runs",), axis_types=(jax.sharding.AxisType.Auto,))
    # No check_vma: runs do not communicate, and the check rejects loops that start from constants.
    shard = partial(jax.shard_map, mesh=mesh, check_vma=False)
    sharded = shard(jax.vmap(of_one_run), in_specs=jax.P("runs"), out_specs=jax.P("runs"))
    on_cpu = jax.default_backend() == "cpu"
    return jax.jit(sharded, compiler_options=COMPILER_OPTIONS if on_cpu else None)


def gather(tree, length):
    """Copy arrays from all devices, in all processes, to the host. Keep the first `length` rows."""
    return jax.tree.map(lambda array: array[:length], process_allgather(tree, tiled=True))


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
        folder, name = os.path.split(path)
        place = path if os.path.exists(path) else os.path.join(folder, ".")
        can_write = os.access(place, os.W_OK) and not os.path.isdir(path)
        if not can_write or os.path.splitext(name)[1] != suffix:
            raise argparse.ArgumentTypeError(f"{path!r} is not a {suffix} file that can be written")
        return path

    return parse


def parse_args(argv=None):
    """Read and check the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.allow_abbrev = False
    add = parser.add_argument
    count = number(int, 1, 1e6)
    steps = number(int, 1, 1e9)
    unit = number(float, 0, 1)
    text = "gymnax environment with observation scales in OBS_SCALE"
    add("--env-id", choices=list(OBS_SCALE), default="CartPole-v1", help=text)
    add("--seed", type=number(int, 0, 2e9), default=0, help="seed of the first run")
    add("--num-seeds", type=count, default=1, help="runs of each setting, with successive seeds")
    text = "environment steps per run, rounded up to whole log intervals"
    add("--total-timesteps", type=steps, default=200_000, help=text)
    add("--num-envs", type=count, default=16, help="environments stepped in lockstep")
    add("--buffer-size", type=count, default=100_000, help="capacity of the ring, in transitions")
    add("--learning-starts", type=count, default=1_000, help="transitions before the first update")
    add("--batch-size", type=count, default=32, help="transitions per update")
    add("--tau", type=unit, nargs="+", default=[0.01], help="step size of the target's average")
    text = "initial step size of Adam, falls to 0"
    add("--learning-rate", type=unit, nargs="+", default=[0.03], help=text)
    add("--gamma", type=unit, nargs="+", default=[0.99], help="discount factor")
    text = "initial probability of a random action, epsilon"
    add("--start-e", type=unit, nargs="+", default=[1.0], help=text)
    add("--end-e", type=unit, nargs="+", default=[0.25], help="lowest epsilon")
    decay = number(float, 1e-6, 0.99999)  # float32 would round larger ones too coarsely
    add("--epsilon-decay", type=decay, nargs="+", default=[0.999], help="factor per vector step")
    add("--num-centers", type=count, default=500, help="number of radial basis features")
    width = number(float, 1e-3, 1e3)
    add("--sigma", type=width, nargs="+", default=[0.5], help="width of the features")
    add("--eval-episodes", type=count, default=100, help="greedy episodes after training")
    text = "approximate number of environment steps between progress lines"
    add("--log-interval", type=count, default=10_000, help=text)
    add("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    add("--save", type=file_name(".npz"), metavar="FILE", help="write weights, curves, arguments")
    add("--plot", type=file_name(".png"), metavar="FILE", help="draw the learning curves")
    args = parser.parse_args(argv)
    if args.distributed and not jax.distributed.is_initialized():
        parser.error("--distributed: from Python, call jax.distributed.initialize() first")
    if args.buffer_size < args.num_envs:
        parser.error("--buffer-size must be at least --num-envs")
    if args.learning_starts > args.total_timesteps:
        parser.error("--learning-starts must be at most --total-timesteps")
    update_timesteps = args.num_envs
    min_updates = math.ceil(args.total_timesteps / update_timesteps)
    args.num_intervals = math.ceil(min_updates / math.ceil(args.log_interval / update_timesteps))
    args.interval_updates = math.ceil(min_updates / args.num_intervals)
    args.interval_timesteps = args.interval_updates * update_timesteps
    steps_without_update = (args.learning_starts - 1) // args.num_envs
    args.num_updates = args.num_intervals * args.interval_updates - steps_without_update
    return args


def plot(path, labels, timesteps, returns):
    """Draw returns (K, R) over timesteps (K,): runs thin, the median of each setting bold."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    plt.figure(layout="constrained")
    settings = np.split(returns, len(labels), axis=1)
    for i, (label, curves) in enumerate(zip(labels, settings, strict=True)):
        median = jnp.nanmedian(curves, axis=1)  # NumPy's would warn if all are nan
        plt.plot(timesteps, curves, f"C{i}.-", linewidth=0.5, markersize=1, alpha=0.3)
        plt.plot(timesteps, median, f"C{i}.-", linewidth=2, label=f"median  {label}".strip())
    plt.gca().xaxis.set_major_formatter(EngFormatter(sep=""))  # 100k
    plt.xlabel("environment steps")
    plt.ylabel("return of training episodes")
    plt.figlegend(loc="outside upper center", fontsize="small")
    plt.savefig(path)
    plt.close()


def main(argv=None):
    """Train, evaluate and report. Return what --save writes."""
    args = parse_args(argv)
    make_env(args.env_id)  # here, since some environments cannot be made inside of jit
    if jax.process_index() > 0:  # process 0 reports for all
        sys.stdout = open(os.devnull, "w")
        args.save = args.plot = None
    runs, labels = sweep(args)
    num_runs = len(runs["seed"])
    num_devices, runs_and_copies = spread(runs, args.distributed)
    on_devices = partial(over_runs, args=args, num_devices=num_devices)
    how_many = "1 run" if num_runs == 1 else f"{num_runs} runs"
    print(f"{args.env_id}, {how_many} on {num_devices} x {jax.devices()[0].device_kind}")

    began = time.perf_counter()
    state = on_devices(init_state)(runs_and_copies)
    train = on_devices(train_interval).lower(runs_and_copies, state).compile()
    compile_seconds = time.perf_counter() - began
    print(f"compiled in {compile_seconds:.1f} s")

    timesteps = args.interval_timesteps * np.arange(1, args.num_intervals + 1)  # (K,)
    history, train_seconds = [], 0.0
    try:
        for timestep in timesteps:
            began = time.perf_counter()
            next_state, metrics = train(runs_and_copies, state)
            history.append(gather(metrics, num_runs))  # waits for it; Ctrl-C is raised here
            state = next_state
            train_seconds += time.perf_counter() - began
            mean = jax.tree.map(jnp.nanmean, history[-1])  # NumPy's would warn if all are nan
            speed = timestep * num_runs / train_seconds
            print(
                f"step {timestep:,}  return {mean['returns']:.1f}  td_error {mean['td_error']:.3f}"
                f"  q_value {mean['q_value']:.2f}  {speed:,.0f} steps/s"
            )
    except KeyboardInterrupt:
        if args.distributed or not history:
            raise
        print("interrupted: the results are those of the last line")

    greedy_return = on_devices(evaluate)(runs_and_copies, state)  # (R, E)
    features = state.features._replace(centers=state.features.centers.mT)  # (R, F, D)
    learned = features._asdict() | {"weights": state.weights}
    greedy_return, learned = gather((greedy_return, learned), num_runs)
    settings = np.split(greedy_return.mean(axis=1), len(labels))
    for label, means in zip(labels, settings, strict=True):
        text = f"greedy return {means.mean():.1f}  worst run {means.min():.1f}"
        print(f"{label}  {text}".strip())
    results = {
        "args": json.dumps(vars(args)),
        **runs,
        "compile_seconds": compile_seconds,
        "train_seconds": train_seconds,
        "interrupted": len(history) < args.num_intervals,
        "timesteps": timesteps[: len(history)],
        **jax.tree.map(lambda *values: np.stack(values), *history),  # (K, R)
        "greedy_return": greedy_return,
        **learned,
    }
    if args.save:
        np.savez(args.save, allow_pickle=False, **results)  # an error if they are nested
    if args.plot:
        plot(args.plot, labels, results["timesteps"], results["returns"])
    return results


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # progress appears at once, in a log too
    sys.exit(130 if main()["interrupted"] else 0)
