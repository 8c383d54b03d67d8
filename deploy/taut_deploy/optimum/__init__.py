"""taut behind optimum's interfaces: a quantizer, a configuration, commands of ``optimum-cli``."""

from taut_deploy.optimum.configuration import TautConfig
from taut_deploy.optimum.quantizer import TautQuantizer

__all__ = ["TautConfig", "TautQuantizer"]
