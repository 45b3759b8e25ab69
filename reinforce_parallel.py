# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["jax==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0"]
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

Read the flags, the algorithm for one run, and `main`. The helpers below are not about learning.
"""

import argparse
import json
import math
import os
import time
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

# Each core of the CPU becomes a device. This must be set before jax is imported.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(CORES))
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnax.environments import spaces


def parse_args(argv=None):
    """Read the flags. Those of `sweep` take several values, and all combinations run.

    Every flag whose value is a list is swept. Sweep numbers for arithmetic, not shapes or counts.
    """
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    flag = parser.add_argument
    sweep = partial(flag, nargs="+")
    text = "gymnax environment (MNISTBandit-bsuite downloads its data)"
    flag("--env-id", choices=gymnax.registered_envs, default="CartPole-v1", help=text)
    flag("--seed", type=int, default=0, help="first seed of each setting")
    flag("--num-seeds", type=count, default=1, help="runs of each setting")
    flag("--num-iterations", type=count, default=100, help="updates")
    flag("--num-intervals", type=count, default=20, help="progress lines, at most")
    flag("--num-envs", type=count, default=16, help="episodes per update, at least 2")
    sweep("--learning-rate", type=fraction, default=[0.01], help="initial value, falls to 0")
    sweep("--gamma", type=fraction, default=[0.99], help="discount factor")
    flag("--hidden-size", type=count, default=64, help="tanh units of the policy network")
    text = "pad episodes to the time limit, or cut all at the end of the shortest (biased)"
    flag("--sync", choices=["padding", "truncation"], default="padding", help=text)
    flag("--eval-episodes", type=count, default=100, help="greedy episodes after training")
    flag("--save", metavar="FILE.npz", help="write weights, learning curves and flags")
    flag("--plot", metavar="FILE.png", help="draw the learning curves (.png, .pdf, .svg)")
    flag("--gif", metavar="FILE.gif", help="animate up to 200 steps of a greedy episode of run 0")
    args = parser.parse_args(argv)
    check_file(parser, args.save, ".npz")
    check_file(parser, args.plot, ".png", ".pdf", ".svg")
    check_file(parser, args.gif, ".gif")
    if args.num_envs == 1:
        parser.error("--num-envs must be at least 2, since the baseline is a mean over episodes")
    # The number of updates is rounded up to equal intervals.
    args.interval_updates = math.ceil(args.num_iterations / args.num_intervals)
    args.num_intervals = math.ceil(args.num_iterations / args.interval_updates)
    args.num_updates = args.num_intervals * args.interval_updates
    return args


def make_env(args):
    """Make the environment of all runs, and its parameters. Wrap or change it here.

    Returns are sums of its rewards, also if you shape them.
    """
    return gymnax.make(args.env_id)


# The algorithm, written for one run. `run` holds its flags, `env` and `env_params`. `run.seed` and
# swept flags are traced, like all arrays: use them in arithmetic, never as a shape, in `range` or
# `if`. All other flags are Python values. partial(f, run) fixes `run`; vmap maps over what is left.
#
# A metric is an entry of the dictionary that `train_step` returns. It is averaged over the updates
# of an interval (timesteps are summed), printed if it is one number, and saved. A mean over steps
# must leave out the padding: jnp.mean(..., where=episodes.mask).


def is_discrete(run):
    """Return whether actions are numbers 0, 1, ..., n - 1. Otherwise, they are real."""
    return isinstance(run.env.action_space(run.env_params), spaces.Discrete)


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


def optimizer(run):
    """Make Adam, with a learning rate that falls linearly to 0 over num_updates steps."""
    return optax.adam(optax.linear_schedule(run.learning_rate, 0.0, run.num_updates))


def init_state(run):
    """Initial state of one run."""
    space = run.env.action_space(run.env_params)
    inputs = math.prod(run.env.observation_space(run.env_params).shape)
    outputs = space.n if is_discrete(run) else math.prod(space.shape)
    key, key_hidden, key_output = jax.random.split(jax.random.key(run.seed), 3)
    params = {
        "w0": jax.random.normal(key_hidden, (inputs, run.hidden_size)) / math.sqrt(inputs),
        "b0": jnp.zeros(run.hidden_size),
        "w1": 0.01 * jax.random.normal(key_output, (run.hidden_size, outputs)),
        "b1": jnp.zeros(outputs),
    }
    if not is_discrete(run):
        params["log_std"] = jnp.zeros(outputs)
    return TrainState(key=key, params=params, opt_state=optimizer(run).init(params))


def network(params, obs):
    """Logits (A,) in an observation (D,), or means if actions are continuous."""
    return jnp.tanh(obs @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]


def sample(run, params, obs, key):
    """Random action of the policy."""
    logits_or_mean = network(params, obs)
    if is_discrete(run):
        return jax.random.categorical(key, logits_or_mean)
    noise = jax.random.normal(key, logits_or_mean.shape)
    return logits_or_mean + jnp.exp(params["log_std"]) * noise


def greedy_action(run, params, obs):
    """Most probable action of the policy."""
    logits_or_mean = network(params, obs)
    return jnp.argmax(logits_or_mean) if is_discrete(run) else logits_or_mean


def log_prob(run, params, obs, action):
    """log pi(action | obs), categorical or a diagonal Gaussian. The action is not clipped yet."""
    logits_or_mean = network(params, obs)
    if is_discrete(run):
        return jax.nn.log_softmax(logits_or_mean)[action]
    std = jnp.exp(params["log_std"])
    return jnp.sum(jax.scipy.stats.norm.logpdf(action, logits_or_mean, std))


def to_env(run, action):
    """Convert an action of the policy for the environment: clip to [-1, 1], scale to its bounds."""
    if is_discrete(run):
        return action
    space = run.env.action_space(run.env_params)
    from_0_to_1 = (jnp.clip(action, -1, 1) + 1) / 2
    return space.low + (space.high - space.low) * from_0_to_1.reshape(space.shape)


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
    # This makes equal returns exactly 0. Adam would turn rounding errors into whole steps.
    relative = returns - returns[0]
    return relative - jnp.mean(relative, axis=0)


def episode_loss(run, params, steps, advantage):
    """Minus the sum of advantage times log pi over the steps (T,) of one episode."""
    log_probs = jax.vmap(partial(log_prob, run, params))(steps.obs, steps.action)  # (T,)
    return -jnp.sum(jnp.where(steps.mask, advantage * log_probs, 0.0))


def policy_loss(run, params, episodes, advantage):
    """Surrogate loss: its gradient is minus the policy gradient estimate."""
    return jnp.mean(jax.vmap(partial(episode_loss, run, params))(episodes, advantage))


def train_step(run, state, _):
    """Play N episodes, then make one Adam step. Also return what a progress line shows."""
    key, key_play = jax.random.split(state.key)
    keys = jax.random.split(key_play, run.num_envs)
    episodes, _ = jax.vmap(partial(play, run, state.params))(keys)  # (N, T); XLA drops the states
    returns = jnp.mean(jnp.sum(episodes.reward, axis=1))  # of whole episodes
    timesteps = jnp.sum(episodes.mask)
    if run.sync == "truncation":  # the mask is true up to the end of the shortest episode
        mask = jnp.broadcast_to(jnp.all(episodes.mask, axis=0), episodes.mask.shape)
        episodes = episodes._replace(mask=mask, reward=jnp.where(mask, episodes.reward, 0.0))
    # The advantages are computed outside of the loss, so no gradient flows through them.
    advantage = advantages(run, episodes)  # (N, T)
    grad = jax.grad(partial(policy_loss, run))(state.params, episodes, advantage)
    updates, opt_state = optimizer(run).update(grad, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(key, params, opt_state), {"timesteps": timesteps, "returns": returns}


def train_interval(run, state):
    """Make U updates, up to the next progress line. Also return what the line shows."""
    state, metrics = jax.lax.scan(partial(train_step, run), state, length=run.interval_updates)
    # A sum of real numbers, since one of integers would overflow at 2^31.
    timesteps = jnp.sum(metrics.pop("timesteps").astype(float))
    return state, {"timesteps": timesteps, **jax.tree.map(partial(jnp.mean, axis=0), metrics)}


def evaluate(run, state):
    """Results of a run: undiscounted returns (E,) of greedy episodes, and what was learned."""
    # Training never uses this key, so you can also evaluate during training.
    keys = jax.random.split(jax.random.fold_in(state.key, 999), run.eval_episodes)
    episodes, _ = jax.vmap(partial(play, run, state.params, greedy=True))(keys)  # (E, T)
    results = {"greedy_return": jnp.sum(episodes.reward, axis=1), "params": state.params}
    if run.gif:  # the first episode once more, since the states of all would take much memory
        results["episode"] = play(run, state.params, keys[0], greedy=True)
    return results


def report(learned, rows):
    """Describe what the runs of a setting, in these rows, have learned."""
    means = learned["greedy_return"][rows].mean(axis=1)  # one for each run
    return f"greedy return {means.mean():.1f}  worst run {means.min():.1f}"


def draw(args, settings, results):
    """Draw the returns (K, R) of training: runs thin, the median of each setting bold."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4 + 0.2 * len(settings)), layout="constrained")
    axes = figure.subplots()
    curves = results["curves"]
    for i, (label, rows) in enumerate(settings.items()):
        x, y = curves["timesteps"][:, rows], curves["returns"][:, rows]
        axes.plot(x, y, f"C{i % 10}", linewidth=0.5, alpha=0.3)
        median = np.median(x, axis=1), np.nanmedian(y, axis=1)
        axes.plot(*median, f"C{i % 10}", linewidth=2, label=f"median  {label}".strip())
    axes.set(xlabel="environment steps", ylabel="return of training episodes")
    figure.legend(loc="outside upper center", fontsize="small")
    figure.savefig(args.plot)


