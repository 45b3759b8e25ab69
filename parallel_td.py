# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0"]
# ///
"""Synchronous parallel Q-learning, linear in radial basis features, on CartPole-v1: the whole run is one program.

N environments step in lockstep; every batch of B transitions makes one gradient step on the mean squared TD error:

    Q(s, a) = phi(s) . w_a    with phi_i(s) = exp(-|s - c_i|^2 / (2 sigma^2)) and random centres c_i
    target  = r + gamma max_a' Q(s', a'), or r where s' is terminal

- The target carries no gradient: semi-gradient Q-learning (Sutton & Barto 2018, sections 11.1-11.5).
- Only `terminated` cuts the bootstrap: at a time limit the target uses the true final observation.
- Evaluated and saved is the average of the weights over about the last 1 / tau updates (Polyak & Juditsky 1992).

    python parallel_td.py                                    # one run, solved in a fraction of a second
    python parallel_td.py --num-seeds 20 --plot curve.png    # twenty runs, side by side in one program
Shapes: R runs, U updates, T vector steps, N environments, B = T * N transitions, F features, A actions.
"""
import argparse, contextlib, json, math, os, resource, signal, sys, time
from functools import partial
from typing import NamedTuple


def number(kind, low, high, text):
    """An int or float (`kind`) from low to high, for argparse; 2e6 and 2_000_000 are whole numbers too."""
    with contextlib.suppress(ValueError):
        if low <= (value := float(text)) <= high and kind(value) == value:
            return kind(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not {'a whole' if kind is int else 'a'} number in [{low:g}, {high:g}]")


def parse_args(argv=None):
    """Read and check the command line; what is wrong ends here, with one line and exit code 2."""
    parser = argparse.ArgumentParser(usage="%(prog)s [--flag value ...]", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, count, rate = parser.add_argument, partial(number, int, 1, 1e9), partial(number, float, 1e-12, 1e38)
    add("--seed", type=partial(number, int, 0, 2e9), default=0, help="seed of the first run; run i has seed + i")
    add("--num-seeds", type=count, default=1, help="independent runs, in one program")
    add("--num-envs", type=count, default=16, help="environments stepped in lockstep by one learner")
    add("--total-timesteps", type=count, default=1_000_000, help="environment steps per run, in whole log intervals")
    add("--learning-rate", type=rate, default=[1e-2], nargs="+", help="Adam's step size; several are run side by side")
    add("--batch-size", type=count, default=16, help="transitions per update, a multiple of --num-envs")
    add("--num-centers", type=count, default=500, help="number of radial basis features")
    add("--tau", type=partial(number, float, 1e-6, 1), default=0.01, help="step of the average towards the weights")
    add("--sigma", type=partial(number, float, 1e-3, 1e3), default=0.5, help="their width, in scaled observations")
    add("--gamma", type=partial(number, float, 0, 1), default=0.99, help="discount factor")
    add("--epsilon", type=partial(number, float, 0, 1), default=0.1, help="probability of a random action")
    add("--residual-gradient", action="store_true", help="let the gradient flow through the target (Baird 1995)")
    add("--solved-at", type=rate, default=475.0, help="a run is solved at this mean return of 100 training episodes")
    add("--no-early-stop", action="store_true", help="train for all of --total-timesteps, report the last weights")
    add("--num-devices", type=partial(number, int, 1, 1024), default=1, help="devices that share the runs; CPU: cores")
    add("--num-processes", type=partial(number, int, 1, 1e5), default=1, help="processes, on any machines, each with --num-devices devices")
    add("--process-id", type=partial(number, int, 0, 1e5), help="which of them this is, from 0 (default: ask the cluster)")
    add("--coordinator", metavar="HOST:PORT", help="where process 0 listens (default: ask the cluster)")
    add("--log-interval", type=count, default=10_000, help="environment steps per run between progress lines")
    add("--eval-episodes", type=partial(number, int, 0, 1e6), default=100, help="greedy episodes at the end; 0: none")
    add("--save", metavar="FILE.npz", help="write parameters, learning curve and arguments, at each progress line")
    add("--evaluate", metavar="FILE.npz", help="do not train: evaluate what --save wrote")
    add("--plot", metavar="FILE.png", help="draw the learning curve")
    add("--json", action="store_true", help="print the report as one line of JSON, progress to standard error")
    args = parser.parse_args(argv)
    args.runs, args.devices = args.num_seeds * len(args.learning_rate), args.num_devices * args.num_processes
    args.updates = math.ceil(min(args.log_interval, args.total_timesteps) / args.batch_size)  # per progress line
    numbers = 9 * args.updates * args.batch_size + args.num_centers * (20 + 4 * args.batch_size + 2 * args.eval_episodes)
    if args.batch_size % args.num_envs or args.runs % args.devices or (args.process_id or 0) >= args.num_processes:
        parser.error(f"--num-envs must divide --batch-size, all devices the {args.runs} runs, and --process-id be below --num-processes")
    if args.coordinator is not None and not args.coordinator.partition(":")[2].isdigit() or args.evaluate and args.num_processes > 1:
        parser.error("--coordinator must be HOST:PORT, and --evaluate takes one process")
    if (memory := 4 * args.runs * numbers / args.num_processes) > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        parser.error(f"this needs about {memory / 2**30:.0f} GiB of memory, more than there is")
    for path, ending in (args.save, ".npz"), (args.plot, ".png"):
        with contextlib.suppress(OSError):
            if path is None or path[-4:] == ending and not os.path.isdir(path) and not os.remove(open(f"{path}.{os.getpid()}", "x").name):
                continue
        parser.error(f"cannot write {path!r}: it must be a file, end in {ending}, in a folder that can be written")
    return args


if __name__ == "__main__":  # before jax is imported, which takes seconds and then reads these settings
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # nothing is learned yet
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    fast = "--xla_cpu_prefer_vector_width=512 --xla_disable_hlo_passes=cpu-parallel-task-assigner "  # +50 %: arrays not split over cores
    os.environ |= dict(JAX_NUM_CPU_DEVICES=str((args := parse_args()).num_devices), XLA_FLAGS=fast + os.environ.get("XLA_FLAGS", ""))
    if args.num_processes > 1:  # jax joins them into one program, and ends it where one of them is lost
        sys.stdout, _ = os.fdopen(os.dup(1), "w"), os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # ours; jax's network layer prints, too
        sys.excepthook = lambda *error: os._exit(sys.stderr.write(f"processes cannot go on; saved so far: {args.save}; {error[1]}\n") > 0)
        import jax
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)

import gymnax, jax, jax.experimental.multihost_utils as multihost, jax.numpy as jnp, numpy as np, optax

SCRIPT = os.path.basename(__file__)
ENV, ENV_PARAMS = gymnax.make("CartPole-v1")
env_reset, env_step = jax.vmap(ENV.reset, in_axes=(0, None)), jax.vmap(ENV.step, in_axes=(0, 0, 0, None))  # of N, each with its key
OBS_SCALE = np.array([2.4, 3.0, 0.2, 3.0], np.float32)  # about the largest: m (edge of track), m/s, rad (pole falls), rad/s


class Transition(NamedTuple):
    obs: jax.Array  # (N, 4)
    action: jax.Array  # (N,)
    reward: jax.Array  # (N,)
    next_obs: jax.Array  # (N, 4) the true successor, also where an episode ended
    terminated: jax.Array  # (N,) true where next_obs is terminal; false at a time limit


class TrainState(NamedTuple):
    key: jax.Array
    learning_rate: jax.Array  # ()
    centers: jax.Array  # (4, F) of the features, in scaled observations; the long axis last, for wide vectors
    weights: jax.Array  # (F, A)
    average: jax.Array  # (F, A) running average of the weights
    opt_state: optax.OptState
    env_state: gymnax.EnvState  # (N,) each
    obs: jax.Array  # (N, 4)
    episode_return: jax.Array  # (N,) of the episodes under way, undiscounted


def rbf_features(obs, centers, sigma):
    """Gaussian radial basis features of observations (B, 4), for centers (4, F): phi (B, F)."""
    difference = (obs / OBS_SCALE).T[:, :, None] - centers[:, None, :]  # (4, B, F)
    return jnp.exp(-jnp.sum(difference**2, axis=0) / (2 * sigma**2))


def td_loss(weights, target_weights, centers, batch, args):
    """Half the mean squared TD error over a batch of transitions (B, ...); its gradient is taken by `weights` alone."""
    next_weights = weights if args.residual_gradient else target_weights
    next_q = jnp.max(rbf_features(batch.next_obs, centers, args.sigma) @ next_weights, axis=-1)  # (B,)
    target = batch.reward + args.gamma * (1 - batch.terminated) * next_q
    q_values = rbf_features(batch.obs, centers, args.sigma) @ weights  # (B, A)
    q_taken = jnp.take_along_axis(q_values, batch.action[:, None], axis=-1)[:, 0]
    return jnp.mean(0.5 * (q_taken - target) ** 2)


def vector_step(args, state, noise):
    """Step all N environments once; returns the new state, the transitions, and the returns of finished episodes."""
    explore, random_action, env_key = noise  # (N,) each
    q_values = rbf_features(state.obs, state.centers, args.sigma) @ state.weights  # (N, A)
    action = jnp.where(explore < args.epsilon, random_action, jnp.argmax(q_values, axis=-1))  # epsilon-greedy
    obs, env_state, reward, terminated, truncated, info = env_step(env_key, state.env_state, action, ENV_PARAMS)
    transition = Transition(state.obs, action, reward, info["final_observation"], terminated)
    done, episode_return = terminated | truncated, state.episode_return + reward
    state = state._replace(env_state=env_state, obs=obs, episode_return=jnp.where(done, 0.0, episode_return))
    return state, (transition, jnp.where(done, episode_return, jnp.nan))


def train_update(args, state, noise):
    """Collect B transitions in T vector steps, then make one Adam step on exactly those."""
    state, (transitions, returns) = jax.lax.scan(partial(vector_step, args), state, noise)  # (T, N, ...)
    batch = jax.tree.map(lambda x: x.reshape(args.batch_size, *x.shape[2:]), transitions)  # (B, ...)
    grad = jax.grad(td_loss)(state.weights, state.weights, state.centers, batch, args)
    updates, opt_state = optax.adam(state.learning_rate).update(grad, state.opt_state)
    weights = optax.apply_updates(state.weights, updates)
    average = optax.incremental_update(weights, state.average, args.tau)
    return state._replace(weights=weights, average=average, opt_state=opt_state), returns


def init_state(args, seed, learning_rate):
    """The state in which the run with this seed starts."""
    key, key_centers, key_weights, key_reset, *_ = jax.random.split(jax.random.key(seed), 6)  # the last two: evaluate
    obs, env_state = env_reset(jax.random.split(key_reset, args.num_envs), ENV_PARAMS)
    centers = jax.random.uniform(key_centers, (obs.shape[-1], args.num_centers), minval=-1.0, maxval=1.0)
    weights = 0.1 * jax.random.normal(key_weights, (args.num_centers, ENV.num_actions))
    opt_state = optax.adam(learning_rate).init(weights)
    return TrainState(key, learning_rate, centers, weights, weights, opt_state, env_state, obs, jnp.zeros(args.num_envs))


def train_chunk(args, state):
    """Make all updates up to the next progress line; returns also the returns (U, T, N) of episodes that ended, else NaN."""
    key, key_explore, key_action, key_env = jax.random.split(state.key, 4)
    shape = (args.updates, args.batch_size // args.num_envs, args.num_envs)  # (U, T, N)
    noise = (jax.random.uniform(key_explore, shape), jax.random.randint(key_action, shape, 0, ENV.num_actions),
             jax.random.split(key_env, shape))  # all of it at once: drawn inside the loop it costs a fifth of the speed
    return jax.lax.scan(partial(train_update, args), state._replace(key=key), noise)


def evaluate(args, weights, centers, seed):
    """Undiscounted returns (E,) of the greedy policy in E fresh episodes."""
    *_, key_reset, key_step = jax.random.split(jax.random.key(seed), 6)
    obs, env_state = env_reset(jax.random.split(key_reset, args.eval_episodes), ENV_PARAMS)
    state = TrainState(*[None] * len(TrainState._fields))._replace(
        centers=centers, weights=weights, env_state=env_state, obs=obs, episode_return=jnp.zeros(args.eval_episodes))
    shape = (ENV_PARAMS.max_steps_in_episode, args.eval_episodes)  # (T, E)
    noise = jnp.ones(shape), jnp.zeros(shape, int), jax.random.split(key_step, shape)  # 1: it never explores
    _, (_, returns) = jax.lax.scan(partial(vector_step, args), state, noise)
    return jnp.take_along_axis(returns, jnp.argmax(~jnp.isnan(returns), axis=0)[None], axis=0)[0]  # of the first to end


def over_runs(function, num_devices, **jit_options):
    """Compile `function` of one run for all runs: vmapped, and sharded over the devices."""
    mesh = jax.make_mesh((num_devices,), ("runs",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(jax.vmap(function), mesh=mesh, in_specs=jax.P("runs"), out_specs=jax.P("runs"), check_vma=False)
    return jax.jit(sharded, **jit_options)


def train(args, say, interrupted):
    """Train every run until all are solved or out of steps; returns what --save writes, run axis first, and if Ctrl-C cut it short."""
    began = time.perf_counter()
    seed = np.tile(args.seed + np.arange(args.num_seeds, dtype=np.uint32), len(args.learning_rate))
    learning_rate = np.repeat(args.learning_rate, args.num_seeds)
    state = over_runs(partial(init_state, args), args.devices)(seed, learning_rate)
    chunk = over_runs(partial(train_chunk, args), args.devices, donate_argnums=0).lower(state).compile()
    say(f"compiled in {(start := time.perf_counter()) - began:.1f} s")
    last_returns, timesteps = [np.zeros(0)] * len(seed), 0
    curve, episodes, ctrl_c = {}, sum(map(len, last_returns)), np.zeros(1)
    solved_at, weights = np.full(len(seed), np.nan), 0.0
    while timesteps < args.total_timesteps and not ctrl_c.any() and (args.no_early_stop or np.isnan(solved_at).any()):
        (state, returns), timesteps = jax.block_until_ready(chunk(state)), timesteps + args.updates * args.batch_size
        returns, average, ctrl_c = multihost.process_allgather((returns, state.average, np.array([len(interrupted)])), tiled=True)
        returns = [run[~np.isnan(run)] for run in returns]  # of the episodes that ended, in order
        last_returns = [np.append(last, new)[-100:] for last, new in zip(last_returns, returns)]
        curve[timesteps] = [last.mean() if len(last) else np.nan for last in last_returns]
        episodes, unsolved = episodes + sum(map(len, returns)), np.isnan(solved_at)
        solved = [len(last) == 100 and mean >= args.solved_at for last, mean in zip(last_returns, curve[timesteps])]
        solved_at = np.where(unsolved & solved, timesteps, solved_at)
        weights = np.where((unsolved | args.no_early_stop)[:, None, None], average, weights)  # once solved, kept
        seconds, steps = time.perf_counter() - start, timesteps * len(seed)
        say(f"step {timesteps:>9,}  return {spread(curve[timesteps])}  episodes {episodes:>7,}  {steps / seconds / 1e6:.2f} M steps/s")
        for run in np.flatnonzero(~np.isfinite(weights).all(axis=(1, 2))):
            sys.exit(f"step {timesteps:,}: weights not finite with seed {seed[run]}, learning rate {learning_rate[run]:g}")
        result = dict(seed=seed, learning_rate=learning_rate, solved_at=solved_at, weights=weights, timesteps=steps,
            centers=multihost.process_allgather(state.centers.mT, tiled=True), curve_timesteps=np.array(list(curve)),
            curve_return=np.array(list(curve.values())).T,
            seconds_to_compile=start - began, seconds_to_run=seconds, steps_per_second=steps / seconds)
        if args.save and jax.process_index() == 0:
            write_file(args.save, partial(np.savez, args=json.dumps(vars(args)), **result))
    say(f"{steps:,} steps in {seconds:.2f} s after compiling, {steps / seconds / 1e6:.2f} M steps/s")
    return result, ctrl_c.any()


def load(args):
    """Read what --save wrote, and set the arguments that go with it; raises whatever another file leads to."""
    result = dict(np.load(args.evaluate, allow_pickle=False))
    args.sigma, (args.runs, features, _) = float(json.loads(str(result["args"]))["sigma"]), result["centers"].shape
    result["weights"] = result["weights"].reshape(args.runs, features, ENV.num_actions)
    return result


def write_file(path, write):
    """Let `write` fill a temporary file beside `path`, then move it there: the file is whole or not there at all."""
    write(temporary := f"{path[:-4]}.{os.getpid()}{path[-4:]}")
    os.replace(temporary, path)


def spread(values, digits=1):
    """The mean of the known values, as text; of several also the least and the greatest; "-" for none."""
    known = np.asarray(values)[~np.isnan(values)]
    bounds = f" [{known.min():,.{digits}f}, {known.max():,.{digits}f}]" if len(known) > 1 else ""
    return f"{known.mean():,.{digits}f}{bounds}" if len(known) else "-"


def plot(args, result):
    """Draw the learning curves: for each learning rate the mean over its runs, and the band of all of them."""
    from matplotlib.figure import Figure
    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    for rate in np.unique(result["learning_rate"]):
        curves = np.ma.masked_invalid(result["curve_return"][result["learning_rate"] == rate])
        axes.plot(result["curve_timesteps"], curves.mean(axis=0), label=f"learning rate {rate:g}, {len(curves)} runs")
        axes.fill_between(result["curve_timesteps"], curves.min(axis=0), curves.max(axis=0), alpha=0.2)
    axes.axhline(args.solved_at, color="gray", linestyle=":")
    axes.set(title=f"{SCRIPT}, CartPole-v1", xlabel="environment steps per run", ylabel="mean return, 100 episodes")
    axes.legend()
    write_file(args.plot, partial(axes.figure.savefig, dpi=150))


def main(argv=None):
    """Train or load, evaluate, report; exit code 130 after Ctrl-C."""
    args = parse_args(argv)
    interrupted = []  # by Ctrl-C: the chunk under way ends, the report follows; a second Ctrl-C ends the program
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(signal.signal(signal.SIGINT, signal.SIG_DFL)))
    if args.evaluate is not None:  # what goes wrong from here on is due to that file
        sys.excepthook = lambda *error: sys.stderr.write(f"{args.evaluate!r} is not what --save of this script wrote: {error[1]!r}\n")
    say = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True) if jax.process_index() == 0 else lambda text: None
    device, saved = jax.devices()[0].device_kind, load(args) if args.evaluate is not None else None
    say(f"{SCRIPT}: CartPole-v1, environments: {args.num_envs}, runs: {args.runs}, device: {args.devices} x {device}")
    result, stopped = (saved, False) if saved else train(args, say, interrupted)
    greedy = partial(over_runs(partial(evaluate, args), math.gcd(args.devices, args.runs)), result["weights"], result["centers"].mT)
    returns = multihost.process_allgather(greedy(result["seed"]), tiled=True) if args.eval_episodes else np.full((args.runs, 1), np.nan)
    table = {name: result[name] for name in ("seed", "learning_rate", "solved_at")} | dict(
        training_return=result["curve_return"][:, -1], eval_mean=returns.mean(1), eval_std=returns.std(1), eval_min=returns.min(1))
    for rate in np.unique(table["learning_rate"]):
        of = {name: column[table["learning_rate"] == rate] for name, column in table.items()}
        say(f"learning rate {rate:g}: {np.isfinite(of['solved_at']).sum()} of {len(of['seed'])} runs solved, at step "
            f"{spread(of['solved_at'], 0)}; training return {spread(of['training_return'])}\n  {args.eval_episodes} greedy "
            f"episodes: mean {spread(of['eval_mean'])}, std {spread(of['eval_std'])}, min {spread(of['eval_min'])}; "
            f"{(of['eval_mean'] >= args.solved_at).sum()} of {len(of['seed'])} runs pass")
    if args.plot and jax.process_index() == 0:
        plot(args, result)
    if args.json and jax.process_index() == 0:
        print(json.dumps(dict(script=SCRIPT, env="CartPole-v1", args=vars(args), device=device, num_devices=args.devices,
            versions=dict(python=sys.version.split()[0], jax=jax.__version__, optax=optax.__version__),
            peak_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            **{name: float(result[name]) for name in ("seconds_to_compile", "seconds_to_run", "timesteps", "steps_per_second")},
            runs=[{name: None if x != x else x for name, x in zip(table, row)} for row in zip(*map(np.ndarray.tolist, table.values()))])))
    sys.exit(130 if interrupted or stopped else 0)


if __name__ == "__main__":
    main()
