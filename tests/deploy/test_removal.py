"""Nothing but a marked child is ever removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from taut_deploy.errors import OutputError
from taut_deploy.removal import remove_child


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A parent with one child of ours, one of somebody else's and one link."""
    parent = tmp_path / "parent"
    for child, file in (("ours", "mark"), ("theirs", "precious"), ("empty", None)):
        (parent / child / "deep").mkdir(parents=True)
        if file is None:
            (parent / child / "deep").rmdir()
        else:
            (parent / child / file).touch()
    (parent / "link").symlink_to(parent / "ours")
    return parent


def names(room: Path) -> list[str]:
    return sorted(path.name for path in room.iterdir())


def test_a_marked_or_empty_child_is_removed_and_links_in_it_are_not_followed(room):
    (room / "ours" / "away").symlink_to(room / "theirs")
    remove_child(room, "ours", ("mark",))
    remove_child(room, "empty", ("mark",))
    assert names(room) == ["link", "theirs"]
    assert (room / "theirs" / "precious").exists()


@pytest.mark.parametrize(
    "name", ["theirs", "link", "", ".", "..", "ours/deep", "../parent", "/etc", "absent"]
)
def test_everything_else_is_refused(name, room):
    before = sorted(room.parent.rglob("*"))
    with pytest.raises(OutputError):
        remove_child(room, name, ("mark",))
    assert sorted(room.parent.rglob("*")) == before


def test_the_marker_goes_last(room, monkeypatch):
    order = []
    real = Path.unlink
    monkeypatch.setattr(
        Path, "unlink", lambda self, **rest: (order.append(self.name), real(self, **rest))[1]
    )
    (room / "ours" / "zebra").touch()
    remove_child(room, "ours", ("mark",))
    assert order[-1] == "mark"
