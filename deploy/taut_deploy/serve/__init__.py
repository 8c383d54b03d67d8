"""``taut serve``: one machine, from a model name to an answering gateway."""

from taut_deploy.serve.settings import ServeSettings, load_serve_settings

__all__ = ["ServeSettings", "load_serve_settings"]
