# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0",
# ]
# ///
r"""Q-learning with decaying exploration: replay_td.py, but epsilon falls during the run.

    Q(s, a) = w_a . phi(s),    phi_i(s) = exp(-|s / scale - c_i|^2 / (2 sigma^2))
    target  = r + gamma max_a' Q'(s', a'),    or r if s' is terminal
    epsilon = max(end_e, start_e epsilon_decay^t)    in vector step t = 0, 1, ...

Epsilon falls with every vector step, so it ends higher if a run has fewer of them: with more
environments, or fewer environment steps.

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
    python epsilon_decay_td.py --env-id Acrobot-v1 --num-centers 1000 --total-timesteps 5e5 \
        --learning-rate 0.06 --end-e 0.1
    python epsilon_decay_td.py --env-id MountainCar-v0 --num-centers 1000 --total-timesteps 5e5 \
        --learning-rate 0.01 --sigma 0.15 --end-e 0.1

Shapes: R runs, K intervals, U = interval_updates updates, N = num_envs environments,
C = buffer_size transitions in the buffer, B = batch_size transitions in a batch, E = eval_episodes
episodes, D observation dimensions, F = num_centers features, A actions.

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
from jax.experimental.multihost_utils import process_allgather

# What each observation is divided by, so that centers in [-1, 1] cover the states that matter.
# These scales suit radial basis functions; a neural network wants observations of unit variance.
OBS_SCALE = {
    "CartPole-v1": [2.4, 3.0, 0.2, 3.0],  # m, m/s, rad, rad/s: the limits, and usual speeds
    "Acrobot-v1": [1.0, 1.0, 1.0, 1.0, 6.0, 12.0],  # cos, sin (twice); rad/s: about half the limits
    "MountainCar-v0": [1.2, 0.07],  # length: the left wall; length/step: the top speed
}
MAX_CURVES = 10  # settings in a figure: Matplotlib has ten colors


def parse_args(argv=None):
    """Read and check the flags. Those of `sweep` take several values: all combinations are run."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.allow_abbrev = False
    # A swept flag is a list in args. In a function of one run, run.gamma is one value, and traced:
    # good for arithmetic, not for shapes, loops or `if`. Other flags are plain Python values.
    # `number` and `output` (see the launcher) refuse wrong values.
    flag, sweep = parser.add_argument, partial(parser.add_argument, nargs="+")
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
    sweep("--tau", type=unit, default=[0.01], help="step size of the target's average")
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
    flag("--distributed", action="store_true", help="join the processes of a Slurm or MPI job")
    flag("--save", type=output(".npz"), metavar="FILE", help="write weights, curves, flags (.npz)")
    picture = output(".png", ".pdf", ".svg")
    text = f"draw the learning curves of at most {MAX_CURVES} settings (.png, .pdf, .svg)"
    flag("--plot", type=picture, metavar="FILE", help=text)
    args = parser.parse_args(argv)
    if args.distributed and not jax.distributed.is_initialized():
        parser.error("--distributed: from Python, call jax.distributed.initialize() first")
    if args.buffer_size < args.num_envs:
        parser.error("--buffer-size must be at least --num-envs")
    num_updates = math.ceil(args.total_timesteps / args.num_envs)
    args.interval_updates = math.ceil(num_updates / args.num_intervals)
    args.num_intervals = math.ceil(num_updates / args.interval_updates)
    args.interval_timesteps = args.interval_updates * args.num_envs
    args.num_updates = args.num_intervals * args.interval_updates
    make_env(args.env_id)  # fills the cache: some environments cannot be made inside of jit
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


def optimizer(run):
    """Make Adam. Its learning rate falls linearly to 0."""
    return optax.adam(optax.linear_schedule(run.learning_rate, 0.0, run.num_updates))


