"""The race: PPO, PQN and DQN of several libraries, with their authors' settings, on CPU cores.

    python tests/benchmark/race.py --clones FOLDER --python PYTHON --speed
    python tests/benchmark/race.py --clones FOLDER --python PYTHON
    python tests/benchmark/race.py --clones FOLDER --python PYTHON --agents 20
    python tests/benchmark/race.py --clones FOLDER --python PYTHON --fraction 0.01

FOLDER has clones of the peers' repositories, and PYTHON is that of an environment with their
packages: RACE.md has the commands that make both, and says what differs between the programs.

- Programs save their networks while they train. Afterwards, all are evaluated in the same way,
  greedily and with 5 % random actions. The seconds include no evaluation.
- Ours, rejax, PureJaxRL and PureJaxQL divide their agents over one device for each core. CleanRL
  trains one agent in a process, so it is only in the race of one agent.
- The functions `drive_*` contain all changes to the code of others.
"""

import argparse
import ast
import json
import os
import pickle
import re
import runpy
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np

CORES = len(os.sched_getaffinity(0))
RECIPES = Path(__file__).parents[1] / "recipes"
SEED = 600_000  # of the first agent: no setting of ours was chosen on these seeds
EPISODES = 20  # greedy episodes of each agent at each snapshot
SNAPSHOTS = 61  # at most, of a program; the budgets of PureJaxRL and PureJaxQL can be divided by it
ROUNDS = 3  # of one agent, and of measurements of the speed
SPEED_SECONDS = 5  # at least, for each measurement of the speed
BOUNDS = {"CartPole-v1": 475, "Acrobot-v1": -100}  # Gymnasium's reward thresholds
# The tasks for which each program has settings. CleanRL's benchmark/*.sh run the defaults on both.
PROGRAMS = {
    "ppo.py": [*BOUNDS],
    "rejax/ppo.py": [*BOUNDS],
    "purejaxrl/ppo.py": ["CartPole-v1"],
    "cleanrl/ppo.py": [*BOUNDS],
    "pqn.py": [*BOUNDS],
    "rejax/pqn.py": [*BOUNDS],
    "purejaxql/pqn_gymnax.py": [*BOUNDS],
    "cleanrl/pqn.py": [*BOUNDS],
    "dqn.py": [*BOUNDS],
    "rejax/dqn.py": [*BOUNDS],
    "purejaxrl/dqn.py": ["CartPole-v1"],
    "cleanrl/dqn_jax.py": [*BOUNDS],
}


# The drivers. Each runs in a process of its own, in the environment of its program.


def save(args, began, seconds, steps, params, activation=None):
    """Save when training began, seconds (K,), steps (K,) and the parameters (K, R, ...)."""
    saved = {"starting": began - args.entered, "seconds": seconds, "steps": steps}
    saved |= {"params": params, "activation": activation}
    Path(args.save).write_bytes(pickle.dumps(saved))


LEARNED = ["bounds", "params"]  # what our networks act with; PPO has no bounds


def drive_ours(args):
    """Run one of our scripts, with snapshots and without its evaluation."""
    import jax

    sys.path.insert(0, str(RECIPES))
    script = import_module(Path(args.drive).stem)
    train_interval = script.train_interval
    structures = []

    def train_and_snapshot(run, state):
        state, metrics = train_interval(run, state)
        learned = {name: getattr(state, name) for name in state._fields if name in LEARNED}
        structures.append(jax.tree.structure(learned))
        return state, metrics | script.flat({"snapshot": learned})

    printed = []  # When each line was printed. Training begins after the second.
    script.print = lambda *words, **flags: printed.append(time.time())
    script.train_interval = train_and_snapshot
    script.evaluate = lambda run, state: {"greedy_return": np.zeros(1)}
    # Flags for another task stand in the docstring of the script.
    task_flags = [*re.findall(rf"--env-id {args.task}.*", script.__doc__), ""][0].split()
    steps = round(script.parse_args(task_flags).total_timesteps * args.fraction)
    flags = f"--seed {args.seed} --num-seeds {args.agents} --num-intervals 40"
    flags += f" --total-timesteps {steps}"
    curves = script.main([*task_flags, *flags.split()])["curves"]
    leaves = [array for name, array in curves.items() if name.startswith("snapshot.")]
    params = jax.tree.unflatten(structures[0], leaves)
    save(args, printed[1], curves["seconds"], curves["timesteps"][:, 0], params)


