"""The collection as a whole: twins, flags, imports, pins."""

import ast
import re
import sys
import tomllib

import pytest
from conftest import LEARNERS, ROOT, SCRIPTS

TEXT = {name: (ROOT / name).read_text() for name in SCRIPTS}
FLAGS = {name: re.findall(r'\b(?:flag|sweep)\(\s*"(--[\w-]+)"', TEXT[name]) for name in SCRIPTS}

# Functions and classes that differ between scripts: those of scripts with one number are identical.
# The order: parallel_td, replay_td, epsilon_decay_td, gridworld, reinforce, mountaincar.
DIFFERS = {
    "parse_args": "012345",
    "main": "000001",
    "TrainState": "01123 ",
    "init_state": "011234",
    "Step": "    01",  # what is kept of a step
    "play": "    01",
    "train_step": "01123 ",
    "train_interval": "00012 ",  # what a progress line shows
    "td_target": "011   ",  # the target's weights
    "vector_step": "001   ",  # how often actions are random
    "select_action": "0001  ",  # ties
    "evaluate": "00012 ",  # what is greedy
    "report": "00010 ",
    "draw": "00012 ",
    "plot": "00010 ",
}


def without_docstrings(node):
    """A syntax tree as text. Comments, line breaks and docstrings do not show."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            inner.body[0].value.value = ""
    return ast.dump(node)


def test_twins_are_identical_but_for_the_list():
    found = {}
    for i, script in enumerate(SCRIPTS):
        for node in ast.parse(TEXT[script]).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.setdefault(node.name, {})[i] = without_docstrings(node)
    groups = {}
    for name, trees in found.items():
        kinds = list(dict.fromkeys(trees.values()))
        if len(kinds) > 1:
            groups[name] = "".join(
                str(kinds.index(trees[i])) if i in trees else " " for i in range(6)
            )
    assert groups == DIFFERS
    for same in r"CORES = .*\n.*NUM_CPU_DEVICES.*\n", r"if __name__ ==.*\n.*MPLBACKEND.*\n":
        assert len({re.search(same, text)[0] for text in TEXT.values()}) == 1


def test_the_launcher_is_the_same_to_the_letter():
    [launcher] = {
        TEXT[script].partition("\n# From here on, all learners")[2] for script in LEARNERS
    }
    assert "def main(" in launcher


@pytest.mark.parametrize("name", SCRIPTS)
def test_flags_are_read_imports_are_declared_and_pins_are_those_of_requirements(name):
    for flag in FLAGS[name]:
        assert re.search(rf"\b(run|args)\.{flag[2:].replace('-', '_')}\b(?! = )", TEXT[name]), flag
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
