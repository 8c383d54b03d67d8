"""Which watch a variant's ``discover`` asks for."""

from taut_service.config.settings import Discovery
from taut_service.worker.discovery.dns import DnsWatch
from taut_service.worker.discovery.kubernetes import EndpointWatch
from taut_service.worker.discovery.watch import Apply, Watch


def watch_for(discover: Discovery, apply: Apply) -> Watch:
    """Make the watch that a configuration asks for.

    Args:
        discover: exactly one of its keys is set.
        apply: told of every new set.
    """
    if discover.dns is not None:
        return DnsWatch(discover.dns, apply)
    assert discover.kubernetes is not None  # noqa: S101 - the settings allow exactly one
    return EndpointWatch(discover.kubernetes, apply)