def train_over_cores(args, train, find_params, find_steps, activation, idle):
    """Compile and run train(key) for all agents. The first `idle` steps make no update."""
    import jax

    keys = jax.random.split(jax.random.PRNGKey(args.seed), args.agents)
    mesh = jax.sharding.Mesh(jax.devices()[: args.agents], "cores")
    axis = jax.sharding.PartitionSpec("cores")
    specs = {"mesh": mesh, "in_specs": axis, "out_specs": axis}
    train = jax.shard_map(jax.vmap(train), **specs, check_vma=False)
    compiled = jax.jit(train).lower(keys).compile()
    began, times = time.time(), 0
    while times == 0 or (args.speed and time.time() - began < SPEED_SECONDS):
        results = jax.block_until_ready(compiled(keys))
        times += 1
    seconds = (time.time() - began) / times
    params = jax.tree.map(lambda x: np.swapaxes(x, 0, 1), find_params(results))  # (K, R, ...)
    steps = find_steps(np.arange(len(params[0]["w"])))
    updating = np.maximum(steps - idle, 0)
    save(args, began, seconds * updating / updating[-1], steps, params, activation)


def flax_layers(params):
    """Layers of a network of flax, with what follows each: a layer normalization or not."""
    layers = []
    for i in range(3):
        dense, norm = params[f"Dense_{i}"], params.get(f"LayerNorm_{i}", {})
        layers.append({"w": dense["kernel"], "b": dense["bias"], **norm})
    return layers


