# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0",
# ]
# ///
r"""REINFORCE on N episodes at a time, of different lengths, padded and masked.

Each iteration plays N episodes with the current policy pi, then gives Adam the gradient estimate

    1/N sum_i sum_t mask_it (G_it - b_t) grad log pi(A_it | S_it),    G_it = R_it + gamma G_i,t+1

(Williams 1992; Sutton & Barto 2018, section 13.4). The mask is 1 up to the last step of episode i
and 0 in the padding after it. The baseline b_t is the mean of all N returns to go; an episode that
has ended counts as 0. Because the mean includes the episode's own return, the expected value is
(N - 1) / N times that of sum_t G_t grad log pi(A_t | S_t). Adam's steps do not depend on such a
factor. The factor gamma^t is left out, as is common: if gamma < 1, this is not the gradient of any
objective (Nota & Thomas 2020). Returns stop at the time limit.

--sync truncation learns only from the steps before the shortest episode ends. This is biased: later
rewards do not count. Where every step has the same reward, as in CartPole-v1, all returns are then
equal, all advantages are 0, and nothing is learned.

    python reinforce_parallel.py    # CartPole-v1
    python reinforce_parallel.py --env-id Pendulum-v1 --num-envs 128 --num-iterations 500 \
        --gamma 0.95 --gif pendulum.gif

Shapes: R runs, K log intervals, U = args.interval_updates updates, N = args.num_envs episodes,
T steps (the time limit), E = args.eval_episodes episodes, D observation dimensions,
H = args.hidden_size units, A actions, or action dimensions if actions are continuous.

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
from jax.experimental.multihost_utils import process_allgather

# These flags take several values; every combination is run. In a function of one run, args.gamma is
# that run's own value. It is traced: good for arithmetic, not for shapes or loops. Elsewhere,
# args.gamma does not exist; args.swept["gamma"] has all values.
SWEPT = "learning_rate", "gamma"


class Step(NamedTuple):
    """One step of an episode, or of the padding after it."""

    obs: jax.Array  # (D,) flattened
    action: jax.Array  # (A,) if continuous
    reward: jax.Array
    mask: jax.Array  # true if the step is real, false in the padding


class TrainState(NamedTuple):
    """The state of one run."""

    key: jax.Array
    params: dict  # w0 (D, H), b0 (H,), w1 (H, A), b1 (A,); log_std (A,) if actions are continuous
    opt_state: optax.OptState


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
    space = env.action_space(env_params)
    discrete = isinstance(space, gymnax.environments.spaces.Discrete)
    inputs = math.prod(env.observation_space(env_params).shape)
    outputs = space.n if discrete else math.prod(space.shape)
    key, key_hidden, key_output = jax.random.split(jax.random.key(args.seed), 3)
    params = {
        "w0": jax.random.normal(key_hidden, (inputs, args.hidden_size)) / math.sqrt(inputs),
        "b0": jnp.zeros(args.hidden_size),
        "w1": 0.01 * jax.random.normal(key_output, (args.hidden_size, outputs)),
        "b1": jnp.zeros(outputs),
    }
    if not discrete:
        params["log_std"] = jnp.zeros(outputs)
    return TrainState(key, params, optimizer(args).init(params))


def network(params, obs):
    """Logits (A,) in an observation (D,), or means if actions are continuous."""
    return jnp.tanh(obs @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]


def sample(params, obs, key):
    """Random action of the policy."""
    output = network(params, obs)
    if "log_std" in params:  # actions are continuous
        return output + jnp.exp(params["log_std"]) * jax.random.normal(key, output.shape)
    return jax.random.categorical(key, output)


def greedy_action(params, obs):
    """Most probable action of the policy."""
    output = network(params, obs)
    return output if "log_std" in params else jnp.argmax(output)


def log_prob(params, obs, action):
    """log pi(action | obs) of a categorical or a diagonal Gaussian distribution."""
    if "log_std" in params:
        std = jnp.exp(params["log_std"])
        return jnp.sum(jax.scipy.stats.norm.logpdf(action, network(params, obs), std))
    return jax.nn.log_softmax(network(params, obs))[action]


def to_bounds(space, action):
    """Clip a continuous action to [-1, 1] and map it to the environment's bounds."""
    return space.low + (space.high - space.low) * (jnp.clip(action, -1, 1) + 1) / 2


