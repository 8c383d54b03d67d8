{{/* One comparison of the validation Job. Context: {root, through}; through: files or servers. */}}
{{- define "taut.validation.container" -}}
{{- $validation := .root.Values.validation -}}
{{- $servers := eq .through "servers" -}}
{{- $both := eq $validation.through "both" -}}
name: {{ .through }}
image: {{ include "taut.image" (dict "root" .root "image" .root.Values.image.toolbox) }}
args:
  - validate
  - --baseline={{ include "taut.validation.side" (dict "root" .root "through" .through "name" $validation.baseline) }}
  - --candidate={{ include "taut.validation.side" (dict "root" .root "through" .through "name" $validation.candidate) }}
  {{- if $servers }}
  - --baseline-model={{ .root.Values.model.name }}
  - --candidate-model={{ .root.Values.model.name }}
  {{- if or $both $validation.acceptLowerBound }}
  # The exact divergence was judged in the container before, or the user does without it.
  - --accept-lower-bound
  {{- end }}
  {{- $latency := $validation.latency }}
  {{- if $latency.enabled }}
  - --latency
  - --latency-requests={{ int $latency.requests }}
  - --latency-concurrency={{ range $i, $n := $latency.concurrency }}{{ if $i }},{{ end }}{{ int $n }}{{ end }}
  - --latency-prompt-tokens={{ int $latency.promptTokens }}
  - --latency-output-tokens={{ int $latency.outputTokens }}
  {{- else }}
  - --no-latency
  {{- end }}
  {{- else }}
  - --device={{ $validation.device }}
  {{- end }}
  - --policy={{ $validation.policy }}
  - --text={{ if $validation.text.configMap }}/etc/taut/text/{{ $validation.text.key }}{{ else }}/models/{{ $validation.text.path }}{{ end }}
  - --sequences={{ int $validation.sequences }}
  - --sequence-length={{ int $validation.sequenceLength }}
  - --output=/reports/{{ .through }}
env:
  - {name: TAUT_HOME, value: /models}
  - {name: HOME, value: /tmp}
  - {name: HF_HUB_OFFLINE, value: "1"}
resources: {{- include "taut.resources" (dict "resources" $validation.resources "gpus" (ternary 0 $validation.gpus $servers) "gpuResource" .root.Values.worker.gpuResource "claims" (ternary list $validation.resourceClaims $servers)) | nindent 2 }}
volumeMounts:
  {{- if or (not $servers) (include "taut.validation.onStore" .root) }}
  # A checkpoint's manifest records the verdict, so it is written to when files are compared.
  - {name: models, mountPath: /models, readOnly: {{ $servers }}}
  {{- end }}
  - {name: reports, mountPath: /reports}
  - {name: tmp, mountPath: /tmp}
  {{- if $validation.text.configMap }}
  - {name: text, mountPath: /etc/taut/text, readOnly: true}
  {{- end }}
{{- end }}

{{/* URL or directory of a variant. Context: {root, through, name}. */}}
{{- define "taut.validation.side" -}}
{{- range .root.Values.variants -}}
{{- if eq .name $.name -}}
{{- if .urls -}}
{{ first .urls }}
{{- else if eq $.through "servers" -}}
http://{{ include "taut.worker.name" (dict "root" $.root "variant" .) }}.{{ include "taut.namespace" $.root }}.svc.{{ $.root.Values.clusterDomain }}:8000
{{- else -}}
{{ include "taut.checkpoint" . }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Whether the text or the policy lies in the model store. Context: the root. */}}
{{- define "taut.validation.onStore" -}}
{{- $validation := .Values.validation -}}
{{- if or $validation.text.path (hasPrefix "/" $validation.policy) -}}yes{{- end -}}
{{- end }}
