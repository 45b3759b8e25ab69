# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0",
# ]
# ///
r"""REINFORCE: N episodes are played at a time. As their lengths differ, they are padded and masked.

Each iteration plays N episodes with the current policy pi, then makes one Adam step along

    1/N sum_i sum_t mask_it (G_it - b_t) grad log pi(A_it | S_it),    G_it = R_it + gamma G_i,t+1

(Williams 1992; Sutton & Barto 2018, section 13.4). The mask is 1 up to the last step of episode i
and 0 in the padding after it. The baseline b_t is the mean of all N returns to go; an episode that
has ended counts as 0. (R_it is the reward of step t; the book has R_t+1.) The book's factor gamma^t
is left out, as is common. Nothing is added for what would follow the time limit. Every episode is
simulated up to the time limit, however early it ends.

--sync truncation learns only from the steps up to the end of the shortest episode. This biases the
gradient, because later rewards do not count. Where every step has the same reward, as in
CartPole-v1, all returns are then equal, all advantages are 0, and nothing is learned.

    python reinforce_parallel.py --gif pole.gif    # CartPole-v1
    python reinforce_parallel.py --env-id Acrobot-v1 --num-envs 256 --num-iterations 50 \
        --learning-rate 0.03
    python reinforce_parallel.py --env-id MountainCarContinuous-v0 --num-envs 64 \
        --num-iterations 200 --learning-rate 0.005 --gamma 1
    python reinforce_parallel.py --env-id Pendulum-v1 --num-envs 128 --num-iterations 500

Shapes: R runs, K intervals, U = interval_updates updates, N = num_envs episodes, T steps (the
time limit), E = eval_episodes episodes, D observation dimensions, H = hidden_size units, A actions,
or action dimensions if actions are continuous.

Read down to the end of `main`: first come the flags, then the algorithm, written for one run, then
`main`, which runs it. What follows `main` is not about learning.
"""

import argparse
import copy
import itertools
import json
import math
import os
import re
import sys
import time
from functools import partial
from typing import NamedTuple

# Each core of the CPU becomes a device. This must be set before jax is imported.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(CORES))
if __name__ == "__main__" and "IPython" not in sys.modules:
    os.environ["MPLBACKEND"] = "agg"  # draw to files; a notebook keeps its own backend
import jax

if __name__ == "__main__" and "--distributed" in sys.argv:
    jax.distributed.initialize()  # before gymnax is imported, because gymnax creates arrays

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


