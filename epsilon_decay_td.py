# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0",
# ]
# ///
"""Q-learning with decaying exploration: replay_td.py, but epsilon falls during the run.

    Q(s, a) = w_a . phi(s),    phi_i(s) = exp(-|s / scale - c_i|^2 / (2 sigma^2))
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
    python epsilon_decay_td.py --end-e 0 0.25 --num-seeds 20 --plot curve.png  # forty, on all cores

Shapes: R runs, K log intervals, U = args.interval_updates updates, N = args.num_envs environments,
C = args.buffer_size transitions in the buffer, B = args.batch_size transitions in a batch,
E = args.eval_episodes episodes, D observation dimensions, F = args.num_centers features, A actions.

The algorithm comes first, for one run. Then come flags, and the code that runs it on all devices.
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

# These flags take several values; every combination is run. In a function of one run, args.gamma is
# that run's own value. It is traced: good for arithmetic, not for shapes or loops. Elsewhere,
# args.gamma does not exist; args.swept["gamma"] has all values.
SWEPT = "learning_rate", "gamma", "start_e", "end_e", "epsilon_decay", "sigma", "tau"


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
    params: dict  # centers (D, F), weights (A, F)
    target_params: dict  # their running average
    opt_state: optax.OptState
    env_state: gymnax.EnvState  # (N,)
    obs: jax.Array  # (N, D)
    episode_return: jax.Array  # (N,) so far
    buffer: Transition  # (C,) a ring
    timesteps: jax.Array  # environment steps so far; each one is stored in the buffer


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
    """State in which a run starts."""
    env, env_params = make_env(args.env_id)
    key, key_reset, key_centers = jax.random.split(jax.random.key(args.seed), 3)
    keys = jax.random.split(key_reset, args.num_envs)
    obs, env_state = jax.vmap(partial(env.reset, params=env_params))(keys)
    params = {
        "centers": jax.random.uniform(key_centers, (obs.shape[1], args.num_centers), minval=-1.0),
        "weights": jnp.zeros((env.num_actions, args.num_centers)),
    }
    return TrainState(
        key=key,
        params=params,
        target_params=params,
        opt_state=optimizer(args).init(params),
        env_state=env_state,
        obs=obs,
        episode_return=jnp.zeros(args.num_envs),
        buffer=Transition(
            obs=jnp.zeros((args.buffer_size, obs.shape[1])),
            action=jnp.zeros(args.buffer_size, int),
            reward=jnp.zeros(args.buffer_size),
            next_obs=jnp.zeros((args.buffer_size, obs.shape[1])),
            terminated=jnp.zeros(args.buffer_size, bool),
        ),
        timesteps=jnp.array(0),
    )


def q_values(args, params, obs):
    """Values (A,) of all actions in an observation (D,)."""
    scaled = obs / jnp.array(OBS_SCALE[args.env_id])
    centers = jax.lax.stop_gradient(params["centers"])  # they stay where they are
    squared_distance = jnp.sum((scaled[:, None] - centers) ** 2, axis=0)  # (F,)
    phi = jnp.exp(-squared_distance / (2 * args.sigma**2))  # (F,)
    return jnp.stack([w_a @ phi for w_a in params["weights"]])  # 1.7 times as fast as weights @ phi


def exploration_rate(args, t):
    """Probability epsilon of a random action in vector step t."""
    return jnp.maximum(args.end_e, args.start_e * args.epsilon_decay**t)


def vector_step(args, state, _):
    """Step N environments epsilon-greedily. Also return transitions, totals of ended episodes."""
    env, env_params = make_env(args.env_id)
    key, key_explore, key_action, key_step = jax.random.split(state.key, 4)
    step_keys = jax.random.split(key_step, args.num_envs)
    epsilon = exploration_rate(args, state.timesteps // args.num_envs)  # vector steps so far
    explore = jax.random.bernoulli(key_explore, epsilon, args.num_envs)
    random_action = jax.random.randint(key_action, args.num_envs, 0, env.num_actions)
    q = jax.vmap(partial(q_values, args, state.params))(state.obs)  # (N, A)
    action = jnp.where(explore, random_action, jnp.argmax(q, axis=1))
    step = jax.vmap(partial(env.step, params=env_params))
    obs, env_state, reward, terminated, truncated, info = step(step_keys, state.env_state, action)
    transitions = Transition(
        obs=state.obs,
        action=action,
        reward=reward,
        next_obs=info["final_observation"],  # where an episode ended, obs is of the next one
        terminated=terminated,
    )
    done = terminated | truncated
    total = state.episode_return + reward
    ended = {"episodes": jnp.sum(done), "return_sum": jnp.sum(done * total)}
    episode_return = jnp.where(done, 0.0, total)
    state = state._replace(key=key, env_state=env_state, obs=obs, episode_return=episode_return)
    return state, (transitions, ended)


def td_target(args, state, transition):
    """Target of one transition."""
    next_q = q_values(args, state.target_params, transition.next_obs)  # (A,)
    return transition.reward + args.gamma * (1 - transition.terminated) * jnp.max(next_q)


def td_error(args, params, transition, target):
    """TD error of one transition."""
    return target - q_values(args, params, transition.obs)[transition.action]


def td_loss(params, args, batch, targets):
    """Half the mean squared TD error of a batch (B,). Also return what a progress line shows."""
    td_errors = jax.vmap(partial(td_error, args, params))(batch, targets)  # (B,)
    metrics = {"td_error": jnp.mean(jnp.abs(td_errors)), "q_value": jnp.mean(targets - td_errors)}
    return jnp.mean(optax.l2_loss(td_errors)), metrics


def train_step(args, state, _):
    """Store the transitions of one vector step, then learn from a random batch of all stored."""
    state, (transitions, ended) = vector_step(args, state, None)
    slots = (state.timesteps + jnp.arange(args.num_envs)) % args.buffer_size
    buffer = jax.tree.map(lambda old, new: old.at[slots].set(new), state.buffer, transitions)
    timesteps = state.timesteps + args.num_envs
    key, key_batch = jax.random.split(state.key)
    state = state._replace(key=key, buffer=buffer, timesteps=timesteps)
    num_stored = jnp.minimum(timesteps, args.buffer_size)
    chosen = jax.random.randint(key_batch, args.batch_size, 0, num_stored)
    batch = jax.tree.map(lambda column: column[chosen], buffer)  # (B,)
    # The targets are computed outside of the loss, so no gradient flows through them.
    targets = jax.vmap(partial(td_target, args, state))(batch)  # (B,)
    grad, metrics = jax.grad(td_loss, has_aux=True)(state.params, args, batch, targets)
    updates, opt_state = optimizer(args).update(grad, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    average = optax.incremental_update(params, state.target_params, args.tau)
    state = state._replace(params=params, target_params=average, opt_state=opt_state)
    return state, metrics | ended


def train_interval(args, state):
    """Make U updates, up to the next progress line. Also return what the line shows."""
    state, metrics = jax.lax.scan(partial(train_step, args), state, length=args.interval_updates)
    means = jax.tree.map(jnp.mean, metrics)
    returns = means.pop("return_sum") / means.pop("episodes")  # nan if none ended
    return state, {"returns": returns, **means}


def evaluate(args, state):
    """Undiscounted returns (E,) of the greedy policy in E new episodes."""

    def greedy_policy(params, obs, _):
        return jnp.argmax(q_values(args, params, obs))

    env, env_params = make_env(args.env_id)
    rollout = RolloutWrapper(greedy_policy, env=env, env_params=env_params)  # up to the time limit
    keys = jax.random.split(state.key, args.eval_episodes)
    *_, returns = rollout.batch_rollout(keys, state.params)  # (E, 1)
    return returns[:, 0]


COMPILER_OPTIONS = {  # on a CPU
    "xla_backend_optimization_level": 1,  # compiles in 0.7 of the time of level 3, runs as fast
    "xla_cpu_prefer_vector_width": 512,  # the widest vectors: 1.3 times as fast
    # Not the matrix library of jax 0.11, which is slow for small matrices: 1.5 times as fast.
    "xla_disable_hlo_passes": "dot-library-rewriter",
}


def sweep(args):
    """Combine the values of the swept flags (settings), and each setting with all seeds (runs).

    Return the swept flags and the seed by name, (R,) each, setting by setting; and a label for each
    setting: its values of the flags that vary.
    """
    values = {**args.swept, "seed": args.seed + np.arange(args.num_seeds)}
    grid = np.meshgrid(*values.values(), indexing="ij")  # the last one, the seed, varies fastest
    runs = {name: array.ravel() for name, array in zip(values, grid, strict=True)}
    several = [name for name in args.swept if np.size(values[name]) > 1]
    firsts = range(0, len(runs["seed"]), args.num_seeds)  # the first run of each setting
    labels = [", ".join(f"{name} {runs[name][run]:g}" for name in several) for run in firsts]
    return runs, labels


def spread(runs, all_devices):
    """Return how many devices R runs need, and the runs, padded with copies of the last one.

    The copies fill up the devices: each takes the same number of runs.
    """
    num_runs = len(runs["seed"])
    per_device = math.ceil(num_runs / jax.device_count())
    num_devices = jax.device_count() if all_devices else math.ceil(num_runs / per_device)
    copies = num_devices * per_device - num_runs
    return num_devices, {name: np.pad(array, (0, copies), "edge") for name, array in runs.items()}


def over_runs(function, args, num_devices):
    """Compile function(args, *arrays) of one run for all runs, vmapped and spread over devices.

    The compiled function takes runs in place of args: each run's own values replace those in
    args. The other arrays have an axis of runs in front.
    """

    def of_one_run(own, *arrays):
        return function(argparse.Namespace(**{**vars(args), **own}), *arrays)

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
        must_exist = path if os.path.exists(path) else os.path.join(folder, ".")
        can_write = os.access(must_exist, os.W_OK) and not os.path.isdir(path)
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
    unit = number(float, 0, 1)
    add("--env-id", choices=list(OBS_SCALE), default="CartPole-v1", help="gymnax environment")
    add("--seed", type=number(int, 0, 2e9), default=0, help="seed of run 0; run i uses seed + i")
    add("--num-seeds", type=count, default=1, help="runs of each setting")
    text = "environment steps per run, rounded up to equal log intervals"
    add("--total-timesteps", type=number(int, 1, 1e9), default=200_000, help=text)
    add("--num-envs", type=count, default=16, help="environments stepped in lockstep")
    add("--buffer-size", type=count, default=100_000, help="transitions that the buffer holds")
    add("--batch-size", type=count, default=32, help="transitions per update")
    add("--tau", type=unit, nargs="+", default=[0.01], help="step size of the target's average")
    add("--learning-rate", type=unit, nargs="+", default=[0.03], help="initial value, falls to 0")
    add("--gamma", type=unit, nargs="+", default=[0.99], help="discount factor")
    text = "initial epsilon, the probability of a random action"
    add("--start-e", type=unit, nargs="+", default=[1.0], help=text)
    add("--end-e", type=unit, nargs="+", default=[0.05], help="lowest epsilon")
    decay = number(float, 1e-6, 0.99999)  # float32 would round larger ones too coarsely
    add("--epsilon-decay", type=decay, nargs="+", default=[0.9997], help="factor per vector step")
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
    args.swept = {name: vars(args).pop(name) for name in SWEPT}
    if args.distributed and not jax.distributed.is_initialized():
        parser.error("--distributed: from Python, call jax.distributed.initialize() first")
    if args.buffer_size < args.num_envs:
        parser.error("--buffer-size must be at least --num-envs")
    update_timesteps = args.num_envs
    min_updates = math.ceil(args.total_timesteps / update_timesteps)
    args.num_intervals = math.ceil(min_updates / math.ceil(args.log_interval / update_timesteps))
    args.interval_updates = math.ceil(min_updates / args.num_intervals)
    args.interval_timesteps = args.interval_updates * update_timesteps
    args.num_updates = args.num_intervals * args.interval_updates
    return args


def plot(path, labels, timesteps, returns):
    """Draw returns (K, R) over timesteps (K,): runs thin, the median of each setting bold."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    plt.figure(layout="constrained")
    settings = np.split(returns, len(labels), axis=1)
    for i, (label, curves) in enumerate(zip(labels, settings, strict=True)):
        median = jnp.nanmedian(curves, axis=1)  # np.nanmedian would warn if all are nan
        plt.plot(timesteps, curves, f"C{i}.-", linewidth=0.5, markersize=1, alpha=0.3)
        plt.plot(timesteps, median, f"C{i}.-", linewidth=2, label=f"median  {label}".strip())
    plt.gca().xaxis.set_major_formatter(EngFormatter(sep=""))  # 100k
    plt.xlabel("environment steps")
    plt.ylabel("return of training episodes")
    plt.figlegend(loc="outside upper center", fontsize="small")
    plt.savefig(path)
    plt.close()


