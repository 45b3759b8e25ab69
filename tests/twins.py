"""Copy a definition of one script to those that have the same, or mend a recipe.

    python tests/twins.py parallel_td.py td_target    # a function, a class or a constant
    python tests/twins.py parallel_td.py --num-envs   # a flag, within the trio
    python tests/twins.py --mend sarsa                # a recipe that no longer applies

The groups of tests/test_consistency.py say which scripts have the same. Nothing else in them
changes. It also says which recipes no longer apply to a script that their heads name.

To mend a recipe, it is applied to the newest committed version of its script that it fits, what has
changed in the script since then is merged, and the difference becomes the new recipe, below the
same head. If both change the same lines, resolve the conflicts in the file that is named then, and
run the command again.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from conftest import RECIPES, ROOT, TRIO, path_of
from test_consistency import SOURCES, groups_of


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


def scripts_of(patch):
    """The scripts that the head of a recipe names. The first one is that of its diff."""
    made_for = re.search(r"^Made for [^:]*?\.$", patch.read_text(), re.MULTILINE)[0]
    return re.findall(r"\w+\.py", made_for)


def applied(patch, text):
    """The text of a script with a recipe, or None if it does not apply."""
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / "changed.py"
        changed.write_text(text)
        command = ["patch", "-s", "-F0", changed, patch]
        applies = subprocess.run(command, capture_output=True).returncode == 0
        return changed.read_text() if applies else None


def broken_recipes():
    """Return the recipes that do not apply, each with its script."""
    pairs = [(patch, x) for patch in sorted(RECIPES.glob("*.patch")) for x in scripts_of(patch)]
    return [(patch, x) for patch, x in pairs if applied(patch, path_of(x).read_text()) is None]


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
        changed = applied(patch, before)
        if changed is not None:
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
    if name.startswith("--"):
        lacking = [other for other in TRIO if name not in SOURCES[other]]
        print(f"without {name}, add it by hand: {', '.join(lacking) or 'none'}")
    broken = broken_recipes()
    for patch, target in broken:
        print(f"{patch.name} does not apply to {target}")
    print("python tests/twins.py --mend RECIPE mends a recipe" if broken else "all recipes apply")


if __name__ == "__main__":
    main()
