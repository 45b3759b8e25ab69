"""Measure what README.md and tests/RESULTS.md say.

    python tests/benchmark.py seconds race   # or other sections

The sections are `learning`, `ablations`, `padding`, `tasks`, `seconds` and `race`. On two cores,
`tasks` takes about fifty minutes, and the others less than half an hour each. A section draws its
pictures, and replaces its part of tests/RESULTS.md, from a mark to the line that says when it was
measured. What stands around it is written by hand: read it again after a section has run.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / ".pictures"
RECIPES = ROOT / "tests" / "recipes"
RESULTS = ROOT / "tests" / "RESULTS.md"
PARALLEL, REPLAY, DECAY = TRIO = ["parallel_td.py", "replay_td.py", "epsilon_decay_td.py"]
GRID, REINFORCE, CAR = "gridworld_qlearning.py", "reinforce_parallel.py", "mountaincar_env.py"
CARTPOLE = [*TRIO, REINFORCE]
SCRIPTS = [GRID, *CARTPOLE, CAR]
# No file of this repository had named these seeds, nor those from 400000 on, before the runs that
# are reported.
FRESH = "--seed 271000"
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # the seconds of a command include compiling


class Result(NamedTuple):
    """What a command printed and saved, and when."""

    seconds: float  # from the start of the command to its end
    lines: list  # that were printed
    times: list  # seconds from the start of the command to each line
    saved: dict  # arrays, by name


def run(script, flags="", text=None, save=True):
    """Run a copy of a script, or another text under its name."""
    print("+", time.strftime("%H:%M:%S"), script, flags, "(changed)" if text else "", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path, saved = Path(folder) / script, Path(folder) / "saved.npz"
        path.write_text(text or (ROOT / script).read_text())
        command = [sys.executable, script, *flags.split()]
        if save:
            command += ["--save", saved.name]
        lines, times = [], []
        began = time.perf_counter()
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout:
                times.append(time.perf_counter() - began)
                lines.append(line.rstrip())
        seconds = time.perf_counter() - began
        if process.returncode != 0:
            sys.exit(f"{script} {flags} failed")
        return Result(seconds, lines, times, dict(np.load(saved)) if save else {})


def patched(script, *recipes):
    """Return the text of a script after recipes of tests/recipes. One may be that of its twin."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / script
        copy.write_text((ROOT / script).read_text())
        for recipe in recipes:
            command = ["patch", "--fuzz=0", copy, RECIPES / f"{recipe}.patch"]
            process = subprocess.run(command, capture_output=True, text=True)
            if process.returncode != 0:
                sys.exit(f"{recipe}.patch no longer applies to {script}:\n{process.stdout}")
        return copy.read_text()


def replaced(script, old, new):
    """Return the text of a script in which `new` takes the place of `old`."""
    text = (ROOT / script).read_text()
    if text.count(old) != 1:
        sys.exit(f"{script} should have this text once, but has it {text.count(old)} times:\n{old}")
    return text.replace(old, new)


