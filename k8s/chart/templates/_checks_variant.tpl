{{/* One variant by itself. Context: {root, variant}. */}}
{{- define "taut.checks.variant" -}}
{{- $root := .root -}}
{{- $variant := .variant -}}
{{- $here := printf "variants[%s]" $variant.name -}}
{{- if $variant.urls -}}
{{- if and $root.Values.networkPolicy.enabled (not $root.Values.networkPolicy.gatewayEgress) -}}
{{- fail (printf "networkPolicy.gatewayEgress: %s.urls needs a rule that lets the gateway reach them" $here) -}}
{{- end -}}
{{- else if not $variant.checkpoint -}}
{{- fail (printf "%s.checkpoint: needed, or urls of workers that run elsewhere" $here) -}}
{{- end -}}
{{- range concat (default list $variant.tolerations) (default list $root.Values.worker.tolerations) -}}
{{- if and (has (default "" .operator) (list "Gt" "Lt")) (semverCompare "<1.35-0" $root.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "%s.tolerations: operator %s needs Kubernetes 1.35 with the feature gate TaintTolerationComparisonOperators; here is %s" $here .operator $root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
{{- if $variant.multiNode -}}{{- include "taut.checks.group" . -}}{{- end -}}
{{- end }}

{{- define "taut.checks.group" -}}
{{- $here := printf "variants[%s].multiNode" .variant.name -}}
{{- $group := .variant.multiNode -}}
{{- $ray := eq (default "mp" $group.engine) "ray" -}}
{{- $claim := eq (include "taut.store.kind" .root) "claim" -}}
{{- if and (include "taut.store.oneNode" .root) (not .variant.artifact) -}}
{{- fail (printf "modelStore.accessMode: %s needs ReadWriteMany or ReadOnlyMany, or a store on every node (modelStore.hostPath)" $here) -}}
{{- end -}}
{{- if and $claim (eq (include "taut.prepare.run" .root) "pod") -}}
{{- fail (printf "prepare.run: pod would have every rank of %s write to one claim; use hook or argocd" $here) -}}
{{- end -}}
{{- with $group.dataParallelSize -}}
{{- if $ray -}}{{- fail (printf "%s.dataParallelSize: for engine mp; with ray give --data-parallel-size and --data-parallel-backend=ray in vllmArgs" $here) -}}{{- end -}}
{{- if mod (int .) (int $group.size) -}}{{- fail (printf "%s.dataParallelSize: %d is no multiple of size %d" $here (int .) (int $group.size)) -}}{{- end -}}
{{- end -}}
{{- $name := include "taut.group.name" . -}}
{{- if gt (len $name) 48 -}}
{{- fail (printf "fullnameOverride: %q is too long a name for a LeaderWorkerSet, whose pods and revisions add to it; 48 at most" $name) -}}
{{- end -}}
{{- end }}