def animate(args, learned):
    """Draw the first evaluation episode of run 0, at most 200 steps, without a screen."""
    os.environ.update(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy")
    from gymnax.visualize import Visualizer

    steps, env_states = jax.tree.map(lambda array: array[0], learned["episode"])  # (T,)
    length = min(200, steps.mask.sum())

    def state(t):
        return jax.tree.map(lambda array: array[t], env_states)

    states = [state(t) for t in range(length)]
    Visualizer(*make_env(args), states, steps.reward.cumsum()).animate(args.gif)


def main(argv=None):
    """Train, evaluate, save and report. Return what --save writes, as nested dictionaries."""
    args = parse_args(argv)  # if None, from the command line; in a notebook, call main([])
    runs, settings = make_runs(args)  # {flag: (R,)} of all runs; {label: rows} of each setting
    num_runs = len(runs["seed"])
    devices, at_once, padded = divide(runs)  # padded with copies of runs, which `gather` cuts off

    # All is compiled before training, so a mistake in `evaluate` shows now.
    began = time.perf_counter()
    over_runs = partial(compile_over_runs, args=args, devices=devices, at_once=at_once)
    init = over_runs(init_state, padded)
    state = init(padded)
    train = over_runs(train_interval, padded, state)
    finish = over_runs(evaluate, padded, state)
    seconds = time.perf_counter() - began
    where = f"{len(devices)} x {devices[0].device_kind}"
    print(f"runs: {num_runs}  devices: {where}  compiled in {seconds:.1f} s", flush=True)

    history, timesteps = [], np.zeros(num_runs, int)
    began = time.perf_counter()
    try:
        for _ in range(args.num_intervals):
            next_state, metrics = train(padded, state)
            metrics = gather(metrics, num_runs)  # waits for `train`
            seconds = time.perf_counter() - began
            state = next_state
            timesteps = timesteps + metrics.pop("timesteps").astype(int)  # (R,) so far
            history.append({"timesteps": timesteps, "seconds": seconds, **metrics})
            # Log elsewhere here: wandb.log({key: np.nanmean(x) for key, x in history[-1].items()})
            speed = f"{timesteps.sum() / seconds:,.0f} steps/s"
            print(f"step {timesteps.mean():,.0f}", *describe(metrics), speed, sep="  ", flush=True)
    except KeyboardInterrupt:  # Ctrl-C ends training early
        if not history:
            raise
        print("interrupted: evaluating what was learned up to the last line")

    learned = gather(finish(padded, state), num_runs)  # (R, ...) each
    curves = jax.tree.map(lambda *values: np.stack(values), *history)  # (K, R) each; seconds (K,)
    results = {
        "args": json.dumps(vars(args), default=str),
        "interrupted": len(history) < args.num_intervals,
        "runs": runs,
        "curves": curves,
        "learned": learned,
    }
    if args.save:
        np.savez(args.save, **flat(results))
    for label, rows in settings.items():
        print(f"{label}  {report(learned, rows)}".strip())
    if args.plot:
        draw(args, settings, results)
    if args.gif:
        animate(args, learned)
    return results


# From here on, nothing is about learning: the helpers of `parse_args` and `main`.

MAX_AT_ONCE = 2  # runs vmapped together on a core of a CPU; more would overflow its cache
COMPILER_OPTIONS = {
    "cpu": {
        "xla_backend_optimization_level": 1,  # compiles in 0.7 of the time of level 3, runs as fast
    },
    "gpu": {"xla_gpu_autotune_level": 0},  # always the same kernels, so always the same bits
}


def count(text):
    """Read a flag: an integer of at least 1. It may be written 2e6."""
    value = float(text)
    if not 1 <= value < 2**31 or value != int(value):
        raise ValueError
    return int(value)


def fraction(text):
    """Read a flag: a number from 0 to 1."""
    if not 0 <= float(text) <= 1:
        raise ValueError
    return float(text)


def check_file(parser, path, *endings):
    """Refuse a name without one of the endings, before anything is computed. Make its folder."""
    if path:
        if not path.endswith(endings):
            parser.error(f"{path} must end in {' or '.join(endings)}")
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)