def main(argv=None):
    """Train, evaluate and report. Return what --save writes. Ctrl-C ends training early."""
    args = parse_args(argv)
    make_env(args.env_id)  # fills the cache: some environments cannot be made inside of jit
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
    play_greedily = on_devices(evaluate).lower(runs_and_copies, state).compile()
    compile_seconds = time.perf_counter() - began
    print(f"compiled in {compile_seconds:.1f} s")

    timesteps = args.interval_timesteps * np.arange(1, args.num_intervals + 1)  # (K,)
    history, train_seconds = [], 0.0
    try:
        for timestep in timesteps:
            began = time.perf_counter()
            next_state, metrics = train(runs_and_copies, state)
            history.append(gather(metrics, num_runs))  # waits for train; Ctrl-C is raised here
            state = next_state
            train_seconds += time.perf_counter() - began
            mean = jax.tree.map(jnp.nanmean, history[-1])  # np.nanmean would warn if all are nan
            speed = timestep * num_runs / train_seconds
            print(
                f"step {timestep:,}  return {mean['returns']:.1f}  td_error {mean['td_error']:.3f}"
                f"  q_value {mean['q_value']:.2f}  {speed:,.0f} steps/s"
            )
    except KeyboardInterrupt:
        if args.distributed or not history:
            raise
        print("interrupted: the results are those of the last line")

    arrays = play_greedily(runs_and_copies, state), state.params
    greedy_return, params = gather(arrays, num_runs)  # (R, E), (R, ...) each
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
        **{name: np.stack([line[name] for line in history]) for name in history[0]},  # (K, R)
        "greedy_return": greedy_return,
        "obs_scale": np.tile(OBS_SCALE[args.env_id], (num_runs, 1)),
        **params,
    }
    if args.save:
        np.savez(args.save, allow_pickle=False, **results)  # an error if one is not an array
    if args.plot:
        plot(args.plot, labels, results["timesteps"], results["returns"])
    return results


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # progress appears at once, in a log too
    sys.exit(130 if main()["interrupted"] else 0)