def init_state(run):
    """State in which a run starts."""
    env, env_params = make_env(run.env_id)
    key, key_reset, key_centers = jax.random.split(jax.random.key(run.seed), 3)
    keys = jax.random.split(key_reset, run.num_envs)
    obs, env_state = jax.vmap(partial(env.reset, params=env_params))(keys)
    num_actions = env.action_space(env_params).n
    params = {
        "centers": jax.random.uniform(key_centers, (obs.shape[1], run.num_centers), minval=-1.0),
        "weights": jnp.zeros((num_actions, run.num_centers)),
    }
    return TrainState(
        key=key,
        params=params,
        target_params=params,
        opt_state=optimizer(run).init(params),
        env_state=env_state,
        obs=obs,
        episode_return=jnp.zeros(run.num_envs),
        buffer=Transition(
            obs=jnp.zeros((run.buffer_size, obs.shape[1])),
            action=jnp.zeros(run.buffer_size, int),
            reward=jnp.zeros(run.buffer_size),
            next_obs=jnp.zeros((run.buffer_size, obs.shape[1])),
            terminated=jnp.zeros(run.buffer_size, bool),
        ),
        timesteps=jnp.array(0),
    )


def q_values(run, params, obs):
    """Values (A,) of all actions in an observation (D,)."""
    scaled = obs / jnp.array(OBS_SCALE[run.env_id])
    centers = jax.lax.stop_gradient(params["centers"])  # they stay where they are
    squared_distance = jnp.sum((scaled[:, None] - centers) ** 2, axis=0)  # (F,)
    phi = jnp.exp(-squared_distance / (2 * run.sigma**2))  # (F,)
    # One product for each action: 1.7 times as fast as weights @ phi.
    return jnp.stack([w_a @ phi for w_a in params["weights"]])


def exploration_rate(run, t):
    """Probability epsilon of a random action in vector step t."""
    return jnp.maximum(run.end_e, run.start_e * run.epsilon_decay**t)


def select_action(epsilon, q, uniform):
    """Choose an action epsilon-greedily by values (A,), with two random numbers in [0, 1)."""
    random_action = (len(q) * uniform[1]).astype(int)
    return jnp.where(uniform[0] < epsilon, random_action, jnp.argmax(q))


