"""The race: algorithms of the same name in different code, on CartPole-v1, on CPU cores.

    python tests/benchmark/race.py                             # all programs, in about two hours
    python tests/benchmark/race.py --only ours-ppo rejax-ppo   # two of them, the others as stored
    python tests/benchmark/race.py --agents 2 --fraction 0.1   # a trial with a tenth of each budget

- Settings are those of the authors for this task: of rejax its cartpole.yaml, of CleanRL and
  PureJaxRL the defaults in the files, of ours the recipes ppo.patch (with 40 iterations, as in its
  head) and dqn.patch. The functions `drive_*` contain all changes to the code.
- Programs save weights while they train. Afterwards, `evaluate` plays all of them greedily, from
  the same start states. The seconds include no evaluation.
- Ours, rejax and PureJaxRL divide their agents over one device for each core. CleanRL trains one
  agent in a process, and one process at a time is bound to each core.
- README.md beside this file says what each column means.
"""

import argparse
import os
import re
import runpy
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np

CORES = sorted(os.sched_getaffinity(0))
SEED = 600_000  # of the first agent: no setting of ours was chosen on these seeds
EPISODES = 20  # greedy episodes of each agent at each snapshot
JAX = "jax==0.10.1 jaxlib==0.10.1 optax==0.2.8 flax==0.12.8 numpy==2.3.5"
GYMNAX = f"{JAX} gymnax==0.0.9 distrax==0.1.9 six==1.17.0"
TORCH = f"{JAX} torch==2.13.0 gymnasium==0.29.1 tyro==1.0.17 tensorboard==2.21.0"
PEERS = {  # name on GitHub, commit, folders of it, packages
    "rejax": ("keraJLi/rejax", "d751095", "src configs", f"{GYMNAX} pyyaml==6.0.4"),
    "purejaxrl": ("luchris429/purejaxrl", "31756b1", "purejaxrl", f"{GYMNAX} flashbax==0.1.3"),
    "cleanrl": ("vwxyzjn/cleanrl", "fe8d8a0", "cleanrl cleanrl_utils", TORCH),
}
PROGRAMS = {  # file, activation of the network
    "ours-ppo": ("reinforce_parallel.py", "tanh"),
    "rejax-ppo": ("src/rejax/algos/ppo.py", "tanh"),
    "purejaxrl-ppo": ("purejaxrl/ppo.py", "tanh"),
    "cleanrl-ppo": ("cleanrl/ppo.py", "tanh"),
    "ours-dqn": ("epsilon_decay_td.py", "silu"),
    "rejax-dqn": ("src/rejax/algos/dqn.py", "silu"),
    "purejaxrl-dqn": ("purejaxrl/dqn.py", "relu"),
    "cleanrl-dqn": ("cleanrl/dqn_jax.py", "relu"),
}


# The drivers. Each runs in the environment of its program, and saves K snapshots of R agents:
# weights (K, R, inputs, outputs) and biases (K, R, outputs) of all layers.

NAMES = "w0", "b0", "w1", "b1", "w2", "b2"


def save(args, began, seconds, steps, arrays):
    """Save when training began, seconds and steps (K,), and the arrays of NAMES."""
    arrays = dict(zip(NAMES, arrays, strict=False))  # networks have two or three layers
    np.savez(args.save, starting=began - args.entered, seconds=seconds, steps=steps, **arrays)


def drive_ours(args, algorithm):
    """Run our script after its recipe, with snapshots and without its evaluation."""
    sys.path.insert(0, str(args.folder))
    script = import_module(Path(PROGRAMS[args.drive][0]).stem)
    train_interval = script.train_interval

    def train_and_snapshot(run, state):
        state, metrics = train_interval(run, state)
        return state, metrics | (state.params if algorithm == "ppo" else state.weights)

    printed = []  # When each line was printed. Training begins after the second.
    script.print = lambda *words, **flags: printed.append(time.time())
    script.train_interval = train_and_snapshot
    script.evaluate = lambda run, state: {"greedy_return": np.zeros(1)}
    flags = f"--seed={SEED} --num-seeds={args.agents} --num-intervals=40"
    budget = {"ppo": ("--num-iterations", 40), "dqn": ("--total-timesteps", 200_000)}[algorithm]
    flags += f" {budget[0]}={round(budget[1] * args.fraction)}"
    curves = script.main(flags.split())["curves"]
    arrays = [curves[name] for name in NAMES if name in curves]
    if algorithm == "dqn":  # it divides observations by a scale, which the first layer does here
        arrays[0] /= np.array(script.OBS_SCALE["CartPole-v1"])[:, None]
    save(args, printed[1], curves["seconds"], curves["timesteps"].mean(axis=1), arrays)


