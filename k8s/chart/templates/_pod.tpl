{{/* What every pod of the chart has in common; the restricted Pod Security Standard. */}}
{{- define "taut.pod.common" -}}
# A Service named taut-gateway would otherwise set TAUT_GATEWAY_PORT=tcp://… in every pod.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Context: whether the root file system is read-only. */}}
{{- define "taut.container.security" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: {{ . }}
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Requests and limits with GPUs added to the limits. Context: {resources, gpus, gpuResource}. */}}
{{- define "taut.resources" -}}
{{- $resources := deepCopy (default dict .resources) -}}
{{- if .gpus -}}
{{- $limits := merge (dict .gpuResource (int .gpus)) (default dict (get $resources "limits")) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{/*
A ReadWriteOnce volume is attached to one node: workers there and the prepare Job elsewhere would wait for each other for
ever. So the pods that mount it keep together. Context: {root, own}; own is the user's affinity, which wins.
*/}}
{{- define "taut.affinity" -}}
{{- $together := dict -}}
{{- if eq .root.Values.modelStore.accessMode "ReadWriteOnce" -}}
{{- $labels := merge (dict "taut/store" "mounted") (include "taut.selector" .root | fromYaml) -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" $labels) -}}
{{- $together = dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) -}}
{{- end -}}
{{- toYaml (mergeOverwrite $together (deepCopy (default dict .own))) -}}
{{- end }}

{{/* Whether a worker's pod mounts a claim. Context: {root, variant}. */}}
{{- define "taut.worker.onStore" -}}
{{- if or (not .variant.artifact) (include "taut.cache.claim" .root) -}}yes{{- end -}}
{{- end }}

{{- define "taut.worker.affinity" -}}
{{- if include "taut.worker.onStore" . -}}
{{- include "taut.affinity" (dict "root" .root "own" .variant.affinity) -}}
{{- else -}}
{{- toYaml (default dict .variant.affinity) -}}
{{- end -}}
{{- end }}

{{/* What the affinity goes by. Context: {root, variant}. */}}
{{- define "taut.store.label" -}}
{{- if include "taut.worker.onStore" . -}}
taut/store: mounted
{{- end -}}
{{- end }}

{{/* Node choice; pods with GPUs tolerate the taint of GPU nodes. Context: {of, gpus, gpuResource, affinity}. */}}
{{- define "taut.placement" -}}
{{- $tolerations := default list .of.tolerations -}}
{{- if .gpus -}}
{{- $gpu := dict "key" .gpuResource "operator" "Exists" "effect" "NoSchedule" -}}
{{- $tolerations = append $tolerations $gpu -}}
{{- end -}}
{{- with .of.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity | default "" | fromYaml }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