def parse_args(argv=None):
    """Read and check the flags. Those added by `sweep` take several values: all combinations run.

    Only numbers that are used in arithmetic can be swept, not those that set shapes or counts.
    """
    parser, flag, sweep = make_parser()
    count, unit = number(int, 1, 1e6), number(float, 0, 1)
    env_ids = gymnax.registered_envs
    flag("--env-id", choices=env_ids, default="CartPole-v1", help="gymnax environment")
    flag("--seed", type=number(int, 0, 2e9), default=0, help="first seed of each setting")
    flag("--num-seeds", type=count, default=1, help="runs of each setting")
    flag("--num-iterations", type=count, default=100, help="updates, rounded up to equal intervals")
    flag("--num-intervals", type=count, default=20, help="progress lines, at most")
    flag("--num-envs", type=number(int, 2, 1e6), default=16, help="episodes per update")
    sweep("--learning-rate", type=unit, default=[0.01], help="initial value, falls to 0")
    sweep("--gamma", type=unit, default=[0.99], help="discount factor")
    flag("--hidden-size", type=count, default=64, help="number of tanh units in the policy network")
    text = "pad episodes to the time limit, or cut all at the end of the shortest (biased)"
    flag("--sync", choices=["padding", "truncation"], default="padding", help=text)
    flag("--eval-episodes", type=count, default=100, help="greedy episodes after training")
    text = "join the processes of a Slurm or Open MPI 4 job"
    flag("--distributed", action="store_true", help=text)
    flag("--save", type=output(".npz"), metavar="FILE", help="write weights, curves, flags (.npz)")
    picture = output(".png", ".pdf", ".svg")
    text = "draw the learning curves of at most ten settings (.png, .pdf, .svg)"
    flag("--plot", type=picture, metavar="FILE", help=text)
    text = "animate the first evaluation episode of run 0, at most 200 steps (.gif)"
    flag("--gif", type=output(".gif"), metavar="FILE", help=text)
    args = parser.parse_args(argv)
    if args.distributed and not jax.distributed.is_initialized():
        parser.error("--distributed: from Python, call jax.distributed.initialize() first")
    if args.env_id == "MNISTBandit-bsuite":
        parser.error("--env-id: MNISTBandit-bsuite would download its data")
    # Copied, in case that gymnax makes the same object each time, because you have registered one:
    # it compiles `step` of an object only once, and would ignore what you change in it later.
    args.env, args.env_params = copy.deepcopy(gymnax.make(args.env_id))
    # To change the environment or its constants, edit args.env or args.env_params here. Here is the
    # place of a wrapper, too (one that was registered cannot be copied). To sweep a constant, edit
    # `make_run`; README.md shows how.
    space = args.env.action_space(args.env_params)
    args.discrete = isinstance(space, spaces.Discrete)
    real = isinstance(space, spaces.Box) and jnp.issubdtype(space.dtype, jnp.floating)
    if not args.discrete and not (real and np.all(np.isfinite(space.high - space.low))):
        text = "actions must be discrete, or real numbers with finite bounds"
        parser.error(f"--env-id {args.env_id}: {text}")
    from_gymnax = type(args.env).__module__.startswith("gymnax.environments.")
    if args.gif and not (from_gymnax and args.env.name in WITH_PICTURES):
        parser.error(f"--gif: gymnax cannot draw {args.env_id}, nor a wrapper or class of your own")
    args.interval_updates = math.ceil(args.num_iterations / args.num_intervals)
    args.num_intervals = math.ceil(args.num_iterations / args.interval_updates)
    args.num_updates = args.num_intervals * args.interval_updates
    interval_episodes = args.interval_updates * args.num_envs
    if interval_episodes * int(args.env_params.max_steps_in_episode) >= 2**31:
        parser.error("2^31 steps or more per interval: raise --num-intervals or lower --num-envs")
    return args


# The algorithm, written for one run. `run` holds its flags. `run.seed` and the flags of `sweep`
# differ between runs, so they are traced: use them in arithmetic, not in shapes, Python loops or
# `if`. All other flags are Python values. (In `args`, which `main` has, swept flags are lists.)
#
# A metric is an entry of the dictionary that `train_step` returns. It is averaged up to the next
# progress line, printed if it is one number, and saved.


class Step(NamedTuple):
    """One step of an episode, or of the padding after it.

    A critic also needs `terminated`, and info["final_observation"], which follows the last step.
    """

    obs: jax.Array  # (D,) flattened
    action: jax.Array  # (A,) if continuous
    reward: jax.Array
    mask: jax.Array  # true if the step is real, false in the padding


class TrainState(NamedTuple):
    """The state of one run."""

    key: jax.Array
    params: dict  # w0 (D, H), b0 (H,), w1 (H, A), b1 (A,); log_std (A,) if actions are continuous
    opt_state: optax.OptState


def optimizer(run):
    """Make Adam. Its learning rate falls linearly to 0, over num_updates steps.

    If you make more or fewer steps than updates, as in the epochs of PPO, change that number.
    """
    return optax.adam(optax.linear_schedule(run.learning_rate, 0.0, run.num_updates))


def init_state(run):
    """Initial state of one run."""
    space = run.env.action_space(run.env_params)
    inputs = math.prod(run.env.observation_space(run.env_params).shape)
    outputs = space.n if run.discrete else math.prod(space.shape)
    key, key_hidden, key_output = jax.random.split(jax.random.key(run.seed), 3)
    params = {
        "w0": jax.random.normal(key_hidden, (inputs, run.hidden_size)) / math.sqrt(inputs),
        "b0": jnp.zeros(run.hidden_size),
        "w1": 0.01 * jax.random.normal(key_output, (run.hidden_size, outputs)),
        "b1": jnp.zeros(outputs),
    }
    if not run.discrete:
        params["log_std"] = jnp.zeros(outputs)
    return TrainState(key=key, params=params, opt_state=optimizer(run).init(params))


def network(params, obs):
    """Logits (A,) in an observation (D,), or means if actions are continuous."""
    return jnp.tanh(obs @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]