def play(args, params, key, greedy=False):
    """Play one episode. Return its steps, padded to the time limit, and the states (T,)."""
    env, env_params = make_env(args.env_id)
    space = env.action_space(env_params)

    def step(carry, _):
        key, obs, env_state, mask = carry
        key, key_action, key_step = jax.random.split(key, 3)
        obs = obs.reshape(-1).astype(float)
        action = greedy_action(params, obs) if greedy else sample(params, obs, key_action)
        env_action = to_bounds(space, action) if "log_std" in params else action
        next_obs, next_state, reward, terminated, truncated, _ = env.step(
            key_step, env_state, env_action, env_params
        )
        # Where an episode ended, gymnax has begun the next one. That is the padding.
        next_carry = key, next_obs, next_state, mask & ~(terminated | truncated)
        return next_carry, (Step(obs, action, reward.astype(float), mask), env_state)

    key, key_reset = jax.random.split(key)
    obs, env_state = env.reset(key_reset, env_params)
    carry = key, obs, env_state, jnp.array(True)
    _, (steps, env_states) = jax.lax.scan(step, carry, length=int(env_params.max_steps_in_episode))
    return steps, env_states


def returns_to_go(args, rewards):
    """Discounted returns (T,) from each step of one episode on, given its rewards (T,)."""

    def step(later, reward):
        return_to_go = reward + args.gamma * later
        return return_to_go, return_to_go

    _, returns = jax.lax.scan(step, 0.0, rewards, reverse=True)
    return returns


def advantages(args, episodes):
    """Each return to go (N, T) minus the mean of all; 0 in the padding."""
    returns = jax.vmap(partial(returns_to_go, args))(episodes.mask * episodes.reward)
    # If all are equal, this gives exact zeros. Adam would turn rounding errors into full steps.
    relative = returns - returns[0]
    return episodes.mask * (relative - jnp.mean(relative, axis=0))


def policy_loss(params, args, episodes):
    """Surrogate loss: its gradient is minus the policy gradient estimate."""
    log_probs = jax.vmap(jax.vmap(partial(log_prob, params)))(episodes.obs, episodes.action)
    return -jnp.mean(jnp.sum(advantages(args, episodes) * log_probs, axis=1))


