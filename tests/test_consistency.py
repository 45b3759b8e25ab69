"""The collection as a whole: twins, flags, imports, pins, sizes."""

import argparse
import ast
import importlib
import re
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT, SCRIPTS

TEXT = {name: (ROOT / name).read_text() for name in SCRIPTS}
TREE = {name: ast.parse(text) for name, text in TEXT.items()}
CEILING = {
    "parallel_td.py": 310,
    "replay_td.py": 345,
    "epsilon_decay_td.py": 355,
    "gridworld_qlearning.py": 270,
    "mountaincar_env.py": 260,
    "reinforce_parallel.py": 350,
}

# Functions and classes of the same name whose bodies differ, each with its reason.
DIFFERS = {
    "TrainState": "what is learned differs",
    "evaluate": "the greedy policy is read from a network or from a table",
    "init_state": "what is learned differs",
    "main": "each fills its own report",
    "parse_args": "each has its own flags",
    "plot": "the grid world draws the grid, the mountain car a phase portrait",
    "td_loss": "a replay buffer needs averaged weights in the target",
    "train_chunk": "each draws its own random numbers",
    "train_step": "what is learned from",
    "vector_step": "epsilon, constant or falling",
}

# What differs between flags of the same name, each with its reason.
FLAGS_DIFFER = {
    "--batch-size default help": "in parallel_td.py a multiple of --num-envs",
    "--gamma default": "the grid world's is its article's",
    "--learning-rate default help": "one value for each algorithm; constant in the grid world",
    "--log-interval default help type": "of steps, of iterations, of all environments' steps",
    "--num-envs default help type": "REINFORCE compares two or more; a mountain car is small",
    "--num-seeds help": "the grid world has agents",
    "--plot help": "the grid world and the mountain car draw other pictures",
    "--save help": "each names what it writes",
    "--seed help": "the mountain car has no runs",
    "--total-timesteps default help type": "the mountain car counts all environments'",
}

# Flags of an earlier version, without their dashes lest this list should find itself.
GONE = (
    "num-devices num-processes process-id coordinator timeout json evaluate solved-at no-early-stop"
    " residual-gradient baseline no-normalize updates-per-step random-start"
).split()

# Lines that diff marks with < or >.
DIFF_BUDGET = {("parallel_td.py", "replay_td.py"): 75, ("replay_td.py", "epsilon_decay_td.py"): 30}


def flags(name):
    """{flag: what add_argument is told about it} of a script; types by their names."""
    found, add_argument = {}, argparse.ArgumentParser.add_argument

    def recorded(parser, *names, **options):
        found[names[-1]] = {k: getattr(v, "__name__", v) for k, v in options.items()}
        return add_argument(parser, *names, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "add_argument", recorded)
        importlib.import_module(name[:-3]).parse_args([])
    del found["--help"]
    return found


def definitions(name):
    """{name: text} of the top-level functions and classes of a script, docstrings included."""
    kinds = ast.FunctionDef, ast.ClassDef
    return {node.name: ast.dump(node) for node in TREE[name].body if isinstance(node, kinds)}


def differing(tables):
    """The keys under which the tables that have them hold different values."""
    keys = {key for table in tables for key in table}
    variants = {key: [table[key] for table in tables if key in table] for key in keys}
    return {key for key, values in variants.items() if any(v != values[0] for v in values)}


def test_twins_are_identical_but_for_the_list():
    assert differing([definitions(name) for name in SCRIPTS]) == set(DIFFERS)


def test_shared_flags_agree_but_for_the_list():
    tables = []
    for name in SCRIPTS:
        told = flags(name).items()
        tables.append(
            {f"{flag} {key}": value for flag, options in told for key, value in options.items()}
        )
    listed = [key.split() for key in FLAGS_DIFFER]
    assert differing(tables) == {f"{flag} {key}" for flag, *keys in listed for key in keys}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_is_read(name):
    words = [flag[2:].replace("-", "_") for flag in flags(name)]
    unread = [word for word in words if not re.search(rf"\bargs\.{word}\b", TEXT[name])]
    assert not unread and len(words) > 5


@pytest.mark.parametrize("name", SCRIPTS)
def test_imports_no_other_script_and_no_undeclared_package(name):
    modules = set()
    for node in ast.walk(TREE[name]):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module.split(".")[0])
    third_party = modules - sys.stdlib_module_names
    assert third_party <= {"jax", "numpy", "optax", "gymnax", "matplotlib"}
    assert "matplotlib" not in re.findall(r"^(?:import|from) (\w+)", TEXT[name], re.MULTILINE)


@pytest.mark.parametrize("name", SCRIPTS)
def test_pep_723_block_equals_requirements(name):
    block = re.match(r"# /// script\n(.*?)# ///\n", TEXT[name], re.DOTALL).group(1)
    block = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = {line.split("#")[0].strip() for line in lines} - {""}
    assert all(re.fullmatch(r"[\w-]+(\[\w+\])?==[\d.]+", pin) for pin in pins)
    assert set(block["dependencies"]) == {pin for pin in pins if not pin.startswith("pytest")}


def test_sizes():
    lengths = {name: len(text.splitlines()) for name, text in TEXT.items()}
    assert lengths.keys() == CEILING.keys()
    assert {name: n for name, n in lengths.items() if n > CEILING[name]} == {}
    assert {
        name: len(TEXT[name]) / n for name, n in lengths.items() if len(TEXT[name]) > 50 * n
    } == {}
    tests = [path for path in ROOT.glob("tests/*.py") if path.name != "benchmark.py"]
    assert sum(len(path.read_text().splitlines()) for path in tests) <= 1300


@pytest.mark.parametrize("pair", DIFF_BUDGET, ids=" -> ".join)
def test_the_next_script_differs_by_its_idea(pair):
    diff = subprocess.run(["diff", *pair], cwd=ROOT, capture_output=True, text=True).stdout
    assert 0 < sum(line[0] in "<>" for line in diff.splitlines()) <= DIFF_BUDGET[pair]


def test_flags_that_are_gone_are_nowhere():
    pattern = re.compile(rf"--({'|'.join(GONE)})\b")
    paths = [*ROOT.glob("*.py"), *ROOT.glob("tests/*.py"), ROOT / "README.md"]
    assert {path.name: pattern.findall(path.read_text()) for path in paths} == {
        path.name: [] for path in paths
    }


def test_top_level_holds_nothing_else():
    files = {path.name for path in ROOT.iterdir() if not path.name.startswith((".", "__"))}
    assert files == {*CEILING, "tests", "requirements.txt", "README.md"}
