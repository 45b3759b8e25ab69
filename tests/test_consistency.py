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
PARALLEL, REPLAY, DECAY, GRID, CAR, REINFORCE = SCRIPTS
CEILING = {PARALLEL: 400, REPLAY: 430, DECAY: 440, GRID: 335, CAR: 335, REINFORCE: 410}
# Lines that diff marks with < or >.
DIFF_BUDGET = {(PARALLEL, REPLAY): 72, (REPLAY, DECAY): 20}

# Functions and classes that are not identical wherever their name occurs: the groups of scripts in
# which they are. main and parse_args differ everywhere: each script has its own flags and report.
LEARNED_FROM = [[PARALLEL], [REPLAY, DECAY], [GRID], [REINFORCE]]
DIFFERS = {
    "TrainState": LEARNED_FROM,
    "init_state": LEARNED_FROM,
    "train_step": LEARNED_FROM,
    "train_chunk": LEARNED_FROM,
    "td_loss": [[PARALLEL], [REPLAY, DECAY]],  # the target's weights
    "vector_step": [[PARALLEL, REPLAY], [DECAY], [CAR], [REINFORCE]],  # how actions are chosen
    "evaluate": [[PARALLEL, REPLAY, DECAY], [GRID], [REINFORCE]],  # what is greedy
    "plot": [[PARALLEL, REPLAY, DECAY, REINFORCE], [GRID], [CAR]],
}

# What differs between flags of one name, each with its reason.
FLAGS_DIFFER = {
    "--batch-size default help": "parallel_td.py collects at least so many",
    "--env-id choices": "REINFORCE takes all of gymnax's environments",
    "--epsilon default": "the grid world's is its article's",
    "--gamma default": "the grid world's is its article's",
    "--learning-rate default help": "one value for each algorithm; constant in the grid world",
    "--log-interval default help": "environment steps, iterations, steps of all cars",
    "--num-envs default help type": "REINFORCE compares two or more; a mountain car is small",
    "--num-seeds help": "the grid world has agents",
    "--plot help": "the grid world and the mountain car draw other pictures",
    "--save help": "each names what it writes",
    "--seed help": "the mountain car has no runs",
    "--total-timesteps default help type": "the mountain car counts the steps of all cars",
}


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


def test_twins_are_identical_but_for_the_list():
    found = {}
    for script in SCRIPTS:
        for name, text in definitions(script).items():
            found.setdefault(name, {}).setdefault(text, []).append(script)
    groups = {name: list(by_text.values()) for name, by_text in found.items() if len(by_text) > 1}
    assert groups.keys() - DIFFERS.keys() == {"main", "parse_args"}
    assert {name: groups.get(name) for name in DIFFERS} == DIFFERS


def test_shared_flags_agree_but_for_the_list():
    values = {}
    for script in SCRIPTS:
        for flag, options in flags(script).items():
            for key, value in options.items():
                values.setdefault(f"{flag} {key}", []).append(value)
    differing = {key for key, told in values.items() if any(value != told[0] for value in told)}
    listed = [key.split() for key in FLAGS_DIFFER]
    assert differing == {f"{flag} {key}" for flag, *keys in listed for key in keys}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_is_read(name):
    words = [flag[2:].replace("-", "_") for flag in flags(name)]
    unread = [word for word in words if not re.search(rf"\bargs\.{word}\b", TEXT[name])]
    assert unread == [] and len(words) > 5


@pytest.mark.parametrize("name", SCRIPTS)
def test_imports_no_other_script_and_declares_what_it_imports(name):
    modules = set()
    for node in ast.walk(TREE[name]):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module.split(".")[0])
    third_party = modules - sys.stdlib_module_names
    assert third_party <= {"jax", "numpy", "optax", "gymnax", "flax", "matplotlib"}
    assert "matplotlib" not in re.findall(r"^(?:import|from) (\w+)", TEXT[name], re.MULTILINE)
    declared = {pin.split("==")[0].split("[")[0] for pin in pep_723(name)}
    wanted = third_party - {"numpy", "flax"} | {"jaxlib"}  # those two come with jax and gymnax
    if "gymnax" in wanted:
        wanted = wanted - {"matplotlib"} | {"six"}  # requirements.txt says why
    assert declared == wanted


def pep_723(name):
    """The packages that a script's first lines declare."""
    block = re.match(r"# /// script\n(.*?)# ///\n", TEXT[name], re.DOTALL).group(1)
    return tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))["dependencies"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_pep_723_versions_are_those_of_requirements(name):
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = {line.split("#")[0].strip() for line in lines} - {""}
    assert all(re.fullmatch(r"[\w-]+(\[\w+\])?==[\d.]+", pin) for pin in pins)
    assert {pin for pin in pep_723(name) if not pin.startswith("matplotlib")} <= pins


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_script_is_longer_than_its_ceiling(name):
    assert len(TEXT[name].splitlines()) <= CEILING[name]


@pytest.mark.parametrize("pair", DIFF_BUDGET, ids=" ".join)
def test_the_next_script_differs_by_its_idea(pair):
    diff = subprocess.run(["diff", *pair], cwd=ROOT, capture_output=True, text=True).stdout
    assert 0 < sum(line[0] in "<>" for line in diff.splitlines()) <= DIFF_BUDGET[pair]


def test_the_repository_holds_nothing_else_at_its_top():
    """Of the tracked files: a user's weights.npz or .venv does not count."""
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode:
        pytest.skip("not a git checkout")
    top = {path.split("/")[0] for path in git.stdout.splitlines()}
    visible = {name for name in top if not name.startswith(".")}
    assert visible == {*SCRIPTS, "tests", "requirements.txt", "README.md"}
