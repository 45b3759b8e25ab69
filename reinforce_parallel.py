# /// script
# requires-python = ">=3.11"
# dependencies = ["jax==0.10.1", "jaxlib==0.10.1", "optax==0.2.8", "gymnax[visualize]==1.0.1", "six==1.17.0"]
# ///
"""REINFORCE over N episodes at once, of different lengths: padded and masked; the whole run is one program.

Each iteration plays N episodes with the policy pi as it is, and then makes one Adam step along (Williams 1992)

    grad J = 1/N sum_i sum_t H_it (G_it - b_t) grad log pi(A_it | S_it),    G_it = R_it + gamma G_i,t+1
- H_it, the mask, is 1 up to the step that ends episode i and 0 in the padding after it: no padding, no gradient.
- The baseline b_t is the mean of the others' returns at time t. An episode's own would shrink the gradient by 1 - 1/N.
- The loop over time ends with the last of the episodes: short ones cost little (--sync truncation: with the first).

    python reinforce_parallel.py                                    # CartPole-v1, solved in a fraction of a second
    python reinforce_parallel.py --env-id Pendulum-v1 --num-envs 128 --num-iterations 300 --gamma 0.95 --learning-rate 5e-3
Shapes: R runs, I iterations, T steps (the time limit), N environments, D observation, A actions (or their dimension).
"""
import argparse, contextlib, json, math, os, resource, signal, sys, time
from functools import cache, partial
from typing import NamedTuple

# The environments of gymnax 1.0.1 with flat observations, and their time limits; the first eight can be drawn.
TIME_LIMIT = {"CartPole-v1": 500, "Pendulum-v1": 200, "Acrobot-v1": 500, "MountainCar-v0": 200, "MountainCarContinuous-v0": 999,
              "PointRobot-misc": 100, "MetaMaze-misc": 200, "FourRooms-misc": 500, "Swimmer-misc": 500, "Reacher-misc": 100,
              "BernoulliBandit-misc": 100, "GaussianBandit-misc": 100, "MemoryChain-bsuite": 1000,
              "UmbrellaChain-bsuite": 100, "DiscountingChain-bsuite": 100}
SCRIPT = os.path.basename(__file__)


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
    add("--env-id", choices=TIME_LIMIT, default="CartPole-v1", help="environment of gymnax, with a flat observation")
    add("--num-envs", type=count, default=16, help="environments stepped in lockstep by one learner")
    add("--num-iterations", type=count, default=100, help="updates per run, each on one episode of each environment")
    add("--learning-rate", type=rate, default=[1e-2], nargs="+", help="Adam's step size; several are run side by side")
    add("--gamma", type=partial(number, float, 0, 1), default=0.99, help="discount factor")
    add("--hidden-size", type=count, default=64, help="tanh units of the policy network")
    add("--sync", choices=["padding", "truncation"], default="padding", help="stop with the last environment or the first")
    add("--baseline", choices=["mean", "time-independent", "none"], default="mean", help="mean return, of each time step or all")
    add("--no-normalize", action="store_true", help="do not scale advantages to unit size")
    add("--solved-at", type=partial(number, float, -1e38, 1e38), help="mean return of 100 training episodes (CartPole-v1: 475)")
    add("--no-early-stop", action="store_true", help="make all iterations, report the last parameters")
    add("--num-devices", type=partial(number, int, 1, 1024), default=1, help="devices that share the runs; CPU: cores")
    add("--num-processes", type=partial(number, int, 1, 1e5), default=1, help="processes, on any machines, each with --num-devices devices")
    add("--process-id", type=partial(number, int, 0, 1e5), help="which of them this is, from 0 (default: ask the cluster)")
    add("--coordinator", metavar="HOST:PORT", help="where process 0 listens (default: ask the cluster)")
    add("--log-interval", type=count, default=5, help="iterations between progress lines")
    add("--eval-episodes", type=partial(number, int, 0, 1e6), default=100, help="greedy episodes at the end; 0: none")
    add("--save", metavar="FILE.npz", help="write parameters, learning curve and arguments, at each progress line")
    add("--evaluate", metavar="FILE.npz", help="do not train: evaluate what --save wrote")
    add("--plot", metavar="FILE.png", help="draw the learning curve")
    add("--gif", metavar="FILE.gif", help="draw a greedy episode of the first run as a film")
    add("--json", action="store_true", help="print the report as one line of JSON, progress to standard error")
    args = parser.parse_args(argv)
    args.runs, args.devices = args.num_seeds * len(args.learning_rate), args.num_devices * args.num_processes
    args.log_interval = min(args.log_interval, args.num_iterations)
    args.solved_at = {None: 475.0 if args.env_id == "CartPole-v1" else 1e38}.get(args.solved_at, args.solved_at)  # 1e38: never
    numbers = args.num_devices * TIME_LIMIT[args.env_id] * max((args.num_envs + 9) * (30 + 4 * args.hidden_size), 30 * args.eval_episodes)
    if args.runs % args.devices or (args.process_id or 0) >= args.num_processes or args.evaluate and args.num_processes > 1 or (
            args.coordinator is not None and not args.coordinator.partition(":")[2].isdigit()):
        parser.error(f"devices must divide {args.runs} runs, --process-id below --num-processes (--evaluate: 1), --coordinator HOST:PORT")
    if args.gif and args.env_id not in list(TIME_LIMIT)[:8]:
        parser.error(f"--gif can draw {', '.join(list(TIME_LIMIT)[:8])}")
    if (memory := 4 * numbers + 300 * args.hidden_size * args.runs) > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        parser.error(f"this needs about {memory / 2**30:.0f} GiB of memory, more than there is")
    for path, ending in (args.save, ".npz"), (args.plot, ".png"), (args.gif, ".gif"):
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

