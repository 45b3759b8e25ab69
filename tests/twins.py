"""Copy a definition of one script to those that have the same, or mend a recipe.

    python tests/twins.py parallel_td.py td_target    # a function, a class or a constant
    python tests/twins.py parallel_td.py --num-envs   # a flag, within the trio
    python tests/twins.py --mend sarsa                # a recipe that no longer applies

The table DIFFERENT says which scripts do not have the same. Nothing else in the scripts changes.
It also prints which recipes no longer apply to a script that their heads name.

To mend a recipe, it is applied to the newest committed version of its script that it fits, what has
changed in the script since then is merged, and the difference becomes the new recipe, below the
same head. If both change the same lines, resolve the conflicts in the file that is named then, and
run the command again.
"""

import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from conftest import (
    DECAY,
    DQN,
    NETWORKS,
    PARALLEL,
    PQN,
    RECIPES,
    REINFORCE,
    REPLAY,
    ROOT,
    SCRIPTS,
    TRIO,
    path_of,
)
from patches import apply, scripts_of

RETURNS = [*TRIO, REINFORCE, *NETWORKS]  # what these show are returns
STEPPING = [*TRIO, *NETWORKS]  # all environments are stepped in lockstep
VALUES = [PQN, DQN]  # a network has values of actions

# Name: the groups of scripts that agree, and why the groups differ. A script that is in no group
# agrees with no other. No flag is here: two scripts of the trio never differ in a default.
DIFFERENT = {
    "AT_ONCE": ([RETURNS], "agents of the grid world are fastest one by one"),
    "COMPILER_OPTIONS": ([STEPPING], "what is fast was measured for each"),
    "parse_args": ([], "each script has flags of its own"),
    "make_env": ([[*TRIO, *VALUES]], "REINFORCE's and PPO's actions may need bounds"),
    "setting_mean": ([RETURNS], "the grid world has steps of episodes, not returns"),
    "main": ([STEPPING], "REINFORCE has --gif and counts its steps, the grid world makes no env"),
    "Transition": ([TRIO], "PPO keeps what its loss needs, PQN where time ran out, DQN pictures"),
    "TrainState": ([[REPLAY, DECAY]], "replay needs a buffer; the others learn something else"),
    "Step": ([], "REINFORCE keeps what its loss needs, the car what --save writes"),
    "init_state": ([[REPLAY, DECAY]], "replay needs a buffer; the others learn something else"),
    "select_action": (
        [[*TRIO, *VALUES]],
        "the grid world breaks ties at random: its table starts at 0",
    ),
    "optimizer": ([[*TRIO, REINFORCE]], "PPO and PQN have several steps in an update, DQN an eps"),
    "q_values": ([TRIO, VALUES], "linear features or a network"),
    "vector_step": ([[PARALLEL, REPLAY]], "epsilon decays; networks need other arrays of a step"),
    "advantages": ([], "REINFORCE's have no critic"),
    "td_target": ([TRIO], "DQN's is double Q-learning"),
    "td_loss": ([TRIO], "a network has parameters; the targets of PQN are no TD targets"),
    "greedy_return": ([TRIO, VALUES], "weights, a network of values, or an actor choose"),
    "train_step": ([], "each method learns in another way"),
    "train_interval": ([STEPPING], "the grid world adds up, REINFORCE knows whole episodes"),
    "evaluate": ([TRIO, VALUES], "each method learns something else"),
    "play": ([], "REINFORCE plays to learn, the car to roll out"),
    "report": ([RETURNS], "the grid world has no greedy returns"),
    "draw": ([RETURNS], "the grid world draws a table"),
}


def definitions(script):
    """The lines of what a script defines, by name, with the comments directly above."""
    text = path_of(script).read_text()
    lines, found = text.splitlines(), {}
    body = ast.parse(text).body
    for node in body:
        first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))])
        while first > 1 and lines[first - 2].startswith("#"):
            first -= 1
        name = getattr(node, "name", lines[node.lineno - 1].partition(" = ")[0])
        found[name] = "\n".join(lines[first - 1 : node.end_lineno])
    if script in TRIO:
        [parse_args] = [node for node in body if getattr(node, "name", "") == "parse_args"]
        for node in parse_args.body:  # a statement for each flag
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if match := re.match(r"\s+(?:flag|sweep)\(\s*\"(--[\w-]+)\"", source):
                found[match[1]] = source
    return found