def sample(run, params, obs, key):
    """Random action of the policy."""
    logits_or_mean = network(params, obs)
    if run.discrete:
        return jax.random.categorical(key, logits_or_mean)
    noise = jax.random.normal(key, logits_or_mean.shape)
    return logits_or_mean + jnp.exp(params["log_std"]) * noise


def greedy_action(run, params, obs):
    """Most probable action of the policy."""
    logits_or_mean = network(params, obs)
    return jnp.argmax(logits_or_mean) if run.discrete else logits_or_mean


def log_prob(run, params, obs, action):
    """log pi(action | obs), categorical or a diagonal Gaussian. The action is not clipped yet."""
    logits_or_mean = network(params, obs)
    if run.discrete:
        return jax.nn.log_softmax(logits_or_mean)[action]
    std = jnp.exp(params["log_std"])
    return jnp.sum(jax.scipy.stats.norm.logpdf(action, logits_or_mean, std))


def to_env(run, action):
    """Convert an action of the policy for the environment: clip to [-1, 1], scale to its bounds."""
    if run.discrete:
        return action
    space = run.env.action_space(run.env_params)
    fraction = (jnp.clip(action, -1, 1) + 1) / 2
    return space.low + (space.high - space.low) * fraction.reshape(space.shape)


def play(run, params, key, greedy=False):
    """Play one episode. Return its steps, padded to the time limit, and the states (T,)."""

    def step(carry, _):
        key, obs, env_state, mask = carry
        key, key_action, key_step = jax.random.split(key, 3)
        obs = obs.reshape(-1).astype(float)
        if greedy:
            action = greedy_action(run, params, obs)
        else:
            action = sample(run, params, obs, key_action)
        stepped = run.env.step(key_step, env_state, to_env(run, action), run.env_params)
        next_obs, next_state, reward, terminated, truncated, _ = stepped
        # Where an episode ended, gymnax has begun the next one. That is the padding.
        next_carry = key, next_obs, next_state, mask & ~(terminated | truncated)
        # `where`, not mask * reward: padding may be nan, and 0 * nan is nan.
        reward = jnp.where(mask, reward, 0.0)
        return next_carry, (Step(obs, action, reward, mask), env_state)

    key, key_reset = jax.random.split(key)
    obs, env_state = run.env.reset(key_reset, run.env_params)
    carry = key, obs, env_state, jnp.array(True)
    time_limit = int(run.env_params.max_steps_in_episode)
    _, (steps, env_states) = jax.lax.scan(step, carry, length=time_limit)
    return steps, env_states


def returns_to_go(run, rewards):
    """Discounted returns (T,) from each step of one episode on, given its rewards (T,)."""

    def step(later, reward):
        return_to_go = reward + run.gamma * later
        return return_to_go, return_to_go

    _, returns = jax.lax.scan(step, 0.0, rewards, reverse=True)
    return returns


def advantages(run, episodes):
    """Each return to go (N, T) minus the mean of all.

    The mean includes the episode's own return. So the expected gradient is (N - 1) / N times that
    without a baseline; Adam's steps do not depend on such a factor. Without the factor gamma^t, the
    result is not the gradient of any objective if gamma < 1 (Nota & Thomas 2020).
    """
    returns = jax.vmap(partial(returns_to_go, run))(episodes.reward)
    # If all returns are equal, this gives exact zeros. Adam would turn rounding errors into steps.
    relative = returns - returns[0]
    return relative - jnp.mean(relative, axis=0)


def episode_loss(run, params, steps, advantage):
    """Minus the sum of advantage times log pi over the steps (T,) of one episode."""

    def step_loss(step, advantage):
        # The first step stands in for the padding, which may be nan: masking the loss alone would
        # leave 0 * nan in the gradient.
        obs = jnp.where(step.mask, step.obs, steps.obs[0])
        action = jnp.where(step.mask, step.action, steps.action[0])
        return jnp.where(step.mask, -advantage * log_prob(run, params, obs, action), 0.0)

    return jnp.sum(jax.vmap(step_loss)(steps, advantage))


def policy_loss(run, params, episodes, advantage):
    """Surrogate loss: its gradient is minus the policy gradient estimate."""
    return jnp.mean(jax.vmap(partial(episode_loss, run, params))(episodes, advantage))