def table(head, rows):
    """Format rows as a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def mean(values, digits=1):
    """Format a mean, and half of its 95 % interval."""
    half = 1.96 * np.std(values) / len(values) ** 0.5
    return f"{np.mean(values):.{digits}f} ± {half:.{digits}f}"


def greedy_means(result):
    """Mean greedy return of each run (R,)."""
    return result.saved["learned.greedy_return"].mean(axis=1)


def first_at_475(result):
    """Environment steps of each run (R,) to its first line with a training return of 475."""
    reached = result.saved["curves.returns"] >= 475  # (K, R)
    return np.where(reached, result.saved["curves.timesteps"], np.inf).min(axis=0)


def last_returns(result):
    """Training return of each run (R,): the mean of its last three lines."""
    return np.nanmean(result.saved["curves.returns"][-3:], axis=0)


CARTPOLE_HEAD = ["passed", "worst run", "greedy return", "first at 475", "training return"]


def cartpole_cells(result):
    """Format the columns of CARTPOLE_HEAD."""
    greedy, first = greedy_means(result), np.median(first_at_475(result))
    return [
        f"{np.sum(greedy >= 475):,} of {len(greedy):,}",
        f"{greedy.min():.0f}",
        mean(greedy),
        "never" if np.isinf(first) else f"{first / 1e3:.0f}k",
        mean(last_returns(result), 0),
    ]


def dots(axes, rows):
    """Draw a dot for each run, and a line at their mean, for each (label, returns)."""
    for i, (_, values) in enumerate(rows):
        spread = np.linspace(-0.3, 0.3, len(values))  # so that all dots are seen
        axes.plot(np.sort(values), -i + spread, ".", markersize=4, alpha=0.6)
        axes.plot([values.mean()] * 2, [-i - 0.4, -i + 0.4], color="black", linewidth=1)
    axes.set_yticks(range(0, -len(rows), -1), [label for label, _ in rows])
    axes.set_xlabel("greedy return")
    axes.grid(axis="x", alpha=0.3)


# The sections. Each returns its part of RESULTS.md.


def learning():
    """All learners on fresh seeds, and replay_td.py with smaller epsilons.

    The mean greedy return of each seed is written to tests/learning.npz.
    """
    rows, per_seed = [], {}
    for script, flags, num_seeds in [
        (PARALLEL, "", 4000),
        (REPLAY, "--epsilon 0.05", 200),
        (REPLAY, "--epsilon 0.1", 200),
        (REPLAY, "", 4000),
        (DECAY, "", 4000),
        (REINFORCE, "", 400),
    ]:
        # At most 400 runs at a time: the buffers of many more would not fit into 24 GB.
        size, first_seeds = min(num_seeds, 400), range(400_000, 400_000 + num_seeds, 400)
        commands = [f"{flags} --num-seeds {size} --seed {seed}" for seed in first_seeds]
        result = joined([run(script, command) for command in commands])
        name = f"{script} {flags}".strip()
        per_seed[name] = greedy_means(result).astype(np.float32)
        rows.append([f"`{name}`", *cartpole_cells(result)])
    np.savez_compressed(ROOT / "tests" / "learning.npz", **per_seed)
    grid = run(GRID, f"--num-seeds 1000 {FRESH}")
    arrive = np.sum(grid.saved["learned.greedy_steps"] == 18)
    error = np.abs(grid.saved["learned.start_value"] - 0.9**17).max()
    text = f"`{GRID}`: {arrive} of 1,000 agents find a shortest path. The largest error of the"
    return f"{table(['command', *CARTPOLE_HEAD], rows)}\n{text} value of the start is {error:.0e}."


def joined(results):
    """Join the runs of several commands."""
    greedy = np.concatenate([result.saved["learned.greedy_return"] for result in results])
    curves = "curves.returns", "curves.timesteps"
    saved = {name: np.concatenate([r.saved[name] for r in results], axis=1) for name in curves}
    return results[0]._replace(saved={"learned.greedy_return": greedy, **saved})


def ablations():
    """Each learner with one change."""
    flags = f"--num-seeds 40 {FRESH}"
    errors = "    errors = targets - values\n"
    own_targets = "    targets = jax.vmap(partial(td_target, run, centers, weights))(batch)\n"
    through_target = replaced(PARALLEL, errors, own_targets + errors)
    ended = 'terminated=info["returned_episode"]'  # terminated or truncated
    limit_is_an_end = replaced(PARALLEL, "terminated=terminated", ended)
    schedule = "optax.linear_schedule(run.learning_rate, 0.0, run.num_updates)"
    constant_rate = replaced(PARALLEL, schedule, "run.learning_rate")
    update = "state._replace(weights=weights, target_weights=target_weights, opt_state=opt_state)"
    wait = f"jax.tree.map(partial(jnp.where, state.timesteps > 1000), {update}, state)"
    warm_up = replaced(REPLAY, update, wait)
    double = patched(REPLAY, "double_q_learning")
    network = patched(DECAY, "dqn")
    expected_sarsa = patched(GRID, "expected_sarsa")
    unused = "--num-seeds 40 --seed 354000"  # nothing was chosen on them
    visible = [
        (PARALLEL, run(PARALLEL, flags)),
        ("gradient through the target", run(PARALLEL, flags, through_target)),
        ("a time limit taken for an end", run(PARALLEL, flags, limit_is_an_end)),
        ("constant learning rate", run(PARALLEL, flags, constant_rate)),
        (REPLAY, run(REPLAY, flags)),
        ("no averaged target: --tau 1", run(REPLAY, f"{flags} --tau 1")),
        ("a small buffer: --buffer-size 1000", run(REPLAY, f"{flags} --buffer-size 1000")),
        (DECAY, run(DECAY, flags)),
        ("a network: dqn.patch", run(DECAY, unused, network)),
    ]
    others = [
        ("1,000 steps before the first update", run(REPLAY, flags, warm_up)),
        ("double_q_learning.patch", run(REPLAY, flags, double)),
    ]
    figure = Figure(figsize=(8, 3.8), layout="constrained", dpi=120)
    axes = figure.subplots()
    dots(axes, [(what, greedy_means(result)) for what, result in visible])
    axes.axvline(475, color="gray", linestyle=":")
    figure.savefig(PICTURES / "ablations.png")
    rows = [[what, *cartpole_cells(result)] for what, result in visible]
    rest = [f"{cartpole_cells(result)[0]} runs pass with {what}" for what, result in others]
    unseen = f"Other changes of `{REPLAY}`: {'; '.join(rest)}."

    grid = []
    for what, text in ("Q-learning", None), ("expected_sarsa.patch", expected_sarsa):
        saved = run(GRID, "--epsilon 0.3 --num-seeds 20", text).saved
        start = saved["learned.start_value"]
        steps = saved["curves.episode_steps"][-1] / saved["curves.episodes"][-1]
        grid.append(f"{what} {mean(start, 4)} and {mean(steps, 2)}")
    head = f"`{GRID} --epsilon 0.3`, value of the start and steps of a training episode"
    return f"{table(['change', *CARTPOLE_HEAD], rows)}\n{unseen}\n{head}: {'; '.join(grid)}."


CONTINUOUS = (
    "--env-id MountainCarContinuous-v0"
    " --num-envs 64 --num-iterations 200 --learning-rate 0.005 --gamma 1"
)


def padding():
    """Padding and truncation on three tasks."""
    commands = ["--env-id CartPole-v1", CONTINUOUS, "--env-id FourRooms-misc"]
    figure = Figure(figsize=(10, 2.2), layout="constrained", dpi=120)
    rows = []
    for axes, flags in zip(figure.subplots(1, 3), commands, strict=True):
        fresh = f"{flags} --num-seeds 40 {FRESH}"
        syncs = "padding", "truncation"
        returns = [greedy_means(run(REINFORCE, f"{fresh} --sync {sync}")) for sync in syncs]
        dots(axes, list(zip(syncs, returns, strict=True)))
        axes.set(title=flags.split()[1])
        rows.append([f"`{REINFORCE} {flags}`", *(f"{mean(x, 2)} ({x.min():.2f})" for x in returns)])
    figure.savefig(PICTURES / "padding.png")
    return table(["command", "padding: mean (worst)", "truncation"], rows)


# Other tasks: command, and a bound that a good run reaches.
TD_SIZE = "--num-centers 1000 --total-timesteps 5e5"
ACROBOT = f"--env-id Acrobot-v1 {TD_SIZE}"
ACROBOT_EPISODES = "--env-id Acrobot-v1 --num-envs 256 --num-iterations 50 --learning-rate 0.03"
MOUNTAIN = f"--env-id MountainCar-v0 {TD_SIZE} --learning-rate 0.01 --sigma 0.15"
TASKS = [
    (PARALLEL, ACROBOT, -200),
    (REPLAY, f"{ACROBOT} --learning-rate 0.06 --tau 0.01", -200),
    (DECAY, f"{ACROBOT} --learning-rate 0.06 --end-e 0.1 --buffer-size 1e5", -200),
    (REINFORCE, ACROBOT_EPISODES, -200),
    (REPLAY, f"{MOUNTAIN} --tau 0.01", -125),
    (DECAY, f"{MOUNTAIN} --end-e 0.1 --buffer-size 1e5", -125),
    (REINFORCE, CONTINUOUS, 75),
    (REINFORCE, "--env-id Pendulum-v1 --num-envs 128 --num-iterations 500", -260),
]


def tasks():
    """The commands for other tasks, on 100 fresh seeds."""
    rows = []
    for script, flags, bound in TASKS:
        fresh = "--seed 352000" if flags == CONTINUOUS else FRESH
        result = run(script, f"{flags} --num-seeds 100 {fresh}")
        greedy = greedy_means(result)
        reached = f"{np.sum(greedy >= bound)} of 100 ({bound})"
        cells = mean(greedy), f"{greedy.min():.1f}", reached, f"{result.seconds:.0f}"
        rows.append([f"`python {script} {flags}`", *cells])
    head = ["command", "mean", "worst run", "reach the bound", "seconds of 100 runs"]
    return table(head, rows)


def seconds():
    """Whole commands, with the scripts in turn: medians of five, and of three with 20 seeds."""
    one = np.median([[seconds_of(script) for script in SCRIPTS] for _ in range(5)], axis=0)
    many = [[seconds_of(script, "--num-seeds 20") for script in CARTPOLE] for _ in range(3)]
    with_20_seeds = dict(zip(CARTPOLE, np.median(many, axis=0)[:, 0], strict=True))
    words = []
    for script, (whole, compiling) in zip(SCRIPTS, one, strict=True):
        words.append(f"`{script}` {whole:.1f} ({compiling:.1f})")
        if script in CARTPOLE:
            words[-1] += f", with 20 seeds {with_20_seeds[script]:.1f}"
    return f"Seconds of a command (of these, compiling): {'; '.join(words)}."


def seconds_of(script, flags=""):
    """Return the seconds of a whole command, and those of compiling."""
    result = run(script, flags, save=False)
    [compiling] = re.findall(r"compiled in ([\d.]+) s", result.lines[0])
    return result.seconds, float(compiling)


CLEANRL = "https://github.com/vwxyzjn/cleanrl"
DQN = "dqn.patch"  # of epsilon_decay_td.py
OURS = [*CARTPOLE, DQN]
PEERS = {"ppo": "rejax PPO", "pqn": "rejax PQN", "dqn": "rejax DQN", CLEANRL: "CleanRL PQN"}
LEARNS = {
    PARALLEL: "500 weights for each action",
    REPLAY: "500 weights for each action",
    DECAY: "500 weights for each action",
    REINFORCE: "a network of one layer",
    DQN: "a network of two layers",
    "ppo": "two networks of two layers",
    "pqn": "a network of two layers",
    "dqn": "a network of two layers",
    CLEANRL: "a network of two layers",
}


class Curve(NamedTuple):
    """What the agents of a program learn, and when."""

    seconds: np.ndarray  # (K,) since the command was entered
    steps: np.ndarray  # (K,) of each agent
    returns: np.ndarray  # (K, R) greedy returns
    alone: float  # seconds until a command with one agent has trained it


def race():
    """The first figure of README.md: greedy returns of twenty agents, over seconds of waiting.

    To evaluate while agents train takes time. So the seconds are those of programs that do not, and
    the returns are those of the same programs with evaluations. rejax prints nothing while it
    trains: its seconds are taken to be proportional to its steps. CleanRL trains one agent: three
    are trained one after the other, and the seconds are those of one.
    """
    with tempfile.TemporaryDirectory() as folder:
        # All that must be downloaded, before anything is measured.
        rejax = "rejax==0.1.3", "gymnax==0.0.9", "six", f"jax=={version('jax')}"
        rejax = peer_environment(Path(folder) / "rejax", *rejax)
        pqn = cleanrl_program(Path(folder) / "cleanrl")
        curves = {**our_curves(), **rejax_curves(rejax), CLEANRL: cleanrl_curve(pqn, num_agents=3)}
    draw_race(curves)
    head = "program", "what each agent learns", "seconds", "steps", "passed", "one agent", "all"
    return table(head, [race_row(name, curve) for name, curve in curves.items()])


def our_curves():
    """Train our learners. Return {name: Curve}, with medians of the seconds of three commands."""
    programs = {script: (script, None) for script in CARTPOLE}
    programs[DQN] = DECAY, patched(DECAY, "dqn")
    many = f"--num-seeds 20 {FRESH}"
    rounds, alone = [], []
    for _ in range(3):
        rounds.append({name: run(script, many, text) for name, (script, text) in programs.items()})
        # The last line is a report; the one before it says that training has ended.
        alone.append([run(script, FRESH, text).times[-2] for script, text in programs.values()])
    curves = {}
    for (name, (script, text)), seconds in zip(programs.items(), np.median(alone, 0), strict=True):
        first = rounds[0][name]
        steps = np.append(0, first.saved["curves.timesteps"].mean(axis=1))
        # Before the progress lines come two others, of which the second says that training begins.
        times = np.median([results[name].times[1 : 1 + len(steps)] for results in rounds], axis=0)
        returns = greedy_curve(name, script, text, f"{many} --eval-episodes 100", first)
        curves[name] = Curve(times, steps, returns, seconds)
    return curves


def rejax_curves(python):
    """Train the learners of rejax, and return the same of them."""
    curves = {}
    for name in ("ppo", "pqn", "dqn"):
        # The times of two lines: it has compiled, it has trained.
        (_, alone), _ = peer(python, name, 1)
        (begin, end), _ = peer(python, name, 20)
        with tempfile.TemporaryDirectory() as folder:
            _, saved = peer(python, name, 20, Path(folder) / "peer.npz")
        steps = saved["steps"]
        times = begin + (end - begin) * steps / steps[-1]
        curves[name] = Curve(times, steps, saved["returns"], alone)
    return curves


def race_row(name, curve):
    """Format when the median agent is first at 475, how many end there, and what it costs."""
    reached = np.flatnonzero(np.median(curve.returns, axis=1) >= 475)
    cells = ["never", "never"]
    if len(reached):
        cells = [f"{curve.seconds[reached[0]]:.1f}", f"{curve.steps[reached[0]]:,.0f}"]
    passed = f"{np.sum(curve.returns[-1] >= 475)} of {curve.returns.shape[1]}"
    of_all = "" if name == CLEANRL else f"{curve.seconds[-1]:.1f}"  # it trains one by one
    label = PEERS.get(name, f"`{name}`")
    return [label, LEARNS[name], *cells, passed, f"{curve.alone:.1f}", of_all]


def peer_environment(folder, *packages):
    """Make a virtual environment with these packages, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = Path(folder) / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def peer(python, name, num_agents, path=None):
    """Train agents of rejax. Return when each line came, and what was saved."""
    print(
        "+",
        time.strftime("%H:%M:%S"),
        PEERS[name],
        num_agents,
        "evaluated" if path else "",
        flush=True,
    )
    command = [python, ROOT / "tests" / "rejax_peer.py", name, str(num_agents)]
    times, began = [], time.perf_counter()
    command += ["--save", path] if path else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in process.stdout:
            times.append(time.perf_counter() - began)
    return times, dict(np.load(path)) if path else {}


