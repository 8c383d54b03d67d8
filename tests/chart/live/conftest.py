"""A control plane for the whole session, and a namespace for each test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))
FIRST = "test_control_plane.py"

if TYPE_CHECKING:
    from live_release import Plane, Release


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a control plane where there is none; one test then says so."""
    from control_plane import missing

    if not missing():
        return
    here = Path(__file__).parent
    asks = [item for item in items if item.path.parent == here and item.path.name != FIRST]
    config.hook.pytest_deselected(items=asks)
    items[:] = [item for item in items if item not in set(asks)]


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """API server, scheduler and controllers, with a default StorageClass; no nodes yet."""
    import definitions
    from control_plane import control_plane
    from live_release import Plane
    from node_agents import NodeAgents, add_storage_class

    with control_plane(tmp_path_factory.mktemp("plane")) as (api, config):
        definitions.install(api)
        add_storage_class(api, "local", grows=False, default=True)
        add_storage_class(api, "elastic", grows=True)
        agents = NodeAgents(api)
        agents.start()
        try:
            yield Plane(api, agents, config)
        finally:
            agents.stop()


@pytest.fixture
def live(plane: Plane, tmp_path: Path) -> Iterator[Release]:
    """A namespace of its own."""
    from live_release import release

    with release(plane, tmp_path) as made:
        yield made