make = cache(gymnax.make)  # main calls it outside of jit first: inside, some environments cannot be made

class Batch(NamedTuple):
    obs: jax.Array  # (T, N, D)
    action: jax.Array  # (T, N), or (T, N, A) if continuous
    reward: jax.Array  # (T, N)
    mask: jax.Array  # (T, N) true where the step is real, false in the padding


class TrainState(NamedTuple):
    key: jax.Array
    learning_rate: jax.Array  # ()
    params: dict  # w0 (D, H), b0 (H,), w1 (H, A), b1 (A,), and, if actions are continuous, log_std (A,)
    opt_state: optax.OptState


def policy(params, obs):
    """The network: of observations (..., D) logits (..., A), or means (..., A) if actions are continuous."""
    return jnp.tanh(obs @ params["w0"] + params["b0"]) @ params["w1"] + params["b1"]


def select_action(params, obs, noise):
    """Sample actions with noise (..., A), Gumbel or normal (Gumbel-max; reparametrized); where it is 0, the greedy ones."""
    if "log_std" in params:
        return policy(params, obs) + jnp.exp(params["log_std"]) * noise
    return jnp.argmax(policy(params, obs) + noise, axis=-1)


def log_prob(params, obs, action):
    """log pi(action | obs): categorical, or diagonal Gaussian, summed over the dimensions of the action."""
    if "log_std" in params:
        return jax.scipy.stats.norm.logpdf(action, policy(params, obs), jnp.exp(params["log_std"])).sum(axis=-1)
    return jnp.take_along_axis(jax.nn.log_softmax(policy(params, obs)), action[..., None], axis=-1)[..., 0]


def to_bounds(space, action):
    """What the environment is given: the action itself, or, if continuous, with [-1, 1] stretched to its bounds, clipped."""
    return action if hasattr(space, "n") else space.low + (space.high - space.low) * (jnp.clip(action, -1, 1) + 1) / 2


def collect(args, params, key, num_envs, greedy=False):
    """Play an episode in each environment; returns a Batch, and which of the episodes ended (N,)."""
    env, env_params = make(args.env_id)
    env_step, space = jax.vmap(env.step, in_axes=(0, 0, 0, None)), env.action_space(env_params)
    key_reset, key_noise, key_step = jax.random.split(key, 3)
    obs, env_state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(key_reset, num_envs), env_params)
    shape = (TIME_LIMIT[args.env_id], num_envs)  # (T, N)
    noise = (jax.random.normal if "log_std" in params else jax.random.gumbel)(key_noise, (*shape, len(params["b1"])))
    env_keys = jax.random.split(key_step, shape)  # random numbers all at once: in the loop they would cost more
    going = jnp.all if args.sync == "truncation" and not greedy else jnp.any  # with the first, or with the last
    def vector_step(carry):
        t, env_state, obs, alive, batch = carry
        action = select_action(params, obs, noise[t] * (not greedy))
        next_obs, env_state, reward, terminated, truncated, _ = env_step(env_keys[t], env_state, to_bounds(space, action), env_params)
        batch = Batch(*[rows.at[t].set(row) for rows, row in zip(batch, (obs, action, reward, alive))])
        return t + 1, env_state, next_obs, alive & ~(terminated | truncated), batch
    first = Batch(obs, select_action(params, obs, noise[0]), jnp.zeros(num_envs), jnp.zeros(num_envs, bool))
    carry = 0, env_state, obs, ~first.mask, jax.tree.map(lambda row: jnp.zeros((shape[0], *row.shape), row.dtype), first)
    *_, alive, batch = jax.lax.while_loop(lambda carry: going(carry[3]), vector_step, carry)
    return batch, ~alive