def drive_rejax(args):
    """Run rejax. Its evaluation, as often as its authors evaluate, returns the network."""
    algorithm = Path(args.drive).stem
    sys.path.insert(0, str(args.clones / "rejax" / "src"))
    import jax.numpy as jnp
    import rejax
    import yaml

    def network(agent, state, key):
        if algorithm == "ppo":
            params = state.actor_ts.params["params"]
            params = params["features"] | {"Dense_2": params["action_logits"]}
        else:
            params = state.q_ts.params["params"]
        if algorithm == "dqn":  # what the dueling network adds leaves argmax as it is
            params = params["MLP_0"] | {"Dense_2": params["Dense_1"]}
        first, *others = flax_layers(params)
        if agent.normalize_observations:  # the first layer does it here
            scale = 1 / jnp.sqrt(state.obs_rms_state.var + 1e-8)
            shift = -state.obs_rms_state.mean * scale
            first |= {"w": scale[:, None] * first["w"], "b": first["b"] + shift @ first["w"]}
        return [first, *others]

    name = args.task.partition("-")[0].lower()
    path = args.clones / "rejax" / "configs" / "gymnax" / f"{name}.yaml"
    config = yaml.safe_load(path.read_text())[algorithm]
    config["total_timesteps"] = round(config["total_timesteps"] * args.fraction)
    if args.speed:
        config["eval_freq"] = config["total_timesteps"]
        if algorithm == "dqn":
            config["fill_buffer"] = 0
    activation = config.get("agent_kwargs", {"activation": "relu"})["activation"]
    agent = rejax.get_algo(algorithm).create(**config)
    agent = agent.replace(eval_callback=network)
    iteration = config["num_envs"] * config.get("num_steps", 1)
    interval = -(-config["eval_freq"] // iteration) * iteration  # rejax rounds up
    idle = config.get("fill_buffer", 0)
    find_params, find_steps = (lambda results: results[1]), (lambda k: interval * k)
    train_over_cores(args, agent.train, find_params, find_steps, activation, idle)


def run_changed(args, changes, names, run_name):
    """Run a copy of the program with each (old, new) text exchanged, and with additional names."""
    project, file = args.drive.split("/")
    path = args.clones / project / project / file
    text = path.read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{path} should have this text once: {old}"
        text = text.replace(old, new)
    Path(file).write_text(text)  # in a temporary folder
    sys.path[:0] = [str(path.parent), str(path.parents[1])]
    return runpy.run_path(file, names, run_name)


def drive_purejax(args):
    """Run PureJaxRL or PureJaxQL. Its loop is a loop of parts, and a snapshot follows each part."""
    import jax
    import yaml

    # Packages for flags, logging, files and other tasks. Training does not need them.
    names = "wandb navix brax brax.envs brax.envs.wrappers brax.envs.wrappers.training"
    for name in f"{names} hydra omegaconf safetensors safetensors.flax".split():
        sys.modules[name] = MagicMock()
    jax.tree_map = jax.tree.map  # its name in jax 0.10

    def parts(update, state, config):
        updates = int(config["NUM_UPDATES"])
        number = next(k for k in range(SNAPSHOTS, 0, -1) if updates % k == 0)
        config["PART"] = updates // number

        def part(state, _):
            state, _ = jax.lax.scan(update, state, length=config["PART"])
            return state, state[0].params

        return part, state, None, number

    loop = '_update_step, runner_state, None, config["NUM_UPDATES"]'  # the arguments of scan
    changes = [(loop, "*parts(_update_step, runner_state, config)")]
    program = run_changed(args, changes, {"parts": parts}, "changed")
    if args.drive.startswith("purejaxql"):
        path = args.clones / "purejaxql" / "purejaxql" / "config" / "alg" / "pqn_cartpole.yaml"
        config = yaml.safe_load(path.read_text()) | {"WANDB_MODE": "disabled"}
        config["TEST_DURING_TRAINING"] = False
        config["TOTAL_TIMESTEPS_DECAY"] = float(config["TOTAL_TIMESTEPS_DECAY"]) * args.fraction
    else:
        text = Path(Path(args.drive).name).read_text()
        config = ast.literal_eval(re.search(r"config = (\{\n.*?\n    +\})", text, re.S)[1])
        config["DEBUG"] = False  # it would print each episode
    config["ENV_NAME"] = args.task
    config["TOTAL_TIMESTEPS"] = float(config["TOTAL_TIMESTEPS"]) * args.fraction
    if args.speed and "LEARNING_STARTS" in config:
        config["LEARNING_STARTS"] = 0
    train = program["make_train"](config)

    def find_params(results):
        params = results["metrics"]
        return flax_layers(params.get("params", params))

    def find_steps(k):  # known only after compiling
        return (k + 1) * config["PART"] * config["NUM_ENVS"] * config.get("NUM_STEPS", 1)

    idle = config.get("LEARNING_STARTS", 0)
    activation = "tanh" if args.drive == "purejaxrl/ppo.py" else "relu"
    train_over_cores(args, train, find_params, find_steps, activation, idle)


def torch_layers(network):
    """Layers of a network of torch, with what follows each: a layer normalization or not."""
    layers = []
    for module in network:
        arrays = [x.detach().numpy().copy() for x in module.parameters()]
        if type(module).__name__ == "Linear":
            layers.append({"w": arrays[0].T, "b": arrays[1]})
        if type(module).__name__ == "LayerNorm":
            layers[-1] |= {"scale": arrays[0], "bias": arrays[1]}
    return layers


def drive_cleanrl(args):
    """Run CleanRL, which trains one agent. It writes its log for TensorBoard, as by default."""
    np.float_ = np.float64  # its name in NumPy 2, for Gymnasium's Acrobot-v1
    began, times, steps, networks = [], [], [], []

    def snapshot(step, network):
        times.append(time.time())
        steps.append(step)
        networks.append(network)

    # The line before which a snapshot is taken, when, of which step, and of what.
    if args.drive == "cleanrl/dqn_jax.py":
        place = "        # TRY NOT TO MODIFY: CRUCIAL step easy to overlook\n"
        condition = "(global_step + 1) % (args.total_timesteps // 50) == 0"
        call = 'global_step + 1, flax_layers(q_state.params["params"])'
    else:
        each = f"max(args.num_iterations // {SNAPSHOTS}, 1)"
        condition = f"iteration % {each} == 0 or iteration == args.num_iterations"
        network = {"ppo.py": "agent.actor", "pqn.py": "q_network.network"}[Path(args.drive).name]
        call = f"global_step, torch_layers({network})"
        place = '        print("SPS:", int(global_step / (time.time() - start_time)))\n'
    begins = "    start_time = time.time()\n"
    changes = [(place, f"        if {condition}:\n            snapshot({call})\n{place}")]
    changes += [(begins, f"{begins}    began.append(time.time())\n")]
    total = round(500_000 * args.fraction)
    sys.argv = f"- --seed {args.seed} --env-id {args.task} --total-timesteps {total}".split()
    names = {"began": began, "snapshot": snapshot}
    names |= {"flax_layers": flax_layers, "torch_layers": torch_layers}
    run_changed(args, changes, names, "__main__")
    import jax

    params = jax.tree.map(lambda *arrays: np.stack(arrays)[:, None], *networks)  # (K, 1, ...)
    activation = "tanh" if args.drive == "cleanrl/ppo.py" else "relu"
    save(args, began[0], np.array(times) - began[0], np.array(steps), params, activation)


DRIVERS = {
    "rejax": drive_rejax,
    "purejaxrl": drive_purejax,
    "purejaxql": drive_purejax,
    "cleanrl": drive_cleanrl,
}


# The measurements.


def run(args, path, **flags):
    """Run a driver in a process of its own. Return what it saves."""
    began = time.time()
    flags = {"fraction": args.fraction, "speed": args.speed, "entered": began} | flags
    flags |= {"clones": str(args.clones), "save": str(path)}
    python = args.python if "/" in flags["drive"] else sys.executable
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}
    environment["JAX_NUM_CPU_DEVICES"] = str(CORES)
    if flags["drive"].startswith(("rejax", "purejax")):
        environment["NPROC"] = str(4 * CORES)  # with one thread for each core, XLA can deadlock
    if flags["drive"].startswith("cleanrl"):
        environment["OMP_NUM_THREADS"] = "1"  # as in its own benchmark
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # compiling is part of the seconds
    words = [python, Path(__file__).resolve(), "--drive", json.dumps(flags)]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
    return pickle.loads(path.read_bytes()) | {"whole": time.time() - began}