def make_runs(args):
    """Combine the values of all swept flags (settings), and each setting with all seeds (runs).

    Return what differs between runs, {flag: (R,)}, and {label: rows} of each setting.
    """
    values = {name: value for name, value in vars(args).items() if isinstance(value, list)}
    varied = [name for name in values if len(values[name]) > 1]
    values["seed"] = range(args.seed, args.seed + args.num_seeds)
    arrays = np.meshgrid(*values.values(), indexing="ij")  # the seed varies fastest
    runs = {name: array.ravel() for name, array in zip(values, arrays, strict=True)}
    settings = {}
    for i in range(0, len(runs["seed"]), args.num_seeds):
        label = ", ".join(f"{name} {runs[name][i]:.9g}" for name in varied)
        settings[label] = slice(i, i + args.num_seeds)
    return runs, settings


def divide(runs):
    """Divide runs evenly among devices, and those of a CPU core into equal batches.

    For example, 300 runs on 16 cores are at most 19 on each. If MAX_AT_ONCE is 8, each core takes 3
    batches of 7. That makes 336 runs, of which the last 36 are copies. Return the devices, the size
    of a batch, and the runs with the copies.
    """
    devices, num_runs = jax.devices(), len(runs["seed"])
    per_device = math.ceil(num_runs / len(devices))
    devices = devices[: math.ceil(num_runs / per_device)]
    most = MAX_AT_ONCE if devices[0].platform == "cpu" else per_device
    num_batches = math.ceil(per_device / most)
    at_once = math.ceil(per_device / num_batches)
    length = len(devices) * num_batches * at_once
    return devices, at_once, {name: np.resize(array, length) for name, array in runs.items()}