def cleanrl_program(folder):
    """Make what runs CleanRL's pqn.py. Return the beginning of its command."""
    packages = "torch==2.13.0", "gymnasium==0.29.1", "numpy<2", "tyro==1.0.17", "tensorboard"
    python = peer_environment(folder / "venv", *packages)
    subprocess.run(["git", "clone", "--quiet", CLEANRL, folder / "repo"], check=True)
    subprocess.run(["git", "-C", folder / "repo", "checkout", "--quiet", "fe8d8a0"], check=True)
    return [python, ROOT / "tests" / "cleanrl_peer.py", folder / "repo" / "cleanrl" / "pqn.py"]


def cleanrl_curve(program, num_agents):
    """Train agents of CleanRL one after the other, and return the same of them."""
    agents = []
    for seed in range(271_000, 271_000 + num_agents):
        print("+", time.strftime("%H:%M:%S"), "CleanRL, seed", seed, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            command = [*program, str(seed), str(time.time()), Path(folder) / "peer.npz"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            agents.append(dict(np.load(Path(folder) / "peer.npz")))
    seconds = np.median([agent["seconds"] for agent in agents], axis=0)
    returns = np.stack([agent["returns"] for agent in agents], axis=1)
    return Curve(seconds, agents[0]["steps"], returns, seconds[-1])


def greedy_curve(name, script, text, flags, unchanged):
    """Return the greedy returns (K + 1, R) of each run, before training and at K lines."""
    one_update = "--num-iterations 1" if script == REINFORCE else "--total-timesteps 1"
    untrained = run(script, f"{flags} {one_update} --learning-rate 0", text)
    changed = run(script, flags, greedy_returns(name))
    for key, array in unchanged.saved.items():
        if key.startswith(("learned.weights", "learned.params")):
            np.testing.assert_array_equal(array, changed.saved[key], key)
    return np.vstack([greedy_means(untrained), changed.saved["curves.greedy_return"]])


@rc_context({"font.size": 15, "axes.spines.top": False, "axes.spines.right": False})
def draw_race(curves):
    """Draw the median of the agents of each program, and a band from the worst to the best."""
    # Ours are blue, rejax's orange, CleanRL's gray: hues that nobody confuses, from dark to light.
    colors = dict(zip(OURS, ["#08306b", "#2171b5", "#4aa3df", "#8cc5e8", "#2171b5"], strict=True))
    colors |= dict(zip(PEERS, ["#7f2704", "#d94801", "#fd9b4f", "#4d4d4d"], strict=True))
    figure = Figure(figsize=(10, 6), layout="constrained", dpi=200)
    rows = {"linear, or one hidden layer": CARTPOLE, "two hidden layers": [DQN, *PEERS]}
    for axes, (title, names) in zip(figure.subplots(2, sharex=True), rows.items(), strict=True):
        for name in names:
            times, _, returns, _ = curves[name]
            low, high, color = returns.min(axis=1), returns.max(axis=1), colors[name]
            axes.fill_between(times, low, high, color=color, alpha=0.12, linewidth=0)
            style = "--" if name in PEERS else "-"
            label = PEERS.get(name, name)
            axes.plot(times, np.median(returns, axis=1), style, color=color, lw=2.2, label=label)
        axes.axhline(475, color="black", linestyle=":", linewidth=1)
        axes.text(1.05, 460, "475: solved", va="top", fontsize="small")
        axes.set(xscale="log", xlim=(1, None), ylim=(0, 530), yticks=[0, 250, 500])
        axes.set(ylabel="greedy return")
        axes.legend(
            title=title,
            alignment="left",
            loc="center left",
            bbox_to_anchor=(1, 0.5),
            fontsize="small",
            title_fontsize="small",
            handlelength=1.5,
            frameon=False,
        )
    axes.set(xlabel="seconds since the command was entered")
    axes.set_xticks([1, 3, 10, 30, 100, 300], ["1", "3", "10", "30", "100", "300"])
    figure.savefig(PICTURES / "race.png")


def greedy_returns(name):
    """Return the text of a program that also evaluates the greedy policy at each progress line."""
    if name == DQN:
        return patched(DECAY, "dqn", "greedy_returns")
    if name != REINFORCE:
        return patched(name, "greedy_returns")
    old = "    return state, dict(timesteps=state.timesteps, **means)\n"
    new = '    means["greedy_return"] = jnp.mean(evaluate(run, state)["greedy_return"])\n'
    return replaced(name, old, new + old)


def write(name, text):
    """Put the tables of a section between its marks in RESULTS.md, and say when and where."""
    git = ["git", "-C", ROOT]
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    if subprocess.check_output(
        [*git, "status", "--porcelain", "--", ":(glob)*.py", "tests/recipes"]
    ):
        commit += " with changes"
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "optax", "gymnax"))
    machine = f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}, {packages}"
    stamp = f"Measured on {date.today()}, commit {commit}: {machine}.\n"
    mark = f"<!-- {name} -->\n"
    before, rest = RESULTS.read_text().split(mark)
    _, after = re.split(r"^Measured on .*\n", rest, maxsplit=1, flags=re.MULTILINE)
    RESULTS.write_text(f"{before}{mark}{text}\n{stamp}{after}")


def main():
    sections = {f.__name__: f for f in (learning, ablations, padding, tasks, seconds, race)}
    parser = argparse.ArgumentParser()
    parser.add_argument("sections", nargs="+", choices=sections, metavar="SECTION")
    for name in parser.parse_args().sections:
        write(name, sections[name]())


if __name__ == "__main__":
    main()