def train_over_cores(args, train, find_layers, first_step, interval, idle):
    """Compile and run train(key) for all agents. The first `idle` steps make no update."""
    import jax

    keys = jax.random.split(jax.random.PRNGKey(SEED), args.agents)
    mesh = jax.sharding.Mesh(jax.devices()[: args.agents], "cores")
    axis = jax.sharding.PartitionSpec("cores")
    specs = {"mesh": mesh, "in_specs": axis, "out_specs": axis}
    train = jax.shard_map(jax.vmap(train), **specs, check_vma=False)
    compiled = jax.jit(train).lower(keys).compile()
    began = time.time()
    results = jax.block_until_ready(compiled(keys))
    seconds = time.time() - began
    layers = find_layers(results)
    arrays = [np.swapaxes(layer[x], 0, 1) for layer in layers for x in ("kernel", "bias")]
    steps = first_step + interval * np.arange(len(arrays[0]))
    updating = np.maximum(steps - idle, 0)
    save(args, began, seconds * updating / updating[-1], steps, arrays)


def drive_rejax(args, algorithm):
    """Run rejax. Its evaluation, as often as its authors evaluate, returns the weights."""
    code = args.folder / "rejax" / "code"
    sys.path.insert(0, str(code / "src"))
    import rejax
    import yaml

    def layers(agent, state, key):
        if algorithm == "ppo":
            params = state.actor_ts.params["params"]
            return [*params["features"].values(), params["action_logits"]]
        params = state.q_ts.params["params"]  # what the dueling network adds leaves argmax as it is
        return [*params["MLP_0"].values(), params["Dense_1"]]

    config = yaml.safe_load((code / "configs" / "gymnax" / "cartpole.yaml").read_text())[algorithm]
    config["total_timesteps"] = round(config["total_timesteps"] * args.fraction)
    agent = rejax.get_algo(algorithm).create(**config)
    agent = agent.replace(eval_callback=layers)
    idle, interval = config.get("fill_buffer", 0), config["eval_freq"]
    train_over_cores(args, agent.train, lambda results: results[1], 0, interval, idle)


def run_changed(args, changes, names):
    """Run a copy of the program with each (old, new) text exchanged, and with additional names."""
    path = args.folder / args.drive.split("-")[0] / "code" / PROGRAMS[args.drive][0]
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{path} should have this text once: {old}"
        text = text.replace(old, new)
    Path(path.name).write_text(text)  # in a temporary folder
    sys.path[:0] = [str(path.parent), str(path.parents[1])]
    runpy.run_path(path.name, names, run_name="__main__")


def drive_purejaxrl(args, algorithm):
    """Run PureJaxRL. Its loop is a loop of parts, and a snapshot follows each part."""
    import jax

    # Packages for logging, which is off by default, and for other tasks. They take time to import.
    for name in "wandb navix brax brax.envs brax.envs.wrappers brax.envs.wrappers.training".split():
        sys.modules[name] = MagicMock()
    jax.tree_map = jax.tree.map  # its name in jax 0.10
    # Updates and steps of a part, and the first steps, which make no update.
    updates, interval, idle = (16, 16 * 512, 0) if algorithm == "ppo" else (1000, 10_000, 10_000)

    def parts(update, state, config):
        def part(state, _):
            state, metrics = jax.lax.scan(update, state, length=updates)
            return state, (metrics, [state[0].params["params"][f"Dense_{i}"] for i in range(3)])

        return part, state, None, int(config["NUM_UPDATES"]) // updates

    def train_all(make_train, config):
        config["TOTAL_TIMESTEPS"] *= args.fraction
        config["DEBUG"] = False  # it would print each episode
        train = make_train(config)
        train_over_cores(args, train, lambda x: x["metrics"][1], interval, interval, idle)
        return lambda key: None  # the program calls this

    loop = '_update_step, runner_state, None, config["NUM_UPDATES"]'
    train = "make_train(config)" if algorithm == "ppo" else "jax.vmap(make_train(config))"
    changes = [(loop, "*parts(_update_step, runner_state, config)")]  # the arguments of scan
    changes += [(f"jax.jit({train})", "train_all(make_train, config)")]
    run_changed(args, changes, {"parts": parts, "train_all": train_all})