def vector_step(run, state, _):
    """Step N environments. Also return their transitions, and what a progress line shows."""
    env, env_params = make_env(run.env_id)
    key, key_step, key_uniform = jax.random.split(state.key, 3)
    step_keys = jax.random.split(key_step, run.num_envs)
    uniform = jax.random.uniform(key_uniform, (run.num_envs, 2))
    q = jax.vmap(partial(q_values, run, state.params))(state.obs)  # (N, A)
    epsilon = exploration_rate(run, state.timesteps // run.num_envs)  # vector steps so far
    action = jax.vmap(partial(select_action, epsilon))(q, uniform)  # (N,)
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
    return_sum = jnp.sum(jnp.where(done, total, 0.0))
    metrics = {"episodes": jnp.sum(done), "return_sum": return_sum, "epsilon": epsilon}
    episode_return = jnp.where(done, 0.0, total)
    state = state._replace(key=key, env_state=env_state, obs=obs, episode_return=episode_return)
    return state, (transitions, metrics)


def td_target(run, state, transition):
    """Target of one transition."""
    next_q = q_values(run, state.target_params, transition.next_obs)  # (A,)
    next_value = jnp.where(transition.terminated, 0.0, jnp.max(next_q))
    return transition.reward + run.gamma * next_value


def q_value(run, params, transition):
    """Value of the action that was taken."""
    return q_values(run, params, transition.obs)[transition.action]


def td_loss(run, params, batch, targets):
    """Half the mean squared TD error of a batch (B,). Also return what a progress line shows."""
    q = jax.vmap(partial(q_value, run, params))(batch)  # (B,)
    metrics = {"td_error": jnp.mean(jnp.abs(targets - q)), "q_value": jnp.mean(q)}
    return jnp.mean((targets - q) ** 2) / 2, metrics


def train_step(run, state, _):
    """Store the transitions of one vector step, then learn from a random batch of all stored."""
    state, (transitions, metrics) = vector_step(run, state, None)
    slots = (state.timesteps + jnp.arange(run.num_envs)) % run.buffer_size
    buffer = jax.tree.map(lambda old, new: old.at[slots].set(new), state.buffer, transitions)
    timesteps = state.timesteps + run.num_envs
    key, key_batch = jax.random.split(state.key)
    state = state._replace(key=key, buffer=buffer, timesteps=timesteps)
    num_stored = jnp.minimum(timesteps, run.buffer_size)
    chosen = jax.random.randint(key_batch, run.batch_size, 0, num_stored)
    batch = jax.tree.map(lambda column: column[chosen], buffer)  # (B,)
    # The targets are computed outside of the loss, so no gradient flows through them.
    targets = jax.vmap(partial(td_target, run, state))(batch)  # (B,)
    loss = partial(td_loss, run)
    grad, loss_metrics = jax.grad(loss, has_aux=True)(state.params, batch, targets)
    updates, opt_state = optimizer(run).update(grad, state.opt_state)
    params = optax.apply_updates(state.params, updates)
    target_params = optax.incremental_update(params, state.target_params, run.tau)
    state = state._replace(params=params, target_params=target_params, opt_state=opt_state)
    return state, metrics | loss_metrics


def train_interval(run, state):
    """Make U updates, up to the next progress line. Also return what the line shows."""
    state, metrics = jax.lax.scan(partial(train_step, run), state, length=run.interval_updates)
    means = jax.tree.map(jnp.mean, metrics)
    episodes = means.pop("episodes")  # per update, as is return_sum
    means["returns"] = means.pop("return_sum") / episodes  # nan if none ended
    return state, {"timesteps": jnp.array(run.interval_timesteps), **means}


def greedy_return(run, params, key):
    """Undiscounted return of one greedy episode, which ends at the time limit at the latest."""
    env, env_params = make_env(run.env_id)

    def step(carry, key):
        obs, env_state, mask, total = carry
        action = jnp.argmax(q_values(run, params, obs))
        stepped = env.step(key, env_state, action, env_params)
        obs, env_state, reward, terminated, truncated, _ = stepped
        total = jnp.where(mask, total + reward, total)
        return (obs, env_state, mask & ~(terminated | truncated), total), None

    key_reset, key_steps = jax.random.split(key)
    obs, env_state = env.reset(key_reset, env_params)
    keys = jax.random.split(key_steps, int(env_params.max_steps_in_episode))
    carry = obs, env_state, jnp.array(True), jnp.array(0.0)
    (*_, total), _ = jax.lax.scan(step, carry, keys)
    return total


def evaluate(run, state):
    """What a run ends with: the returns (E,) of greedy episodes, and what was learned."""
    keys = jax.random.split(state.key, run.eval_episodes)
    returns = jax.vmap(partial(greedy_return, run, state.params))(keys)
    scale = jnp.array(OBS_SCALE[run.env_id])
    return {"greedy_return": returns, "obs_scale": scale, **state.params}


def report(args, learned):
    """Describe what the r runs of a setting learned."""
    means = learned["greedy_return"].mean(axis=1)  # (r,)
    return f"greedy return {means.mean():.1f}  worst run {means.min():.1f}"


def draw(args, labels, results):
    """Draw the learning curves for --plot."""
    if args.plot:
        plot(args.plot, labels, results["timesteps"], results["returns"])


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


vectorize = jax.vmap  # the runs of a device
COMPILER_OPTIONS = {  # on a CPU
    "xla_backend_optimization_level": 1,  # compiles in 0.7 of the time of level 3, runs as fast
    "xla_cpu_prefer_vector_width": 512,  # the widest vectors: 1.1 to 1.3 times as fast
    # Not the matrix library of jax 0.11, which is slow for small matrices: 1.4 times as fast.
    "xla_disable_hlo_passes": "dot-library-rewriter",
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