def measure(args, path, program, task, agents):
    """Train one agent ROUNDS times, with other seeds, or many agents once. Store the results."""
    print("+", time.strftime("%H:%M:%S"), program, task, agents, flush=True)
    flags = {"drive": program, "task": task, "agents": agents}
    last = args.folder / "last.pkl"
    if agents == 1:
        results = [run(args, last, **flags, seed=SEED + i) for i in range(ROUNDS)]
    else:
        results = [run(args, last, **flags, seed=SEED)]
    path.write_bytes(pickle.dumps(results))


def player_of(program, task, activation):
    """Return a function of parameters (R, ...) and epsilon: the mean returns (R,) of episodes."""
    import jax
    import jax.numpy as jnp
    from benchmark import make_player, policy_of

    def peers_action(layers, obs):
        *hidden, output = layers
        x = obs
        for layer in hidden:
            x = x @ layer["w"] + layer["b"]
            if "scale" in layer:  # of a layer normalization
                x = (x - jnp.mean(x)) / jnp.sqrt(jnp.var(x) + in_root)
                x = x * layer["scale"] + layer["bias"]
            x = getattr(jax.nn, activation)(x)
        return jnp.argmax(x @ output["w"] + output["b"])

    in_root = 1e-5 if program.startswith("cleanrl") else 1e-6  # of torch, and of flax
    return make_player(peers_action if "/" in program else policy_of(program), task, EPISODES)


def spread(values, form):
    """Text of a number, or of the median of several, with the lowest and the highest."""
    words = [f"{x:{form}}" if np.isfinite(x) else "never" for x in np.sort(values)]
    return (
        words[0]
        if len(set(words)) == 1
        else f"{words[len(words) // 2]} ({words[0]} to {words[-1]})"
    )


def row(program, task, results):
    """Format the results of a program, in the columns of HEAD."""
    import jax

    play = player_of(program, task, results[0]["activation"])
    until, its_steps, passed, with_random = [], [], [], []
    for result in results:
        networks = [
            jax.tree.map(itemgetter(k), result["params"]) for k in range(len(result["steps"]))
        ]
        returns = np.stack([play(network, 0.0) for network in networks])  # (K, R)
        reached = np.flatnonzero(np.median(returns, axis=1) >= BOUNDS[task])
        until.append(result["seconds"][reached[0]] if len(reached) else np.inf)
        its_steps.append(result["steps"][reached[0]] if len(reached) else np.inf)
        passed += list(returns[-1] >= BOUNDS[task])
        with_random += list(play(networks[-1], 0.05) >= BOUNDS[task])
    return [
        f"`{program}`",
        spread([result["starting"] for result in results], ".1f"),
        spread(until, ".1f"),
        spread(its_steps, ",.0f"),
        f"{sum(passed)} of {len(passed)}",
        f"{sum(with_random)} of {len(with_random)}",
        spread([result["seconds"][-1] for result in results], ".1f"),
        f"{results[0]['steps'][-1]:,.0f}",
        spread([result["whole"] for result in results], ".1f"),
    ]