def drive_cleanrl(args, algorithm):
    """Run CleanRL, which trains one agent. It writes its log for TensorBoard, as by default."""
    began, snapshots = [], []

    def snapshot(step, *arrays):
        snapshots.append((time.time(), step, *(np.array([x]) for x in arrays)))  # of one agent

    begins = "    start_time = time.time()\n"
    if algorithm == "ppo":
        place = "        y_pred, y_true = b_values.cpu().numpy(), b_returns.cpu().numpy()\n"
        condition, step = "iteration % 20 == 0 or iteration == args.num_iterations", "global_step"
        arrays = "(x.detach().numpy().T for x in agent.actor.parameters())"
    else:
        place = "        # TRY NOT TO MODIFY: CRUCIAL step easy to overlook\n"
        condition, step = "global_step % 10_000 == 9_999", "global_step + 1"  # it begins with 0
        arrays = '(x[y] for x in q_state.params["params"].values() for y in ("kernel", "bias"))'
    call = f"        if {condition}:\n            snapshot({step}, *{arrays})\n"
    changes = [(begins, f"{begins}    began.append(time.time())\n"), (place, call + place)]
    sys.argv = f"- --seed {args.seed} --total-timesteps {round(500_000 * args.fraction)}".split()
    run_changed(args, changes, {"began": began, "snapshot": snapshot})
    times, steps, *arrays = (np.stack(x) for x in zip(*snapshots, strict=True))
    save(args, began[0], times - began[0], steps, arrays)


def prepare(args, name):
    """Make what a program needs. Return its Python."""
    from benchmark import patched

    project, algorithm = name.split("-")
    if project == "ours":
        (args.folder / PROGRAMS[name][0]).write_text(patched(PROGRAMS[name][0], algorithm))
        return sys.executable
    repository, commit, folders, packages = PEERS[project]
    folder = args.folder / project
    code, python, ready = folder / "code", folder / "venv" / "bin" / "python", folder / "ready"
    if not ready.exists():
        address = f"https://github.com/{repository}"
        run = subprocess.check_call
        run([sys.executable, "-m", "venv", folder / "venv"])
        run([python, "-m", "pip", "install", "--quiet", *packages.split()])
        run(["git", "clone", "--quiet", "--no-checkout", address, code])
        run(["git", "-C", code, "checkout", "--quiet", commit, "--", *folders.split()])
        ready.touch()
    return python


def command(args, name, python, path, cores=CORES, **changes):
    """Run a driver in a process of its own, bound to these cores. Return its seconds."""
    words = ["taskset", "--cpu-list", ",".join(map(str, cores)), python, Path(__file__).resolve()]
    flags = {"agents": args.agents, "fraction": args.fraction, "folder": args.folder}
    flags |= {"drive": name, "save": path, "seed": SEED, "entered": time.time()} | changes
    words += [f"--{flag}={value}" for flag, value in flags.items()]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    environment["JAX_NUM_CPU_DEVICES"] = str(len(cores))
    if "rejax" in name or "purejaxrl" in name:  # with one thread for each core, XLA can deadlock
        environment["NPROC"] = str(4 * len(cores))
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # compiling is part of the seconds
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.time() - flags["entered"]


def one_process_each(args, name, python):
    """Train each agent in a process of a core. Return their median seconds, and all snapshots."""
    paths = [args.folder / f"{name}-{i}.npz" for i in range(args.agents)]
    alone = []

    def train_on(number, core):
        for i in range(number, len(paths), len(CORES)):
            alone.append(command(args, name, python, paths[i], [core], agents=1, seed=SEED + i))

    with ThreadPoolExecutor(len(CORES)) as pool:
        list(pool.map(train_on, range(len(CORES)), CORES))
    saved = {key: [np.load(path)[key] for path in paths] for key in np.load(paths[0])}
    for key, arrays in saved.items():
        saved[key] = np.concatenate(arrays, 1) if key in NAMES else np.median(arrays, 0)
    return np.median(alone), saved


def measure(args, name, path):
    """Train one agent with a program, then all. Store the snapshots and the seconds."""
    python = prepare(args, name)
    print("+", time.strftime("%H:%M:%S"), name, flush=True)
    began, last = time.time(), args.folder / "last.npz"
    if name.startswith("cleanrl"):
        alone, saved = one_process_each(args, name, python)
    else:
        alone = command(args, name, python, last, agents=1)
        began = time.time()
        command(args, name, python, last)
        saved = dict(np.load(last))
    np.savez(path, alone=alone, together=time.time() - began, **saved)


