# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0",
# ]
# ///
"""REINFORCE on N episodes at a time, of different lengths, padded and masked.

Each iteration plays N episodes with the current policy pi, then gives Adam the gradient estimate

    1/N sum_i sum_t mask_it (G_it - b_t) grad log pi(A_it | S_it),    G_it = R_it + gamma G_i,t+1

(Williams 1992; Sutton & Barto 2018, section 13.4). The mask is 1 up to the last step of episode i
and 0 in the padding after it. The baseline b_t is the mean of all N returns to go; an episode that
has ended counts as 0. Returns stop at the time limit. However short the episodes are, all are
simulated up to the time limit.

--sync truncation learns only from the steps before the shortest episode ends. This is biased: later
rewards do not count. Where every step has the same reward, as in CartPole-v1, all returns are then
equal, all advantages are 0, and nothing is learned.

    python reinforce_parallel.py --gif pole.gif    # CartPole-v1
    python reinforce_parallel.py --env-id Acrobot-v1 --num-envs 256 --learning-rate 0.03
    python reinforce_parallel.py --env-id MountainCarContinuous-v0 --num-envs 64
    python reinforce_parallel.py --env-id Pendulum-v1 --num-envs 128 --num-iterations 500

Shapes: R runs, K intervals, U = interval_updates updates, N = num_envs episodes, T steps (the
time limit), E = eval_episodes episodes, D observation dimensions, H = hidden_size units, A actions,
or action dimensions if actions are continuous.

First come the flags, then the algorithm, for one run, then the launcher, the same in all learners.
"""

import argparse
import itertools
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
# A command draws into files, with any backend. In a notebook, the user's backend stays.
if __name__ == "__main__" and "IPython" not in sys.modules:
    os.environ["MPLBACKEND"] = "agg"
import jax

if "--distributed" in sys.argv:  # before gymnax is imported, because gymnax creates arrays
    jax.distributed.initialize()

import gymnax
import jax.numpy as jnp
import numpy as np
import optax
from gymnax.environments import spaces
from jax.experimental.multihost_utils import process_allgather

# The environments that gymnax can draw, for --gif.
WITH_PICTURES = (
    "Acrobot-v1 CartPole-v1 Pendulum-v1 MountainCar-v0 MountainCarContinuous-v0 Catch-bsuite"
    " Asterix-MinAtar Breakout-MinAtar Freeway-MinAtar Seaquest-MinAtar SpaceInvaders-MinAtar"
    " Pong-misc PointRobot-misc MetaMaze-misc FourRooms-misc"
).split()
MAX_CURVES = 10  # settings in a figure: Matplotlib has ten colors


