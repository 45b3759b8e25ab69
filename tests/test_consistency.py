"""The collection as a whole: twins, flags, imports, pins."""

import argparse
import ast
import importlib
import re
import sys
import tomllib

import pytest
from conftest import LEARNERS, ROOT, SCRIPTS, TRIO

TEXT = {name: (ROOT / name).read_text() for name in SCRIPTS}
PARALLEL, REPLAY, DECAY, GRID, REINFORCE, CAR = SCRIPTS

# Functions and classes that differ between scripts: within each group, they are identical.
# parse_args is not listed: it differs everywhere.
LEARNED_FROM = [[PARALLEL], [REPLAY, DECAY], [GRID], [REINFORCE]]
BY_KIND = [TRIO, [GRID], [REINFORCE]]
DIFFERS = {
    "main": [LEARNERS, [CAR]],
    "TrainState": LEARNED_FROM,
    "init_state": [*LEARNED_FROM, [CAR]],
    "Step": [[REINFORCE], [CAR]],  # what is kept of a step
    "play": [[REINFORCE], [CAR]],
    "train_step": LEARNED_FROM,
    "train_interval": BY_KIND,  # what a progress line shows
    "td_target": [[PARALLEL], [REPLAY, DECAY]],  # the target's weights
    "vector_step": [[PARALLEL, REPLAY], [DECAY]],  # how often actions are random
    "select_action": [TRIO, [GRID]],  # ties
    "evaluate": BY_KIND,  # what is greedy
    "report": [[*TRIO, REINFORCE], [GRID]],
    "draw": BY_KIND,
    "plot": [[*TRIO, REINFORCE], [GRID]],
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


def without_docstrings(node):
    """A syntax tree as text. Comments, line breaks and docstrings do not show."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            inner.body[0].value.value = ""
    return ast.dump(node)


def test_twins_are_identical_but_for_the_list():
    found = {}
    for script in SCRIPTS:
        for node in ast.parse(TEXT[script]).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                same = found.setdefault(node.name, {})
                same.setdefault(without_docstrings(node), []).append(script)
    groups = {name: [*by_tree.values()] for name, by_tree in found.items() if len(by_tree) > 1}
    assert len(groups.pop("parse_args")) == len(SCRIPTS)
    assert groups == DIFFERS
    for same in r"CORES = .*\n.*NUM_CPU_DEVICES.*\n", r"if __name__ ==.*\n.*MPLBACKEND.*\n":
        assert len({re.search(same, text)[0] for text in TEXT.values()}) == 1


def test_the_launcher_is_the_same_to_the_letter():
    [launcher] = {
        TEXT[script].partition("\n# From here on, all learners")[2] for script in LEARNERS
    }
    assert launcher.count("\ndef ") == 6


def test_flags_are_read_and_those_of_one_name_have_one_type():
    types = {}
    for script in SCRIPTS:
        for flag, options in flags(script).items():
            word = flag[2:].replace("-", "_")
            assert re.search(rf"\b(run|args)\.{word}\b(?! = )", TEXT[script]), f"{script} {flag}"
            kind = str(options.get("type")).split(" in ")[0], options.get("nargs")
            assert types.setdefault(flag, kind) == kind, f"{script} {flag}"


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
