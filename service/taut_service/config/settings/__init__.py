"""The gateway's configuration: one YAML file, parsed once, frozen, unknown keys refused.

:func:`load_settings` turns a file into :class:`Settings` or raises :class:`SettingsError` whose
text has one line a mistake, each naming the file and the place in it. One module a concern:
``listen``, ``models``, ``discovery``, ``admission``, ``routing``, ``limits``, ``keys``, ``guard``,
``rollout``; ``root``
puts them together and ``load`` reads the file.
"""

from taut_service.config.settings.admission import AdmissionLimit, BrownOut
from taut_service.config.settings.discovery import (
    Discovery,
    DnsDiscovery,
    KubernetesApi,
    KubernetesDiscovery,
)
from taut_service.config.settings.guard import Examples, GuardSettings
from taut_service.config.settings.keys import ApiKey, PriorityName
from taut_service.config.settings.limits import Limits, RateLimits, RedisServer, RedisStore
from taut_service.config.settings.listen import AdminListen, Listen, TlsFiles
from taut_service.config.settings.load import SettingsError, load_settings
from taut_service.config.settings.models import (
    DEFAULT_VARIANT,
    Golden,
    ModelSettings,
    Price,
    VariantSettings,
    WorkerSettings,
)
from taut_service.config.settings.rollout import KubernetesEvents, RolloutRedis, RolloutSettings
from taut_service.config.settings.root import Settings
from taut_service.config.settings.routing import (
    Affinity,
    Breaker,
    Hedge,
    Retries,
    Routing,
    Timeouts,
    WorkerLoad,
)
from taut_service.config.settings.telemetry import (
    AccessLogSettings,
    MetricsSettings,
    TracingSettings,
)

__all__ = [
    "DEFAULT_VARIANT",
    "AccessLogSettings",
    "AdminListen",
    "AdmissionLimit",
    "Affinity",
    "ApiKey",
    "Breaker",
    "BrownOut",
    "Discovery",
    "DnsDiscovery",
    "Examples",
    "Golden",
    "GuardSettings",
    "Hedge",
    "KubernetesApi",
    "KubernetesDiscovery",
    "KubernetesEvents",
    "Limits",
    "Listen",
    "MetricsSettings",
    "ModelSettings",
    "Price",
    "PriorityName",
    "RateLimits",
    "RedisServer",
    "RedisStore",
    "Retries",
    "RolloutRedis",
    "RolloutSettings",
    "Routing",
    "Settings",
    "SettingsError",
    "Timeouts",
    "TlsFiles",
    "TracingSettings",
    "VariantSettings",
    "WorkerLoad",
    "WorkerSettings",
    "load_settings",
]