def parse_args(argv=None):
    """Read and check the flags. Those of `sweep` take several values: all combinations are run."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.allow_abbrev = False
    # A swept flag is a list in args. In a function of one run, run.gamma is one value, and traced:
    # good for arithmetic, not for shapes, loops or `if`. Other flags are plain Python values.
    # `number` and `output` (see the launcher) refuse wrong values.
    flag, sweep = parser.add_argument, partial(parser.add_argument, nargs="+")
    count, unit = number(int, 1, 1e6), number(float, 0, 1)
    env_ids = gymnax.registered_envs
    flag("--env-id", choices=env_ids, default="CartPole-v1", help="gymnax environment")
    flag("--seed", type=number(int, 0, 2e9), default=0, help="first seed of each setting")
    flag("--num-seeds", type=count, default=1, help="runs of each setting")
    text = "updates, rounded up to equal intervals"
    flag("--num-iterations", type=count, default=100, help=text)
    flag("--num-intervals", type=count, default=20, help="progress lines, at most")
    flag("--num-envs", type=number(int, 2, 1e6), default=16, help="episodes per update")
    sweep("--learning-rate", type=unit, default=[0.01], help="initial value, falls to 0")
    sweep("--gamma", type=unit, default=[0.99], help="discount factor")
    flag("--hidden-size", type=count, default=64, help="number of tanh units in the policy network")
    text = "pad episodes to the time limit, or cut all at the end of the shortest (biased)"
    flag("--sync", choices=["padding", "truncation"], default="padding", help=text)
    flag("--eval-episodes", type=count, default=100, help="greedy episodes after training")
    flag("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    flag("--save", type=output(".npz"), metavar="FILE", help="write weights, curves, flags (.npz)")
    picture = output(".png", ".pdf", ".svg")
    text = f"draw the learning curves of at most {MAX_CURVES} settings (.png, .pdf, .svg)"
    flag("--plot", type=picture, metavar="FILE", help=text)
    text = "animate the first evaluation episode of run 0, at most 200 steps (.gif)"
    flag("--gif", type=output(".gif"), metavar="FILE", help=text)
    args = parser.parse_args(argv)
    if args.distributed and not jax.distributed.is_initialized():
        parser.error("--distributed: from Python, call jax.distributed.initialize() first")
    if args.env_id == "MNISTBandit-bsuite":
        parser.error("MNISTBandit-bsuite would download its data")
    env, env_params = make_env(args.env_id)  # in the cache: some cannot be made inside of jit
    space = env.action_space(env_params)
    bounded = isinstance(space, spaces.Box) and np.all(np.isfinite(space.high - space.low))
    if not isinstance(space, spaces.Discrete) and not bounded:
        parser.error(f"{args.env_id}: actions must be discrete, or in a box with finite bounds")
    if args.gif and env.name not in WITH_PICTURES:
        parser.error(f"--gif: gymnax has no picture of {args.env_id}")
    args.interval_updates = math.ceil(args.num_iterations / args.num_intervals)
    args.num_intervals = math.ceil(args.num_iterations / args.interval_updates)
    args.num_updates = args.num_intervals * args.interval_updates
    return args


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


def optimizer(run):
    """Make Adam. Its learning rate falls linearly to 0."""
    return optax.adam(optax.linear_schedule(run.learning_rate, 0.0, run.num_updates))


def init_state(run):
    """State in which a run starts."""
    env, env_params = make_env(run.env_id)
    space = env.action_space(env_params)
    discrete = isinstance(space, spaces.Discrete)
    inputs = math.prod(env.observation_space(env_params).shape)
    outputs = space.n if discrete else math.prod(space.shape)
    key, key_hidden, key_output = jax.random.split(jax.random.key(run.seed), 3)
    params = {
        "w0": jax.random.normal(key_hidden, (inputs, run.hidden_size)) / math.sqrt(inputs),
        "b0": jnp.zeros(run.hidden_size),
        "w1": 0.01 * jax.random.normal(key_output, (run.hidden_size, outputs)),
        "b1": jnp.zeros(outputs),
    }
    if not discrete:
        params["log_std"] = jnp.zeros(outputs)
    return TrainState(key, params, optimizer(run).init(params))


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
    """Clip a continuous action (A,) to [-1, 1]. Map it to the bounds and the shape of its space."""
    fraction = (jnp.clip(action, -1, 1) + 1) / 2
    return space.low + (space.high - space.low) * fraction.reshape(space.shape)


def play(run, params, key, greedy=False):
    """Play one episode. Return its steps, padded to the time limit, and the states (T,)."""
    env, env_params = make_env(run.env_id)
    space = env.action_space(env_params)

    def step(carry, _):
        key, obs, env_state, mask = carry
        key, key_action, key_step = jax.random.split(key, 3)
        obs = obs.reshape(-1).astype(float)
        action = greedy_action(params, obs) if greedy else sample(params, obs, key_action)
        env_action = to_bounds(space, action) if "log_std" in params else action
        stepped = env.step(key_step, env_state, env_action, env_params)
        next_obs, next_state, reward, terminated, truncated, _ = stepped
        # Where an episode ended, gymnax has begun the next one. That is the padding.
        next_carry = key, next_obs, next_state, mask & ~(terminated | truncated)
        return next_carry, (Step(obs, action, reward.astype(float), mask), env_state)

    key, key_reset = jax.random.split(key)
    obs, env_state = env.reset(key_reset, env_params)
    carry = key, obs, env_state, jnp.array(True)
    _, (steps, env_states) = jax.lax.scan(step, carry, length=int(env_params.max_steps_in_episode))
    return steps, env_states


def real_rewards(episodes):
    """Rewards (N, T), 0 in the padding. This is a choice: 0 times what is there may be nan."""
    return jnp.where(episodes.mask, episodes.reward, 0.0)


def returns_to_go(run, rewards):
    """Discounted returns (T,) from each step of one episode on, given its rewards (T,)."""

    def step(later, reward):
        return_to_go = reward + run.gamma * later
        return return_to_go, return_to_go

    _, returns = jax.lax.scan(step, 0.0, rewards, reverse=True)
    return returns


def advantages(run, episodes):
    """Each return to go (N, T) minus the mean of all; 0 in the padding.

    The mean includes the episode's own return. So the expected gradient is (N - 1) / N times that
    without a baseline; Adam's steps do not depend on such a factor. The factor gamma^t is left out,
    as is common: if gamma < 1, there is no objective of which this is the gradient (Nota & Thomas
    2020).
    """
    returns = jax.vmap(partial(returns_to_go, run))(real_rewards(episodes))
    # If all are equal, this gives exact zeros. Adam would turn rounding errors into full steps.
    relative = returns - returns[0]
    return jnp.where(episodes.mask, relative - jnp.mean(relative, axis=0), 0.0)


def step_loss(params, step, advantage):
    """Minus the advantage times log pi of one step; in the padding, 0."""
    obs, action = jnp.where(step.mask, step.obs, 0), jnp.where(step.mask, step.action, 0)
    return -advantage * log_prob(params, obs, action)


def policy_loss(run, params, episodes):
    """Surrogate loss: its gradient is minus the policy gradient estimate."""
    of_steps = jax.vmap(jax.vmap(partial(step_loss, params)))
    losses = of_steps(episodes, advantages(run, episodes))  # (N, T)
    return jnp.mean(jnp.sum(losses, axis=1))


def train_step(run, state, _):
    """Play N episodes, then make one Adam step. Also return what a progress line shows."""
    key, key_play = jax.random.split(state.key)
    keys = jax.random.split(key_play, run.num_envs)
    episodes, _ = jax.vmap(partial(play, run, state.params))(keys)  # (N, T)
    metrics = {
        "returns": jnp.mean(jnp.sum(real_rewards(episodes), axis=1)),
        "timesteps": jnp.sum(episodes.mask, axis=1),  # (N,) their sum may be above 2^31
    }
    if run.sync == "truncation":
        episodes = episodes._replace(mask=episodes.mask & jnp.all(episodes.mask, axis=0))
    grad = jax.grad(partial(policy_loss, run))(state.params, episodes)
    updates, opt_state = optimizer(run).update(grad, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    return state._replace(key=key, params=params, opt_state=opt_state), metrics


def train_interval(run, state):
    """Make U updates, up to the next progress line. Also return what the line shows."""
    state, metrics = jax.lax.scan(partial(train_step, run), state, length=run.interval_updates)
    timesteps = metrics.pop("timesteps")  # (U, N)
    return state, {"timesteps": timesteps, **jax.tree.map(jnp.mean, metrics)}


def evaluate(run, state):
    """What a run ends with: undiscounted returns (E,) of greedy episodes, and what was learned."""
    keys = jax.random.split(state.key, run.eval_episodes)
    episodes, _ = jax.vmap(partial(play, run, state.params, greedy=True))(keys)  # (E, T)
    returns = jnp.sum(real_rewards(episodes), axis=1)
    first_key = jax.random.key_data(keys[0])  # of the episode that --gif shows
    return {"greedy_return": returns, "first_key": first_key, **state.params}


def report(args, learned):
    """Describe what the r runs of a setting learned."""
    means = learned["greedy_return"].mean(axis=1)  # (r,)
    return f"greedy return {means.mean():.1f}  worst run {means.min():.1f}"


def draw(args, labels, results):
    """Draw the learning curves for --plot, and an episode of run 0 for --gif."""
    if args.plot:
        plot(args.plot, labels, results["timesteps"], results["returns"])
    if args.gif:
        params = {
            name: results[name][0]
            for name in ("w0", "b0", "w1", "b1", "log_std")
            if name in results
        }
        animate(args, params, jax.random.wrap_key_data(results["first_key"][0]))


def plot(path, labels, timesteps, returns):
    """Draw returns (K, R) over timesteps (K, R): runs thin, the median of each setting bold."""
    from matplotlib.figure import Figure

    shown, title = labels[:MAX_CURVES], None
    if len(shown) < len(labels):
        title = f"the first {len(shown)} of {len(labels)} settings"
    figure = Figure(figsize=(6.4, 4.4 + 0.2 * len(shown)), layout="constrained")
    axes = figure.subplots()
    x, y = (np.split(array, len(labels), axis=1) for array in (timesteps, returns))
    for i, label in enumerate(shown):  # x[i], y[i]: (K, r)
        axes.plot(x[i], y[i], f"C{i}.-", linewidth=0.5, markersize=1, alpha=0.3)
        # Not np.nanmedian, which would warn if all are nan.
        middle = np.median(x[i], axis=1), jnp.nanmedian(y[i], axis=1)
        axes.plot(*middle, f"C{i}.-", linewidth=2, label=f"median  {label}".strip())
    axes.set(xlabel="environment steps", ylabel="return of training episodes")
    figure.legend(loc="outside upper center", fontsize="small", title=title)
    figure.savefig(path)


def animate(args, params, key):
    """Draw an episode for --gif, at most 200 steps, without a screen."""
    os.environ.update(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy")
    from gymnax.visualize import Visualizer

    episode, env_states = play(args, params, key, greedy=True)

    def state_at(step):
        return jax.tree.map(lambda array: array[step], env_states)

    num_frames = min(200, np.sum(episode.mask))
    states = [state_at(step) for step in range(num_frames)]
    Visualizer(*make_env(args.env_id), states, np.cumsum(episode.reward)).animate(args.gif)


vectorize = jax.vmap  # the runs of a device
COMPILER_OPTIONS = {  # on a CPU
    "xla_backend_optimization_level": 1,  # twenty runs compile in 0.6 of the time, run as fast
}


# From here on, all learners are the same to the letter: the launcher.


def all_runs(args):
    """Combine the values of all swept flags (settings), and each setting with all seeds (runs).

    Return what differs between runs, {flag: (R,)}, and a label for each setting.
    """
    swept = {name: values for name, values in vars(args).items() if isinstance(values, list)}
    product = itertools.product(*swept.values())
    settings = [dict(zip(swept, values, strict=True)) for values in product]
    seeds = range(args.seed, args.seed + args.num_seeds)
    runs = [{**setting, "seed": seed} for setting in settings for seed in seeds]
    varied = [name for name, values in swept.items() if len(values) > 1]
    labels = [", ".join(f"{name} {setting[name]:.9g}" for name in varied) for setting in settings]
    return {name: np.array([run[name] for run in runs]) for name in runs[0]}, labels


def over_runs(function, args, num_devices):
    """Turn function(run, *arrays) of one run into a function of all runs, spread over devices.

    It takes what differs between runs, {flag: (R,)}, in the place of `run`. The other arrays have
    an axis of runs in front.
    """

    def of_one_run(own, *arrays):
        return function(argparse.Namespace(**{**vars(args), **own}), *arrays)

    mesh, axis = jax.sharding.Mesh(jax.devices()[:num_devices], "runs"), jax.P("runs")
    # No check_vma: runs do not communicate, and the check rejects loops that start from constants.
    shard = partial(jax.shard_map, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=False)
    options = COMPILER_OPTIONS if jax.default_backend() == "cpu" else None
    return jax.jit(shard(vectorize(of_one_run)), compiler_options=options)


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


def output(*endings):
    """Make an argparse type: a file that can be written, with one of these endings."""

    def parse(path):
        target = path if os.path.exists(path) else os.path.join(os.path.dirname(path), ".")
        if not path.endswith(endings) or os.path.isdir(path) or not os.access(target, os.W_OK):
            text = f"{path!r} is not a {' or '.join(endings)} file that can be written"
            raise argparse.ArgumentTypeError(text)
        return path

    return parse


def main(argv=None):
    """Train, evaluate and report. Return what --save writes. Ctrl-C ends training early."""
    args = parse_args(argv)
    file = None if jax.process_index() == 0 else open(os.devnull, "w")  # one process prints for all
    show = partial(print, file=file, flush=True)
    columns, labels = all_runs(args)
    num_runs = len(columns["seed"])
    per_device = math.ceil(num_runs / jax.device_count())
    num_devices = jax.device_count() if args.distributed else math.ceil(num_runs / per_device)
    # Copies of the first runs fill up the devices; `gather` cuts them off.
    padded = {name: np.resize(column, num_devices * per_device) for name, column in columns.items()}
    on_devices = partial(over_runs, args=args, num_devices=num_devices)
    runs = "1 run" if num_runs == 1 else f"{num_runs} runs"
    show(f"{runs} on {num_devices} x {jax.devices()[0].device_kind}")

    began = time.perf_counter()
    state = on_devices(init_state)(padded)
    train = on_devices(train_interval).lower(padded, state).compile()
    finish = on_devices(evaluate).lower(padded, state).compile()
    compile_seconds = time.perf_counter() - began
    show(f"compiled in {compile_seconds:.1f} s")

    history, timesteps, train_seconds = [], np.zeros(num_runs, np.int64), 0.0
    try:
        for _ in range(args.num_intervals):
            began = time.perf_counter()
            next_state, metrics = train(padded, state)
            metrics = gather(metrics, num_runs)  # waits for train; Ctrl-C is raised here
            train_seconds += time.perf_counter() - began
            # The steps of each run may come in parts, because arrays of jax hold less than 2^31.
            parts = metrics.pop("timesteps").reshape(num_runs, -1)
            timesteps = timesteps + parts.sum(axis=1, dtype=np.int64)  # (R,) so far
            # Not np.nanmean, which would warn if all are nan.
            means = [f"{name} {jnp.nanmean(values):#.4g}" for name, values in metrics.items()]
            speed = f"{timesteps.sum() / train_seconds:,.0f} steps/s"
            # Both in one statement, so that Ctrl-C cannot come between them.
            state, history = next_state, [*history, {"timesteps": timesteps, **metrics}]
            show(f"step {timesteps.mean():,.0f}", *means, speed, sep="  ")
    except KeyboardInterrupt:
        if args.distributed or not history:
            raise
        show(f"interrupted: the results are those of step {history[-1]['timesteps'].mean():,.0f}")

    learned = gather(finish(padded, state), num_runs)  # (R, ...) each
    for label, rows in zip(labels, np.split(np.arange(num_runs), len(labels)), strict=True):
        text = report(args, {name: values[rows] for name, values in learned.items()})
        show(f"{label}  {text}".strip())
    results = {
        "args": json.dumps(vars(args)),
        **columns,
        "compile_seconds": compile_seconds,
        "train_seconds": train_seconds,
        "interrupted": len(history) < args.num_intervals,
        **{name: np.stack([line[name] for line in history]) for name in history[0]},  # (K, R)
        **learned,
    }
    if jax.process_index() == 0:
        if args.save:
            np.savez(args.save, **results)
        draw(args, labels, results)
    return results


if __name__ == "__main__":
    sys.exit(130 if main()["interrupted"] else 0)