def advantages(args, batch):
    """Discounted returns-to-go less the baseline (T, N), 0 in the padding."""
    reward = jnp.where(batch.mask, batch.reward, 0.0)
    _, returns = jax.lax.scan(lambda later, now: (now + args.gamma * later,) * 2, jnp.zeros_like(reward[0]), reward, reverse=True)
    if args.baseline != "none":
        axis, own = (1, jnp.asarray) if args.baseline == "mean" else (None, partial(jnp.sum, axis=0, keepdims=True))
        others = lambda x: jnp.sum(x, axis=axis, keepdims=True) - own(x)  # over the other episodes; with none, there is no advantage
        returns = jnp.where(batch.mask & (others(batch.mask) > 0), returns - others(returns) / jnp.maximum(others(batch.mask), 1), 0.0)
    return returns if args.no_normalize else returns / (jnp.sqrt(jnp.sum(returns**2) / jnp.sum(batch.mask)) + 1e-8)


def policy_gradient(args, params, batch):
    """-grad J, for an optimiser that descends: of each episode by itself, since sums over all would round as the threads have it."""
    loss = lambda params, episode, advantage: -jnp.sum(advantage * log_prob(params, episode.obs, episode.action))  # 0 in the padding
    each = jax.vmap(jax.grad(loss), in_axes=(None, 1, 1))(params, batch, advantages(args, batch))
    return jax.tree.map(partial(jnp.mean, axis=0), each)


def train_iteration(args, state, _):
    """Collect N episodes, make one Adam step; returns also their returns (N,), NaN where cut short, and lengths (N,)."""
    key, key_collect = jax.random.split(state.key)
    batch, ended = collect(args, state.params, key_collect, args.num_envs)
    updates, opt_state = optax.adam(state.learning_rate).update(policy_gradient(args, state.params, batch), state.opt_state)
    state = state._replace(key=key, params=optax.apply_updates(state.params, updates), opt_state=opt_state)
    return state, (jnp.where(ended, jnp.sum(batch.reward * batch.mask, axis=0), jnp.nan), jnp.sum(batch.mask, axis=0))


def init_state(args, seed, learning_rate):
    """The state in which the run with this seed starts."""
    env, env_params = make(args.env_id)
    key, key_hidden, key_out, *_ = jax.random.split(jax.random.key(seed), 5)  # the last two: evaluate, film
    (inputs,), space, hidden = env.observation_space(env_params).shape, env.action_space(env_params), args.hidden_size
    outputs = space.n if hasattr(space, "n") else space.shape[0]
    params = dict(w0=jax.random.normal(key_hidden, (inputs, hidden)) / math.sqrt(inputs), b0=jnp.zeros(hidden),
                  w1=0.1 * jax.random.normal(key_out, (hidden, outputs)) / math.sqrt(hidden), b1=jnp.zeros(outputs))  # near uniform
    params |= {} if hasattr(space, "n") else dict(log_std=jnp.zeros(outputs))
    return TrainState(key, learning_rate, params, optax.adam(learning_rate).init(params))


def evaluate(args, params, seed):
    """Undiscounted returns (E,) and lengths (E,) of the greedy policy in E fresh episodes."""
    batch, _ = collect(args, params, jax.random.split(jax.random.key(seed), 5)[3], args.eval_episodes, greedy=True)
    return jnp.sum(batch.reward * batch.mask, axis=0), jnp.sum(batch.mask, axis=0)


