"""The collection as a whole: twins, flags, imports, pins."""

import ast
import re
import sys
import tomllib

import pytest
from conftest import LEARNERS, ROOT, SCRIPTS

TEXT = {name: (ROOT / name).read_text() for name in SCRIPTS}
FLAGS = {name: re.findall(r'\b(?:flag|sweep)\(\s*"(--[\w-]+)"', TEXT[name]) for name in SCRIPTS}

# Functions that differ: those of scripts with one number are identical. Scripts are in the order
# parallel_td, replay_td, epsilon_decay_td, gridworld_qlearning, reinforce_parallel, mountaincar_env
DIFFERS = {"parse_args": "012345", "main": "000001", "init_state": "011234", "TrainState": "01123 "}
DIFFERS |= {"train_step": "01123 ", "td_target": "011   ", "vector_step": "001   "}  # the subject
DIFFERS |= {"train_interval": "00012 ", "evaluate": "00012 ", "select_action": "0001  "}
DIFFERS |= {
    "draw": "00012 ",
    "plot": "00010 ",
    "report": "00010 ",
    "Step": "    01",
    "play": "    01",
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
    rest = [[ast.dump(node) for node in ast.parse(text).body] for text in TEXT.values()]
    same = [[tree for tree in trees if "CORES" in tree or tree[:2] == "If"] for trees in rest]
    assert same == [same[0]] * 6 and len(same[0]) == 5


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
    wanted = {*re.findall(r"^ *(?:import|from) (\w+)", TEXT[name], re.MULTILINE)}
    wanted -= sys.stdlib_module_names | {"numpy", "flax", "matplotlib"}
    names = {re.match("[a-z]+", pin)[0] for pin in block} - {"jaxlib", "six", "matplotlib"}
    assert names == wanted