def evaluate(saved, activation, epsilon=0.0):
    """Mean returns (K, R) of an agent's episodes at each snapshot, with random actions or none."""
    import gymnax
    import jax
    import jax.numpy as jnp

    (env, env_params), function = gymnax.make("CartPole-v1"), getattr(jax.nn, activation)

    def episode_return(layers, key):
        def step(carry, keys):
            output, state, alive = carry  # the output of no layer is the observation
            for i in range(0, len(layers), 2):
                output = (function(output) if i > 0 else output) @ layers[i] + layers[i + 1]
            explore = jax.random.bernoulli(keys[0], epsilon)
            action = jnp.where(explore, jax.random.randint(keys[1], (), 0, 2), jnp.argmax(output))
            obs, state, reward, terminated, truncated, _ = env.step(key, state, action, env_params)
            return (obs, state, alive & ~(terminated | truncated)), jnp.where(alive, reward, 0.0)

        obs, state = env.reset(key, env_params)
        keys = jax.random.split(key, (500, 2))  # the time limit
        _, rewards = jax.lax.scan(step, (obs, state, True), keys)
        return jnp.sum(rewards)

    keys = jax.random.split(jax.random.key(SEED), EPISODES)
    play = jax.jit(jax.vmap(jax.vmap(episode_return, in_axes=(None, 0)), in_axes=(0, None)))
    layers = [saved[name] for name in NAMES if name in saved]
    returns = [play([array[k] for array in layers], keys) for k in range(len(layers[0]))]
    return np.stack(returns).mean(axis=2)


HEAD = "program|starting|until 475|its steps|passed|with 5 % random|training|steps|one agent|all"


def row(name, path):
    """Format the results of a program, in the columns of HEAD."""
    saved = dict(np.load(path))
    seconds, steps = saved["seconds"], saved["steps"]  # (K,)
    returns = evaluate(saved, PROGRAMS[name][1])  # (K, R)
    cells = [f"{saved['starting']:.1f}", "never", "never"]
    reached = np.flatnonzero(np.median(returns, axis=1) >= 475)
    if len(reached):
        cells[1:] = [f"{seconds[reached[0]]:.1f}", f"{steps[reached[0]]:,.0f}"]
    last = {key: saved[key][-1:] for key in NAMES if key in saved}
    for final in returns[-1], evaluate(last, PROGRAMS[name][1], epsilon=0.05)[0]:
        cells.append(f"{np.sum(final >= 475)} of {len(final)}")
    cells += [f"{seconds[-1]:.1f}", f"{steps[-1]:,.0f}", f"{saved['alone']:.1f}"]
    return [f"{name}: `{PROGRAMS[name][0]}`", *cells, f"{saved['together']:.1f}"]


def main():
    """Run the programs and print the table; with --drive, be one of the programs."""
    parser = argparse.ArgumentParser()
    flag = parser.add_argument
    flag("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="NAME")
    flag("--agents", type=int, default=20, help="1, or a multiple of the number of cores")
    flag("--fraction", type=float, default=1.0, help="of the budget of each program, for a trial")
    flag("--folder", type=lambda x: Path(x).resolve(), default=f"{tempfile.gettempdir()}/race")
    for name, kind in ("drive", str), ("save", str), ("seed", int), ("entered", float):
        flag(f"--{name}", type=kind, help=argparse.SUPPRESS)  # only `command` uses them
    args = parser.parse_args()
    if args.drive:
        project, algorithm = args.drive.split("-")
        return globals()[f"drive_{project}"](args, algorithm)
    from benchmark import table

    args.folder.mkdir(parents=True, exist_ok=True)
    paths = {x: args.folder / f"{x}-{args.agents}-{args.fraction}.npz" for x in PROGRAMS}
    for name in args.only:
        measure(args, name, paths[name])
    rows = [row(name, path) for name, path in paths.items() if path.exists()]
    print(table(HEAD.split("|"), rows), flush=True)
    subprocess.check_call(["git", "-C", Path(__file__).parent, "log", "-1", "--format=ours: %h"])
    [model] = set(re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()))
    print(len(CORES), "cores,", model, "jax", version("jax"))


if __name__ == "__main__":
    main()