def train_step(args, state, _):
    """Play N episodes, then make one Adam step. Also return what a progress line shows."""
    key, key_play = jax.random.split(state.key)
    keys = jax.random.split(key_play, args.num_envs)
    episodes, _ = jax.vmap(partial(play, args, state.params))(keys)  # (N, T)
    episode_return = jnp.sum(episodes.mask * episodes.reward, axis=1)  # (N,)
    metrics = {"returns": jnp.mean(episode_return), "timesteps": jnp.sum(episodes.mask)}
    if args.sync == "truncation":
        episodes = episodes._replace(mask=episodes.mask & jnp.all(episodes.mask, axis=0))
    grad = jax.grad(policy_loss)(state.params, args, episodes)
    updates, opt_state = optimizer(args).update(grad, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    return state._replace(key=key, params=params, opt_state=opt_state), metrics


def train_interval(args, state):
    """Make U updates, up to the next progress line. Also return what the line shows."""
    state, metrics = jax.lax.scan(partial(train_step, args), state, length=args.interval_updates)
    means = jax.tree.map(jnp.mean, metrics)
    return state, {**means, "timesteps": metrics["timesteps"].sum()}


def evaluate(args, state):
    """Undiscounted returns (E,) of the greedy policy in E new episodes."""
    keys = jax.random.split(state.key, args.eval_episodes)
    episodes, _ = jax.vmap(partial(play, args, state.params, greedy=True))(keys)  # (E, T)
    return jnp.sum(episodes.mask * episodes.reward, axis=1)


COMPILER_OPTIONS = {  # on a CPU
    "xla_backend_optimization_level": 1,  # twenty runs compile in 0.6 of the time, run as fast
}

# The environments that gymnax can draw, for --gif.
WITH_PICTURES = (
    "Acrobot-v1 CartPole-v1 Pendulum-v1 MountainCar-v0 MountainCarContinuous-v0 Catch-bsuite"
    " Asterix-MinAtar Breakout-MinAtar Freeway-MinAtar Seaquest-MinAtar SpaceInvaders-MinAtar"
    " Pong-misc PointRobot-misc MetaMaze-misc FourRooms-misc"
).split()


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
    env_ids = gymnax.registered_envs
    add("--env-id", choices=env_ids, default="CartPole-v1", help="gymnax environment")
    add("--seed", type=number(int, 0, 2e9), default=0, help="seed of run 0; run i uses seed + i")
    add("--num-seeds", type=count, default=1, help="runs of each setting")
    add("--num-iterations", type=count, default=100, help="updates, rounded up to equal intervals")
    add("--num-envs", type=number(int, 2, 1e6), default=16, help="episodes per update")
    add("--learning-rate", type=unit, nargs="+", default=[0.01], help="initial value, falls to 0")
    add("--gamma", type=unit, nargs="+", default=[0.99], help="discount factor")
    add("--hidden-size", type=count, default=64, help="number of tanh units in the policy network")
    text = "pad episodes to the time limit, or cut all at the end of the shortest (biased)"
    add("--sync", choices=["padding", "truncation"], default="padding", help=text)
    add("--eval-episodes", type=count, default=100, help="greedy episodes after training")
    add("--log-interval", type=count, default=5, help="iterations between progress lines, at most")
    add("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    add("--save", type=file_name(".npz"), metavar="FILE", help="write weights, curves, arguments")
    add("--plot", type=file_name(".png"), metavar="FILE", help="draw the learning curves")
    text = "animate the first evaluation episode of run 0, at most 200 steps"
    add("--gif", type=file_name(".gif"), metavar="FILE", help=text)
    args = parser.parse_args(argv)
    args.swept = {name: vars(args).pop(name) for name in SWEPT}
    if args.env_id == "MNISTBandit-bsuite":
        parser.error("MNISTBandit-bsuite would download its data")
    if args.gif and make_env(args.env_id)[0].name not in WITH_PICTURES:
        parser.error(f"--gif: gymnax has no picture of {args.env_id}")
    if args.distributed and not jax.distributed.is_initialized():
        parser.error("--distributed: from Python, call jax.distributed.initialize() first")
    args.num_intervals = math.ceil(args.num_iterations / args.log_interval)
    args.interval_updates = math.ceil(args.num_iterations / args.num_intervals)
    args.num_updates = args.num_intervals * args.interval_updates
    return args


def plot(path, labels, timesteps, returns):
    """Draw returns (K, R) over timesteps (K, R): runs thin, the median of each setting bold."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    plt.figure(layout="constrained")
    settings = [np.split(array, len(labels), axis=1) for array in (timesteps, returns)]
    for i, (label, x, y) in enumerate(zip(labels, *settings, strict=True)):
        plt.plot(x, y, f"C{i}.-", linewidth=0.5, markersize=1, alpha=0.3)
        x, y = np.median(x, axis=1), np.median(y, axis=1)
        plt.plot(x, y, f"C{i}.-", linewidth=2, label=f"median  {label}".strip())
    plt.gca().xaxis.set_major_formatter(EngFormatter(sep=""))  # 100k
    plt.xlabel("environment steps")
    plt.ylabel("return of training episodes")
    plt.figlegend(loc="outside upper center", fontsize="small")
    plt.savefig(path)
    plt.close()


def animate(args, path, params, key):
    """Draw the first evaluation episode of a run, at most 200 steps, without a screen."""
    os.environ.update(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy")
    from gymnax.visualize import Visualizer

    key = jax.random.split(key, args.eval_episodes)[0]
    episode, env_states = play(args, params, key, greedy=True)

    def state_at(step):
        return jax.tree.map(lambda array: array[step], env_states)

    num_frames = min(200, np.sum(episode.mask))
    states = [state_at(step) for step in range(num_frames)]
    Visualizer(*make_env(args.env_id), states, np.cumsum(episode.reward)).animate(path)


def main(argv=None):
    """Train, evaluate and report. Return what --save writes. Ctrl-C ends training early."""
    args = parse_args(argv)
    make_env(args.env_id)  # fills the cache: some environments cannot be made inside of jit
    if jax.process_index() > 0:  # process 0 reports for all
        sys.stdout = open(os.devnull, "w")
        args.save = args.plot = args.gif = None
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

    iterations = args.interval_updates * np.arange(1, args.num_intervals + 1)  # (K,)
    history, timesteps, train_seconds = [], np.zeros(num_runs, np.int64), 0.0
    try:
        for iteration in iterations:
            began = time.perf_counter()
            next_state, metrics = train(runs_and_copies, state)
            metrics = gather(metrics, num_runs)  # (R,); waits for train; Ctrl-C is raised here
            state = next_state
            train_seconds += time.perf_counter() - began
            timesteps = timesteps + metrics["timesteps"]  # (R,) so far
            history.append({**metrics, "timesteps": timesteps})
            speed = timesteps.sum() / train_seconds
            mean_return = history[-1]["returns"].mean()
            print(f"iteration {iteration:,}  return {mean_return:.1f}  {speed:,.0f} steps/s")
    except KeyboardInterrupt:
        if args.distributed or not history:
            raise
        print("interrupted: the results are those of the last line")

    arrays = play_greedily(runs_and_copies, state), state.params, jax.random.key_data(state.key)
    greedy_return, params, key_data = gather(arrays, num_runs)  # (R, E), (R, ...) each, (R, ...)
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
        **{name: np.stack([line[name] for line in history]) for name in history[0]},  # (K, R)
        "greedy_return": greedy_return,
        **params,
    }
    if args.save:
        np.savez(args.save, allow_pickle=False, **results)  # an error if one is not an array
    if args.plot:
        plot(args.plot, labels, results["timesteps"], results["returns"])
    if args.gif:
        params = {name: array[0] for name, array in params.items()}
        animate(args, args.gif, params, jax.random.wrap_key_data(key_data[0]))
    return results


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # progress appears at once, in a log too
    sys.exit(130 if main()["interrupted"] else 0)
