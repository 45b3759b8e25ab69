"""twins.py --mend: a recipe that no longer applies is made again, below the same head."""

import subprocess

import pytest
import twins

HEAD = "Three is a number.\n\nMade for count.py.\n\n    git apply tests/recipes/number.patch\n"
DIFF = """
--- a/count.py
+++ b/count.py
@@ -1,5 +1,5 @@
 one
 two
-three
+3
 four
 five
"""


@pytest.fixture
def mend(tmp_path, monkeypatch):
    """A function that mends a recipe after changes of its script, and returns the script with it.

    The first version of the script is committed, then those that are given.
    """
    script, patch = tmp_path / "count.py", tmp_path / "number.patch"
    monkeypatch.setattr(twins, "ROOT", tmp_path)
    monkeypatch.setattr(twins, "RECIPES", tmp_path)
    monkeypatch.setattr(twins, "path_of", tmp_path.joinpath)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    who = ["-c", "user.name=Me", "-c", "user.email=me@example.org"]
    patch.write_text(HEAD + DIFF)

    def after(*versions):
        for text in ("one two three four five six", *versions):
            script.write_text("".join(f"{word}\n" for word in text.split()))
            twins.git("add", "count.py")
            twins.git(*who, "commit", "--quiet", "-m", "a version")
        twins.mend("number")
        assert patch.read_text().startswith(f"{HEAD}\n--- a/count.py\n")
        subprocess.run(["git", "apply", "number.patch"], cwd=tmp_path, check=True)
        return script.read_text().split()

    return after


def test_a_recipe_is_merged_with_what_has_changed_near_it(mend):
    assert mend("ONE two three four five six") == ["ONE", "two", "3", "four", "five", "six"]


def test_the_newest_version_is_found_to_which_the_recipe_applied(mend):
    """In the next one, it did not apply any more. In the last one, more has changed."""
    versions = (
        "one two three four five SIX",
        "ONE two three four five SIX",
        "ONE two three four five 6",
    )
    assert mend(*versions) == ["ONE", "two", "3", "four", "five", "6"]


def test_conflicts_are_resolved_by_hand(mend, tmp_path):
    with pytest.raises(SystemExit, match=r"number\.tmp"):
        mend("one TWO three four five six")
    merged = tmp_path / "number.tmp"
    assert "<<<<<<<" in merged.read_text()
    merged.write_text("one\nTWO\n3\nfour\nfive\nsix\n")
    assert mend("one TWO three four five six") == ["one", "TWO", "3", "four", "five", "six"]
    assert not merged.exists()