SOURCES = {script: definitions(script) for script in SCRIPTS}
NAMES = sorted({name for sources in SOURCES.values() for name in sources})


def groups_of(name):
    """The scripts that have a name, in groups that must agree."""
    having = [script for script in SCRIPTS if name in SOURCES[script]]
    if name not in DIFFERENT:
        return [having]
    groups = [list(group) for group in DIFFERENT[name][0]]
    alone = [[script] for script in having if not any(script in group for group in groups)]
    return groups + alone


def copy(script, name):
    """Copy a definition to its twins. Return the scripts that changed."""
    changed = []
    [group] = [group for group in groups_of(name) if script in group]
    for other in group:
        old, new = SOURCES[other][name], SOURCES[script][name]
        if old != new:
            before, after = f"\n{path_of(other).read_text()}".split(f"\n{old}\n")
            path_of(other).write_text(f"{before}\n{new}\n{after}"[1:])
            changed.append(other)
    return changed


def broken_recipes():
    """Return the recipes that do not apply, each with its script."""
    pairs = [(patch, x) for patch in sorted(RECIPES.glob("*.patch")) for x in scripts_of(patch)]
    return [(patch, x) for patch, x in pairs if apply(patch, x, path_of(x).read_text())[1]]


def git(*command):
    """What a command of git prints. (A merge with conflicts returns their number, up to 127.)"""
    process = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
    return process.stdout if process.returncode < 128 else sys.exit(process.stderr)


def merge(patch, script):
    """The script with a recipe, merged with what has changed since the recipe applied.

    Where both change the same lines, there are conflict markers.
    """
    path = path_of(script).relative_to(ROOT)
    for commit in git("log", "--format=%h", "--", str(path)).split():
        before = git("show", f"{commit}:{path}")
        changed, complaint = apply(patch, script, before)
        if not complaint:
            break
    else:
        sys.exit(f"{patch.name} applies to no version of {script}")
    with tempfile.TemporaryDirectory() as folder:
        names = ["recipe", f"{script}_{commit}", script]
        for name, text in zip(names, [changed, before, path_of(script).read_text()], strict=True):
            (Path(folder) / name).write_text(text)
        return git("-C", folder, "merge-file", "-p", *names)


def mend(recipe):
    """Write a recipe that applies to its script as it is now."""
    patch = RECIPES / f"{recipe}.patch"
    script = scripts_of(patch)[0]
    merged = ROOT / f"{recipe}.tmp"
    if not merged.exists():
        merged.write_text(merge(patch, script))
    if "<<<<<<<" in merged.read_text():
        sys.exit(f"resolve the conflicts in {merged.name}, then run this again")
    head = patch.read_text().partition("\n--- a/")[0]
    path = path_of(script).relative_to(ROOT)
    labels = ["--label", f"a/{path}", "--label", f"b/{path}"]
    command = ["diff", "-U1", "-F", r"^def \|^class ", *labels, path_of(script), merged]
    diff = subprocess.run(command, capture_output=True, text=True).stdout
    patch.write_text(f"{head}\n{diff}")
    merged.unlink()
    print(f"{patch.name} applies to {script}")


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    script, name = Path(sys.argv[1]).name, sys.argv[2]
    if script == "--mend":
        return mend(Path(name).stem)
    if name not in SOURCES.get(script, {}):
        sys.exit(f"{script} defines no {name} (flags are copied within the trio only)")
    changed = copy(script, name)
    print(f"{name} of {script} was copied to: {', '.join(changed) or 'no script'}")
    [group] = [group for group in groups_of(name) if script in group]
    others = [other for other in SCRIPTS if name in SOURCES[other] and other not in group]
    if others:
        print(f"not to those that differ (see DIFFERENT), so look at them: {', '.join(others)}")
    if name.startswith("--"):
        lacking = [other for other in TRIO if name not in SOURCES[other]]
        print(f"without {name}, add it by hand: {', '.join(lacking) or 'none'}")
    broken = broken_recipes()
    for patch, target in broken:
        print(f"{patch.name} does not apply to {target}")
    print("python tests/twins.py --mend RECIPE mends a recipe" if broken else "all recipes apply")


if __name__ == "__main__":
    main()
