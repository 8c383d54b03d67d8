"""The report as Markdown, made from the JSON report alone."""

from collections.abc import Mapping
from typing import Any

from taut_deploy.validate import markdown_items, markdown_latency
from taut_deploy.validate.tables import cell, table

LABELS = {
    "perplexity_ratio": "perplexity ratio",
    "delta_nll": "ΔNLL (nats/token)",
    "mean_kl": "mean KL (nats)",
    "kl_p50": "KL p50",
    "kl_p90": "KL p90",
    "kl_p99": "KL p99",
    "top1_agreement": "top-1 agreement",
    "rms_delta_p": "RMS Δp of the true token",
    "served_kl": "mean KL of what is served from the files (nats)",
    "default_sampling": "log-probability of what is written by default (nats/token)",
    "group_edge_error": "columns at the edges of groups with another group's scale",
    "weight_gain": "size of a layer's weights, away from the baseline's",
}
"""Metrics of accuracy in words."""


def render(report: Mapping[str, Any]) -> str:
    """Render a report.

    Args:
        report: the content of ``report.json``.
    """
    sections = (
        _head,
        _rules,
        _metrics,
        _serving,
        markdown_items.tasks,
        markdown_items.slices,
        markdown_latency.latency,
        _worst,
        _models,
        _conditions,
    )
    return "\n\n".join(filter(None, (section(report) for section in sections))) + "\n"


def _head(report: Mapping[str, Any]) -> str:
    policy = report["policy"]
    lines = [
        f"# Validation: {report['verdict']}",
        "",
        f"Policy `{policy['name']}`. Exit code {report['exit_code']}. {_parts(report)}",
    ]
    if policy.get("description"):
        lines += ["", " ".join(policy["description"].split())]
    if report["kl"]["is_lower_bound"]:
        lines += [
            "",
            f"**KL values are lower bounds**: a server returned the {report['kl']['top_k']} "
            "most likely tokens of each position; all others count as one outcome.",
        ]
    return "\n".join(lines)


def _parts(report: Mapping[str, Any]) -> str:
    """The verdict of each part; of tasks and slices where a policy bounds them."""
    shown = (
        f"{part.capitalize()}: {verdict or 'not judged'}."
        for part, verdict in report["verdicts"].items()
        if verdict is not None or part in ("accuracy", "latency")
    )
    return " ".join(shown)


def _rules(report: Mapping[str, Any]) -> str:
    rows = [
        (
            rule_label(rule),
            f"{rule['side']} {rule['limit']:g}",
            f"**{rule['verdict']}**",
            "–" if rule["margin"] is None else f"{rule['margin']:+.4g}",
            rule["reason"],
        )
        for rule in report["rules"]
    ]
    return "## Limits\n\n" + table(("metric", "limit", "verdict", "margin", "why"), rows)


def rule_label(rule: Mapping[str, Any]) -> str:
    """The metric, of which task or slice; for a ratio of latency also at which concurrency."""
    if rule["subject"] is not None:
        return f"{rule['subject']}: {markdown_items.label(rule['metric'])}"
    if rule["part"] == "accuracy":
        return LABELS[rule["metric"]]
    label = markdown_latency.LABELS[rule["metric"]]
    label += " ratio" if rule["metric"].endswith("_ratio") else ""
    return label if rule["concurrency"] is None else f"{label}, concurrency {rule['concurrency']}"


def _metrics(report: Mapping[str, Any]) -> str:
    rows = []
    for name, metric in report["metrics"].items():
        label = LABELS[name] + (" ≥" if metric["is_lower_bound"] else "")
        noise = "–" if metric["noise"] is None else f"{metric['noise']:#.5g}"
        interval = f"[{metric['low']:#.5g}, {metric['high']:#.5g}]"
        rows.append((label, f"{metric['estimate']:#.5g}", interval, noise))
    kl, perplexity = report["kl"], report["perplexity"]
    rows_table = table(("metric", "estimate", "95 % interval", "noise floor"), rows)
    return "\n".join(
        (
            "## Measurements",
            "",
            rows_table,
            "",
            f"Perplexity {perplexity['baseline']:.4f} (baseline), {perplexity['candidate']:.4f} "
            f"(candidate). KL p99.9 {kl['p99.9']:.4g}, max {kl['max']:.4g}. Mean Δp "
            f"{report['mean_delta_p']:+.4g}.",
            "",
            f"Intervals: {report['statistics']['interval']}. Noise floor: {report['noise_floor']}.",
        )
    )


def _serving(report: Mapping[str, Any]) -> str:
    reason = cell(report["serving"]["reason"])
    return f"## Serving\n\n{reason[0].upper()}{reason[1:]}."


def _worst(report: Mapping[str, Any]) -> str:
    rows = [
        (
            f"{row['kl']:.4g}",
            f"{row['sequence']}:{row['position']}",
            cell(row["context"]),
            cell(row["token"]),
            f"{row['baseline_probability']:.4g} → {row['candidate_probability']:.4g}",
            f"{cell(row['baseline_top1'])} → {cell(row['candidate_top1'])}",
        )
        for row in report["worst_positions"]
    ]
    head = ("KL", "at", "context", "token", "its probability", "most likely")
    return "## Largest differences\n\n" + table(head, rows)


def _models(report: Mapping[str, Any]) -> str:
    lines = ["## Models", ""]
    for role, model in report["models"].items():
        if model["kind"] == "server":
            lines.append(f"- {role}: {cell(model['model']['id'])} at {model['url']}")
            continue
        lines.append(f"- {role}: {cell(model['path'])}, {model['bytes']} bytes, {model['digest']}")
        if model.get("recipe_hash"):
            lines.append(f"  - recipe {model['recipe_hash']}")
        shards = {name: sha for name, sha in model["files"].items() if "safetensors" in name}
        lines += [f"  - {cell(name)} sha256 `{sha}`" for name, sha in shards.items()]
    return "\n".join(lines)


def _conditions(report: Mapping[str, Any]) -> str:
    text, where, statistics = report["text"], report["environment"], report["statistics"]
    versions = ", ".join(f"{name} {version}" for name, version in where["libraries"].items())
    bos = "none" if text["bos_token_id"] is None else f"token {text['bos_token_id']}"
    return "\n".join(
        (
            "## Conditions",
            "",
            f"- text: {cell(text['path'])}, sha256 `{text['sha256']}`",
            f"- {text['sequences']} sequences of {text['sequence_length']} tokens, "
            f"{text['predictions']} predictions, BOS: {bos}, "
            f"token ids sha256 `{text['tokens_sha256']}`",
            f"- bootstrap: {statistics['resamples']} resamples, seed {statistics['seed']}",
            f"- {where['cpu']}, {where['torch_threads']} threads, "
            f"device {where['gpu'] or where['device']}, "
            f"peak memory {where['peak_rss_bytes'] / 1e9:.2f} GB",
            f"- Python {where['python']}, {versions}",
            f"- started {report['started_at']}, took {report['wall_time_s']:.1f} s, report schema "
            f"{report['schema_version']}",
        )
    )
