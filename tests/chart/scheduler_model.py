"""A model of what a cluster does with the rendered chart, to play every order of arrival.

It is a model, not a cluster. It knows: node selectors, required node affinity, taints and
tolerations, required pod affinity and anti-affinity (with the rule that a pod which matches its
own term may be the first), requests for GPUs and other counted resources, ReadWriteOnce volumes
that one node holds at a time and that are made where their first pod runs, Helm's hooks before
everything else, Jobs whose init containers run one after the other, and init containers that
wait for a file.
It leaves out: preferences, CPU and memory, preemption, autoscalers, image pulls, and time, but for
one thing: whatever can happen next may happen next, and all such runs are played.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler_pods import Pod, afterwards, phases

Document = dict[str, Any]
ENDLESS = 100_000
"""More runs than this mean that the model is too large, not that the chart is wrong."""


class ModelError(Exception):
    """The rendered objects hold something that the model does not know."""


@dataclass(frozen=True)
class Node:
    """A node: its labels, its taints (keys, all NoSchedule) and what it has of each resource."""

    name: str
    labels: dict[str, str] = field(default_factory=dict, hash=False)
    taints: tuple[str, ...] = ()
    resources: dict[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Volume:
    """How claims behave: ``local`` ones stay on their first node, others in its ``zone``."""

    local: bool = True


@dataclass(frozen=True)
class State:
    """One moment of one run."""

    placed: tuple[tuple[str, str], ...] = ()
    """Pod → node, of pods that have not ended."""
    bound: tuple[tuple[str, str], ...] = ()
    """Claim → node where its first pod ran."""
    made: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Stuck:
    """How a run ended with somebody waiting for ever."""

    waiting: tuple[str, ...]
    placed: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Cluster:
    """Nodes and volumes, and the pods to come."""

    nodes: tuple[Node, ...]
    volume: Volume = Volume()

    def play(self, rendered: list[Document], serving: State | None = None) -> list[Stuck]:
        """Play every run of an installation, or of an upgrade.

        Args:
            rendered: the chart's objects.
            serving: how an earlier release came up; its workers run on while hooks do, with
                what they hold, and end when new ones come.

        Returns:
            The runs that end with a pod that waits for ever; none if all come up.

        Raises:
            ModelError: more runs than the model is for.
        """
        states = {replace(serving, ended=frozenset()) if serving else State()}
        stuck: list[Stuck] = []
        *hooks, last = phases(rendered)
        later = afterwards(rendered)
        for phase in [*hooks, last, *later]:
            after: set[State] = set()
            for state in states:
                begin = replace(state, placed=()) if phase is last else state
                held = phase in later or (serving and phase is not last)
                running = last if held else []
                for end in self._runs(phase, begin, running):
                    waiting = _unfinished(phase, end)
                    if waiting:
                        stuck.append(Stuck(waiting, end.placed))
                    else:
                        after.add(end)
            states = after
        return stuck

    def ends(self, rendered: list[Document]) -> set[State]:
        """States in which an installation may end well."""
        states = {State()}
        for phase in phases(rendered):
            states = {
                end
                for state in states
                for end in self._runs(phase, state)
                if not _unfinished(phase, end)
            }
        return states

    def _runs(self, pods: list[Pod], start: State, running: Sequence[Pod] = ()) -> Iterator[State]:
        """Every state in which nothing more can happen; ``running`` pods only hold what they do."""
        seen = {start}
        open_states = [start]
        while open_states:
            state = open_states.pop()
            following = list(self._next(pods, state, running))
            if not following:
                yield state
            for each in following:
                if each not in seen:
                    seen.add(each)
                    open_states.append(each)
            if len(seen) > ENDLESS:
                raise ModelError("more states than this model is for")

    def _next(self, pods: list[Pod], state: State, running: Sequence[Pod]) -> Iterator[State]:
        by_name = {pod.name: pod for pod in (*running, *pods)}
        placed = dict(state.placed)
        for pod in pods:
            if pod.name in placed:
                if pod.is_job and pod.needs() <= state.made:
                    yield _without(state, pod)
            elif pod.name not in state.ended:
                for node in self.nodes:
                    if self._fits(pod, node, state, by_name):
                        yield self._with(state, pod, node)

    def _with(self, state: State, pod: Pod, node: Node) -> State:
        bound = dict(state.bound)
        for claim in pod.claims():
            bound.setdefault(claim, node.name)
        placed = {**dict(state.placed), pod.name: node.name}
        return replace(
            state, placed=tuple(sorted(placed.items())), bound=tuple(sorted(bound.items()))
        )

    def _fits(self, pod: Pod, node: Node, state: State, by_name: dict[str, Pod]) -> bool:
        others = [(by_name[name], where) for name, where in state.placed if name in by_name]
        return (
            _tolerates(pod, node)
            and _selects(pod, node)
            and _has_room(pod, node, others)
            and self._reaches(pod, node, state, others)
            and _keeps_together(pod, node, others)
            and _keeps_apart(pod, node, others)
        )

    def _reaches(self, pod: Pod, node: Node, state: State, others: list[tuple[Pod, str]]) -> bool:
        """Whether its volumes can be there: none is held by another node or bound elsewhere."""
        zones = {each.name: each.labels.get("topology.kubernetes.io/zone") for each in self.nodes}
        for claim in pod.claims():
            if any(claim in other.claims() and where != node.name for other, where in others):
                return False
            home = dict(state.bound).get(claim)
            if home and self.volume.local and home != node.name:
                return False
            if home and zones[home] != zones[node.name]:
                return False
        return True


def _without(state: State, pod: Pod) -> State:
    placed = tuple(item for item in state.placed if item[0] != pod.name)
    return replace(
        state, placed=placed, made=state.made | pod.makes(), ended=state.ended | {pod.name}
    )


def _unfinished(pods: list[Pod], state: State) -> tuple[str, ...]:
    placed = dict(state.placed)
    waiting = [
        pod.name
        for pod in pods
        if (pod.is_job and pod.name not in state.ended)
        or (not pod.is_job and (pod.name not in placed or not pod.needs() <= state.made))
    ]
    return tuple(waiting)


def _tolerates(pod: Pod, node: Node) -> bool:
    tolerated = pod.spec.get("tolerations", [])
    return all(
        any(
            each.get("key") in (None, taint) and each.get("operator") == "Exists"
            for each in tolerated
        )
        for taint in node.taints
    )


def _selects(pod: Pod, node: Node) -> bool:
    wanted = pod.spec.get("nodeSelector", {})
    if not wanted.items() <= node.labels.items():
        return False
    affinity = pod.spec.get("affinity", {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if not required:
        return True
    return any(_term_holds(term, node.labels) for term in required["nodeSelectorTerms"])


def _term_holds(term: Document, labels: dict[str, str]) -> bool:
    for each in term["matchExpressions"]:
        has = labels.get(each["key"])
        if each["operator"] == "In":
            holds = has in each["values"]
        elif each["operator"] == "Exists":
            holds = has is not None
        else:
            raise ModelError(f"operator {each['operator']} of a node affinity")
        if not holds:
            return False
    return True


def _has_room(pod: Pod, node: Node, others: list[tuple[Pod, str]]) -> bool:
    for key, count in pod.wants().items():
        taken = sum(other.wants().get(key, 0) for other, where in others if where == node.name)
        if taken + count > node.resources.get(key, 0):
            return False
    return True


def _terms(pod: Pod, kind: str) -> list[Document]:
    affinity = pod.spec.get("affinity", {}).get(kind, {})
    terms: list[Document] = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", [])
    for term in terms:
        if term["topologyKey"] != "kubernetes.io/hostname":
            raise ModelError(f"topology {term['topologyKey']} of a pod affinity")
    return terms


def _matches(term: Document, pod: Pod) -> bool:
    wanted: dict[str, str] = term["labelSelector"]["matchLabels"]
    return wanted.items() <= pod.labels.items()


def _keeps_together(pod: Pod, node: Node, others: list[tuple[Pod, str]]) -> bool:
    for term in _terms(pod, "podAffinity"):
        nodes = {where for other, where in others if _matches(term, other)}
        if nodes and node.name not in nodes:
            return False
        if not nodes and not _matches(term, pod):
            return False
    return True


def _keeps_apart(pod: Pod, node: Node, others: list[tuple[Pod, str]]) -> bool:
    return not any(
        where == node.name and _matches(term, other)
        for term in _terms(pod, "podAntiAffinity")
        for other, where in others
    )
