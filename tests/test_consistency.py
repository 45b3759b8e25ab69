"""The collection as a whole: twins, flags, imports, pins."""

import argparse
import ast
import importlib
import re
import sys
import tomllib

import pytest
from conftest import ROOT, SCRIPTS, TRIO

TEXT = {name: (ROOT / name).read_text() for name in SCRIPTS}
PARALLEL, REPLAY, DECAY, GRID, CAR, REINFORCE = SCRIPTS

# Functions and classes that differ between scripts: within each group, they are identical.
# main and parse_args are not listed: they differ everywhere, with the flags and the report.
LEARNED_FROM = [[PARALLEL], [REPLAY, DECAY], [GRID], [REINFORCE]]
DIFFERS = {
    "TrainState": LEARNED_FROM,
    "init_state": [[PARALLEL], [REPLAY, DECAY], [GRID], [CAR], [REINFORCE]],
    "Step": [[CAR], [REINFORCE]],  # what is kept of a step
    "play": [[CAR], [REINFORCE]],
    "train_step": LEARNED_FROM,
    "train_interval": [TRIO, [GRID], [REINFORCE]],  # what is averaged
    "td_target": [[PARALLEL], [REPLAY, DECAY]],  # the target's weights
    "vector_step": [[PARALLEL, REPLAY], [DECAY]],  # how often actions are random
    "evaluate": [TRIO, [GRID], [REINFORCE]],  # what is greedy
    "over_runs": [[*TRIO, CAR, REINFORCE], [GRID]],  # one after the other on a CPU
    "plot": [TRIO, [GRID], [REINFORCE]],  # runs of REINFORCE differ in their steps
}

# What differs between flags of one name, apart from their help.
FLAGS_DIFFER = {
    "choices": "--env-id",  # REINFORCE takes all of gymnax's environments
    "type": "--log-interval --num-envs",  # other units, other ranges
    "default": "--log-interval --num-envs --total-timesteps"  # in those units
    " --batch-size --epsilon --gamma --learning-rate",  # one for each algorithm
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


def test_twins_are_identical_but_for_the_list():
    """Functions and classes with their comments, cores, and the lines that run a script."""
    found = {}
    for script in SCRIPTS:
        for node in ast.parse(TEXT[script]).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
                source = "\n".join(TEXT[script].splitlines()[first - 1 : node.end_lineno])
                found.setdefault(node.name, {}).setdefault(source, []).append(script)
    groups = {name: list(by_text.values()) for name, by_text in found.items() if len(by_text) > 1}
    for same in r"CORES = .*\nos.environ.*", r"if __name__ ==[\s\S]*":
        assert len({re.search(same, text)[0] for text in TEXT.values()}) == 1
    assert groups.keys() - DIFFERS.keys() == {"main", "parse_args"}
    assert {name: groups.get(name) for name in DIFFERS} == DIFFERS


def test_flags_are_read_and_shared_ones_agree_but_for_the_list():
    told = {}
    for script in SCRIPTS:
        for flag, options in flags(script).items():
            word = flag[2:].replace("-", "_")
            assert re.search(rf"\bargs\.{word}\b(?! = )", TEXT[script]), f"{script} {flag}"
            for key in options.keys() - {"help"}:
                told.setdefault((key, flag), []).append(options[key])
    differing = {pair for pair, values in told.items() if any(v != values[0] for v in values)}
    assert differing == {(key, flag) for key in FLAGS_DIFFER for flag in FLAGS_DIFFER[key].split()}
    assert told["default", "--epsilon"] == [[0.25], [0.25], [0.1]]  # RESULTS.md compares others


@pytest.mark.parametrize("name", SCRIPTS)
def test_imports_no_other_script_and_declares_what_it_imports_as_requirements_do(name):
    pins = re.findall(r"^[^#\s]+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert all(re.fullmatch(r"[\w-]+(\[\w+\])?==[\d.]+", pin) for pin in pins)
    block = re.match(r"# /// script\n(.*?)# ///\n", TEXT[name], re.DOTALL).group(1)
    block = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))["dependencies"]
    assert {*block} - {"matplotlib"} <= {*pins}
    modules = {*re.findall(r"^ *(?:import|from) (\w+)", TEXT[name], re.MULTILINE)}
    wanted = modules - sys.stdlib_module_names - {"numpy", "flax"} | {"jaxlib"}
    if "gymnax" in wanted:  # with it come flax and matplotlib; requirements.txt says why six
        wanted = wanted - {"matplotlib"} | {"six"}
    assert {re.match("[a-z]+", pin)[0] for pin in block} == wanted
