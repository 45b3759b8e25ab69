# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0",
# ]
# ///
r"""Q-learning with decaying exploration: replay_td.py, but epsilon falls during the run.

    Q(s, a) = w_a . phi(s),    phi_i(s) = exp(-|s / scale - c_i|^2 / (2 sigma^2))
    target  = r + gamma max_a' Q_avg(s', a'),    or r if s' is terminal
    epsilon = max(end_e, start_e epsilon_decay^t)    in vector step t = 0, 1, ...

The decay counts vector steps. With more environments, or fewer environment steps, a run has fewer
of them, and epsilon ends higher.

The features phi are radial basis functions with random centers c_i (Sutton & Barto 2018, section
9.5.5). A ring buffer keeps the last C transitions (experience replay, Lin 1992). After each vector
step (one step of all N environments), B transitions are drawn from it at random, since these are
less correlated than successive ones (Mnih et al. 2015). They give one Adam step on half the mean
squared TD error. Q_avg is Q with slowly averaged weights: after each update, w_avg <- w_avg +
tau (w - w_avg) (Lillicrap et al. 2016, section 3).

No gradient flows through the target: this is semi-gradient Q-learning (section 11.1). With
function approximation, it may diverge (section 11.3). If s' is terminal,
the target is r alone. Where only the time limit ends an episode, the value of s' still counts
(Pardo et al. 2018). The learning rate falls linearly to 0, so that the weights settle. The final
weights are evaluated.

    python epsilon_decay_td.py                                                 # one run
    python epsilon_decay_td.py --end-e 0 0.25 --num-seeds 20 --plot curve.png  # forty, on all cores
    python epsilon_decay_td.py --env-id Acrobot-v1 --num-centers 1000 --total-timesteps 5e5 \
        --learning-rate 0.06 --end-e 0.1
    python epsilon_decay_td.py --env-id MountainCar-v0 --num-centers 1000 --total-timesteps 5e5 \
        --learning-rate 0.01 --sigma 0.15 --end-e 0.1

Shapes: R runs, K intervals, U = interval_updates updates, N = num_envs environments,
C = buffer_size transitions in the buffer, B = batch_size transitions in a batch, E = eval_episodes
episodes, D observation dimensions, F = num_centers features, A actions.

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
from jax.experimental.multihost_utils import process_allgather

# What each observation is divided by, so that centers in [-1, 1] cover the states that matter.
# To use another environment, add its scale here. With more dimensions, centers are farther away:
# raise --sigma with the square root of the number of dimensions, or all features will be near 0.
OBS_SCALE = {
    "CartPole-v1": [2.4, 3.0, 0.2, 3.0],  # m, m/s, rad, rad/s: the limits, and typical speeds
    "Acrobot-v1": [1.0, 1.0, 1.0, 1.0, 6.0, 12.0],  # cos, sin (twice); rad/s: about half the limits
    "MountainCar-v0": [1.2, 0.07],  # position: the left wall; speed: the maximum
}


def parse_args(argv=None):
    """Read and check the flags. Those added by `sweep` take several values: all combinations run.

    Only numbers that are used in arithmetic can be swept, not those that set shapes or counts.
    """
    parser, flag, sweep = make_parser()
    count, unit, width = number(int, 1, 1e6), number(float, 0, 1), number(float, 1e-3, 1e3)
    flag("--env-id", choices=list(OBS_SCALE), default="CartPole-v1", help="gymnax environment")
    flag("--seed", type=number(int, 0, 2e9), default=0, help="first seed of each setting")
    flag("--num-seeds", type=count, default=1, help="runs of each setting")
    text = "environment steps per run, rounded up to equal intervals"
    flag("--total-timesteps", type=number(int, 1, 1e9), default=200_000, help=text)
    flag("--num-intervals", type=count, default=20, help="progress lines, at most")
    flag("--num-envs", type=count, default=16, help="environments stepped in lockstep")
    flag("--buffer-size", type=count, default=100_000, help="transitions that the buffer holds")
    flag("--batch-size", type=count, default=32, help="transitions per update")
    sweep("--tau", type=unit, default=[0.01], help="step size of the averaged weights")
    sweep("--learning-rate", type=unit, default=[0.03], help="initial value, falls to 0")
    sweep("--gamma", type=unit, default=[0.99], help="discount factor")
    text = "initial epsilon, the probability of a random action"
    sweep("--start-e", type=unit, default=[1.0], help=text)
    sweep("--end-e", type=unit, default=[0.05], help="lowest epsilon")
    decay = number(float, 1e-6, 0.99999)  # float32 would round larger ones too coarsely
    sweep("--epsilon-decay", type=decay, default=[0.9997], help="factor per vector step")
    flag("--num-centers", type=count, default=500, help="number of radial basis features")
    sweep("--sigma", type=width, default=[0.5], help="width of the features")
    flag("--eval-episodes", type=count, default=100, help="greedy episodes after training")
    text = "join the processes of a Slurm or Open MPI 4 job"
    flag("--distributed", action="store_true", help=text)
    flag("--save", type=output(".npz"), metavar="FILE", help="write weights, curves, flags (.npz)")
    picture = output(".png", ".pdf", ".svg")
    text = "draw the learning curves of at most ten settings (.png, .pdf, .svg)"
    flag("--plot", type=picture, metavar="FILE", help=text)
    args = parser.parse_args(argv)
    if args.distributed and not jax.distributed.is_initialized():
        parser.error("--distributed: from Python, call jax.distributed.initialize() first")
    # Copied, in case that gymnax makes the same object each time, because you have registered one:
    # it compiles `step` of an object only once, and would ignore what you change in it later.
    args.env, args.env_params = copy.deepcopy(gymnax.make(args.env_id))
    # To change the environment or its constants, edit args.env or args.env_params here. Here is the
    # place of a wrapper, too (one that was registered cannot be copied). To sweep a constant, edit
    # `make_run`; README.md shows how.
    obs_shape = args.env.observation_space(args.env_params).shape
    if len(OBS_SCALE[args.env_id]) != math.prod(obs_shape):
        parser.error(f"--env-id: OBS_SCALE must hold a number for each entry of {obs_shape}")
    if args.buffer_size < args.num_envs:
        parser.error("--buffer-size must be at least --num-envs")
    num_updates = math.ceil(args.total_timesteps / args.num_envs)
    args.interval_updates = math.ceil(num_updates / args.num_intervals)
    args.num_intervals = math.ceil(num_updates / args.interval_updates)
    args.num_updates = args.num_intervals * args.interval_updates
    return args


# The algorithm, written for one run. `run` holds its flags. `run.seed` and the flags of `sweep`
# differ between runs, so they are traced: use them in arithmetic, not in shapes, Python loops or
# `if`. All other flags are Python values. (In `args`, which `main` has, swept flags are lists.)
#
# A metric is an entry of the dictionary that `td_loss`, `vector_step` or `train_step` returns. It
# is averaged over the updates up to the next progress line, printed if one number, and saved.


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
    target_params: dict  # running average of params
    opt_state: optax.OptState
    env_state: gymnax.EnvState  # (N,)
    obs: jax.Array  # (N, D)
    episode_return: jax.Array  # (N,) so far
    buffer: Transition  # (C,) a ring
    timesteps: jax.Array  # environment steps so far, which decide the next slot of the buffer


def optimizer(run):
    """Make Adam for the weights. Its learning rate falls linearly to 0, over num_updates steps.

    If you make more or fewer steps than updates, change num_updates here. The centers are frozen:
    Adam does not see them. (freeze_mask needs an entry for each of params.) Put gradient clipping
    or weight decay beside Adam, as in adam = optax.chain(..., adam). The learning rate is traced,
    so optax's schedules that use it in an `if` fail: make such a schedule for a rate of 1, and
    multiply its value by run.learning_rate.
    """
    adam = optax.adam(optax.linear_schedule(run.learning_rate, 0.0, run.num_updates))
    return optax.selective_transform(adam, freeze_mask={"centers": True, "weights": False})


def init_state(run):
    """Initial state of one run."""
    key, key_reset, key_centers = jax.random.split(jax.random.key(run.seed), 3)
    keys = jax.random.split(key_reset, run.num_envs)
    obs, env_state = jax.vmap(partial(run.env.reset, params=run.env_params))(keys)
    num_actions = run.env.action_space(run.env_params).n
    params = {
        "centers": jax.random.uniform(key_centers, (obs[0].size, run.num_centers), minval=-1.0),
        "weights": jnp.zeros((num_actions, run.num_centers)),
    }
    no_obs = jnp.zeros((run.buffer_size, *obs.shape[1:]), obs.dtype)
    return TrainState(
        key=key,
        params=params,
        target_params=params,
        opt_state=optimizer(run).init(params),
        env_state=env_state,
        obs=obs,
        episode_return=jnp.zeros(run.num_envs),
        buffer=Transition(
            obs=no_obs,
            action=jnp.zeros(run.buffer_size, int),
            reward=jnp.zeros(run.buffer_size),
            next_obs=no_obs,
            terminated=jnp.zeros(run.buffer_size, bool),
        ),
        timesteps=jnp.array(0),
    )


def q_values(run, params, obs):
    """Values (A,) of all actions in an observation (D,)."""
    scaled = obs.reshape(-1) / jnp.array(OBS_SCALE[run.env_id])
    squared_distance = jnp.sum((scaled[:, None] - params["centers"]) ** 2, axis=0)  # (F,)
    phi = jnp.exp(-squared_distance / (2 * run.sigma**2))  # (F,)
    # One product for each action: 1.8 times as fast as weights @ phi on a CPU.
    return jnp.stack([w_a @ phi for w_a in params["weights"]])


def exploration_rate(run, t):
    """Probability epsilon of a random action in vector step t."""
    return jnp.maximum(run.end_e, run.start_e * run.epsilon_decay**t)


def select_action(epsilon, q, uniform):
    """Choose an action epsilon-greedily from values (A,), given two random numbers in [0, 1)."""
    coin, choice = uniform
    random_action = (len(q) * choice).astype(int)  # rounded down, so each is equally likely
    return jnp.where(coin < epsilon, random_action, jnp.argmax(q))


def vector_step(run, state, _):
    """Step N environments. Return their transitions, and what the next progress line averages."""
    key, key_step, key_uniform = jax.random.split(state.key, 3)
    step_keys = jax.random.split(key_step, run.num_envs)
    # To draw all random numbers at once is faster than to have a key for each environment.
    uniform = jax.random.uniform(key_uniform, (run.num_envs, 2))
    q = jax.vmap(partial(q_values, run, state.params))(state.obs)  # (N, A)
    epsilon = exploration_rate(run, state.timesteps // run.num_envs)  # vector steps so far
    action = jax.vmap(partial(select_action, epsilon))(q, uniform)  # (N,)
    step = jax.vmap(partial(run.env.step, params=run.env_params))
    obs, env_state, reward, terminated, truncated, info = step(step_keys, state.env_state, action)
    transitions = Transition(
        obs=state.obs,
        action=action,
        reward=reward,
        # Where an episode ended, `obs` already belongs to the next one. A wrapper that changes
        # observations must change final_observation, too.
        next_obs=info["final_observation"],
        terminated=terminated,
    )
    done = terminated | truncated
    total = state.episode_return + reward
    to_average = {"episodes": jnp.sum(done), "return_sum": jnp.sum(jnp.where(done, total, 0.0))}
    to_average["epsilon"] = epsilon
    episode_return = jnp.where(done, 0.0, total)
    state = state._replace(key=key, env_state=env_state, obs=obs, episode_return=episode_return)
    return state, (transitions, to_average)


def td_target(run, params, transition):
    """Target of one transition: r + gamma max_a' Q(s', a'), or r if s' is terminal."""
    next_q = q_values(run, params, transition.next_obs)  # (A,)
    next_value = jnp.where(transition.terminated, 0.0, jnp.max(next_q))
    return transition.reward + run.gamma * next_value


def td_error(run, params, transition, target):
    """Target minus the value of the action that was taken. Also return that value."""
    value = q_values(run, params, transition.obs)[transition.action]
    return target - value, value


def td_loss(run, params, batch, targets):
    """Half the mean squared TD error of a batch (B,). Also return what a progress line shows."""
    errors, values = jax.vmap(partial(td_error, run, params))(batch, targets)  # (B,)
    metrics = {"td_error": jnp.mean(jnp.abs(errors)), "q_value": jnp.mean(values)}
    return jnp.mean(errors**2) / 2, metrics


def train_step(run, state, _):
    """Store the transitions of one vector step, then learn from a random batch of all stored."""
    state, (transitions, to_average) = vector_step(run, state, None)
    # Stored step after step: the next transition of an environment is N slots on, modulo C. Methods
    # of several steps must also store `truncated`, and must not go on beyond the newest transition.
    slots = (state.timesteps + jnp.arange(run.num_envs)) % run.buffer_size
    buffer = jax.tree.map(lambda old, new: old.at[slots].set(new), state.buffer, transitions)
    timesteps = state.timesteps + run.num_envs
    key, key_batch = jax.random.split(state.key)
    state = state._replace(key=key, buffer=buffer, timesteps=timesteps)
    num_stored = jnp.minimum(timesteps, run.buffer_size)
    chosen = jax.random.randint(key_batch, run.batch_size, 0, num_stored)
    batch = jax.tree.map(lambda column: column[chosen], buffer)  # (B,)
    # The targets are computed outside of the loss, so no gradient flows through them.
    targets = jax.vmap(partial(td_target, run, state.target_params))(batch)  # (B,)
    loss = partial(td_loss, run)
    # The gradient has an entry for the centers, too, which the optimizer ignores.
    grad, metrics = jax.grad(loss, has_aux=True)(state.params, batch, targets)
    updates, opt_state = optimizer(run).update(grad, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    target_params = optax.incremental_update(params, state.target_params, run.tau)
    state = state._replace(params=params, target_params=target_params, opt_state=opt_state)
    return state, dict(**to_average, **metrics)  # unlike `|`, refuses a duplicate name


def train_interval(run, state):
    """Make U updates, up to the next progress line. Also return what the line shows."""
    before = state.timesteps
    state, metrics = jax.lax.scan(partial(train_step, run), state, length=run.interval_updates)
    means = jax.tree.map(partial(jnp.mean, axis=0), metrics)
    # The mean return of the episodes that ended; nan if none did. The ratio of the two means is the
    # same as that of the sums.
    returns = means.pop("return_sum") / means.pop("episodes")
    timesteps = state.timesteps - before  # of this interval and run; `main` adds them up
    return state, dict(timesteps=timesteps, returns=returns, **means)


def greedy_return(run, params, key):
    """Undiscounted return of one greedy episode of at most max_steps_in_episode steps."""

    def step(carry, key):
        obs, env_state, alive, total = carry
        action = jnp.argmax(q_values(run, params, obs))
        stepped = run.env.step(key, env_state, action, run.env_params)
        obs, env_state, reward, terminated, truncated, _ = stepped
        total = jnp.where(alive, total + reward, total)
        return (obs, env_state, alive & ~(terminated | truncated), total), None

    key_reset, key_steps = jax.random.split(key)
    obs, env_state = run.env.reset(key_reset, run.env_params)
    keys = jax.random.split(key_steps, int(run.env_params.max_steps_in_episode))
    carry = obs, env_state, jnp.array(True), jnp.array(0.0)
    (*_, total), _ = jax.lax.scan(step, carry, keys)
    return total


def evaluate(run, state):
    """Results of a run: the returns (E,) of greedy episodes, and what was learned."""
    # A key that training does not use, so that you can also evaluate during training.
    key = jax.random.fold_in(state.key, 999)
    keys = jax.random.split(key, run.eval_episodes)
    returns = jax.vmap(partial(greedy_return, run, state.params))(keys)
    scale = jnp.array(OBS_SCALE[run.env_id])
    return dict(greedy_return=returns, obs_scale=scale, **flat(state.params))


def report(learned):
    """Describe what the runs of a setting learned.

    `main` first calls it with zeros, so that a mistake shows before training.
    """
    means = learned["greedy_return"].mean(axis=1)  # one for each run
    return f"greedy return {means.mean():.1f}  worst run {means.min():.1f}"


def draw(args, labels, results, learned):
    """Draw what --plot asks for."""
    if args.plot:
        plot(args.plot, labels, results["timesteps"], results["returns"])


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


RUNS_AT_ONCE = 10  # vmapped together on a core of a CPU; more would overflow its cache
COMPILER_OPTIONS = {
    "cpu": {
        "xla_backend_optimization_level": 1,  # compiles in 0.7 of the time of level 3, runs as fast
        "xla_cpu_prefer_vector_width": 512,  # the widest vectors: 1.1 to 1.3 times as fast
        # In jax 0.10, this does nothing. In jax 0.11, it switches a matrix library off that is slow
        # for small matrices: 1.5 times as fast.
        "xla_disable_hlo_passes": "dot-library-rewriter",
    },
    # By default, XLA times several kernels for each matrix product and keeps the fastest, which is
    # not always the same one. Without that, the same command gives the same bits. Compiling takes
    # 0.8 of the time, training about as long.
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