def train_step(run, state, _):
    """Play N episodes, then make one Adam step. Also return what a progress line shows."""
    key, key_play = jax.random.split(state.key)
    keys = jax.random.split(key_play, run.num_envs)
    episodes, _ = jax.vmap(partial(play, run, state.params))(keys)  # (N, T); XLA drops the states
    returns = jnp.sum(episodes.reward, axis=1)  # (N,) of whole episodes
    metrics = {"returns": jnp.mean(returns)}
    timesteps = jnp.sum(episodes.mask)
    if run.sync == "truncation":  # the mask is true up to the end of the shortest episode
        mask = jnp.broadcast_to(jnp.all(episodes.mask, axis=0), episodes.mask.shape)
        episodes = episodes._replace(mask=mask, reward=jnp.where(mask, episodes.reward, 0.0))
    # The advantages are computed outside of the loss, so no gradient flows through them.
    advantage = advantages(run, episodes)  # (N, T)
    grad = jax.grad(partial(policy_loss, run))(state.params, episodes, advantage)
    updates, opt_state = optimizer(run).update(grad, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    state = state._replace(key=key, params=params, opt_state=opt_state)
    return state, dict(timesteps=timesteps, **metrics)  # refuses a duplicate name


def train_interval(run, state):
    """Make U updates, up to the next progress line. Also return what the line shows."""
    state, metrics = jax.lax.scan(partial(train_step, run), state, length=run.interval_updates)
    timesteps = jnp.sum(metrics.pop("timesteps"))
    return state, {"timesteps": timesteps, **jax.tree.map(partial(jnp.mean, axis=0), metrics)}


def evaluate(run, state):
    """Results of a run: undiscounted returns (E,) of greedy episodes, and what was learned."""
    # A key that training does not use, so that you can also evaluate during training.
    key = jax.random.fold_in(state.key, 999)
    keys = jax.random.split(key, run.eval_episodes)
    episodes, _ = jax.vmap(partial(play, run, state.params, greedy=True))(keys)  # (E, T)
    learned = dict(greedy_return=jnp.sum(episodes.reward, axis=1), **flat(state.params))
    if run.gif:  # the first episode once more, since the states of all would take much memory
        steps, env_states = play(run, state.params, keys[0], greedy=True)
        learned["episode"] = {"steps": steps, "env_states": env_states}
    return learned


def report(learned):
    """Describe what the runs of a setting learned.

    `main` first calls it with zeros, so that a mistake shows before training.
    """
    means = learned["greedy_return"].mean(axis=1)  # one for each run
    return f"greedy return {means.mean():.1f}  worst run {means.min():.1f}"


def draw(args, labels, results, learned):
    """Draw what --plot and --gif ask for."""
    if args.plot:
        plot(args.plot, labels, results["timesteps"], results["returns"])
    if args.gif:
        animate(args, **take(learned["episode"], 0))  # of run 0


def main(argv=None):
    """Train, evaluate, save and report. Return what --save writes. Ctrl-C ends training early."""
    args = parse_args(argv)  # if None, those of the command line; in a notebook, call main([])
    flags_json = json.dumps(vars(args), default=as_json)
    columns, labels = settings_and_seeds(args)  # what differs between runs: {flag: (R,)}
    num_runs = len(columns["seed"])
    devices, at_once, padded = divide(args, columns)  # padded with copies, which `gather` cuts off
    over_runs = partial(vectorize, args=args, devices=devices, at_once=at_once)
    writes = jax.process_index() == 0  # in a job, only process 0 prints and writes
    show = partial(print, flush=True) if writes else lambda *_: None
    show(f"{num_runs} run{'s' * (num_runs > 1)} on {len(devices)} x {devices[0].device_kind}")
    # Trace everything, which tells the shapes and types of results; check them; compile.
    began = time.perf_counter()
    state = over_runs(init_state)(padded)  # init_state of all runs at once, on all devices
    train = over_runs(train_interval).lower(padded, state)
    finish = over_runs(evaluate).lower(padded, state)
    check_results(columns, state, *train.out_info, finish.out_info)
    try_report(finish.out_info, args.num_seeds)
    train, finish = train.compile(), finish.compile()
    compile_seconds = time.perf_counter() - began
    show(f"compiled in {compile_seconds:.1f} s")
    # Train up to one progress line after the other. Ctrl-C loses at most the one in progress.
    lines, num_lines, timesteps, stopped = [], 0, 0, None
    began = time.perf_counter()
    try:
        while num_lines < args.num_intervals:
            next_state, metrics = train(padded, state)
            line = flat(gather(metrics, num_runs))  # waits for train; Ctrl-C is raised here
            train_seconds = time.perf_counter() - began
            timesteps = timesteps + line["timesteps"].astype(np.int64)  # (R,) so far
            lines.append({**line, "timesteps": timesteps.copy()})
            state, num_lines = next_state, num_lines + 1  # Ctrl-C cannot come in between
            show(describe(lines[-1], train_seconds))
    except BaseException as error:  # Ctrl-C, or an error in a logger of yours, for example
        if args.distributed or num_lines == 0:
            raise
        stopped = error
        show(f"interrupted by {error!r}: evaluating what was learned up to line {num_lines}")
    # Evaluate, save, then report: so a mistake in a report or a figure loses nothing.
    results = {
        "args": flags_json,
        "compile_seconds": compile_seconds,
        "train_seconds": train_seconds,
        "interrupted": stopped is not None,
        **columns,  # (R,) each
    }
    results |= stack(lines[:num_lines], [*results, *flat(finish.out_info)])  # (K, R) each
    path = args.save if writes else None
    learned = evaluate_or_save(partial(finish, padded), state, num_runs, path, results)
    if any(x.dtype.kind in "fc" and np.isnan(x).any() for x in flat(learned).values()):
        show("warning: what was learned contains nan")
    results |= flat(learned)  # (R, ...) each
    save(path, results)
    for label, of_setting in zip(labels, split(learned, len(labels)), strict=True):
        show(f"{label}  {report(of_setting)}".strip())
    if writes:
        draw(args, labels, results, learned)
    if stopped is not None and not isinstance(stopped, KeyboardInterrupt):
        raise stopped  # what was learned is saved by now
    return results


RUNS_AT_ONCE = 2  # vmapped together on a core of a CPU; more would overflow its cache
COMPILER_OPTIONS = {
    "cpu": {
        "xla_backend_optimization_level": 1,  # twenty runs compile in 0.6 of the time, run as fast
    },
    # By default, XLA times several kernels for each matrix product and keeps the fastest, which is
    # not always the same one. Without that, the same command gives the same bits. Compiling takes
    # 0.8 of the time, training 1.2 times as long.
    "gpu": {"xla_gpu_autotune_level": 0},
}


def plot(path, labels, timesteps, returns):
    """Draw returns (K, R) over timesteps (K, R): runs thin, the median of each setting bold."""
    import matplotlib.style
    from matplotlib.figure import Figure

    shown, title = labels[:10], None  # Matplotlib has ten colors
    if len(shown) < len(labels):
        title = f"the first {len(shown)} of {len(labels)} settings"
    x, y = (np.split(array, len(labels), axis=1) for array in (timesteps, returns))
    with matplotlib.style.context("default"):  # whatever a matplotlibrc says
        figure = Figure(figsize=(6.4, 4.4 + 0.2 * len(shown)), layout="constrained")
        axes = figure.subplots()
        for i, label in enumerate(shown):  # x[i], y[i]: (K, runs of a setting)
            axes.plot(x[i], y[i], f"C{i}.-", linewidth=0.5, markersize=1, alpha=0.3)
            # Not np.nanmedian, which would warn if all are nan.
            middle = np.median(x[i], axis=1), jnp.nanmedian(y[i], axis=1)
            axes.plot(*middle, f"C{i}.-", linewidth=2, label=f"median  {label}".strip())
        axes.set(xlabel="environment steps", ylabel="return of training episodes")
        figure.legend(loc="outside upper center", fontsize="small", title=title)
        figure.savefig(path)


def animate(args, steps, env_states):
    """Draw an episode for --gif, at most 200 steps, without a screen."""
    os.environ.update(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy")
    import matplotlib.style
    from gymnax.visualize import Visualizer

    states = [take(env_states, t) for t in range(min(200, steps.mask.sum()))]
    with matplotlib.style.context("default"):  # whatever a matplotlibrc says
        Visualizer(args.env, args.env_params, states, steps.reward.cumsum()).animate(args.gif)


# From here on, nothing is about learning: the helpers of `parse_args` and `main`, the same in all
# learners.


def make_parser():
    """Make a parser, and functions that add a flag of one value, and a swept flag of several."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.allow_abbrev = False
    swept = []
    parser.set_defaults(swept=swept)  # so args.swept has the names of all swept flags

    def sweep(name, **more):
        if more.get("type") is bool or "action" in more:  # bool("False") is True
            raise TypeError(f"{name}: to sweep it, use type=int, with 0 and 1")
        action = parser.add_argument(name, nargs="+", **more)
        swept.append(action.dest)

    return parser, parser.add_argument, sweep


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
    """Make an argparse type: a writable file with one of these endings."""

    def parse(path):
        target = path if os.path.lexists(path) else os.path.join(os.path.dirname(path), ".")
        if not path.endswith(endings) or os.path.isdir(path) or not os.access(target, os.W_OK):
            text = f"{path!r} is not a {' or '.join(endings)} file that can be written"
            raise argparse.ArgumentTypeError(text)
        return path

    return parse


def as_json(value):
    """Convert a flag that JSON does not know: an array to a list, anything else to text."""
    if hasattr(value, "tolist"):  # an array
        return value.tolist()
    return re.sub(" at 0x[0-9a-f]+", "", str(value))  # addresses differ each time


def settings_and_seeds(args):
    """Combine the values of all swept flags (settings), and each setting with all seeds (runs).

    Return what differs between runs, {flag: (R,)}, and a label for each setting.
    """
    swept = {name: getattr(args, name) for name in args.swept}
    for name, values in swept.items():
        array = np.array(values)
        fits = array.dtype.kind in "bf" or (array.dtype.kind in "iu" and abs(array).max() < 2**31)
        if array.ndim != 1 or not fits:
            text = "a list of numbers; integers must be below 2^31"
            raise ValueError(f"{name} is swept, so it must be {text}. Else declare it by `flag`.")
    product = itertools.product(*swept.values())
    settings = [dict(zip(swept, values, strict=True)) for values in product]
    seeds = range(args.seed, args.seed + args.num_seeds)
    runs = [{**setting, "seed": seed} for setting in settings for seed in seeds]
    varied = [name for name, values in swept.items() if len(values) > 1]
    labels = [", ".join(f"{name} {setting[name]:.9g}" for name in varied) for setting in settings]
    return {name: np.array([run[name] for run in runs]) for name in runs[0]}, labels


def divide(args, columns):
    """Divide runs evenly among devices, and those of a CPU core into equal batches.

    For example, 300 runs on 16 cores are at most 19 on each. If 8 fit at once, that makes 3 batches
    of 7 on each core, so 336 runs: the last 36 are copies of the first, which `gather` cuts off.
    Return the devices, the runs in a batch, and the columns with the copies.
    """
    devices, num_batches, num_runs = jax.devices(), 1, len(columns["seed"])
    per_device = math.ceil(num_runs / len(devices))
    if not args.distributed:  # in a job, each process needs all of its devices
        devices = devices[: math.ceil(num_runs / per_device)]
    if devices[0].platform == "cpu":
        num_batches = math.ceil(per_device / RUNS_AT_ONCE)
    at_once = math.ceil(per_device / num_batches)
    length = len(devices) * num_batches * at_once
    padded = {name: np.resize(column, length) for name, column in columns.items()}
    return devices, at_once, padded


def make_run(args, own):
    """Make the flags of one run: those of all, with its own seed and values of swept flags."""
    return argparse.Namespace(**{**vars(args), **own})


def vectorize(function, args, devices, at_once):
    """Turn function(run, *arrays) of one run into a function of all runs, spread over devices.

    It takes what differs between runs, {flag: (R,)}, in place of `run`. The other arrays have a
    leading axis of runs.
    """

    def one_run(inputs):
        own, *arrays = inputs
        return function(make_run(args, own), *arrays)

    def one_device(*inputs):  # one batch of runs after the other, each batch vmapped
        return jax.lax.map(one_run, inputs, batch_size=at_once)

    mesh, axis = jax.sharding.Mesh(devices, "runs"), jax.P("runs")
    # Each device gets an equal part of the runs. check_vma would reject loops that start from
    # constants.
    spread = jax.shard_map(one_device, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=False)
    options = COMPILER_OPTIONS.get(devices[0].platform)
    return jax.jit(spread, compiler_options=options)


def take(tree, rows):
    """Take some rows of each array."""
    return jax.tree.map(lambda array: array[rows], tree)


def split(tree, parts):
    """Split the rows of each array into equal parts. Return a list of trees."""
    length = len(jax.tree.leaves(tree)[0]) // parts
    return [take(tree, slice(i * length, (i + 1) * length)) for i in range(parts)]


def gather(tree, length):
    """Copy arrays from all devices, in all processes, to the host. Keep the first `length` rows."""
    return take(process_allgather(tree, tiled=True), slice(length))


def flat(tree):
    """Make {name: array} of any tree. Names of nested arrays are joined, as in layer.kernel."""
    leaves = jax.tree.leaves_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    if len(set(names)) < len(names):
        raise ValueError(f"two arrays have the same name: {sorted(names)}")
    return dict(zip(names, [leaf for _, leaf in leaves], strict=True))


def save(path, results):
    """Write {name: array}, if there is a path. Make its folder, in case you have changed it."""
    if path:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        np.savez(path, **results)


def check_results(more_names, state, next_state, *results):
    """Refuse, before compiling, what would fail later, or would be saved wrongly."""
    before, after = (jax.tree.map(lambda x: f"{x.dtype}{x.shape}", x) for x in (state, next_state))
    if before != after:
        raise TypeError(f"the state changes its shapes or types: {before} becomes {after}")
    arrays = [item for tree in results for item in flat(tree).items()]
    # The last two are parameters of np.savez.
    names = ["args", "compile_seconds", "train_seconds", "interrupted", "file", "allow_pickle"]
    names += [*more_names, *(name for name, _ in arrays)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"rename one of the flags and results that have the name {name!r}")
    for name, array in arrays:
        if not isinstance(array.dtype, np.dtype) or array.dtype.kind not in "biufc":
            raise TypeError(f"{name!r} has the type {array.dtype}, which NumPy cannot save")


def evaluate_or_save(finish, state, num_runs, path, results):
    """Evaluate all runs. If that fails, or if Ctrl-C ends it, save the results and the state."""
    try:
        return gather(finish(state), num_runs)
    except BaseException:
        if jax.process_count() == 1:  # else, all processes would have to gather
            arrays = {f"state.{name}": x for name, x in flat(state).items()}
            arrays = {name: x for name, x in arrays.items() if isinstance(x.dtype, np.dtype)}
            save(path, {**results, **gather(arrays, num_runs)})
        raise


def try_report(learned, num_seeds):
    """Call `report` with zeros: a mistake in it shows now, not after training."""
    # Read-only, like the arrays that `gather` returns.
    zeros = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), learned)
    report(take(zeros, slice(num_seeds)))


def stack(lines, taken):
    """Stack the arrays of all lines: {name: (K, ...)}. A line may lack a name.

    What you have added to lines is kept in any case: a name that is taken gets a prefix, and arrays
    of different shapes get a name each.
    """
    stacked = {}
    for name in {name: None for line in lines for name in line}:
        arrays = [as_array(line[name]) for line in lines if name in line]
        # np.savez has parameters of the names file and allow_pickle.
        name = f"lines.{name}" if name in [*taken, "file", "allow_pickle"] else str(name)
        if len({array.shape for array in arrays}) == 1:
            stacked[name] = np.stack(arrays)
        else:
            stacked |= {f"{name}.{i}": array for i, array in enumerate(arrays)}
    return stacked


def as_array(value):
    """Convert to an array that NumPy can save: what holds no numbers and no text, to text."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # for example a key, or lists of different lengths
        return np.asarray(str(value))
    return np.asarray(str(value)) if array.dtype == object else array


def describe(line, seconds):
    """Describe an interval. Metrics are averaged over the runs in which they are not nan."""
    words = [f"step {line['timesteps'].mean():,.0f}"]
    for name, array in line.items():
        if name != "timesteps" and array.ndim == 1:  # one number for each run
            known = array[~np.isnan(array)]
            words.append(f"{name} {known.mean() if len(known) else np.nan:#.4g}")
            if 0 < len(known) < len(array):
                words.append(f"({len(known)} of {len(array)} runs)")
    return "  ".join([*words, f"{line['timesteps'].sum() / seconds:,.0f} steps/s"])


if __name__ == "__main__":
    sys.exit(130 if main()["interrupted"] else 0)  # 130 is the status after Ctrl-C