def over_runs(function, num_devices, **jit_options):
    """Compile `function` of one run for all runs: sharded over the devices, on each of which one follows the other."""
    mesh, runs = jax.make_mesh((num_devices,), ("runs",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P("runs")
    in_turn = partial(jax.lax.map, lambda xs: function(*xs))  # vmapped, all would wait for the longest episode of any
    return jax.jit(jax.shard_map(lambda *xs: in_turn(xs), mesh=mesh, in_specs=runs, out_specs=runs, check_vma=False), **jit_options)


def train(args, say, interrupted):
    """Train every run until all are solved or out of iterations; returns what --save writes, run axis first, and if Ctrl-C cut it short."""
    began = time.perf_counter()
    seed = np.tile(args.seed + np.arange(args.num_seeds, dtype=np.uint32), len(args.learning_rate))
    learning_rate = np.repeat(args.learning_rate, args.num_seeds)
    state = over_runs(partial(init_state, args), args.devices)(seed, learning_rate)
    iterate = partial(jax.lax.scan, partial(train_iteration, args), length=args.log_interval)
    chunk = over_runs(iterate, args.devices, donate_argnums=0).lower(state).compile()
    say(f"compiled in {(start := time.perf_counter()) - began:.1f} s")
    last_returns, timesteps, iterations, ctrl_c = [np.zeros(0)] * len(seed), np.zeros(len(seed), int), 0, np.zeros(1)
    curve, solved_at, params = {}, np.full(len(seed), np.nan), dict.fromkeys(state.params, np.zeros(()))
    while iterations < args.num_iterations and not ctrl_c.any() and (args.no_early_stop or np.isnan(solved_at).any()):
        state, out = jax.block_until_ready(chunk(state))
        (returns, lengths), new, ctrl_c = multihost.process_allgather((out, state.params, np.array([len(interrupted)])), tiled=True)
        iterations, timesteps = iterations + args.log_interval, timesteps + lengths.sum(axis=(1, 2), dtype=int)
        returns = [run[~np.isnan(run)] for run in returns]  # of the episodes that ended, in order
        last_returns = [np.append(last, new)[-100:] for last, new in zip(last_returns, returns)]
        means = curve[timesteps.mean()] = [last.mean() if len(last) else np.nan for last in last_returns]
        params = {name: np.where(np.isnan(solved_at) | args.no_early_stop, new[name].T, params[name].T).T for name in params}
        solved = [len(last) == 100 and mean >= args.solved_at for last, mean in zip(last_returns, means)]
        solved_at = np.where(np.isnan(solved_at) & solved, timesteps, solved_at)
        seconds, steps = time.perf_counter() - start, timesteps.sum()
        say(f"iteration {iterations:>6,}  length {spread(np.mean(lengths[:, -1], axis=1))}  return {spread(means)}  "
            f"step {timesteps.mean():>11,.0f}  {steps / seconds / 1e6:.2f} M steps/s")
        for run, name in [(run, name) for name in params for run in range(len(seed)) if not np.isfinite(params[name][run]).all()]:
            sys.exit(f"iteration {iterations:,}: {name} not finite with seed {seed[run]}, learning rate {learning_rate[run]:g}")
        result = dict(seed=seed, learning_rate=learning_rate, solved_at=solved_at, **params, timesteps=steps,
            curve_timesteps=np.array(list(curve)), curve_return=np.array(list(curve.values())).T,
            seconds_to_compile=start - began, seconds_to_run=seconds, steps_per_second=steps / seconds)
        if args.save and jax.process_index() == 0:
            write_file(args.save, partial(np.savez, args=json.dumps(vars(args)), **result))
    say(f"{steps:,} steps in {seconds:.2f} s after compiling, {steps / seconds / 1e6:.2f} M steps/s")
    return result, ctrl_c.any()


def load(args):
    """Read what --save wrote, and set the arguments that go with it; raises whatever another file leads to."""
    result = dict(np.load(args.evaluate, allow_pickle=False))
    saved, args.runs = json.loads(str(result["args"])), len(result["curve_return"])
    args.hidden_size, args.solved_at = saved["hidden_size"], saved["solved_at"]
    if args.env_id != saved["env_id"]:
        raise ValueError(f"it is for --env-id {saved['env_id']}")
    for name, like in jax.eval_shape(partial(init_state, args), 0, 0.0).params.items():
        result[name] = result[name].reshape(args.runs, *like.shape)
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
    axes.set(title=f"{SCRIPT}, {args.env_id}", xlabel="environment steps per run, mean", ylabel="mean return, 100 episodes")
    axes.legend()
    write_file(args.plot, partial(axes.figure.savefig, dpi=150))


def film(args, params):
    """Draw a greedy episode of the run with these parameters, its first 200 steps at most, with gymnax's visualizer."""
    os.environ |= dict(SDL_VIDEODRIVER="dummy", SDL_AUDIODRIVER="dummy", MPLBACKEND="agg")  # no screen needed
    from gymnax.visualize import Visualizer
    (env, env_params), keys = make(args.env_id), jax.random.split(jax.random.split(jax.random.key(args.seed), 5)[4], 201)
    def one_step(carry, key):
        obs, env_state = carry
        action = to_bounds(env.action_space(env_params), select_action(params, obs, 0.0))
        next_obs, next_state, reward, terminated, truncated, _ = env.step(key, env_state, action, env_params)
        return (next_obs, next_state), (env_state, reward, terminated | truncated)
    _, (states, rewards, done) = jax.lax.scan(one_step, env.reset(keys[0], env_params), keys[1:])
    frames = [jax.tree.map(lambda x: x[t], states) for t in range(np.append(np.flatnonzero(done), len(done) - 1)[0] + 1)]
    (visualizer := Visualizer(env, env_params, frames, np.cumsum(rewards))).fig.set_dpi(50)
    write_file(args.gif, visualizer.animate)


def main(argv=None):
    """Train or load, evaluate, report; exit code 130 after Ctrl-C."""
    args = parse_args(argv)
    interrupted = []  # by Ctrl-C: the chunk under way ends, the report follows; a second Ctrl-C ends the program
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(signal.signal(signal.SIGINT, signal.SIG_DFL)))
    if args.evaluate is not None:  # what goes wrong from here on is due to that file
        sys.excepthook = lambda *error: sys.stderr.write(f"{args.evaluate!r} is not what --save of this script wrote: {error[1]!r}\n")
    say = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True) if jax.process_index() == 0 else lambda text: None
    make(args.env_id)
    device, saved = jax.devices()[0].device_kind, load(args) if args.evaluate is not None else None
    say(f"{SCRIPT}: {args.env_id}, environments: {args.num_envs}, runs: {args.runs}, device: {args.devices} x {device}")
    result, stopped = (saved, False) if saved else train(args, say, interrupted)
    params = {name: result[name] for name in ("w0", "b0", "w1", "b1", "log_std") if name in result}
    greedy = partial(over_runs(partial(evaluate, args), math.gcd(args.devices, args.runs)), params, result["seed"])
    returns, lengths = multihost.process_allgather(greedy(), tiled=True) if args.eval_episodes else np.full((2, args.runs, 1), np.nan)
    table = {name: result[name] for name in ("seed", "learning_rate", "solved_at")} | dict(training_return=result["curve_return"][:, -1],
        eval_mean=returns.mean(1), eval_std=returns.std(1), eval_min=returns.min(1), eval_length=lengths.mean(1))
    for rate in np.unique(table["learning_rate"]):
        of = {name: column[table["learning_rate"] == rate] for name, column in table.items()}
        solved, passed = (f"{np.sum(x)} of {len(x)} runs" for x in (np.isfinite(of["solved_at"]), of["eval_mean"] >= args.solved_at))
        say(f"learning rate {rate:g}: {solved} solved, at step {spread(of['solved_at'], 0)}; training return "
            f"{spread(of['training_return'])}\n  {args.eval_episodes} greedy episodes: mean {spread(of['eval_mean'])}, std "
            f"{spread(of['eval_std'])}, min {spread(of['eval_min'])}; {passed} pass; length {spread(of['eval_length'])}, of the "
            f"time limit {np.mean(of['eval_length']) / TIME_LIMIT[args.env_id]:.2f}")
    if args.plot and jax.process_index() == 0:
        plot(args, result)
    if args.gif and jax.process_index() == 0:
        film(args, {name: value[0] for name, value in params.items()})
    if args.json and jax.process_index() == 0:
        print(json.dumps(dict(script=SCRIPT, env=args.env_id, args=vars(args), device=device, num_devices=args.devices,
            versions=dict(python=sys.version.split()[0], jax=jax.__version__, optax=optax.__version__),
            peak_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            **{name: float(result[name]) for name in ("seconds_to_compile", "seconds_to_run", "timesteps", "steps_per_second")},
            runs=[{name: None if x != x else x for name, x in zip(table, row)} for row in zip(*map(np.ndarray.tolist, table.values()))])))
    sys.exit(130 if interrupted or stopped else 0)


if __name__ == "__main__":
    main()