HEAD = "program|starting|until it passes|its steps|passed|with 5 % random|training|steps|whole"


def race(args):
    """Train with all programs. Return the tables, also of what is stored from earlier commands."""
    from benchmark import table

    tables = []
    agents = args.agents
    for task in args.tasks:
        paths = {}
        for program in PROGRAMS:
            name = f"{program}-{task}-{agents}-{args.fraction}.pkl".replace("/", "-")
            paths[program] = args.folder / name
            if program in args.only and task in PROGRAMS[program]:
                measure(args, paths[program], program, task, agents)
        rows = [
            row(program, task, pickle.loads(path.read_bytes()))
            for program, path in paths.items()
            if path.exists()
        ]
        number = f"one agent, {ROUNDS} times" if agents == 1 else f"{agents} agents, once"
        tables.append(f"{task}, {number}:\n\n{table(HEAD.split('|'), rows)}")
    return "\n".join(tables)


def speed(args):
    """Return a table of the steps per second of many agents, with the programs in turn."""
    from benchmark import table

    agents = max(args.agents, 20)
    speeds = {program: [] for program in args.only}
    for program in args.only * ROUNDS:
        fraction = 0.1 if "/" in program else 0.2  # peers repeat theirs for SPEED_SECONDS
        flags = {"drive": program, "task": "CartPole-v1", "agents": agents, "seed": SEED}
        result = run(args, args.folder / "last.pkl", **flags | {"fraction": fraction})
        speeds[program].append(agents * result["steps"][-1] / result["seconds"][-1])
        print("+", time.strftime("%H:%M:%S"), program, f"{speeds[program][-1]:,.0f}", flush=True)
    rows = [[f"`{program}`", spread(values, ",.0f")] for program, values in speeds.items()]
    return table(["program", f"steps per second of {agents} agents in all"], rows)


def main():
    """Run the programs, and print and write the tables; with --drive, be one of the programs."""
    parser = argparse.ArgumentParser()
    flag = parser.add_argument
    path = {"type": lambda x: Path(x).absolute(), "metavar": "PATH"}
    # A table is of one commit: results of another one are not taken.
    git = ["git", "-C", Path(__file__).parent, "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, stdout=subprocess.PIPE, text=True).stdout.strip()
    flag("--clones", **path, help="has cleanrl, purejaxrl, purejaxql and rejax")
    flag("--python", **path, help="of the environment with the packages of the peers")
    flag("--only", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="PROGRAM")
    flag("--tasks", nargs="+", choices=BOUNDS, default=["CartPole-v1"], metavar="TASK")
    flag("--agents", type=int, default=1, help="1, or a multiple of the cores")
    flag("--fraction", type=float, default=1.0, help="of the steps of each program, for a trial")
    flag("--speed", action="store_true", help="measure only the steps per second of many agents")
    flag("--folder", **path, default=f"{tempfile.gettempdir()}/race-{commit}", help="for results")
    flag("--drive", type=json.loads, help=argparse.SUPPRESS)  # only `run` uses it
    args = parser.parse_args()
    if args.drive:
        args = SimpleNamespace(**args.drive)
        args.clones = Path(args.clones)
        project = args.drive.partition("/")[0]
        return DRIVERS.get(project, drive_ours)(args)
    from benchmark import write

    if args.speed or args.agents > 1:
        args.only = [program for program in args.only if not program.startswith("cleanrl")]
    args.folder.mkdir(parents=True, exist_ok=True)
    text = speed(args) if args.speed else race(args)
    print(text)
    if args.fraction == 1:
        write("speed" if args.speed else "race" if args.agents == 1 else "race_of_many", text)


if __name__ == "__main__":
    main()