def compile_over_runs(function, *inputs, args, devices, at_once):
    """Compile function(run, *arrays) of one run into a function of all runs, over all devices.

    Its inputs are the padded runs and the arrays, each with an axis of runs in front.
    """
    env, env_params = make_env(args)  # outside of jit, since some environments cannot be made there

    def one_run(inputs):
        own, *arrays = inputs  # its own seed and values of swept flags
        run = SimpleNamespace(**(vars(args) | own), env=env, env_params=env_params)
        # To sweep a constant: run.env_params = env_params.replace(gravity=run.gravity)
        return function(run, *arrays)

    def one_device(*inputs):  # one batch after the other, the runs of a batch vmapped
        return jax.lax.map(one_run, inputs, batch_size=at_once)

    mesh = jax.sharding.Mesh(devices, "runs")
    axis = jax.sharding.PartitionSpec("runs")  # the first axis of each array is divided
    # check_vma would reject loops that start from constants.
    sharded = jax.shard_map(one_device, mesh=mesh, in_specs=axis, out_specs=axis, check_vma=False)
    options = COMPILER_OPTIONS.get(devices[0].platform)
    return jax.jit(sharded, compiler_options=options).lower(*inputs).compile()


def gather(tree, num_runs):
    """Copy arrays from all devices to the host, without the copies of runs."""
    return jax.tree.map(lambda array: np.asarray(array)[:num_runs], tree)


def describe(metrics):
    """Write metrics (R,) as words: their means over all runs in which they are known (not nan)."""
    words = []
    for name, values in metrics.items():
        if values.ndim == 1:
            known = values[~np.isnan(values)]
            words.append(f"{name} {known.mean() if len(known) else np.nan:#.4g}")
            if 0 < len(known) < len(values):
                words.append(f"({len(known)} of {len(values)} runs)")
    return words


def flat(tree):
    """Make {name: array} of any tree. Names are joined, as in learned.params.weights."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


if __name__ == "__main__":
    if main()["interrupted"]:
        raise KeyboardInterrupt  # so that Ctrl-C also ends a loop of the shell over commands
